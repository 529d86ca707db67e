"""Lines against batch, one panel an experiment: what throughput, memory, ratio and roofline have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flexroll.analysis.model import Analysis, Result
from flexroll.report.figures.style import COLOURS, DASHES, INK, MARKERS, PAPER
from flexroll.report.text import series_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECTIONS = ("batch_sweep", "grpo")
Bar = Literal["interval", "range", ""]
BARS = {"interval": "95 % interval over sessions", "range": "slowest to best round"}


@dataclass(frozen=True)
class Point:
    """bar: what low and high are. hollow: drawn without a filling, where that says something of the point."""

    batch: int
    value: float
    low: float | None = None
    high: float | None = None
    bar: Bar = ""
    hollow: bool = False


@dataclass
class Line:
    """One series of a panel. look: matplotlib's keywords. failed: batches at which it has a failed cell."""

    name: str
    look: dict[str, Any]
    points: list[Point]
    failed: list[int] = field(default_factory=list)


@dataclass
class Panel:
    title: str
    batches: list[int]
    lines: list[Line]

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines for point in line.points]


def panels(analysis: Analysis, point: Callable[[Result], Point | None]) -> list[Panel]:
    """Experiments of the sweep and GRPO sections with a point; those of one batch only where no other is there."""
    groups: dict[str, list[Result]] = {}
    for r in analysis.results:
        if r.section in SECTIONS:
            groups.setdefault(r.experiment, []).append(r)
    points = {id(r): point(r) for group in groups.values() for r in group if r.status == "ok"}
    groups = {name: group for name, group in groups.items() if any(points.get(id(r)) for r in group)}
    chosen = swept(groups)
    stacks = list(dict.fromkeys(r.stack for group in chosen.values() for r in group))
    found = []
    for name, group in chosen.items():
        lines = [
            Line(
                name=label,
                look=look,
                points=sorted((p for r in own if (p := points.get(id(r)))), key=lambda p: p.batch),
                failed=[r.batch for r in own if r.status == "failed"],
            )
            for label, look, own in series(group, stacks)
        ]
        title = analysis.config["experiments"][name]["title"]
        found.append(Panel(title, sorted({r.batch for r in group}), lines))
    return found


def swept(groups: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Those with several batches; all where there is none."""
    return {name: group for name, group in groups.items() if len({r.batch for r in group}) > 1} or groups


def series(
    group: Sequence[Result], stacks: Sequence[str], hollow: bool = True
) -> list[tuple[str, dict[str, Any], list[Result]]]:
    """(name, look, results) of each series of an experiment. hollow: further options and stacks are."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for r in group:
        found.setdefault((r.backend, r.adapter, r.option, r.sampling, r.stack), []).append(r)
    samplings = Counter(key[:3] + key[4:] for key in found)
    named = []
    for (backend, adapter, option, sampling, stack), results in found.items():
        name = series_label(backend, adapter) + ("" if option == "default" else f", {option}")
        # Panels are titled by their sampling; it is named again only where it tells two series of one panel apart.
        name += f", {sampling}" if samplings[(backend, adapter, option, stack)] > 1 else ""
        name += f", {stack}" if len(stacks) > 1 else ""
        options = list(dict.fromkeys(r.option for r in group if r.backend == backend))
        line = "-" if option == options[0] else DASHES[(options.index(option) - 1) % len(DASHES)]
        look: dict[str, Any] = {"color": COLOURS[backend], "marker": MARKERS[adapter], "linestyle": line}
        if hollow and (stacks.index(stack) or option != options[0]):
            look["markerfacecolor"] = PAPER
        named.append((name, look, results))
    return named


def draw(
    found: Sequence[Panel],
    ylabel: str,
    scale: Callable[[Axes, list[float]], None],
    extra: Iterable[tuple[str, dict[str, Any]]] = (),
    dodge: float = 0.0,
) -> Figure | None:
    """The panels as one figure; None without any.

    Args:
        scale: sets the y axis from the panel's values.
        extra: further entries of the legend, (name, look of a marker or line).
        dodge: share of a doubling of batch by which series stand apart, so that their bars do not hide each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not found:
        return None
    columns = min(2, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes.flat, found, strict=False):
        ax.set_title(panel.title)
        _panel(ax, panel, handles, dodge)
        scale(ax, [v for p in panel.points for v in (p.value, p.low, p.high) if v is not None])
        ax.set_ylabel(ylabel)
        ax.set_xlabel("batch (sequences)")
    for ax in axes.flat[len(found) :]:
        ax.remove()
    bars = {p.bar for panel in found for p in panel.points}
    shown = [(BARS[bar], _bar_look(bar)) for bar in BARS if bar in bars]
    handles |= {name: Line2D([], [], **look) for name, look in (*shown, *extra)}
    across = 3 if columns == 2 else 2
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(across, len(handles)))
    return figure


def _bar_look(bar: str) -> dict[str, Any]:
    look: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": "|", "markersize": 10}
    return look | {"markeredgewidth": 1.8 if bar == "interval" else 0.8}


def _panel(ax: Axes, panel: Panel, handles: dict[str, Any], dodge: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    drawn = [line for line in panel.lines if line.points]
    for i, line in enumerate(drawn):
        shift = 2 ** (dodge * (i - (len(drawn) - 1) / 2))
        at = [p.batch * shift for p in line.points]
        (handle,) = ax.plot(at, [p.value for p in line.points], **line.look)
        handles.setdefault(line.name, handle)
        hollow = [(x, p.value) for x, p in zip(at, line.points, strict=True) if p.hollow]
        if hollow:
            over = line.look | {"linestyle": "none", "markerfacecolor": PAPER}
            ax.plot(*zip(*hollow, strict=True), zorder=handle.get_zorder() + 0.1, **over)
        for bar in BARS:
            own = [(x, p) for x, p in zip(at, line.points, strict=True) if p.bar == bar]
            if own:
                _bars(ax, own, bar, line.look["color"])
    missed: Counter[int] = Counter()
    for line in panel.lines:
        for batch in line.failed:
            cross = {"marker": "x", "color": line.look["color"], "linestyle": "none", "clip_on": False, "zorder": 5}
            height = [0.03 + 0.07 * missed[batch]]
            (handle,) = ax.plot([batch], height, transform=ax.get_xaxis_transform(), **cross)
            handles.setdefault(f"{line.name}: failed", handle)
            missed[batch] += 1
    ticks = panel.batches
    ax.set_xscale("log", base=2)
    ax.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


def _bars(ax: Axes, own: list[tuple[float, Point]], bar: str, colour: str) -> None:
    """Intervals thick and with caps, ranges thin and without, so that a figure with both can be read."""
    xs, low = [x for x, _ in own], [p.value - p.low for _, p in own]  # type: ignore[operator]
    high = [p.high - p.value for _, p in own]  # type: ignore[operator]
    thick = bar == "interval"
    ax.errorbar(
        xs,
        [p.value for _, p in own],
        # Rounding may put an end of an interval a hair inside of its centre.
        yerr=[[max(v, 0.0) for v in low], [max(v, 0.0) for v in high]],
        fmt="none",
        ecolor=colour,
        elinewidth=1.8 if thick else 0.8,
        capsize=3 if thick else 0,
    )


def rate_scale(ax: Axes, values: list[float]) -> None:
    """From zero where the values lie close together, logarithmic where a linear axis would flatten the small ones."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) > 0 and max(values) > 8 * min(values):
        ax.set_yscale("log")
        ax.set_ylim(min(values) / 1.6, max(values) * 1.4)
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(0, max(values) * 1.12)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 10 or y == 0 else f"{y:g}"))
