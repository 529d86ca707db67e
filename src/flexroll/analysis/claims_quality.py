"""Claims that quality records judge: whether an option is admissible, its KL, and text that no cell of a run has.

A quality record is of a backend, adapter, option and stack, whatever the batch: of a selector those four keys count.
The model that is scored may be another than the run's, whose weights may be drawn; it is named beside the device.
"""

from __future__ import annotations

from flexroll.analysis.claims_run import Measured, NotRunError, Run
from flexroll.analysis.model import QualityRow, VerdictRow
from flexroll.analysis.quality import not_finite
from flexroll.schema.claims import AbsoluteClaim, BooleanClaim


def judge_admissible(claim: BooleanClaim, run: Run, row: VerdictRow) -> None:
    """All that the selector means are admissible, or one is not. Raises NotRunError where it cannot be told."""
    found = _fitting(claim, run)
    _where(found, row)
    refused = [q for q in found if q.admissible is False]
    untold = [q for q in found if q.admissible is None]
    if not refused and untold:
        raise NotRunError(untold[0].why)
    row.measured = not refused
    row.reason = (refused or found)[0].why


def judge_coherent(claim: BooleanClaim, run: Run, row: VerdictRow, otherwise: str) -> None:
    """The greedy text of the model that was scored, where no cell has any. otherwise: why none has."""
    try:
        found = _fitting(claim, run)
    except NotRunError as error:
        scored = any(claim.cells.engine.matches(q) for q in run.quality)
        raise NotRunError(f"{otherwise}; {error}" if scored else otherwise) from None
    told = [q for q in found if q.coherent is not None or not_finite(q)]
    if not told:
        raise NotRunError(f"{otherwise}; {found[0].why}")
    _where(told, row)
    broken = [q for q in told if not q.coherent]
    row.measured = not broken
    count = f"broken in {len(broken)} of {len(told)} configurations" if broken else "coherent"
    row.reason = f"{otherwise}: judged by the greedy text of {told[0].model} in the quality record, which is {count}"
    if broken and not_finite(broken[0]):
        row.reason = f"{otherwise}: {broken[0].model}, scored in its place, gave none: {broken[0].reason}"


def measure_kl_times(claim: AbsoluteClaim, run: Run, row: VerdictRow) -> Measured:
    """KL to fp32 over that of the baseline of the same backend, adapter and stack, with its interval."""
    found = _fitting(claim, run)
    if len(found) > 1:
        raise NotRunError(f"{len(found)} quality records match {claim.cells}: the claim must say which")
    one = found[0]
    if one.baseline:
        raise NotRunError("it is the baseline of this run")
    if one.times is None:
        raise NotRunError(one.why)
    form = (one.stack, one.backend, one.adapter)
    bases = [q for q in run.quality if q.baseline and (q.stack, q.backend, q.adapter) == form]
    _where([one, *bases], row)
    if one.times_low is None or one.times_high is None:
        raise NotRunError(f"{one.prompts} scored prompts are too few for an interval")
    return Measured(one.times, one.times_low, one.times_high, interval=True)


def _fitting(claim: BooleanClaim | AbsoluteClaim, run: Run) -> list[QualityRow]:
    """The rows that a claim is about, on a device that can judge it."""
    found = claim.cells.engine.narrowed(run.quality)
    if not found:
        raise NotRunError(f"this run scores no configuration with {claim.cells.engine}")
    if claim.gpu == "none":
        return found
    # What was not scored has no device, and says itself why.
    known = [q for q in found if q.device]
    if known and all(q.device == "cpu" for q in known):
        raise NotRunError("scored on a CPU, which says nothing about a GPU")
    if claim.gpu != "any" and not all(claim.gpu.lower() in q.device.lower() for q in known):
        raise NotRunError(f"published for a {claim.gpu}; scored on {', '.join(sorted({q.device for q in known}))}")
    return [q for q in found if q.device != "cpu"]


def _where(rows: list[QualityRow], row: VerdictRow) -> None:
    """Files behind a verdict, and the model and device that they are of."""
    row.files = [q.file for q in rows]
    row.device = ", ".join(sorted({name for q in rows for name in (q.model, q.device) if name}))
