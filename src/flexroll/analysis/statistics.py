"""Throughput statistics. A round's tok/s is that round's tokens over that round's seconds, and nothing else.

Best-of-N is the largest of those, not the last round's tokens over the shortest round's seconds: the two come from
different rounds and make a rate that no round had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from flexroll.schema.records import Round


@dataclass(frozen=True)
class Rates:
    """Rates of one session in tok/s over its `n` measured rounds. spread: (best - low) / median."""

    n: int
    median: float
    best: float
    low: float

    @property
    def spread(self) -> float:
        return (self.best - self.low) / self.median if self.median else 0.0


def rates(values: Iterable[float]) -> Rates | None:
    """Summary of a session's rates; None without any."""
    listed = list(values)
    if not listed:
        return None
    return Rates(n=len(listed), median=median(listed), best=max(listed), low=min(listed))


def round_rates(rounds: Sequence[Round]) -> Rates | None:
    """Whole-rollout rates of the measured rounds, prefill included; warm-up rounds are left out."""
    return rates(r.tps for r in rounds if not r.warmup)


def decode_rates(rounds: Sequence[Round]) -> Rates | None:
    """Decode-only rates of the measured rounds; None unless every one of them tells its decode time."""
    found = [r.decode_tps for r in rounds if not r.warmup]
    if any(value is None for value in found):
        return None
    return rates(value for value in found if value is not None)


def headline(session_medians: Iterable[float]) -> float | None:
    """Median of the sessions' medians: rounds of one process are not independent, sessions are."""
    listed = list(session_medians)
    return median(listed) if listed else None
