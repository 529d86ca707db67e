"""How many times the baseline's a configuration's KL is, with an interval over the scored sequences.

KL a token is heavy-tailed, and the tokens of one sequence are not independent: few sequences make a ratio that more of
them take back. Both configurations are scored on the same continuations, so that what is resampled is prompts, with
both sides' KL of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from flexroll.analysis.statistics import RESAMPLES, expanded_level
from flexroll.schema.quality import QualityRecord

# Below this many nats a token a KL is what rounding fp32 log probabilities makes of 0, and its multiples say nothing.
RESOLUTION = 1e-6
# Fewer sequences have too few resamples: an interval of 4 holds the true ratio 87 times in 100, of 6 and more 91 to 95.
MIN_SEQUENCES = 6


@dataclass(frozen=True)
class Times:
    """value: KL over the baseline's, each no less than RESOLUTION below the line. low, high: its 95 % interval, which
    holds it; None below MIN_SEQUENCES sequences. n: sequences."""

    value: float
    low: float | None
    high: float | None
    n: int

    def told(self) -> str:
        """`1.45 times [0.9, 2.1] the baseline's over 8 sequences`."""
        band = "" if self.low is None or self.high is None else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.3g} times{band} the baseline's over {self.n} sequence{'s' if self.n > 1 else ''}"


def kl_times(record: QualityRecord, baseline: QualityRecord) -> Times | None:
    """The ratio of two records' KL, both scored on the same continuations; None where they were not, or where one has
    no KL."""
    if record.kl is None or baseline.kl is None:
        return None
    if record.reference_sha256 != baseline.reference_sha256 or record.sequence_tokens != baseline.sequence_tokens:
        return None
    return ratio(record.kl_sequences, baseline.kl_sequences, record.sequence_tokens)


def ratio(over: Sequence[float], under: Sequence[float], tokens: Sequence[int]) -> Times:
    """Ratio of two configurations' mean KL a token: sums over all tokens, not a mean of the sequences' ratios.

    Paired bootstrap over sequences, percentile interval at a level widened for small n, seeded. Resamples are drawn
    from sorted sequences: the order of prompts says nothing, and so changes nothing. Why so: over 600 simulated sets a
    case of log-normal KL (sigma 0.5 to 1.5, uncorrelated and with 0.7), 6 to 32 sequences, it holds the true ratio in
    0.91 to 0.95 and lies wholly above it in 0.02 to 0.05 of sets; the plain percentile interval in 0.81 to 0.93 and
    0.02 to 0.09, the log ratio's by the delta method with t in 0.81 to 0.95 and 0.02 to 0.11.

    Args:
        over, under: KL of each sequence, mean nats a token, in the same order. tokens: of each sequence.
    """
    rows = np.array(sorted(zip(over, under, tokens, strict=True)), dtype=float)
    sums = np.column_stack([rows[:, 0] * rows[:, 2], rows[:, 1] * rows[:, 2], rows[:, 2]]).T
    value = float(_ratio(*sums))
    n = len(rows)
    if n < MIN_SEQUENCES:
        return Times(value, None, None, n)
    interval = stats.bootstrap(
        tuple(sums),
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=expanded_level(n),
        method="percentile",
        rng=0,
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        return Times(value, None, None, n)
    return Times(value, min(low, value), max(high, value), n)


def _ratio(over: np.ndarray, under: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of sums over the sequences of an axis."""
    total = tokens.sum(axis=axis)
    return over.sum(axis=axis) / total / np.maximum(under.sum(axis=axis) / total, RESOLUTION)
