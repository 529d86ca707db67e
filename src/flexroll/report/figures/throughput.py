"""tok/s against batch, with 95 % intervals where there are enough sessions, else the slowest and the best round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flexroll.analysis.model import Analysis, Result
from flexroll.report.figures import batch
from flexroll.report.figures.batch import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(analysis: Analysis) -> Figure | None:
    return batch.draw(batch.panels(analysis, _point), "tok/s, median", batch.rate_scale)


def bars(analysis: Analysis) -> Literal["interval", "range", "mixed", ""]:
    """What the figure's bars are: all of one kind, or mixed; '' without any."""
    kinds = {p.bar for panel in batch.panels(analysis, _point) for p in panel.points} - {""}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), "")  # type: ignore[return-value]


def _point(r: Result) -> Point | None:
    if r.tps is None:
        return None
    if r.tps_low is not None and r.tps_high is not None:
        return Point(r.batch, r.tps, r.tps_low, r.tps_high, "interval")
    if r.tps_min is None or r.tps_best is None:
        return Point(r.batch, r.tps)
    return Point(r.batch, r.tps, r.tps_min, r.tps_best, "range")
