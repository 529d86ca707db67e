"""Claims -> verdicts, each with what was measured, on what, and the raw files behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

from flexroll.analysis.blocks import different_work, paired_ratio
from flexroll.analysis.claims_cells import check_reason, judge_cells
from flexroll.analysis.claims_quality import judge_admissible, measure_kl_times
from flexroll.analysis.claims_run import TRAINING, Measured, NotRunError, Run, check_run, devices, foreign, unfit
from flexroll.analysis.claims_verdict import hold_against
from flexroll.analysis.model import DriftRow, Result, VerdictRow
from flexroll.analysis.pairs import key_of
from flexroll.analysis.train_claims import judge_training
from flexroll.errors import FlexrollError
from flexroll.provenance import find_root
from flexroll.schema.claims import (
    AbsoluteClaim,
    ArithmeticClaim,
    BooleanClaim,
    Claim,
    ClaimsFile,
    DifferenceClaim,
    DriftFact,
    DriftMetric,
    QualityMetric,
    RatioClaim,
    Selector,
    StatementClaim,
    TestedClaim,
)

DRIFT_METRICS, DRIFT_FACTS = get_args(DriftMetric), get_args(DriftFact)
QUALITY_METRICS = get_args(QualityMetric)
RATES = ("tps", "decode_tps", "round_s")  # the longer sequences are, the less a prefill weighs in them
FIELDS = {"best": "best", "median": "median", "slowest": "min"}


def judge_all(claims: ClaimsFile, run: Run) -> list[VerdictRow]:
    return [judge(claim, claims, run) for claim in claims.claims]


def judge(claim: Claim, claims: ClaimsFile, run: Run) -> VerdictRow:
    """The verdict of one claim. A contradiction inside the source stands whatever was measured."""
    row = VerdictRow(
        id=claim.id,
        kind=claim.kind,
        source=claim.source,
        section=claim.section,
        topic=claim.topic,
        quote=claim.quote,
        note=claim.note,
        gpu=claim.gpu,
        direction=getattr(claim, "direction", ""),
        unit=getattr(claim, "unit", ""),
        metric=getattr(claim, "metric", ""),
        published=getattr(claim, "value", None),
        verdict="not run",
    )
    if row.direction in ("more", "less") and row.published == 1:
        row.published = None  # an order of two, without a number
    try:
        if row.metric in TRAINING:
            judge_training(claim, claims, run, row)
        else:
            JUDGES[claim.kind](claim, claims, run, row)
    except NotRunError as error:
        row.verdict, row.reason = "not run", str(error)
    own = claim.own_source
    if own is not None:
        row.computed = own.computed
        numbers = "; ".join(f"{label}: {value:g}" for label, value in own.numbers.items())
        if not own.holds:
            row.verdict, row.reason = "contradicted by its own source", own.note or numbers
        elif isinstance(claim, ArithmeticClaim):
            row.verdict, row.reason = "reproduced", own.note or numbers
    return row


def _pick(selector: Selector, run: Run) -> Result:
    """The one measured result a selector means. Raises NotRunError with the reason where there is none."""
    found = [r for r in run.results if selector.matches(r)]
    if not found:
        left = f" (left out of this run: {', '.join(run.left_out)})" if run.left_out else ""
        raise NotRunError(f"the matrix has no cell with {selector}{left}")
    ok = [r for r in found if r.status == "ok"]
    if not ok:
        raise NotRunError(f"{found[0].status}: {found[0].reason or selector}")
    meant = selector.narrowed(ok)
    if len(meant) > 1:
        raise NotRunError(f"{len(meant)} results match {selector}: the claim must say which")
    return meant[0]


def _value(result: Result, metric: str, statistic: str) -> Measured:
    if metric == "memory_gb":
        return _single(result.memory.device_total, 1e9, "the device's memory in use")
    if metric == "start_s":
        return _single(result.start_s, 1, "the seconds to start")
    if metric == "round_s":
        if not isinstance(result.new_tokens, int):
            raise NotRunError("its sequences have lengths of their own")
        tokens, rate = result.batch * result.new_tokens, _value(result, "tps", statistic)
        return Measured(tokens / rate.value, tokens / rate.high, tokens / rate.low)
    middle, best, slowest = (getattr(result, f"{metric}{end}") for end in ("", "_best", "_min"))
    if middle is None:
        raise NotRunError("the backend does not tell its decode time")
    low, high = (getattr(result, f"{metric}_{end}") for end in ("low", "high"))
    if statistic == "median" and low is not None and high is not None:
        return Measured(middle, low, high, interval=True)
    return Measured({"best": best, "median": middle, "slowest": slowest}[statistic], slowest, best)


def _single(value: float | None, scale: float, what: str) -> Measured:
    if value is None:
        raise NotRunError(f"the record does not tell {what}")
    return Measured(value / scale, value / scale, value / scale)


def _absolute(claim: AbsoluteClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    if claim.metric in DRIFT_METRICS and claim.metric != "refresh_share":
        _drift_value(claim, claims, run, row)
        return
    check_run(claim, claims, run)
    if claim.metric in QUALITY_METRICS:
        measured = measure_kl_times(claim, run, row)
        row.measured, row.low, row.high, row.interval = measured.value, measured.low, measured.high, measured.interval
        hold_against(claim, measured, row, distinct=True)
        return
    result = _pick(claim.cells, run)
    row.files, row.device = result.files, devices([result])
    if claim.metric == "refresh_share":
        measured = _refresh_share(claim, result, run, row)
    else:
        measured = _value(result, claim.metric, claim.statistic)
    row.measured, row.low, row.high, row.interval = measured.value, measured.low, measured.high, measured.interval
    reason = unfit(claim, claims, run, [result])
    if reason:
        raise NotRunError(reason)
    hold_against(claim, measured, row, distinct=True)


def _refresh_share(claim: AbsoluteClaim, result: Result, run: Run, row: VerdictRow) -> Measured:
    """Seconds of a refresh over those of a round, both of one stack and device."""
    drift = next((d for d in run.drift if d.stack == result.stack), None)
    if drift is None or drift.refresh_ms_median is None:
        raise NotRunError(f"no drift record of {result.stack} tells the time of a refresh")
    if [drift.device] != result.devices:
        raise NotRunError(f"refreshed on {drift.device}, generated on {devices([result])}")
    row.files = [drift.file, *result.files]
    seconds, refresh = _value(result, "round_s", claim.statistic), drift.refresh_ms_median / 1000
    return Measured(refresh / seconds.value, refresh / seconds.high, refresh / seconds.low)


def _pair(claim: RatioClaim | DifferenceClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    check_run(claim, claims, run)
    over, under = _pick(claim.over, run), _pick(claim.under, run)
    a = _value(over, claim.metric, claim.statistic)
    b = _value(under, claim.metric, getattr(claim, "under_statistic", None) or claim.statistic)
    row.files, row.device = list(dict.fromkeys([*over.files, *under.files])), devices([over, under])
    if over.device_uuids != under.device_uuids:
        raise NotRunError("the two sides ran on different devices, and cards of one model differ")
    if over.prompts_sha256 != under.prompts_sha256:
        raise NotRunError("the two sides ran on different prompts")
    different = different_work(over, under, ["new_tokens"]) if claim.metric in RATES else None
    if different:
        raise NotRunError(different)
    if claim.kind == "difference":
        measured = Measured(a.value - b.value, a.low - b.high, a.high - b.low)
    else:
        measured = Measured(a.value / b.value, a.low / b.high, a.high / b.low)
    if over is under:  # two statistics of the same rounds
        measured = Measured(measured.value, measured.value, measured.value)
    else:
        measured = _over_blocks(claim, over, under, run) or measured
    row.measured, row.low, row.high, row.interval = measured.value, measured.low, measured.high, measured.interval
    reason = unfit(claim, claims, run, [over, under])
    if reason:
        raise NotRunError(reason)
    # A published difference is not reproduced by two sides whose rounds overlap.
    none = 0 if claim.kind == "difference" else 1
    hold_against(claim, measured, row, distinct=claim.value == none or not measured.low <= none <= measured.high)


def _over_blocks(claim: RatioClaim | DifferenceClaim, over: Result, under: Result, run: Run) -> Measured | None:
    """A ratio of rates taken session by session; None where too few pair for an interval, or it is none of rates."""
    if claim.kind != "ratio" or claim.under_statistic or claim.metric not in ("tps", "decode_tps"):
        return None
    sides = (run.sessions.get(key_of(side), []) for side in (over, under))
    found = paired_ratio(*sides, metric=f"{claim.metric}_{FIELDS[claim.statistic]}", across=("sampling",))
    if found.ratio is None or found.low is None or found.high is None:
        return None
    return Measured(found.ratio, found.low, found.high, interval=True)


def _drifts(claim: AbsoluteClaim | BooleanClaim, run: Run) -> list[DriftRow]:
    stack = Selector(stack=claim.cells.stack)
    found = [d for d in run.drift if stack.matches(d)]
    if not found:
        raise NotRunError("no stack of this run verifies drift")
    ok = [d for d in found if d.status == "ok"]
    if not ok:
        raise NotRunError(found[0].reason)
    return ok


def _drift_where(rows: list[DriftRow], row: VerdictRow) -> None:
    row.files = [d.file for d in rows]
    row.device = "; ".join(sorted({f"{d.model}, {d.dtype}, {d.device}" for d in rows}))


def _drift_metric(row: DriftRow, metric: str) -> float | None:
    if metric == "refresh_ms":
        return row.refresh_ms_median
    if not row.peft:
        return None
    first, last = row.peft[0].max_abs_diff, row.peft[-1].max_abs_diff
    return first if metric == "peft_max_abs_diff" else last / first if first else None


def _drift_value(claim: AbsoluteClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    rows = _drifts(claim, run)
    values = [value for d in rows if (value := _drift_metric(d, claim.metric)) is not None]
    if not values:
        raise NotRunError("the drift record does not hold it")
    _drift_where(rows, row)
    measured = Measured(max(values), min(values), max(values))
    row.measured, row.low, row.high = measured.value, measured.low, measured.high
    reason = foreign(claim, claims, run)
    if reason:
        raise NotRunError(reason)
    devices = {d.device or "" for d in rows}
    if claim.gpu != "none" and any(device.startswith("cpu") for device in devices):
        raise NotRunError("measured on a CPU, which says nothing about a GPU")
    if claim.gpu not in ("none", "any") and not all(claim.gpu.lower() in device.lower() for device in devices):
        raise NotRunError(f"published for a {claim.gpu}; measured on {', '.join(sorted(devices))}")
    hold_against(claim, measured, row, distinct=True)


def _boolean(claim: BooleanClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    if claim.metric in DRIFT_FACTS:
        rows = _drifts(claim, run)
        if claim.metric == "peft_drifts":
            facts = [any(c.max_abs_diff > 0 for c in d.peft) for d in rows if d.peft]
        else:
            facts = [fact for d in rows if (fact := getattr(d, claim.metric)) is not None]
        if not facts:
            raise NotRunError("the drift record does not hold it")
        _drift_where(rows, row)
        row.measured = all(facts)
    elif claim.metric == "admissible":
        check_run(claim, claims, run)
        judge_admissible(claim, run, row)
    else:
        judge_cells(claim, claims, run, row)
    row.verdict = "reproduced" if row.measured == claim.value else "not reproduced"
    if claim.reason and row.measured:
        check_reason(claim, run, row)


def _arithmetic(claim: ArithmeticClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    """The verdict is that of `own_source`."""
    row.published = None if claim.own_source.compares else claim.own_source.value


def _tested(claim: TestedClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    missing = [name for name in claim.tests if not _exists(name)]
    if missing:
        raise NotRunError(f"no such test in this tree: {', '.join(missing)}")
    row.verdict, row.reason = "reproduced", f"asserted by {', '.join(claim.tests)}"


def _exists(test: str) -> bool:
    """Whether `tests/test_x.py::test_y` is in the tree."""
    file, function = test.split("::")
    try:
        return function in _functions(find_root() / file)
    except (FlexrollError, OSError):
        return False


@cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.M))


def _statement(claim: StatementClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    raise NotRunError(claim.why)


JUDGES: dict[str, Callable[[Any, ClaimsFile, Run, VerdictRow], None]] = {
    "absolute": _absolute,
    "ratio": _pair,
    "difference": _pair,
    "boolean": _boolean,
    "arithmetic": _arithmetic,
    "tested": _tested,
    "statement": _statement,
}
