"""Rows with a point and a horizontal 95 % interval each, and the same in numbers; the marker says the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Comparison
from flexroll.report.figures.style import INK, PAPER
from flexroll.report.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Filled where the interval says which way; shape and filling both tell, so that colour need not.
VERDICTS: dict[str, dict[str, Any]] = {
    "faster": {"marker": ">"},
    "slower": {"marker": "<"},
    "no difference shown": {"marker": "o", "markerfacecolor": PAPER},
    "insufficient n": {"marker": "D", "markerfacecolor": PAPER, "markersize": 4.5},
}


@dataclass(frozen=True)
class Row:
    label: str
    comparison: Comparison
    colour: str


def draw_rows(ax: Axes, rows: Sequence[Row], percent: bool, unit: str, handles: dict[str, Any]) -> None:
    """Draw the rows from the top, with a line where both sides are alike.

    Args:
        percent: gains in % rather than ratios.
        handles: verdict -> marker for the legend; what the rows show is added.
    """
    from matplotlib.lines import Line2D

    def value(ratio: float) -> float:
        return 100 * (ratio - 1) if percent else ratio

    ends = [value(1.0)]
    for y, row in enumerate(rows):
        c = row.comparison
        at = value(c.ratio or 1.0)
        ends.append(at)
        if c.low is not None and c.high is not None:
            low, high = value(c.low), value(c.high)
            ends += [low, high]
            ax.hlines(y, low, high, color=row.colour, linewidth=1.6)
        ax.plot([at], [y], color=row.colour, linestyle="none", **VERDICTS[c.verdict])
        handles.setdefault(c.verdict, Line2D([], [], color=INK, linestyle="none", **VERDICTS[c.verdict]))
    ax.axvline(value(1.0), color=INK, linewidth=1, zorder=1.5)
    margin = 0.06 * (max(ends) - min(ends)) or 1.0
    ax.set_xlim(min(ends) - margin, max(ends) + margin)
    ax.set_yticks(range(len(rows)), [row.label for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(unit)
    for y, row in enumerate(rows):
        ax.text(1.01, y, _numbers(row.comparison, percent), transform=ax.get_yaxis_transform(), va="center", color=INK)


def _numbers(c: Comparison, percent: bool) -> str:
    """`+4.1 % (+2.0 to +6.3)`, `1.88 (1.85 to 1.91)`; without an interval where there is none."""

    def told(ratio: float) -> str:
        return f"{100 * (ratio - 1):+.1f}" if percent else significant(ratio)

    inside = "" if c.low is None or c.high is None else f" ({told(c.low)} to {told(c.high)})"
    return f"{told(c.ratio or 1.0)}{' %' if percent else ''}{inside}".replace("-", "−")
