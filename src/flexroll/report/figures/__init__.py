"""The figures, as SVG whose bytes depend on the data alone: no date, fixed ids, fonts as paths, no user settings.

Colour (Okabe and Ito's palette, safe for the colour-blind) says the backend, the marker the form of the adapter, a
dashed line an option other than the default. One module a kind of figure; each has `draw(analysis)`, which returns
None where there is nothing to show.
"""

from __future__ import annotations

from pathlib import Path

from flexroll.analysis.model import Analysis
from flexroll.report.figures import (
    drift,
    grpo,
    memory,
    memory_parts,
    options,
    ratio,
    roofline,
    rounds,
    throughput,
    workloads,
)
from flexroll.report.figures.captions import ALT, captions
from flexroll.report.figures.style import save, style

__all__ = ["ALT", "captions", "draw_all"]

DRAW = {
    "throughput": throughput.draw,
    "ratio": ratio.draw,
    "workloads": workloads.draw,
    "roofline": roofline.draw,
    "memory": memory.draw,
    "memory_parts": memory_parts.draw,
    "options": options.draw,
    "rounds": rounds.draw,
    "drift": drift.draw,
    "grpo_curves": grpo.draw_curves,
    "grpo_steps": grpo.draw_steps,
}


def draw_all(analysis: Analysis, folder: Path) -> dict[str, str]:
    """Write every figure that has data into `folder` as NAME.svg; name -> path relative to the results document.

    A figure without data is not written, and an old one of that name is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    with style():
        for name, draw in DRAW.items():
            path, figure = folder / f"{name}.svg", draw(analysis)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            save(figure, path)
            drawn[name] = f"figures/{name}.svg"
    return drawn
