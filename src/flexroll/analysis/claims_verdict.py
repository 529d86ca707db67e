"""The verdict of a claim whose value was measured: cells and trainings are judged alike."""

from __future__ import annotations

from flexroll.analysis.claims_run import Measured
from flexroll.analysis.model import VerdictRow
from flexroll.schema.claims import AbsoluteClaim, DifferenceClaim, RatioClaim

OVERLAP = "the two sides' rounds overlap, so no difference was seen"
HOLDS = "the interval of the ratio holds the value, so no difference was seen"


def hold_against(
    claim: AbsoluteClaim | RatioClaim | DifferenceClaim, measured: Measured, row: VerdictRow, distinct: bool
) -> None:
    """Write the verdict. distinct: whether two sides that are compared were seen to differ; True of a single value."""
    slack, around = claim.tolerance * claim.value, measured.low <= claim.value <= measured.high
    close = abs(measured.value - claim.value) <= slack
    inside = {
        "about": close,
        "at_least": measured.value >= claim.value - slack,
        "at_most": measured.value <= claim.value + slack,
        "more": measured.value > claim.value and not around,
        "less": measured.value < claim.value and not around,
        "same": close or around,
    }[claim.direction]
    side = "above" if measured.value > claim.value else "below"
    overlap = HOLDS if measured.interval else OVERLAP
    behind = "the 95 % interval" if measured.interval else "the range of the measured rounds"
    if inside and (distinct or claim.direction != "about"):
        row.verdict = "reproduced"
        if claim.direction == "same" and not close:
            row.reason = overlap
    elif inside or (around and claim.direction in ("more", "less")):
        row.verdict, row.reason = "within noise", overlap
    elif around:
        row.verdict, row.reason = "within noise", f"outside the tolerance, inside {behind}"
    elif claim.direction in ("more", "less"):
        row.verdict, row.reason = "not reproduced", f"{side} the published value, and {behind} does not hold it"
    else:
        row.verdict, row.reason = "not reproduced", f"{side} the published value by more than {claim.tolerance:.0%}"
