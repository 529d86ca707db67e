"""tok/s over vLLM's of the workloads that ran at one batch: LoRA, groups, uneven lengths.

Drawn where there is an interval: points without any would rank what nothing tells apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Analysis, Pair
from flexroll.report.figures.intervals import Row, draw_rows
from flexroll.report.figures.ratio import against_batch, told
from flexroll.report.figures.style import COLOURS
from flexroll.report.text import SECTIONS, series_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 30


def draw(analysis: Analysis) -> Figure | None:
    from matplotlib.figure import Figure

    swept = against_batch(analysis)
    pairs = [pair for pair in told(analysis, "vllm") if pair.over.experiment not in swept][:MOST]
    if all(pair.comparison.low is None for pair in pairs):
        return None
    rows = [Row(_label(pair, pairs), pair.comparison, COLOURS[pair.over.backend]) for pair in pairs]
    figure = Figure(figsize=(9.2, 1.3 + 0.3 * len(rows)), layout="constrained")
    handles: dict[str, Any] = {}
    draw_rows(figure.subplots(), rows, False, "tok/s over vLLM's (ratio)", handles)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _label(pair: Pair, pairs: list[Pair]) -> str:
    """The workload, and below it the two sides; an option of vLLM's and a stack where they tell rows apart."""
    over, under = pair.over, pair.under
    ours = series_label(over.backend, over.adapter) + ("" if over.option == "default" else f", {over.option}")
    forms = {p.under.option for p in pairs if p.over == over and p.under.adapter == under.adapter}
    theirs = series_label(under.backend, under.adapter) + (f", {under.option}" if len(forms) > 1 else "")
    where = f"{SECTIONS[over.section]}, batch {over.batch}, {over.sampling}"
    stack = f", {over.stack}" if len({p.over.stack for p in pairs}) > 1 else ""
    return f"{where}{stack}\n{ours} over {theirs}"
