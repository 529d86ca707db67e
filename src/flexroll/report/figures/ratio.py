"""tok/s over vLLM's against batch, paired session by session, with 95 % intervals; hollow where nothing is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.analysis.model import Analysis, Pair, Result
from flexroll.analysis.pairs import key_of
from flexroll.report.figures import batch
from flexroll.report.figures.batch import Line, Panel, Point
from flexroll.report.figures.style import INK, PAPER
from flexroll.report.text import series_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECIDED = ("faster", "slower")
LOG_FROM = 4  # largest over smallest ratio


def draw(analysis: Analysis) -> Figure | None:
    return batch.draw(_panels(analysis), "tok/s over vLLM's (ratio)", _scale, _legend(analysis), dodge=0.07)


def told(analysis: Analysis, kind: str) -> list[Pair]:
    """Pairs of a kind that have a ratio."""
    return [pair for pair in analysis.pairs if pair.kind == kind and pair.comparison.ratio is not None]


def against_batch(analysis: Analysis) -> list[str]:
    """Experiments whose ratios are drawn against batch: those that have them at several batches."""
    batches: dict[str, set[int]] = {}
    for pair in told(analysis, "vllm"):
        batches.setdefault(pair.over.experiment, set()).add(pair.over.batch)
    return [name for name, found in batches.items() if len(found) > 1]


def _legend(analysis: Analysis) -> list[tuple[str, dict[str, Any]]]:
    """What the filling of the markers that are drawn means."""
    names = against_batch(analysis)
    verdicts = {pair.comparison.verdict for pair in told(analysis, "vllm") if pair.over.experiment in names}
    dot = {"color": INK, "marker": "o", "linestyle": "none"}
    found = [("filled: the interval excludes 1", dot)] if verdicts & set(DECIDED) else []
    unsure = [name for name in ("no difference shown", "insufficient n") if name in verdicts]
    if unsure:
        found.append((f"hollow: {' or '.join(unsure)}", dot | {"markerfacecolor": PAPER}))
    return found


def _panels(analysis: Analysis) -> list[Panel]:
    pairs = told(analysis, "vllm")
    names = against_batch(analysis)
    stacks = list(dict.fromkeys(pair.over.stack for pair in pairs if pair.over.experiment in names))
    results = {key_of(r): r for r in analysis.results}
    found = []
    for name in names:
        own = [pair for pair in pairs if pair.over.experiment == name]
        group: dict[tuple[object, ...], Result] = {key_of(pair.over): results[key_of(pair.over)] for pair in own}
        lines = []
        for label, look, members in batch.series(list(group.values()), stacks, hollow=False):
            keys = {key_of(r) for r in members}
            lines += _lines(label, look, [pair for pair in own if key_of(pair.over) in keys])
        title = analysis.config["experiments"][name]["title"]
        found.append(Panel(title, sorted({pair.over.batch for pair in own}), lines))
    return found


def _lines(label: str, look: dict[str, Any], pairs: list[Pair]) -> list[Line]:
    """A line for each form of vLLM; it is named where there are several."""
    forms: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        forms.setdefault((pair.under.adapter, pair.under.option, pair.under.sampling), []).append(pair)
    lines = []
    for i, ((adapter, option, _), own) in enumerate(forms.items()):
        options = {key[1] for key in forms if key[0] == adapter}
        form = series_label("vllm", adapter) + (f", {option}" if len(options) > 1 else "")
        name = f"{label}, over {form}" if len(forms) > 1 else label
        style = look if i == 0 else look | {"linestyle": batch.DASHES[(i - 1) % len(batch.DASHES)]}
        lines.append(Line(name, style, sorted((_point(pair) for pair in own), key=lambda p: p.batch)))
    return lines


def _point(pair: Pair) -> Point:
    c = pair.comparison
    bar = "" if c.low is None else "interval"
    return Point(pair.over.batch, c.ratio or 0.0, c.low, c.high, bar, hollow=c.verdict not in DECIDED)  # type: ignore[arg-type]


def _scale(ax: Axes, values: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(*values, 1.0), max(*values, 1.0)
    if high > LOG_FROM * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.25, high * 1.25)
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        margin = max(0.12 * (high - low), 0.02)
        ax.set_ylim(low - margin, high + margin)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.axhline(1, color=INK, linewidth=1, zorder=1.5)
