"""A figure's SVG made fit to stand inside a page: ids of its own, colours by name, as wide as there is room."""

from __future__ import annotations

import html
import re

from markupsafe import Markup

from flexroll.report.figures.memory_parts import PARTS
from flexroll.report.figures.style import COLOURS, GRID, INK, MUTED, PAPER

# Colour -> name of the page's variable, which has a value for a light and one for a dark ground.
NAMES = {colour.lower(): backend.replace("_", "-") for backend, colour in COLOURS.items()}
NAMES |= {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
NAMES |= {colour.lower(): f"part-{i}" for i, colour in enumerate(PARTS.values()) if colour.lower() not in NAMES}
# Of the figure's own size in CSS pixels: below it letters are too small to read, above it they shout.
LEAST, MOST = 0.68, 1.1


def inline(svg: str, name: str, label: str) -> Markup:
    """The drawing as an <svg> element of an HTML page.

    Args:
        svg: as `figures.style.save` wrote it.
        name: prefix of its ids, which are unique in one drawing only.
        label: what it shows, for those who cannot see it.
    """
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise ValueError(f"{name}: no figure of this version")
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'xlink:href="#', f'href="#{name}-', body).replace("url(#", f"url(#{name}-")
    body = re.sub(r"#[0-9a-fA-F]{6}\b", _named, body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    width, height = (float(side) * 4 / 3 for side in box.groups())
    room = f"min-width:{LEAST * width:.0f}px;max-width:{MOST * width:.0f}px;aspect-ratio:{width:.0f}/{height:.0f}"
    shown = f'class="plot" role="img" aria-label="{html.escape(label, quote=True)}"'
    return Markup(f'<svg {shown} viewBox="{box.group()[9:-1]}" style="{room}">\n{body}\n</svg>')


def _named(match: re.Match[str]) -> str:
    name = NAMES.get(match.group().lower())
    return f"var(--fig-{name})" if name else match.group()
