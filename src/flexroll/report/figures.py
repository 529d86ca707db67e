"""The figures, as SVG whose bytes depend on the data alone: no date, fixed ids, fonts as paths, no user settings.

Colour (Okabe and Ito's palette, safe for the colour-blind) says the backend, the marker the form of the adapter, a
dashed line an option other than the default.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Analysis, DriftRow, Result
from flexroll.report.text import series_label
from flexroll.schema.records import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Result], float | None]
COLOURS = {
    "flex": "#0072B2",
    "vllm": "#D55E00",
    "transformers_generate": "#E69F00",
    "transformers_cb": "#009E73",
    "unsloth": "#CC79A7",
}
MARKERS = {"none": "o", "merged": "s", "unmerged": "^", "request": "D"}
DASHES = ("--", ":", "-.")
STYLE = {
    "svg.hashsalt": "flexroll",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}


def draw_all(analysis: Analysis, folder: Path) -> dict[str, str]:
    """Write throughput.svg, memory.svg and drift.svg into `folder`; name -> path relative to the results document.

    A figure without data is not written, and an old one of that name is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    with _style():
        figures = {"throughput": _throughput(analysis), "memory": _memory(analysis), "drift": _drift(analysis.drift)}
        for name, figure in figures.items():
            path = folder / f"{name}.svg"
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            write_json(path, "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n")
            drawn[name] = f"figures/{name}.svg"
    return drawn


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _throughput(analysis: Analysis) -> Figure | None:
    return _against_batch(analysis, lambda r: r.tps, "tok/s, median of rounds", bars=True)


def _memory(analysis: Analysis) -> Figure | None:
    on_gpu = any(r.on_gpu for r in analysis.results)
    part = "device_total" if on_gpu else "peak_allocated"
    label = "GPU memory in use, GB" if on_gpu else "Peak resident memory, GB"

    def value(result: Result) -> float | None:
        used = getattr(result.memory, part)
        return None if used is None else used / 1e9

    return _against_batch(analysis, value, label, bars=False)


def _against_batch(analysis: Analysis, value: Value, label: str, bars: bool) -> Figure | None:
    from matplotlib.figure import Figure

    panels = _panels(analysis, value)
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    handles: dict[str, Any] = {}
    stacks = list(dict.fromkeys(r.stack for group in panels.values() for r in group))
    for ax, (name, group) in zip(axes.flat, panels.items(), strict=False):
        ax.set_title(analysis.config["experiments"][name]["title"])
        _panel(ax, group, value, bars, handles, stacks)
        ax.set_ylabel(label)
        ax.set_xlabel("batch (sequences)")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    across = 3 if columns == 2 else 2
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(across, len(handles)))
    return figure


def _panels(analysis: Analysis, value: Value) -> dict[str, list[Result]]:
    """Experiments of the sweep and GRPO sections with a value; those of one batch only where no other is there."""
    found: dict[str, list[Result]] = {}
    for r in analysis.results:
        if r.section in ("batch_sweep", "grpo"):
            found.setdefault(r.experiment, []).append(r)
    found = {name: group for name, group in found.items() if any(_known(r, value) for r in group)}
    swept = {name: group for name, group in found.items() if len({r.batch for r in group}) > 1}
    return swept or found


def _known(result: Result, value: Value) -> bool:
    return result.status == "ok" and value(result) is not None


def _panel(ax: Axes, group: list[Result], value: Value, bars: bool, handles: dict[str, Any], stacks: list[str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    series: dict[tuple, list[Result]] = {}
    for r in group:
        series.setdefault((r.backend, r.adapter, r.option, r.sampling, r.stack), []).append(r)
    samplings = Counter(key[:3] + key[4:] for key in series)
    missed: dict[int, int] = {}
    for (backend, adapter, option, sampling, stack), results in series.items():
        name = series_label(backend, adapter) + ("" if option == "default" else f", {option}")
        # Panels are titled by their sampling; it is named again only where it tells two series of one panel apart.
        name += f", {sampling}" if samplings[(backend, adapter, option, stack)] > 1 else ""
        name += f", {stack}" if len(stacks) > 1 else ""
        options = list(dict.fromkeys(r.option for r in group if r.backend == backend))
        style = "-" if option == options[0] else DASHES[(options.index(option) - 1) % len(DASHES)]
        look: dict[str, Any] = {"color": COLOURS[backend], "marker": MARKERS[adapter], "linestyle": style}
        if stacks.index(stack) or option != options[0]:
            look["markerfacecolor"] = "white"
        ok = sorted((r for r in results if _known(r, value)), key=lambda r: r.batch)
        if ok:
            batches, values = [r.batch for r in ok], [value(r) for r in ok]
            (line,) = ax.plot(batches, values, **look)
            handles.setdefault(name, line)
            if bars:
                ax.vlines(
                    batches, [r.tps_min for r in ok], [r.tps_best for r in ok], color=COLOURS[backend], linewidth=1
                )
        for r in results:
            if r.status == "failed":
                missed[r.batch] = missed.get(r.batch, -1) + 1
                cross = {"marker": "x", "color": COLOURS[backend], "linestyle": "none", "clip_on": False, "zorder": 5}
                (mark,) = ax.plot(
                    [r.batch], [0.03 + 0.07 * missed[r.batch]], transform=ax.get_xaxis_transform(), **cross
                )
                handles.setdefault(f"{name}: failed", mark)
    ticks = sorted({r.batch for r in group})
    ax.set_xscale("log", base=2)
    ax.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    _scale(ax, [v for r in group if _known(r, value) and (v := value(r))])
    if ax.get_yscale() == "log":
        ax.yaxis.set_minor_formatter(NullFormatter())


def _scale(ax: Axes, values: list[float]) -> None:
    """From zero where the values lie close together, logarithmic where a linear axis would flatten the small ones."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    if max(values) > 8 * min(values):
        ax.set_yscale("log")
        ax.set_ylim(min(values) / 1.6, max(values) * 1.4)
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    else:
        ax.set_ylim(0, max(values) * 1.12)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 10 or y == 0 else f"{y:g}"))


def _drift(drift: list[DriftRow]) -> Figure | None:
    """Largest change and share of base weights changed, per cycle: the refresh beside PEFT's merge and unmerge."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = [d for d in drift if d.status == "ok" and d.peft]
    if not known:
        return None
    figure = Figure(figsize=(9.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, d in enumerate(known):
        cycles = [c.cycle for c in d.peft]
        # Stacks often agree to the last bit: the first is drawn large, the next small and hollow on top of it.
        look = {"marker": "os^D"[i % 4], "linestyle": ("-", *DASHES)[i % 4], "markersize": 4 if i else 8}
        look |= {"markerfacecolor": "white"} if i else {}
        peft: dict[str, Any] = {"color": COLOURS["vllm"], **look}
        flex: dict[str, Any] = {"color": COLOURS["flex"], **look}
        left.plot(cycles, [c.max_abs_diff for c in d.peft], label=f"PEFT merge and unmerge, {d.stack}", **peft)
        right.plot(cycles, [100 * c.share_changed for c in d.peft], **peft)
        if d.base_identical:
            for ax in (left, right):
                ax.plot(
                    cycles,
                    [0] * len(cycles),
                    label=f"flex refresh, {d.stack}: 0" if ax is left else None,
                    clip_on=False,
                    **flex,
                )
    left.set_title("Largest change of a base weight")
    right.set_title("Base weights changed, %")
    for ax in (left, right):
        ax.set_xlabel("cycles")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(labels)))
    return figure
