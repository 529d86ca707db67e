"""Every measured round against wall-clock time: its rate relative to its cell's median, and the SM clock below.

What drifts with time, or jumps when something else runs, shows here as a slope or a step that sessions share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from flexroll.analysis.model import Analysis
from flexroll.report.figures.style import COLOURS, GRID, INK, MUTED
from flexroll.schema.catalogue import BACKENDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A machine that was left alone within this is quiet; a smaller axis would make its noise look large.
LEAST_SPAN = 1.0


@dataclass(frozen=True)
class Dot:
    """started: Unix time, seconds. change: of tok/s against the cell's median, %. sm_clock: MHz."""

    backend: str
    session: int
    started: float
    change: float
    sm_clock: float | None
    flagged: bool


def draw(analysis: Analysis) -> Figure | None:
    from matplotlib.figure import Figure

    found = dots(analysis)
    if not found:
        return None
    clocks = any(dot.sm_clock is not None for dot in found)
    figure = Figure(figsize=(9.2, 4.3 if clocks else 3.0), layout="constrained")
    axes = figure.subplots(2 if clocks else 1, 1, squeeze=False, sharex=True, height_ratios=[2, 1] if clocks else [1])
    begin = min(dot.started for dot in found)
    span = max(dot.started for dot in found) - begin
    scale, unit = (3600.0, "hours") if span > 3 * 3600 else (60.0, "minutes")
    upper = axes[0, 0]
    _rates(upper, found, begin, scale)
    if clocks:
        _clocks(axes[1, 0], found, begin, scale)
    for ax in axes.flat:
        _sessions(ax, found, begin, scale)
    when = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d %H:%M")
    axes[-1, 0].set_xlabel(f"{unit} since the first round ({when} UTC)")
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def dots(analysis: Analysis) -> list[Dot]:
    """The measured rounds whose begin is known, of cells that ended ok."""
    found = []
    for cell in analysis.cells:
        own = [r for r in cell.rounds if not r.warmup]
        if cell.status != "ok" or not own:
            continue
        middle = median(r.tokens / r.wall_s for r in own)
        for r in own:
            if r.started is not None and middle:
                change = 100 * (r.tokens / r.wall_s / middle - 1)
                found.append(Dot(cell.backend, cell.session, r.started, change, r.sm_clock, bool(r.flags)))
    return found


def _rates(ax: Axes, found: Sequence[Dot], begin: float, scale: float) -> None:
    ax.axhline(0, color=INK, linewidth=1, zorder=1.5)
    for backend, colour in COLOURS.items():
        own = [dot for dot in found if dot.backend == backend]
        if own:
            at = [(dot.started - begin) / scale for dot in own]
            look = {"linestyle": "none", "marker": "o", "markersize": 3.5, "color": colour}
            ax.plot(at, [dot.change for dot in own], label=BACKENDS[backend].label, **look)
    flagged = [dot for dot in found if dot.flagged]
    if flagged:
        at = [(dot.started - begin) / scale for dot in flagged]
        ring = {"linestyle": "none", "marker": "s", "markersize": 7, "markerfacecolor": "none", "color": INK}
        ax.plot(at, [dot.change for dot in flagged], label="flagged", markeredgewidth=0.9, **ring)
    reach = 1.15 * max(LEAST_SPAN, *(abs(dot.change) for dot in found))
    ax.set_ylim(-reach, reach)
    ax.set_ylabel("tok/s against the\ncell's median, %")


def _clocks(ax: Axes, found: Sequence[Dot], begin: float, scale: float) -> None:
    for backend, colour in COLOURS.items():
        own = [dot for dot in found if dot.backend == backend and dot.sm_clock is not None]
        at = [(dot.started - begin) / scale for dot in own]
        ax.plot(at, [dot.sm_clock for dot in own], linestyle="none", marker="o", markersize=3, color=colour)
    clocks = [dot.sm_clock for dot in found if dot.sm_clock is not None]
    room = max(0.15 * (max(clocks) - min(clocks)), 25.0)
    ax.set_ylim(min(clocks) - room, max(clocks) + room)
    ax.set_ylabel("SM clock, MHz")


def _sessions(ax: Axes, found: Sequence[Dot], begin: float, scale: float) -> None:
    """Every other session on a grey ground, numbered, where there are several that follow each other."""
    spans = {}
    for session in sorted({dot.session for dot in found}):
        at = [(dot.started - begin) / scale for dot in found if dot.session == session]
        spans[session] = (min(at), max(at))
    ends = list(spans.values())
    if len(spans) < 2 or any(a[1] > b[0] for a, b in pairwise(ends)):
        return
    for i, (session, (low, high)) in enumerate(spans.items()):
        if i % 2 == 0:
            ax.axvspan(low, high, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        if ax.get_subplotspec().is_first_row():
            top = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top", "color": MUTED, "fontsize": 8}
            ax.text((low + high) / 2, 0.98, f"session {session}" if i == 0 else str(session), **top)
