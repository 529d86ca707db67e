"""The interval of a KL's multiple of the baseline's, and the verdict made from it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from flexroll.analysis.kl_ratio import MIN_SEQUENCES, RESOLUTION, Times, kl_times, ratio
from flexroll.analysis.quality import within
from flexroll.schema.quality import QualityRecord

KL = st.floats(1e-7, 1.0)
SEQUENCES = st.lists(st.tuples(KL, KL, st.integers(1, 64)), min_size=2, max_size=20)
LIMITS = st.floats(1.01, 100.0)
ORDER = {False: 0, None: 1, True: 2}


@settings(deadline=None, max_examples=40)
@given(SEQUENCES, LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_prompts_changes_nothing(rows, limit, random):
    shuffled = random.sample(rows, len(rows))
    one, other = (ratio(*zip(*each, strict=True)) for each in (rows, shuffled))
    assert one == other and within(one, limit) is within(other, limit)


@settings(deadline=None, max_examples=40)
@given(SEQUENCES, LIMITS, LIMITS)
def test_a_wider_limit_never_makes_a_verdict_worse(rows, one, other):
    times = ratio(*zip(*rows, strict=True))
    narrow, wide = sorted((one, other))
    assert ORDER[within(times, narrow)] <= ORDER[within(times, wide)]
    assert within(times, times.value) is True


@settings(deadline=None, max_examples=40)
@given(SEQUENCES)
def test_an_interval_holds_its_value_and_needs_enough_sequences(rows):
    times = ratio(*zip(*rows, strict=True))
    assert times.n == len(rows) and (times.low is None) == (times.high is None) == (len(rows) < MIN_SEQUENCES)
    assert times.low is None or 0 <= times.low <= times.value <= times.high


@settings(deadline=None, max_examples=20)
@given(SEQUENCES, st.floats(1.01, 10.0))
def test_every_sequence_so_many_times_as_far_leaves_no_doubt(rows, factor):
    _, under, tokens = zip(*rows, strict=True)
    under = [value + RESOLUTION for value in under]
    times = ratio([value * factor for value in under], under, tokens)
    bounds = [times.value] if times.low is None else [times.low, times.value, times.high]
    assert bounds == pytest.approx([factor] * len(bounds))


def test_by_hand():
    """Sums over all tokens: (2 * 1 + 8 * 3) / (2 * 2 + 8 * 1), not the mean of 1 / 2 and 3."""
    assert ratio([1.0, 3.0], [2.0, 1.0], [2, 8]) == Times(pytest.approx(26 / 12), None, None, 2)
    assert ratio([1e-3], [1e-9], [5]).value == pytest.approx(1e-3 / RESOLUTION)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        (Times(1.05, 0.9, 1.3, 8), True),
        (Times(1.05, 1.0, 1.09, 8), True),
        (Times(1.45, 0.9, 2.1, 8), None),
        (Times(1.45, 1.1, 2.1, 8), None),
        (Times(1.45, 1.2, 2.1, 8), False),
        (Times(9.0, None, None, 2), None),
        (Times(1.0, None, None, 2), True),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side_or_the_value_inside(times, verdict):
    assert within(times, 1.1) is verdict


def test_the_interval_is_as_sure_as_it_says():
    """Log-normal KL of 8 sequences, equal on both sides: a configuration as exact as its baseline is refused seldom."""
    rng = np.random.default_rng(0)
    held, above, rounds = 0, 0, 150
    for _ in range(rounds):
        over, under = np.exp(rng.standard_normal((2, 8)))
        times = ratio(over, under, [24] * 8)
        held += times.low <= 1 <= times.high
        above += times.low > 1
    assert held / rounds > 0.88 and above / rounds < 0.08


def record(option: str, kl_each: list[float], **changes) -> QualityRecord:
    values = {"stack": "s", "backend": "flex", "adapter": "none", "option": option, "option_values": {}, "model": "m"}
    n = len(kl_each)
    told = {"kl": sum(kl_each) / n, "kl_sequences": kl_each, "sequence_tokens": [8] * n, "prompts": n, "tokens": 8 * n}
    return QualityRecord(**values, dtype="bfloat16", status="ok", **(told | changes))


def test_records_pair_on_the_same_continuations_alone():
    one, base = record("a", [2e-4] * 6), record("default", [1e-4] * 6)
    assert kl_times(one, base) == Times(pytest.approx(2), pytest.approx(2), pytest.approx(2), 6)
    assert kl_times(one, record("default", [1e-4] * 6, reference_sha256="b" * 64)) is None
    assert kl_times(one, record("default", [1e-4] * 5)) is None
    assert kl_times(one, record("default", [1e-4] * 6, kl=None, kl_sequences=[])) is None


@pytest.mark.parametrize("changes", [{"kl_sequences": []}, {"sequence_tokens": [8]}, {"prompts": 5}])
def test_a_kl_without_its_sequences_is_no_record(changes):
    with pytest.raises(ValueError, match="needs kl_sequences and sequence_tokens of all its"):
        record("a", [1e-4] * 6, **changes)
