"""What all figures share: colours, markers, matplotlib's settings, and how one is saved."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flexroll.schema.records import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "flex": "#0072B2",
    "vllm": "#D55E00",
    "transformers_generate": "#E69F00",
    "transformers_cb": "#009E73",
    "unsloth": "#CC79A7",
}
MARKERS = {"none": "o", "merged": "s", "unmerged": "^", "request": "D"}
DASHES = ("--", ":", "-.")
# Named, so that the page can give a figure other ones on a dark ground (`report.svg`).
INK, MUTED, GRID, PAPER = "#1f2328", "#6e7781", "#e4e4e4", "#ffffff"
STYLE = {
    "svg.hashsalt": "flexroll",
    "svg.fonttype": "path",
    "font.size": 9,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults with STYLE, whatever the user's settings are; they come back at the end."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save(figure: Figure, path: Path) -> None:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    write_json(path, "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n")
