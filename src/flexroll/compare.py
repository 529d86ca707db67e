"""`flexroll compare`: is one run faster than another, configuration by configuration, and does a regression show.

Two runs are other processes at other times, so their sessions are no blocks (`analysis.blocks`): they are compared
unpaired, by Welch's t on the logs of the session medians, and on one device only, for cards of one model differ.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scipy import stats

from flexroll.analysis.blocks import paired_ratio
from flexroll.analysis.collect import IDENTITY
from flexroll.analysis.model import CellRow
from flexroll.analysis.run import read_analysis
from flexroll.analysis.statistics import CONFIDENCE, MIN_SESSIONS
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.schema.config import Config
from flexroll.schema.load import parse_config
from flexroll.schema.records import write_json

KEY = tuple(name for name in IDENTITY if name != "section")
Key = tuple[Any, ...]
MetricName = Literal["tps", "decode_tps", "memory"]
Judged = Literal["faster", "slower", "more", "less", "no difference shown", "insufficient n"]
Verdict = Judged | Literal["not comparable", "only in A", "only in B"]
BAD = ("failed", "missing", "unreadable")
# Of the model, what a run can differ in; where its folder lies it can, too, and it is the same model.
MODEL = ("name", "source", "repo", "revision", "dtype", "weights", "seed")


@dataclass(frozen=True)
class Metric:
    """more_is_worse: of memory. shown: a value as tables print it."""

    title: str
    value: Callable[[CellRow], float | None]
    shown: Callable[[Any], str]
    more_is_worse: bool = False


METRICS: dict[str, Metric] = {
    "tps": Metric("tok/s", lambda row: row.tps_median, text.rate),
    "decode_tps": Metric("decode tok/s", lambda row: row.decode_tps_median, text.rate),
    "memory": Metric("peak memory, GB", lambda row: row.memory.peak_allocated, text.gigabytes, more_is_worse=True),
}


class Row(BaseModel):
    """One configuration in both runs.

    a, b: geometric mean of the session medians, tok/s or bytes, so that b / a is `ratio`, whose 95 % interval is low to
    high. n_a, n_b: sessions behind them, all on `device`. missing: sessions of B that failed or have no record, though
    A's did not all. regression: the whole interval is worse than the threshold allows.
    """

    experiment: str
    backend: str
    adapter: str
    batch: int
    option: str
    sampling: str
    stack: str
    a: float | None = None
    b: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    n_a: int = 0
    n_b: int = 0
    device: str = ""
    missing: int = 0
    regression: bool = False
    verdict: Verdict
    reason: str = ""


class RunComparison(BaseModel):
    """geometric_mean: of the ratios of `comparable` configurations, those with too few sessions for an interval
    included."""

    schema_version: int = 1
    a: str
    b: str
    metric: MetricName
    threshold: float
    across_devices: bool
    geometric_mean: float | None
    comparable: int
    regressions: int
    missing: int
    rows: list[Row]

    def exit_code(self, strict: bool = False) -> int:
        """1 for a regression; strict: also for what B lacks or failed at, and where nothing compares."""
        return int(bool(self.regressions or (strict and (self.missing or not self.comparable))))


@dataclass(frozen=True)
class _Run:
    config: Config
    rows: dict[Key, list[CellRow]]


def compare(
    a: Path, b: Path, metric: str = "tps", threshold: float = 0.02, across_devices: bool = False
) -> RunComparison:
    """B against A: how many times A's metric B's is, for every configuration of either.

    Args:
        a, b: folders with an analysis.json.
        metric: tps, decode_tps or memory (the peak).
        threshold: a regression's least size, a fraction.
        across_devices: compare sessions of other devices as well.

    Raises:
        FlexrollError: a folder or its analysis.json is missing or bad, the metric is unknown, the threshold is no
            fraction, or the runs have no configuration in common.
    """
    if metric not in METRICS:
        raise FlexrollError(f"--metric: unknown metric '{metric}'; known: {', '.join(METRICS)}")
    if not 0 <= threshold < 1:
        raise FlexrollError(f"--threshold: {threshold:g} is no fraction from 0 to below 1")
    first, second = _read(a), _read(b)
    if not first.rows.keys() & second.rows.keys():
        raise FlexrollError(f"{a} and {b} have no configuration in common")
    keys = dict.fromkeys([*first.rows, *second.rows])
    rows = [_compare(key, first, second, METRICS[metric], threshold, across_devices) for key in keys]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return RunComparison(
        a=str(a),
        b=str(b),
        metric=metric,  # type: ignore[arg-type]
        threshold=threshold,
        across_devices=across_devices,
        geometric_mean=math.exp(fmean(map(math.log, ratios))) if ratios else None,
        comparable=len(ratios),
        regressions=sum(row.regression for row in rows),
        missing=sum(row.missing for row in rows),
        rows=rows,
    )


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """95 % interval of mean(b) - mean(a) of independent values of unlike spread, two or more a side.

    Welch's t with the Welch-Satterthwaite degrees of freedom; no width where neither side varies.
    """
    middle = fmean(b) - fmean(a)
    of_a, of_b = variance(a) / len(a), variance(b) / len(b)
    if not of_a + of_b:
        return middle, middle
    # Shares, not squares: squares of small variances vanish.
    share = of_a / (of_a + of_b)
    freedom = 1 / (share**2 / (len(a) - 1) + (1 - share) ** 2 / (len(b) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(of_a + of_b)
    return middle - half, middle + half


def _read(folder: Path) -> _Run:
    if not Path(folder).is_dir():
        raise FlexrollError(f"{folder}: no such folder of results")
    analysis = read_analysis(folder)
    config = parse_config(analysis.config, f"{folder}/analysis.json")
    rows: dict[Key, list[CellRow]] = {}
    for row in analysis.cells:
        if row.experiment not in config.experiments:
            raise FlexrollError(f"{folder}/analysis.json: its config has no experiment '{row.experiment}'")
        rows.setdefault(tuple(getattr(row, name) for name in KEY), []).append(row)
    return _Run(config, rows)


def _compare(key: Key, a: _Run, b: _Run, metric: Metric, threshold: float, across: bool) -> Row:
    row = Row(**dict(zip(KEY, key, strict=True)), verdict="not comparable")
    ours, theirs = _ok(a.rows.get(key, [])), _ok(b.rows.get(key, []))
    bad = [cell for cell in b.rows.get(key, []) if cell.status in BAD]
    row.n_a, row.n_b = len(ours), len(theirs)
    if ours or key not in a.rows:  # what failed in both runs is no news
        row.missing = len(bad) or int(not theirs)
    if not ours or not theirs:
        row.verdict = "only in A" if ours else "only in B" if theirs or key not in a.rows else "not comparable"
        row.reason = "; ".join(filter(None, (_absent("A", key, a), _absent("B", key, b))))
        return row
    notes = [f"{len(bad)} of {len(b.rows[key])} sessions of B {bad[0].status}: {bad[0].reason}"] if bad else []
    reason = _unlike(key, a.config, b.config)
    if reason is None:
        ours, theirs, reason = _on_one_device(ours, theirs, notes, across)
    row.n_a, row.n_b = len(ours), len(theirs)
    if reason is None:
        reason = next(filter(None, (_refusal(x, y, metric, across) for x in ours for y in theirs)), None)
    if reason is None:
        _judge(row, [_value(x, metric) for x in ours], [_value(y, metric) for y in theirs], metric, threshold)
        row.device = ", ".join(dict.fromkeys(str(cell.device) for cell in (*ours, *theirs)))
    row.reason = "; ".join(filter(None, (reason, row.reason, *notes)))
    return row


def _judge(row: Row, a: list[float], b: list[float], metric: Metric, threshold: float) -> None:
    of_a, of_b = [math.log(value) for value in a], [math.log(value) for value in b]
    row.a, row.b = math.exp(fmean(of_a)), math.exp(fmean(of_b))
    row.ratio = math.exp(fmean(of_b) - fmean(of_a))
    if min(row.n_a, row.n_b) < MIN_SESSIONS:
        row.verdict = "insufficient n"
        row.reason = f"an interval needs {MIN_SESSIONS} sessions a side"
        return
    low, high = welch(of_a, of_b)
    row.low, row.high = math.exp(low), math.exp(high)
    more, less = ("more", "less") if metric.more_is_worse else ("faster", "slower")
    row.verdict = more if row.low > 1 else less if row.high < 1 else "no difference shown"  # type: ignore[assignment]
    row.regression = row.low > 1 + threshold if metric.more_is_worse else row.high < 1 - threshold


def _ok(rows: Sequence[CellRow]) -> list[CellRow]:
    return [row for row in rows if row.status == "ok"]


def _value(row: CellRow, metric: Metric) -> float:
    value = metric.value(row)
    assert value is not None  # _refusal has seen to it
    return float(value)


def _absent(side: str, key: Key, run: _Run) -> str:
    """Why a side has nothing to compare; '' where it has."""
    rows = run.rows.get(key)
    if rows is None:
        return f"{side} does not have this configuration"
    return "" if _ok(rows) else f"{side}: {rows[0].status}: {rows[0].reason or 'no reason given'}"


def _unlike(key: Key, a: Config, b: Config) -> str | None:
    """Why two configurations of one name are not of one model and one length, or None."""
    named = dict(zip(KEY, key, strict=True))
    pairs = {f"model {name}": (getattr(a.model, name), getattr(b.model, name)) for name in MODEL}
    lengths = [config.length_of(config.experiments[named["experiment"]]) for config in (a, b)]
    pairs["max_model_len"] = (lengths[0], lengths[1])
    if named["adapter"] != "none":
        pairs["adapter"] = (a.adapter.model_dump(), b.adapter.model_dump())
    differ = [f"{name} {mine} against {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    return f"not the same work: {', '.join(differ)}" if differ else None


def _device(row: CellRow) -> str:
    """A GPU is its uuid, a CPU its name; '' where the record does not tell."""
    return row.device_uuid or ("" if row.on_gpu or row.device is None else f"{row.device}, {row.cpu}")


def _on_one_device(
    a: list[CellRow], b: list[CellRow], notes: list[str], across: bool
) -> tuple[list[CellRow], list[CellRow], str | None]:
    """The sessions of the device on which both sides have most, or why there is none; notes: gets what is left out."""
    if across:
        return a, b, None
    counts = [Counter(_device(row) for row in rows) for rows in (a, b)]
    shared = [name for name in counts[0] if name in counts[1]]
    if not shared:
        return a, b, "the two runs were on different devices, and cards of one model differ (see --across-devices)"
    name = max(shared, key=lambda name: (min(c[name] for c in counts), sum(c[name] for c in counts)))
    kept = [[row for row in rows if _device(row) == name] for rows in (a, b)]
    left = len(a) + len(b) - sum(map(len, kept))
    if left:
        notes.append(f"{left} sessions left out, on other devices than the rest")
    return kept[0], kept[1], None


def _refusal(a: CellRow, b: CellRow, metric: Metric, across: bool) -> str | None:
    """Why two sessions do not compare, as `blocks` would say of one block of both; None where they do."""
    changes: dict[str, Any] = {"session": a.session}
    if across:
        changes |= {name: getattr(a, name) for name in ("device", "device_uuid", "cpu", "on_gpu")}
    found = paired_ratio([a], [b.model_copy(update=changes)], metric.value)
    return found.reason if found.ratio is None else None


def show(comparison: RunComparison, console: Console | None = None) -> None:
    """A table on a terminal, markdown elsewhere."""
    if not sys.stdout.isatty() and console is None:
        print(markdown(comparison), end="")
        return
    console = console or Console(highlight=False)
    table = Table(title=escape(_title(comparison)), title_justify="left")
    rows = _table(comparison)
    for name in rows.headers:
        table.add_column(name, justify="left" if name in rows.left else "right")
    colours = {"slower": "yellow", "more": "yellow", "faster": "green", "less": "green"}
    for row, found in zip(rows.rows, comparison.rows, strict=True):
        table.add_row(*map(escape, row.values()), style="red" if found.regression else colours.get(found.verdict))
    console.print(table)
    for line in _summary(comparison):
        console.print(escape(line), soft_wrap=True)


def markdown(comparison: RunComparison) -> str:
    rows = _table(comparison)
    lines = [f"## {_title(comparison)}", "", "| " + " | ".join(rows.headers) + " |"]
    lines.append("|" + "|".join("---" if name in rows.left else "---:" for name in rows.headers) + "|")
    lines += ["| " + " | ".join(map(text.cell, row.values())) + " |" for row in rows.rows]
    return "\n".join([*lines, "", *(f"- {line}" for line in _summary(comparison))]) + "\n"


def _title(comparison: RunComparison) -> str:
    return f"{comparison.b} against {comparison.a}: {METRICS[comparison.metric].title}"


def _table(comparison: RunComparison) -> text.Table:
    shown = METRICS[comparison.metric].shown
    rows = [
        {
            "experiment": row.experiment,
            "engine": text.series_label(row.backend, row.adapter),
            "option": row.option,
            "sampling": row.sampling,
            "stack": row.stack,
            "batch": str(row.batch),
            "A": shown(row.a),
            "B": shown(row.b),
            "B/A": text.NONE if row.ratio is None else f"{row.ratio:.3f}",
            "95 % interval": text.NONE if row.low is None else f"{row.low:.3f}–{row.high:.3f}",
            "n": f"{row.n_a}, {row.n_b}",
            "verdict": row.verdict + (", a regression" if row.regression else ""),
            "why": row.reason,
        }
        for row in comparison.rows
    ]
    words = ("experiment", "engine", "option", "sampling", "stack", "verdict", "why")
    return text.Table(rows, frozenset(words)).without_constant("option", "sampling", "stack")


def _summary(comparison: RunComparison) -> list[str]:
    mean, over = comparison.geometric_mean, text.plural(comparison.comparable, "configuration")
    verdicts = [f"{count} {name}" for name, count in Counter(row.verdict for row in comparison.rows).items()]
    lines = [
        "nothing could be compared" if mean is None else f"geometric mean of B/A over {over}: {mean:.4f}",
        f"verdicts: {', '.join(verdicts)}",
        f"regressions past {comparison.threshold:.3g}: {comparison.regressions}; "
        f"cells that B lacks or failed at: {comparison.missing}",
    ]
    if comparison.across_devices:
        lines.append("devices were not required to be the same: differences may be those of the cards")
    return lines


def write(comparison: RunComparison, json_file: Path | None = None, markdown_file: Path | None = None) -> None:
    """Raises FlexrollError where a file cannot be written."""
    for path, content in (
        (json_file, comparison.model_dump_json(indent=1) + "\n"),
        (markdown_file, markdown(comparison)),
    ):
        try:
            if path is not None:
                write_json(path, content)
        except OSError as failure:
            raise FlexrollError(f"{path}: cannot be written: {failure.strerror or failure}") from None
