"""Claims -> verdicts, each with what was measured, on what, and the raw files behind it."""

from __future__ import annotations

from dataclasses import dataclass

from flexroll.analysis.model import DriftRow, Result, VerdictRow
from flexroll.schema.claims import AbsoluteClaim, ArithmeticClaim, BooleanClaim, Claim, ClaimsFile, RatioClaim, Selector

DRIFT_METRICS = ("refresh_ms", "peft_max_abs_diff")
DRIFT_FACTS = ("base_identical", "inference_identical", "merged_exact", "peft_drifts")


@dataclass(frozen=True)
class Run:
    """What claims are judged against. model_source random: its text is noise, so coherence says nothing."""

    model: str
    model_source: str
    results: list[Result]
    drift: list[DriftRow]
    left_out: list[str]


@dataclass(frozen=True)
class Measured:
    """A value with the range of the rounds behind it."""

    value: float
    low: float
    high: float


class NotRunError(Exception):
    """Why a claim cannot be judged in this run; the message ends in the report."""


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
        unit=getattr(claim, "unit", ""),
        metric=getattr(claim, "metric", ""),
        published=getattr(claim, "value", None),
        verdict="not run",
    )
    own = claim.own_source
    if isinstance(claim, ArithmeticClaim):
        row.published = claim.own_source.value if claim.own_source.operation in ("ratio", "change") else None
    else:
        try:
            {"absolute": _absolute, "ratio": _ratio, "boolean": _boolean}[claim.kind](claim, claims, run, row)
        except NotRunError as error:
            row.verdict, row.reason = "not run", str(error)
    if own is not None:
        row.computed = own.computed
        numbers = "; ".join(f"{n.label}: {n.value:g}" for n in own.numbers)
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
    if len(ok) > 1:
        raise NotRunError(f"{len(ok)} results match {selector}: the claim must say which")
    return ok[0]


def _value(result: Result, metric: str, statistic: str) -> Measured:
    if metric == "memory_gb":
        used = result.memory.device_total
        if used is None:
            raise NotRunError("the record does not tell the device's memory in use")
        return Measured(used / 1e9, used / 1e9, used / 1e9)
    middle, best, low = getattr(result, metric), getattr(result, f"{metric}_best"), getattr(result, f"{metric}_min")
    if middle is None:
        raise NotRunError("the backend does not tell its decode time")
    return Measured(best if statistic == "best" else middle, low, best)


def _fit(claim: Claim, claims: ClaimsFile, run: Run, results: list[Result]) -> str | None:
    """Why these results cannot judge the claim, or None: another model, no GPU, another GPU."""
    if not claims.about_model(run.model):
        return f"published for {claims.model}; this run's model is {run.model}"
    if claim.gpu == "none":
        return None
    if not all(result.on_gpu for result in results):
        return "measured on a CPU, which says nothing about a GPU"
    if claim.gpu != "any" and not all(claim.gpu.lower() in device.lower() for r in results for device in r.devices):
        return f"published for a {claim.gpu}; measured on {_device(results)}"
    return None


def _device(results: list[Result]) -> str:
    return ", ".join(sorted({device for result in results for device in result.devices})) or "an unknown device"


def _early(claim: Claim, claims: ClaimsFile, run: Run) -> None:
    """Reasons that hold for the whole run come before those of single cells: they say more."""
    if not claims.about_model(run.model):
        raise NotRunError(f"published for {claims.model}; this run's model is {run.model}")
    known = [r for r in run.results if r.on_gpu is not None]
    if claim.gpu != "none" and known and not any(r.on_gpu for r in known):
        raise NotRunError("this run is on a CPU, which says nothing about a GPU")


def _absolute(claim: AbsoluteClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    if claim.metric in DRIFT_METRICS:
        _drift_value(claim, claims, run, row)
        return
    _early(claim, claims, run)
    result = _pick(claim.cells, run)
    measured = _value(result, claim.metric, claim.statistic)
    row.measured, row.low, row.high = measured.value, measured.low, measured.high
    row.files, row.device = result.files, _device([result])
    reason = _fit(claim, claims, run, [result])
    if reason:
        raise NotRunError(reason)
    _compare(claim, measured, row, distinct=True)


def _ratio(claim: RatioClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    _early(claim, claims, run)
    over, under = _pick(claim.over, run), _pick(claim.under, run)
    a, b = _value(over, claim.metric, claim.statistic), _value(under, claim.metric, claim.statistic)
    row.files, row.device = [*over.files, *under.files], _device([over, under])
    if over.device_uuids != under.device_uuids:
        raise NotRunError("the two sides ran on different devices, and cards of one model differ")
    if over.prompts_sha256 != under.prompts_sha256:
        raise NotRunError("the two sides ran on different prompts")
    measured = Measured(a.value / b.value, a.low / b.high, a.high / b.low)
    row.measured, row.low, row.high = measured.value, measured.low, measured.high
    reason = _fit(claim, claims, run, [over, under])
    if reason:
        raise NotRunError(reason)
    # A published difference is not reproduced by two sides whose rounds overlap.
    _compare(claim, measured, row, distinct=claim.value == 1 or not measured.low <= 1 <= measured.high)


def _compare(claim: AbsoluteClaim | RatioClaim, measured: Measured, row: VerdictRow, distinct: bool) -> None:
    slack = claim.tolerance * claim.value
    inside = {
        "about": abs(measured.value - claim.value) <= slack,
        "at_least": measured.value >= claim.value - slack,
        "at_most": measured.value <= claim.value + slack,
    }[claim.direction]
    if inside and (distinct or claim.direction != "about"):
        row.verdict = "reproduced"
    elif inside:
        row.verdict, row.reason = "within noise", "the two sides' rounds overlap, so no difference was seen"
    elif measured.low <= claim.value <= measured.high:
        row.verdict, row.reason = "within noise", "outside the tolerance, inside the range of the measured rounds"
    else:
        row.verdict = "not reproduced"
        side = "above" if measured.value > claim.value else "below"
        row.reason = f"{side} the published value by more than {claim.tolerance:.0%}"


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


def _drift_value(claim: AbsoluteClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    rows = _drifts(claim, run)
    if claim.metric == "refresh_ms":
        values = [d.refresh_ms_median for d in rows if d.refresh_ms_median is not None]
    else:
        values = [d.peft[0].max_abs_diff for d in rows if d.peft]
    if not values:
        raise NotRunError("the drift record does not hold it")
    _drift_where(rows, row)
    row.measured, row.low, row.high = max(values), min(values), max(values)
    if not claims.about_model(run.model):
        raise NotRunError(f"published for {claims.model}; this run's model is {run.model}")
    devices = {d.device or "" for d in rows}
    if claim.gpu != "none" and any(device.startswith("cpu") for device in devices):
        raise NotRunError("measured on a CPU, which says nothing about a GPU")
    if claim.gpu not in ("none", "any") and not all(claim.gpu.lower() in device.lower() for device in devices):
        raise NotRunError(f"published for a {claim.gpu}; measured on {', '.join(sorted(devices))}")
    _compare(claim, Measured(max(values), min(values), max(values)), row, distinct=True)


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
    else:
        _cell_fact(claim, claims, run, row)
    row.verdict = "reproduced" if row.measured == claim.value else "not reproduced"


def _cell_fact(claim: BooleanClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    _early(claim, claims, run)
    found = [r for r in run.results if claim.cells.matches(r) and r.status in ("ok", "failed")]
    if not found:
        raise NotRunError(f"this run has no measured cell with {claim.cells}")
    if claim.metric == "coherent":
        if run.model_source == "random":
            raise NotRunError("the model's weights are random, so its text is noise")
        judged = [r for r in found if r.coherent is not None]
        if not judged:
            raise NotRunError("no cell kept a sample")
        row.measured = all(r.coherent for r in judged)
        if not row.measured:
            row.reason = f"broken text in {sum(not r.coherent for r in judged)} of {len(judged)} configurations"
    else:
        judged = found
        row.measured = all(r.status == "failed" for r in found)
    row.files = [file for r in judged for file in r.files]
    row.device = ", ".join(sorted({run.model, _device(judged)}))
