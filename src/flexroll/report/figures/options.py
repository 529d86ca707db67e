"""Gain of every option over its base, with its 95 % interval: one panel a setting, the largest gain on top.

Drawn where there is an interval: points without any would rank what nothing tells apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Analysis, Pair
from flexroll.analysis.quality import is_inadmissible
from flexroll.report.figures.intervals import Row, draw_rows
from flexroll.report.figures.ratio import told
from flexroll.report.figures.style import COLOURS
from flexroll.report.measured import SETTING
from flexroll.report.text import series_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A grid of options has hundreds of points: of those the best and the worst are shown.
BEST, WORST = 20, 10


def draw(analysis: Analysis) -> Figure | None:
    from matplotlib.figure import Figure

    settings = by_setting(analysis)
    if all(pair.comparison.low is None for pairs in settings for pair in pairs):
        return None
    heights = [1.0 + 0.24 * len(pairs) for pairs in settings]
    figure = Figure(figsize=(9.2, 0.6 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(settings), 1, squeeze=False, height_ratios=heights)
    handles: dict[str, Any] = {}
    for ax, pairs in zip(axes.flat, settings, strict=True):
        over, under = pairs[0].over, pairs[0].under
        rows = [Row(_label(pair, analysis), pair.comparison, COLOURS[over.backend]) for pair in pairs]
        draw_rows(ax, rows, True, f"gain in tok/s over {under.option}, %", handles)
        label = series_label(over.backend, over.adapter)
        ax.set_title(f"{label}, batch {over.batch}, {over.sampling}, {over.stack}")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _label(pair: Pair, analysis: Analysis) -> str:
    return f"{pair.over.option} (not admissible)" if is_inadmissible(pair.over, analysis) else pair.over.option


def by_setting(analysis: Analysis) -> list[list[Pair]]:
    """The pairs of each setting that are drawn, the largest gain first."""
    found: dict[tuple[object, ...], list[Pair]] = {}
    for pair in told(analysis, "option"):
        found.setdefault(tuple(getattr(pair.over, name) for name in SETTING), []).append(pair)
    ranked = (sorted(pairs, key=lambda p: -(p.comparison.ratio or 0.0)) for pairs in found.values())
    return [pairs if len(pairs) <= BEST + WORST else pairs[:BEST] + pairs[-WORST:] for pairs in ranked]


def left_out(analysis: Analysis) -> int:
    """How many pairs the figure has no room for."""
    return len(told(analysis, "option")) - sum(map(len, by_setting(analysis)))
