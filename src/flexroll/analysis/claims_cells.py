"""Facts that cells judge: whether their text is coherent, whether they fail."""

from __future__ import annotations

from flexroll.analysis.claims_quality import judge_coherent
from flexroll.analysis.claims_run import NotRunError, Run, check_run, devices
from flexroll.analysis.model import Result, VerdictRow
from flexroll.analysis.quality import not_finite
from flexroll.schema.claims import BooleanClaim, ClaimsFile


def judge_cells(claim: BooleanClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    """Whether text is coherent, or cells fail. Raises NotRunError where nothing tells."""
    check_run(claim, claims, run)
    found = _ran(claim, run)
    if claim.metric == "coherent":
        judged = _with_text(claim, run, row, found)
        if not judged:
            return
    elif not found:
        raise NotRunError(f"this run has no measured cell with {claim.cells}")
    else:
        judged = found
        row.measured = all(r.status == "failed" for r in found)
    row.files = [file for r in judged for file in r.files]
    row.device = ", ".join(sorted({run.model, devices(judged)}))


def _ran(claim: BooleanClaim, run: Run) -> list[Result]:
    """What a fact is about, of what was run, whether or not it failed."""
    return claim.cells.narrowed(r for r in run.results if r.status in ("ok", "failed"))


def _with_text(claim: BooleanClaim, run: Run, row: VerdictRow, found: list[Result]) -> list[Result]:
    """Configurations whose text tells whether it is coherent; [] where the quality records told instead.

    Logits that are not finite are broken text: their most likely token is the first of the vocabulary, over and over;
    our engine raises instead.
    """
    random = run.model_source == "random"
    judged = [r for r in found if not_finite(r) or (r.coherent is not None and not random)]
    if not judged:
        why = "the model's weights are random, so its text is noise" if random else "no cell kept a sample"
        judge_coherent(claim, run, row, why if found else f"this run has no measured cell with {claim.cells}")
        return []
    row.measured = all(r.coherent and not not_finite(r) for r in judged)
    if not row.measured:
        row.reason = f"broken text in {sum(not r.coherent for r in judged)} of {len(judged)} configurations"
    raised = next((r.reason for r in judged if not_finite(r)), None)
    if raised is not None:
        row.reason = " ".join(raised.split())
    return judged


def check_reason(claim: BooleanClaim, run: Run, row: VerdictRow) -> None:
    """A failure is the published one only where its reason holds the published words."""
    reasons = {r.reason for r in _ran(claim, run) if r.status == "failed"}
    others = sorted(reason for reason in reasons if claim.reason.lower() not in reason.lower())
    if others:
        row.verdict, row.reason = "not reproduced", f"it fails, but otherwise: {others[0] or 'without a reason'}"
