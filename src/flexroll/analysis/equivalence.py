"""Whether two trainings learn alike: equivalence has to be shown, it does not follow from a difference that was not.

Two one-sided tests (Schuirmann, 1987): at 5 % each they find two means equivalent within a band where the 90 % interval
of their difference lies inside of it. What is independent is a seed; steps of one run are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean, variance

from scipy import stats

from flexroll.analysis.model import Equivalence

LEVEL = 0.05  # of each of the two tests


def equivalence(own: Mapping[int, float], reference: Mapping[int, float], band: float) -> Equivalence:
    """The test of one quantity, given a value a seed of each side. Swapping the sides negates the difference alone.

    Seeds that both sides have are paired, where there are two or more; else Welch's interval, with two or more a side.
    """
    if not own or not reference:
        return Equivalence(band=band, reason="one side has no run to compare")
    common = sorted(own.keys() & reference.keys())
    if len(common) > 1:
        values = [own[seed] - reference[seed] for seed in common]
        error, freedom = math.sqrt(variance(values) / len(values)), len(values) - 1.0
        return _judged(mean(values), error, freedom, len(values), band, paired=True)
    if common:
        return _told(own[common[0]] - reference[common[0]], band, paired=True)
    difference = mean(own.values()) - mean(reference.values())
    if min(len(own), len(reference)) < 2:
        return _told(difference, band)
    parts = [(variance(side.values()) / len(side), len(side)) for side in (own, reference)]
    error = math.sqrt(sum(part for part, _ in parts))
    within = sum(part**2 / (n - 1) for part, n in parts)
    freedom = error**4 / within if within else float(len(own) + len(reference) - 2)
    return _judged(difference, error, freedom, min(len(own), len(reference)), band)


def _told(difference: float, band: float, paired: bool = False) -> Equivalence:
    reason = "one seed gives no interval"
    return Equivalence(band=band, difference=difference, n=1, paired=paired, reason=reason)


def _judged(difference: float, error: float, freedom: float, n: int, band: float, paired: bool = False) -> Equivalence:
    half = float(stats.t.ppf(1 - LEVEL, freedom)) * error
    low, high = difference - half, difference + half
    found = Equivalence(band=band, difference=difference, low=low, high=high, n=n, paired=paired)
    if -band <= low and high <= band:
        found.verdict = "equivalent"
    elif low > band or high < -band:
        found.verdict = "different"
    else:
        found.reason = f"{n} seeds: the interval is neither inside the band nor outside"
    return found
