"""Where the memory of each backend goes at one batch: weights, KV cache, the rest up to the peak, the rest in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexroll.analysis.model import Analysis, MemoryRow, Result
from flexroll.report.figures import batch
from flexroll.report.figures.style import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {
    "weights": "#0072B2",
    "KV cache, reserved": "#56B4E9",
    "everything else up to the peak": "#E69F00",
    "rest of what is in use on the device": "#bbbbbb",
}


def draw(analysis: Analysis) -> Figure | None:
    from matplotlib.figure import Figure

    chosen = choose(analysis)
    if not chosen:
        return None
    stacks = list(dict.fromkeys(r.stack for r in chosen))
    bars = [(name, split(own[0].memory)) for name, _, own in batch.series(chosen, stacks)]
    figure = Figure(figsize=(9.2, 1.5 + 0.36 * len(bars)), layout="constrained")
    ax = figure.subplots()
    at = list(range(len(bars)))
    left = [0.0] * len(bars)
    for i, (part, colour) in enumerate(PARTS.items()):
        widths = [parts[i] / 1e9 for _, parts in bars if parts]
        ax.barh(at, widths, left=left, height=0.66, color=colour, edgecolor=PAPER, linewidth=0.8, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in zip(at, left, strict=True):
        ax.text(total + max(left) * 0.008, y, f"{total:.1f}", va="center")
    ax.set_yticks(at, [name for name, _ in bars])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, max(left) * 1.08)
    ax.set_xlabel("GPU memory in use, GB")
    first = chosen[0]
    ax.set_title(f"{analysis.config['experiments'][first.experiment]['title']} (batch {first.batch})")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def choose(analysis: Analysis) -> list[Result]:
    """Results of the experiment and batch that the figure shows, all of whose parts are known.

    Of section memory where there is one; then where most configurations are told; then the largest batch.
    """
    groups: dict[tuple[str, int], list[Result]] = {}
    for r in analysis.results:
        if r.status == "ok" and r.on_gpu and split(r.memory):
            groups.setdefault((r.experiment, r.batch), []).append(r)
    ranked = sorted(groups.values(), key=lambda g: (g[0].section == "memory", len(g), g[0].batch))
    return ranked[-1] if ranked else []


def split(memory: MemoryRow) -> tuple[int, int, int, int] | None:
    """Bytes of each of PARTS, which add up to what is in use on the device; None unless all are told."""
    weights, kv, peak, total = memory.weights, memory.kv_reserved, memory.peak_allocated, memory.device_total
    if weights is None or kv is None or peak is None or total is None or total < weights + kv:
        return None
    # A backend may count what its allocator never saw, so that its peak is below its parts: then nothing is left.
    other = max(min(peak, total) - weights - kv, 0)
    return weights, kv, other, total - weights - kv - other
