"""results.html: what results.md says as one page that needs nothing else, with claims to filter and tables to sort.

It is made from the same values as results.md (`render.context`). Style, script and figures stand in the page; only raw
files are linked, relative to it. Values are escaped, and the page's own policy (CSP) lets nothing run or load but its
one script, named by its hash: what a record holds stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markupsafe import Markup

from flexroll.analysis.model import Analysis
from flexroll.errors import FlexrollError
from flexroll.report import headline, inline, roofline, svg
from flexroll.report.figures import ALT, captions
from flexroll.report.text import NONE, Table
from flexroll.schema.claims import VERDICTS
from flexroll.schema.records import write_json

TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "page.js"
# Sections that every page has, and so what a cell or sentence may link to.
ANCHORS = frozenset({"claims", "set-up", "batch-sweep", "options", "what-broke", "drift-verification", "raw-stats"})
# Verdict of a claim or a comparison -> its look.
BADGES = dict(zip(VERDICTS, ("reproduced", "within", "not", "contradicted", "unrun"), strict=True)) | {
    "faster": "faster",
    "slower": "slower",
    "no difference shown": "same",
    "insufficient n": "unrun",
    "not comparable": "unrun",
}
# Columns of a claim that stand below another one's value, so that a claim fits the width of a screen.
BELOW = {"Text, section": "Claim", "On": "Measured"}
STATUSES = ("failed", "skipped", "missing", "unreadable", "broken", "not admissible")


@dataclass(frozen=True)
class CellView:
    """One cell of a table. look: its CSS classes. badge: look of the verdict that the cell is, or ''."""

    html: Markup
    label: str
    look: str
    badge: str


@dataclass(frozen=True)
class RowView:
    """id: of a claim's row, '' elsewhere. verdict: the claim's."""

    id: str
    verdict: str
    cells: list[CellView]


@dataclass(frozen=True)
class TableView:
    """headers: (text, CSS class)."""

    headers: list[tuple[Markup, str]]
    rows: list[RowView]


@dataclass(frozen=True)
class Block:
    """One experiment of a section: its table, and what is said about it."""

    name: str
    title: str
    table: Table
    says: list[str]


@dataclass(frozen=True)
class Plot:
    """A figure in the page. file: the same as a file of its own."""

    name: str
    file: str
    drawing: Markup
    caption: str


def write_page(
    analysis: Analysis, results_dir: Path, template_dir: Path, figures: dict[str, str], values: dict[str, Any]
) -> Path:
    """Write results_dir/results.html; returns its path.

    Args:
        figures: name -> path relative to results_dir, as `draw_all` returns it.
        values: what `render.context` returns. Keys beyond those that the template knows are left alone.

    Raises:
        FlexrollError: a template is missing or broken.
    """
    script = _read(template_dir / SCRIPT)
    more = {
        "style": Markup(_read(template_dir / STYLE)),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "cards": headline.cards(analysis),
        "plots": plots(analysis, results_dir, figures),
        "floors": roofline.table(roofline.rooflines(analysis)),
        "topics": topics(values),
        "badges": [(v, BADGES[v], n) for v in VERDICTS if (n := sum(c.verdict == v for c in analysis.verdicts))],
        "blocks": {name: blocks(items) for name, items in values["sweeps"].items()},
        "memory_blocks": blocks(values["memory"]),
    }
    path = results_dir / "results.html"
    write_json(path, _fill(template_dir, results_dir, {"sentences": {}} | values | more))
    return path


def page(results_dir: Path, template_dir: Path) -> Path:
    """Write the page of a run whose results.md and figures are there already."""
    from flexroll.analysis.run import read_analysis
    from flexroll.report.render import context

    results_dir = Path(results_dir)
    analysis = read_analysis(results_dir)
    figures = {name: f"figures/{name}.svg" for name in ALT if (results_dir / "figures" / f"{name}.svg").is_file()}
    return write_page(analysis, results_dir, Path(template_dir), figures, context(analysis, results_dir, figures))


def plots(analysis: Analysis, results_dir: Path, figures: dict[str, str]) -> dict[str, Plot]:
    """Name -> figure, of those that were drawn."""
    told = captions(analysis, figures)
    found = {}
    for name, path in figures.items():
        drawing = svg.inline((results_dir / path).read_text(), name, ALT.get(name, name))
        found[name] = Plot(name, path, drawing, told.get(name, ""))
    return found


def blocks(items: Iterable[tuple[Any, ...]]) -> list[Block]:
    """The tables of a section, each with its sentences: one, a list, or none."""
    found = []
    for name, title, table, *rest in items:
        says = [s for part in rest for s in ([part] if isinstance(part, str) else part)]
        found.append(Block(name, title, table, [s for s in says if s]))
    return found


def topics(values: dict[str, Any]) -> list[tuple[str, list[Table]]]:
    """(topic, its tables of claims, one or more)."""
    return [(topic, [table for table in tables if table.rows]) for topic, *tables in values["claims"]]


def view(table: Table, markdown: partial[Markup]) -> TableView:
    """A table as the template prints it."""
    claims = "Claim" in table.headers and "Verdict" in table.headers
    under = {upper: lower for lower, upper in BELOW.items() if claims and {lower, upper} <= set(table.headers)}
    shown = [header for header in table.headers if header not in under.values()]
    headers = [(markdown(name), " ".join(filter(None, _header_look(name, table, claims)))) for name in shown]
    rows = []
    for row in table.rows:
        claim = re.match(r"`([^`]+)`", row["Claim"]) if claims else None
        cells = [_cell(name, row[name], row[under[name]] if name in under else "", table, markdown) for name in shown]
        verdict = inline.to_text(row["Verdict"]) if claims else ""
        rows.append(RowView(f"claim-{claim[1]}" if claim else "", verdict, cells))
    return TableView(headers, rows)


def _header_look(header: str, table: Table, claims: bool) -> tuple[str, str]:
    """Columns of claims are named, for they have widths of their own."""
    return "" if header in table.left else "num", header.lower() if claims else ""


def _cell(header: str, value: str, below: str, table: Table, markdown: partial[Markup]) -> CellView:
    plain = inline.to_text(value)
    looks = [
        "" if header in table.left else "num",
        "none" if plain == NONE else "",
        "bad" if plain in STATUSES else "",
    ]
    shown = markdown(value)
    if below not in ("", NONE):
        shown += Markup("<small>{}</small>").format(markdown(below))
    badge = BADGES.get(plain, "") if header == "Verdict" else ""
    return CellView(shown, inline.to_text(header), " ".join(filter(None, looks)), badge)


def unfenced(block: str) -> str:
    """The text inside a fenced code block."""
    return "\n".join(block.split("\n")[1:-1])


class Anchors:
    """Ids of headings as GitHub makes them, so that a link into results.md holds in the page: unique, in order."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, heading: object) -> str:
        slug = re.sub(r"[^\w\- ]", "", inline.to_text(heading).lower()).strip().replace(" ", "-")
        number = self.seen.get(slug, 0)
        self.seen[slug] = number + 1
        return f"{slug}-{number}" if number else slug


def _allowed(target: str, results_dir: Path) -> bool:
    """Whether a link of a cell may stand: to a section, or to a file of this run."""
    if target.startswith("#"):
        return target[1:] in ANCHORS
    path = unquote(target)
    return not re.match(r"[\w+.-]*:|/", path) and ".." not in path.split("/") and (results_dir / path).is_file()


def _fill(template_dir: Path, results_dir: Path, values: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    markdown = partial(inline.to_html, allowed=partial(_allowed, results_dir=results_dir))
    environment.filters |= {"md": markdown, "view": partial(view, markdown=markdown), "unfenced": unfenced}
    environment.globals["anchor"] = Anchors()
    try:
        return environment.get_template(TEMPLATE).render(values)
    except jinja2.TemplateNotFound as error:
        raise FlexrollError(f"{template_dir / TEMPLATE}: no such template ({error})") from None
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise FlexrollError(f"{template_dir / TEMPLATE}{f':{line}' if line else ''}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise FlexrollError(f"{path}: {error.strerror or error}") from None
