"""Statistics: whether sessions and rounds are many and quiet enough for what is read from them. Warnings only."""

from __future__ import annotations

from collections.abc import Iterator

from flexroll.analysis.collect import IDENTITY
from flexroll.analysis.statistics import MIN_SESSIONS, TREND_ROUNDS, trend
from flexroll.check.registry import MEASURED, Finding, Over, check, not_applicable, warning
from flexroll.check.submission import Held, Run

STATISTICS = "statistics"

CONFIGURATIONS = Over(
    "measured configuration",
    lambda run: list(run.grouped(lambda held: tuple(getattr(held.cell, name) for name in IDENTITY)).values()),
    lambda cells: f"{cells[0].cell.engine}/{cells[0].cell.file}",
)


@check(STATISTICS, CONFIGURATIONS)
def enough_sessions(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """A configuration has sessions enough for an interval."""
    if len(cells) < MIN_SESSIONS:
        yield warning(f"insufficient n: {len(cells)} of the {MIN_SESSIONS} sessions that an interval needs")


@check(STATISTICS, MEASURED)
def flagged_rounds(run: Run, held: Held) -> Iterator[Finding]:
    """No measured round was disturbed by throttling, load or another process; one that was counts like any other."""
    rounds = held.record.measured
    flags = sorted({flag for r in rounds for flag in getattr(r, "flags", [])})
    if flags:
        count = sum(bool(getattr(r, "flags", [])) for r in rounds)
        yield warning(f"{count} of {len(rounds)} measured rounds flagged: {'; '.join(flags)}")
    elif any(getattr(r, "telemetry", None) is None for r in rounds):
        yield not_applicable("nobody watched the machine in every round (no telemetry)")


@check(STATISTICS, MEASURED)
def no_trend(run: Run, held: Held) -> Iterator[Finding]:
    """Measured rounds do not go one way: up, the warm-up was too short; down, the device slowed under load."""
    rates = [r.tps for r in held.record.measured]
    if len(rates) < TREND_ROUNDS:
        yield not_applicable(f"a trend shows from {TREND_ROUNDS} measured rounds on")
    elif (change := trend(rates)) is not None:
        why = "the warm-up was too short" if change > 0 else "the device slowed under load"
        yield warning(f"tok/s {change:+.1%} from the first measured round to the last: {why}")
