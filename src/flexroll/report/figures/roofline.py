"""Share of the memory-bandwidth floor that decoding reaches, against batch (`report.roofline` has the formula)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexroll.analysis.model import Analysis, Result
from flexroll.analysis.pairs import key_of
from flexroll.report.figures import batch
from flexroll.report.figures.batch import Point
from flexroll.report.roofline import rooflines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(analysis: Analysis) -> Figure | None:
    known = {key_of(one.result): one for one in rooflines(analysis)}

    def point(result: Result) -> Point | None:
        one = known.get(key_of(result))
        if one is None:
            return None
        if one.low is None or one.high is None:
            return Point(result.batch, 100 * one.share)
        return Point(result.batch, 100 * one.share, 100 * one.low, 100 * one.high, "interval")

    return batch.draw(batch.panels(analysis, point), "share of the floor, %", _scale)


def _scale(ax: Axes, values: list[float]) -> None:
    ax.set_ylim(0, max(100.0, *values) * 1.04)
    ax.axhline(100, color=batch.INK, linewidth=1, zorder=1.5)
