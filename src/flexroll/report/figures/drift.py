"""Largest change and share of base weights changed, per cycle: the refresh beside PEFT's merge and unmerge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Analysis
from flexroll.report.figures.style import COLOURS, DASHES, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(analysis: Analysis) -> Figure | None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = [d for d in analysis.drift if d.status == "ok" and d.peft]
    if not known:
        return None
    figure = Figure(figsize=(9.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, d in enumerate(known):
        cycles = [c.cycle for c in d.peft]
        # Stacks often agree to the last bit: the first is drawn large, the next small and hollow on top of it.
        look = {"marker": "os^D"[i % 4], "linestyle": ("-", *DASHES)[i % 4], "markersize": 4 if i else 8}
        look |= {"markerfacecolor": PAPER} if i else {}
        peft: dict[str, Any] = {"color": COLOURS["vllm"], **look}
        flex: dict[str, Any] = {"color": COLOURS["flex"], **look}
        left.plot(cycles, [c.max_abs_diff for c in d.peft], label=f"PEFT merge and unmerge, {d.stack}", **peft)
        right.plot(cycles, [100 * c.share_changed for c in d.peft], **peft)
        if d.base_identical:
            for ax in (left, right):
                label = f"flex refresh, {d.stack}: 0" if ax is left else None
                ax.plot(cycles, [0] * len(cycles), label=label, clip_on=False, **flex)
    left.set_title("Largest change of a base weight")
    right.set_title("Base weights changed")
    right.set_ylabel("share of weights, %")
    left.set_ylabel("absolute change")
    for ax in (left, right):
        ax.set_xlabel("cycles")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(labels)))
    return figure
