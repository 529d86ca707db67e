"""GRPO on each rollout backend: reward and KL over steps, and where the seconds of a step go."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flexroll.analysis.grpo_runs import PARTS
from flexroll.analysis.model import Analysis, GrpoRow
from flexroll.report.figures.style import COLOURS, DASHES, GRID, MUTED, PAPER
from flexroll.report.grpo import label
from flexroll.schema.grpo import OPTIONS_OF

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a step; each has a value of its own on a dark ground (`report.svg`).
SHADES = dict(zip(PARTS, ("#0072B2", "#56B4E9", "#CC79A7", "#E69F00", "#009E73", "#bbbbbb"), strict=True))
Point = tuple[int, float, float, float]  # step, mean over seeds, least, most


def draw_curves(analysis: Analysis) -> Figure | None:
    """Reward and KL over steps: the mean over seeds as a line, their range as a band."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [(name, title) for name, title in (("reward", "Reward"), ("kl", "KL to the base model, nats a token"))]
    panels = [(name, title) for name, title in panels if any(points(row, name) for row in analysis.grpo)]
    if not panels:
        return None
    figure = Figure(figsize=(9.2, 3.3), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    looks = styles(analysis.grpo)
    for ax, (name, title) in zip(axes, panels, strict=True):
        for row in analysis.grpo:
            _curve(ax, points(row, name), label(row, analysis.grpo), looks[row.form])
        skipped = analysis.config["grpo"]["skip_steps"]
        if skipped:
            ax.axvspan(0.5, skipped + 0.5, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)))
    return figure


def draw_steps(analysis: Analysis) -> Figure | None:
    """One bar a form: the mean seconds of each part of a measured step."""
    from matplotlib.figure import Figure

    rows = [row for row in analysis.grpo if row.ok and row.seconds]
    if not rows:
        return None
    figure = Figure(figsize=(9.2, 1.5 + 0.36 * len(rows)), layout="constrained")
    ax = figure.subplots()
    at, left = list(range(len(rows))), [0.0] * len(rows)
    for part, colour in SHADES.items():
        widths = [row.seconds[part] for row in rows]
        ax.barh(at, widths, left=left, height=0.66, color=colour, edgecolor=PAPER, linewidth=0.8, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in zip(at, left, strict=True):
        ax.text(total + max(left) * 0.008, y, f"{total:.3g}", va="center")
    ax.set_yticks(at, [label(row, analysis.grpo).replace("`", "") for row in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, max(left) * 1.08)
    ax.set_xlabel("seconds of a step, mean")
    figure.legend(loc="outside lower center", ncols=len(PARTS))
    return figure


def points(row: GrpoRow, name: str) -> list[Point]:
    """Of each step that all runs with a result have, where it is told."""
    curves = [getattr(run, name) for run in row.ok]
    found = []
    for step, values in enumerate(zip(*curves, strict=False), 1):
        told = [value for value in values if value is not None]
        if told:
            found.append((step, fmean(told), min(told), max(told)))
    return found


def styles(rows: Sequence[GrpoRow]) -> dict[str, dict[str, Any]]:
    """Form -> its look: the backend's colour, dashed where a form of that colour came before."""
    found: dict[str, dict[str, Any]] = {}
    used: dict[str, int] = {}
    for row in rows:
        colour = COLOURS.get(OPTIONS_OF.get(row.backend, row.backend), MUTED)
        number = used.get(colour, 0)
        used[colour] = number + 1
        found[row.form] = {"color": colour, "linestyle": ("-", *DASHES)[number % 4]}
    return found


def _curve(ax: Axes, found: Sequence[Point], name: str, look: dict[str, Any]) -> None:
    if not found:
        return
    steps = [step for step, *_ in found]
    ax.plot(steps, [mean for _, mean, _, _ in found], label=name.replace("`", ""), marker="o", markersize=3, **look)
    low, high = [low for *_, low, _ in found], [high for *_, high in found]
    if low != high:
        ax.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
