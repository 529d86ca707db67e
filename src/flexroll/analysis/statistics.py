"""Throughput statistics. A round's tok/s is that round's tokens over that round's seconds, and nothing else.

Best-of-N is the largest of those, not the last round's tokens over the shortest round's seconds: the two come from
different rounds and make a rate that no round had.

Two levels, after Kalibera & Jones (ISMM'13): sessions, which are fresh processes, and rounds inside them. Rounds of one
process share its memory layout, its compiled code and the card's state, so an interval is of sessions only, and the
spread within sessions is told beside it. An estimate has its interval, and two configurations differ only where that of
their ratio says so (Hoefler & Belli, SC'15, rules 5 and 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Literal

import numpy as np
from scipy import stats

from flexroll.analysis.model import Method
from flexroll.schema.records import Round

CONFIDENCE = 0.95
# With two sessions t has one degree of freedom and its factor is 12.7: an interval 18 standard deviations wide says
# nothing, and looks as if it did.
MIN_SESSIONS = 3
BOOTSTRAP_SESSIONS = 8
RESAMPLES = 9999
# Fewer rounds show a trend only where they are all but sorted.
TREND_ROUNDS = 8
# One cell in a hundred shows such an order by chance; a change below a hundredth moves the median by half of that.
TREND_P = 0.01
TREND_CHANGE = 0.01


@dataclass(frozen=True)
class Rates:
    """Rates of one session in tok/s over its `n` measured rounds.

    spread: (best - low) / median. cv: coefficient of variation, the rounds' sd over their mean; None for one round.
    """

    n: int
    median: float
    best: float
    low: float
    cv: float | None = None

    @property
    def spread(self) -> float:
        return (self.best - self.low) / self.median if self.median else 0.0


def rates(values: Iterable[float]) -> Rates | None:
    """Summary of a session's rates; None without any."""
    listed = list(values)
    if not listed:
        return None
    return Rates(n=len(listed), median=median(listed), best=max(listed), low=min(listed), cv=variation(listed))


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


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval in the unit of its values, and how it was made."""

    low: float
    high: float
    method: Method


@dataclass(frozen=True)
class Estimate:
    """A configuration's rate in tok/s: the median of its `n` sessions' medians, with an interval where n suffices."""

    value: float
    n: int
    interval: Interval | None

    @property
    def sufficient(self) -> bool:
        return self.interval is not None


def estimate(session_medians: Iterable[float]) -> Estimate | None:
    """The headline of a configuration with its 95 % interval over sessions; None without a session.

    The best round stands beside an estimate and has no interval: a maximum grows with the number of rounds.
    """
    listed = list(session_medians)
    value = headline(listed)
    return None if value is None else Estimate(value, len(listed), interval(listed, value))


def interval(values: Sequence[float], centre: float) -> Interval | None:
    """95 % interval of the median of independent positive values, one a session or a block.

    None ("insufficient n") below MIN_SESSIONS values, and where one of them is not positive and finite, which a rate
    never is. centre: their median; the interval holds it.
    """
    if len(values) < MIN_SESSIONS or not all(0 < value < math.inf for value in values):
        return None
    low, high = log_interval(np.log(np.asarray(values) / centre))
    method: Method = "t" if len(values) < BOOTSTRAP_SESSIONS else "bootstrap"
    return Interval(centre * math.exp(low), centre * math.exp(high), method)


def log_interval(logs: np.ndarray, resamples: int = RESAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """95 % intervals of the centre of log values over the last axis, which holds MIN_SESSIONS or more.

    Below BOOTSTRAP_SESSIONS values: Student's t about their mean. From there on: bootstrap of their median, percentile
    interval, at a level widened for small n as t widens the normal's (Hesterberg, The American Statistician 2015, 69:4,
    "expanded percentile"). Seeded, so that the same values give the same interval.

    Why so: coverage of the true median over 3000 simulated sets a case or more. Normal logs: t 0.95 at any n; plain
    percentile 0.92 at 8, 0.94 at 12, 0.93 at 20, and BCa the same (a median's acceleration is no more than noise);
    bootstraps of the mean 0.88 at 8; expanded percentile 0.97 at 8, 0.96 at 12 and 20, and over 8 to 30 between 0.936
    (at 11) and 0.969. Exponential logs: t 0.95 at 8 but 0.83 at 20, for it grows sure about the mean; expanded
    percentile 0.936 to 0.970. So too with t(3) tails and with a tenth of the sessions off by 10 %. Below 8 values the
    bootstrap answers with their whole range: the smallest of 7 is the median of 1 % of resamples.
    """
    n = logs.shape[-1]
    t = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    if n < BOOTSTRAP_SESSIONS:
        middle, half = logs.mean(axis=-1), t * logs.std(axis=-1, ddof=1) / math.sqrt(n)
        return middle - half, middle + half
    found = stats.bootstrap(
        (logs,),
        np.median,
        n_resamples=resamples,
        vectorized=True,
        axis=-1,
        confidence_level=expanded_level(n),
        method="percentile",
        rng=0,
    )
    return found.confidence_interval.low, found.confidence_interval.high


def expanded_level(n: int) -> float:
    """At which a percentile bootstrap of n values is to be taken for 95 %: wider for small n (`log_interval`)."""
    return 1 - 2 * float(stats.norm.sf(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(n / (n - 1))))


def variation(values: Sequence[float]) -> float | None:
    """Coefficient of variation: sample sd over mean, a fraction; None below two values or where their mean is 0."""
    return stdev(values) / mean(values) if len(values) > 1 and mean(values) else None


@dataclass(frozen=True)
class Split:
    """Where a configuration's noise comes from; fractions, None where too few sessions or rounds can tell.

    between: coefficient of variation of the session medians. within: median over sessions of the rounds' own.
    helps: what narrows the interval. More sessions always do; more rounds only where their noise is most of what the
    sessions' medians show: a median of r rounds has the variance pi / 2 * within^2 / r of its own.
    """

    between: float | None
    within: float | None
    helps: Literal["sessions", "rounds", ""]


def split(medians: Sequence[float], variations: Sequence[float], rounds: Sequence[int]) -> Split:
    """Spread between and within sessions (Kalibera & Jones, ISMM'13), from what each session tells.

    Args:
        medians: the sessions' medians.
        variations: the coefficients of variation of their rounds.
        rounds: their numbers of rounds.
    """
    between = variation(medians)
    within = median(variations) if variations else None
    if between is None or within is None:
        return Split(between, within, "")
    of_rounds = math.pi / 2 * within**2 / median(rounds)
    return Split(between, within, "rounds" if of_rounds > between**2 / 2 else "sessions")


def trend(values: Sequence[float]) -> float | None:
    """Relative change from the first round to the last where rounds go one way, else None.

    Up, the warm-up was too short; down, the machine slowed under load. Kendall's tau of rate and order at p < 0.01, the
    size by the Theil-Sen line over the median, both of which a single odd round does not move; changes below 1 % are
    left alone, and fewer than 8 rounds tell nothing.
    """
    n, middle = len(values), median(values) if values else 0
    if n < TREND_ROUNDS or not middle or min(values) == max(values):
        return None
    order = range(n)
    if not stats.kendalltau(order, values).pvalue < TREND_P:
        return None
    change = float(stats.theilslopes(values, order).slope) * (n - 1) / middle
    return change if abs(change) >= TREND_CHANGE else None
