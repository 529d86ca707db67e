"""Intervals, ratios and noise against known truth: hand-computed values, properties, coverage in seeded simulations."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

np = pytest.importorskip("numpy")
stats = pytest.importorskip("scipy.stats")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexroll.analysis import statistics
from flexroll.analysis.blocks import paired_ratio
from flexroll.analysis.model import CellRow, Comparison, MemoryRow, Workload
from flexroll.analysis.statistics import estimate, interval, log_interval, split, trend
from flexroll.schema.config import Sampling

SEED = 20131  # of every simulation here
WORK = Workload(new_tokens=64, samples=1, slots=8, ignore_eos=True, sampling=Sampling())

Rates = st.lists(st.floats(1e-2, 1e5), min_size=3, max_size=20)


def row(session: int, tps: float | None, **changes: Any) -> CellRow:
    values: dict[str, Any] = {
        "experiment": "options",
        "section": "options",
        "backend": "flex",
        "adapter": "none",
        "batch": 8,
        "option": "default",
        "sampling": "greedy",
        "stack": "torch2.11",
        "session": session,
        "new_tokens": 64,
        "status": "ok",
        "tps_median": tps,
        "device": "NVIDIA H200",
        "device_uuid": "GPU-1",
        "on_gpu": True,
        "prompts_sha256": "e" * 64,
        "workload": WORK,
        "file": f"raw/s{session}.json",
    }
    return CellRow(**(values | changes))


def rows(values: list[float], **changes: Any) -> list[CellRow]:
    return [row(session, value, **changes) for session, value in enumerate(values, 1)]


def test_t_interval_by_hand() -> None:
    # Logs 0, 0.01, 0.02: mean 0.01, sd 0.01; t(0.975, 2) = 4.303; half width 4.303 * 0.01 / sqrt(3) = 0.02484.
    found = estimate([100 * math.exp(0.01 * i) for i in range(3)])
    assert (found.n, found.interval.method, found.sufficient) == (3, "t", True)
    assert found.value == pytest.approx(100 * math.exp(0.01))
    assert found.interval.low == pytest.approx(100 * math.exp(0.01 - 0.02484), rel=1e-4)
    assert found.interval.high == pytest.approx(100 * math.exp(0.01 + 0.02484), rel=1e-4)


@pytest.mark.parametrize(("n", "method"), [(3, "t"), (7, "t"), (8, "bootstrap"), (20, "bootstrap")])
def test_method_by_sessions(n: int, method: str) -> None:
    assert estimate([100.0 + i for i in range(n)]).interval.method == method


def test_too_few_sessions_have_no_interval() -> None:
    assert estimate([]) is None
    for values in ([100.0], [100.0, 101.0]):
        found = estimate(values)
        assert found.value == median(values) and found.interval is None and not found.sufficient


def test_what_is_no_rate_has_no_interval() -> None:
    assert interval([0.0, 100.0, 101.0], 100.0) is None
    assert interval([math.inf, 100.0, 101.0], 101.0) is None


@pytest.mark.parametrize("n", [3, 5, 8, 12])
def test_equal_sessions_have_an_interval_of_no_width(n: int) -> None:
    found = estimate([123.4] * n).interval
    assert (found.low, found.high) == (123.4, 123.4)


@settings(max_examples=60)
@given(Rates, st.floats(1e-3, 1e3))
def test_interval_scales_holds_the_estimate_and_repeats(values: list[float], factor: float) -> None:
    found = estimate(values)
    assert found == estimate(values)
    assert found.interval.low <= found.value * (1 + 1e-12) and found.value <= found.interval.high * (1 + 1e-12)
    scaled = estimate([value * factor for value in values])
    assert scaled.interval.low == pytest.approx(found.interval.low * factor, rel=1e-6)
    assert scaled.interval.high == pytest.approx(found.interval.high * factor, rel=1e-6)


def simulated(n: int, sets: int, shape: str) -> Any:
    """Logs of sessions' effects about a true median of 0, [sets, n]."""
    rng = np.random.default_rng(SEED + n)
    if shape == "skewed":
        return 0.02 * (math.log(2) - rng.exponential(size=(sets, n)))  # most alike, a few much slower
    disturbed = rng.random((sets, n)) < (0.1 if shape == "disturbed" else 0)
    return rng.normal(0, 0.02, (sets, n)) + np.where(disturbed, rng.choice([-0.1, 0.1], (sets, n)), 0)


def coverage(logs: Any) -> float:
    """Share of intervals that hold 0."""
    chunks = [log_interval(part, resamples=999) for part in np.array_split(logs, max(1, len(logs) // 100))]
    return float(np.mean(np.concatenate([(low <= 0) & (high >= 0) for low, high in chunks])))


@pytest.mark.parametrize("n", [3, 5, 7])
def test_coverage_of_t(n: int) -> None:
    """Exact for lognormal sessions; wider than need be where some are disturbed."""
    assert 0.94 <= coverage(simulated(n, 20000, "lognormal")) <= 0.96
    assert 0.92 <= coverage(simulated(n, 20000, "skewed")) <= 0.98
    assert 0.92 <= coverage(simulated(n, 20000, "disturbed")) <= 0.985


@pytest.mark.parametrize("shape", ["lognormal", "skewed", "disturbed"])
@pytest.mark.parametrize("n", [8, 11, 12, 20])
def test_coverage_of_the_bootstrap(n: int, shape: str) -> None:
    """A median of few values takes few values itself, so the coverage goes up and down with n: 0.936 to 0.975."""
    assert 0.925 <= coverage(simulated(n, 1500, shape)) <= 0.985


def test_why_the_percentile_is_expanded() -> None:
    """The plain interval holds the truth in 92 % of sets of eight."""
    logs = simulated(8, 2000, "lognormal")
    indices = np.random.default_rng(SEED).integers(0, 8, (499, 8))
    medians = np.median(logs[:, indices], axis=-1)
    low, high = np.quantile(medians, [0.025, 0.975], axis=-1)
    assert np.mean((low <= 0) & (high >= 0)) < 0.93


# Ratios of two configurations.


def test_ratio_by_hand() -> None:
    # Block ratios 1.02, 1.03, 1.04: logs 0.0198, 0.02956, 0.03922; sd 0.00971; half width 0.02412.
    found = paired_ratio(rows([102.0, 206.0, 312.0]), rows([100.0, 200.0, 300.0]))
    assert found.ratio == pytest.approx(1.03) and (found.n, found.sessions, found.method) == (3, [1, 2, 3], "t")
    assert found.low == pytest.approx(math.exp(0.02953 - 0.02412), rel=1e-4)
    assert found.high == pytest.approx(math.exp(0.02953 + 0.02412), rel=1e-4)
    assert found.verdict == "faster" and found.reason == ""


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1, 1e5)), min_size=3, max_size=20))
def test_the_inverse_comparison_gives_the_inverse(pairs: list[tuple[float, float]]) -> None:
    a, b = rows([x for x, _ in pairs]), rows([y for _, y in pairs])
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert back.ratio == pytest.approx(1 / there.ratio, rel=1e-9)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low), rel=1e-6)
    assert there.low <= there.ratio * (1 + 1e-12) and there.ratio <= there.high * (1 + 1e-12)
    assert there == paired_ratio(list(reversed(a)), b)


def test_a_configuration_against_itself() -> None:
    found = paired_ratio(rows([100.0, 110.0, 120.0]), rows([100.0, 110.0, 120.0]))
    assert (found.ratio, found.low, found.high, found.verdict) == (1, 1, 1, "no difference shown")


def planted(rng: Any, ratio: float, blocks: int, noise: float, shared: float = 0.0) -> tuple[list, list]:
    block = rng.normal(0, shared, blocks)
    over = 1000 * ratio * np.exp(block + rng.normal(0, noise, blocks))
    under = 1000 * np.exp(block + rng.normal(0, noise, blocks))
    return rows(over.tolist()), rows(under.tolist())


def verdicts(ratio: float, blocks: int, times: int, shared: float = 0.0) -> list[str]:
    rng = np.random.default_rng(SEED)
    return [paired_ratio(*planted(rng, ratio, blocks, 0.01, shared)).verdict for _ in range(times)]


def test_a_planted_effect_is_found() -> None:
    """3 % with 1 % of noise a session: in 9 of 10 runs of five blocks, and never the other way round."""
    found = verdicts(1.03, 5, 500)
    assert found[0] == "faster" and found.count("faster") >= 440 and "slower" not in found
    found = verdicts(1 / 1.03, 5, 500)
    assert found.count("slower") >= 440 and "faster" not in found


@pytest.mark.parametrize(("blocks", "times"), [(3, 1500), (5, 1500), (10, 300)])
def test_a_planted_null_shows_no_difference(blocks: int, times: int) -> None:
    share = verdicts(1.0, blocks, times, shared=0.05).count("no difference shown") / times
    assert 0.93 <= share <= 0.98


def test_block_effects_cancel() -> None:
    """A hot card that slows both sides by 5 % widens an unpaired interval and leaves the paired one alone."""
    rng = np.random.default_rng(SEED)
    narrower = []
    for _ in range(100):
        over, under = planted(rng, 1.03, 5, 0.01, shared=0.05)
        found = paired_ratio(over, under)
        logs = [np.log([r.tps_median for r in side]) for side in (over, under)]
        span = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
        narrower.append(math.log(found.high / found.low) / (span.high - span.low))
    assert median(narrower) < 0.3


def test_a_disturbed_block_does_not_move_the_ratio() -> None:
    found = paired_ratio(rows([103.0, 103.1, 60.0, 102.9, 103.0]), rows([100.0] * 5))
    assert found.ratio == pytest.approx(1.03) and found.verdict == "no difference shown"


def alter(**changes: Any) -> Callable[[CellRow], CellRow]:
    return lambda r: r.model_copy(update=changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (alter(device_uuid="GPU-2"), "different devices"),
        (alter(device_uuid=None), "does not tell which device"),
        (alter(device_uuid=None, on_gpu=False, device="cpu", cpu="a CPU"), "different devices"),
        (alter(prompts_sha256="f" * 64), "different prompts"),
        (alter(workload=WORK.model_copy(update={"new_tokens": 128})), "new_tokens 64 against 128"),
        (alter(workload=WORK.model_copy(update={"ignore_eos": False})), "ignore_eos True against False"),
        (alter(workload=WORK.model_copy(update={"slots": 4})), "slots 8 against 4"),
        (alter(workload=WORK.model_copy(update={"samples": 8})), "samples 1 against 8"),
        (alter(workload=WORK.model_copy(update={"sampling": Sampling(temperature=1)})), "temperature=1.0"),
        (alter(workload=None), "what a round did"),
        (alter(tps_median=None), "metric is not told"),
        (alter(tps_median=0.0), "not a positive number"),
        (alter(status="failed"), "one side does not have a session that ended ok"),
    ],
)
def test_what_is_no_block_is_not_compared(change: Callable[[CellRow], CellRow], reason: str) -> None:
    sides = rows([100.0] * 5), [change(r) for r in rows([130.0] * 5)]
    found = paired_ratio(*sides)
    assert found.verdict == paired_ratio(*reversed(sides)).verdict == "not comparable"
    assert found == Comparison(verdict="not comparable", reason=found.reason) and reason in found.reason


def test_no_common_session() -> None:
    found = paired_ratio([row(1, 100.0), row(2, 100.0)], [row(3, 100.0)])
    assert (found.verdict, found.reason) == ("not comparable", "no session in common: 1, 2 against 3")
    assert "neither side" in paired_ratio([], []).reason


def test_cpus_compare_by_name() -> None:
    cpu = {"device": "cpu", "device_uuid": None, "on_gpu": False, "cpu": "a CPU"}
    over, under = rows([130.0] * 3, **cpu), rows([100.0] * 3, **cpu)
    assert paired_ratio(over, under).verdict == "faster"
    assert paired_ratio(over, rows([100.0] * 3, **(cpu | {"cpu": "another CPU"}))).verdict == "not comparable"


def test_only_what_pairs_counts() -> None:
    """The second session ran on another card, the third failed: three blocks are left, two of them flagged."""
    over, under = rows([103.0, 300.0, 103.0, 104.0, 102.0]), rows([100.0] * 5)
    over[1] = over[1].model_copy(update={"device_uuid": "GPU-2"})
    over[2] = over[2].model_copy(update={"status": "failed"})
    over[3] = over[3].model_copy(update={"rounds_flagged": 2})
    under[4] = under[4].model_copy(update={"rounds_flagged": 1})
    found = paired_ratio(over, under)
    assert found.ratio == pytest.approx(1.03) and (found.n, found.sessions) == (3, [1, 4, 5])
    assert found.flagged == 2 and found.reason.startswith("1 of 4 sessions do not pair: the two sides ran on different")


@pytest.mark.parametrize("n", [1, 2])
def test_few_blocks_are_not_judged(n: int) -> None:
    found = paired_ratio(rows([200.0] * n), rows([100.0] * n))
    assert (found.verdict, found.ratio, found.n) == ("insufficient n", 2, n)
    assert found.low is found.high is None and found.reason == f"n = {n}; an interval needs 3 blocks"


def test_any_positive_metric() -> None:
    over = [r.model_copy(update={"decode_tps_median": 2 * r.tps_median}) for r in rows([100.0, 101.0, 102.0])]
    under = [r.model_copy(update={"decode_tps_median": r.tps_median}) for r in rows([100.0, 101.0, 102.0])]
    assert paired_ratio(over, under).ratio == 1
    assert paired_ratio(over, under, "decode_tps_median").ratio == 2
    heavy = [r.model_copy(update={"memory": MemoryRow(device_total=30)}) for r in over]
    light = [r.model_copy(update={"memory": MemoryRow(device_total=20)}) for r in under]
    assert paired_ratio(heavy, light, lambda r: r.memory.device_total).ratio == pytest.approx(1.5)
    assert paired_ratio(heavy, under, lambda r: r.memory.device_total).verdict == "not comparable"


def test_two_configurations_are_no_side() -> None:
    with pytest.raises(ValueError, match="two cells of session 1"):
        paired_ratio([row(1, 100.0), row(1, 101.0, option="other", file="raw/other.json")], [row(1, 100.0)])


# Where noise comes from.


def noise(between: float, within: float, sessions: int = 40, rounds: int = 5) -> statistics.Split:
    rng = np.random.default_rng(SEED)
    centres = 1000 * np.exp(rng.normal(0, between, (sessions, 1)))
    found = [statistics.rates(s) for s in (centres * np.exp(rng.normal(0, within, (sessions, rounds)))).tolist()]
    return split([s.median for s in found], [s.cv for s in found], [s.n for s in found])


def test_split_tells_what_helps() -> None:
    found = noise(between=0.02, within=0.003)
    assert found.helps == "sessions"
    assert found.between == pytest.approx(0.02, rel=0.25) and found.within == pytest.approx(0.003, rel=0.25)
    assert noise(between=0.001, within=0.02).helps == "rounds"


def test_split_needs_sessions_and_rounds() -> None:
    assert split([], [], []) == statistics.Split(None, None, "")
    assert split([100.0], [0.1], [5]) == statistics.Split(None, 0.1, "")
    assert split([100.0, 100.0], [], [1, 1]) == statistics.Split(0, None, "")
    assert statistics.rates([100.0]).cv is None
    assert statistics.rates([90.0, 110.0]).cv == pytest.approx(math.sqrt(200) / 100)


def test_trend_of_a_short_warm_up() -> None:
    rising = [100 * (1 + 0.05 * i / 9) for i in range(10)]
    assert trend(rising) == pytest.approx(0.05, rel=0.05)
    assert trend(rising[::-1]) == pytest.approx(-0.05, rel=0.05)
    assert trend(rising[:7]) is None, "too few rounds"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [100.0] * 10,
        [50.0] + [100.0, 101.0, 99.0] * 3,  # one odd round
        [100 * (1 + 0.001 * i / 9) for i in range(10)],  # in order, and nothing
        [100.0, 110.0] * 5,
    ],
)
def test_no_trend(values: list[float]) -> None:
    assert trend(values) is None


def test_trend_rarely_cries_wolf() -> None:
    """Rounds with 1 % of noise: one session in a hundred without a trend, four in five with one of 5 %."""
    rng = np.random.default_rng(SEED)
    still = (1000 * np.exp(rng.normal(0, 0.01, (1000, 10)))).tolist()
    assert sum(trend(values) is not None for values in still) <= 15
    ramp = 1 + 0.05 * np.arange(10) / 9
    assert sum(trend((ramp * values).tolist()) is not None for values in still) >= 750
