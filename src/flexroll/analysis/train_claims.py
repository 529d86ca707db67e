"""Claims about training, judged by the runs of GRPO; `claims.judge` calls `judge_training`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from flexroll.analysis.claims_run import Measured, NotRunError, Run, devices, unfit
from flexroll.analysis.claims_verdict import hold_against
from flexroll.analysis.grpo import chosen
from flexroll.analysis.model import GrpoRow, GrpoRun, PublishedTraining, VerdictRow
from flexroll.schema.claims import AbsoluteClaim, BooleanClaim, Claim, ClaimsFile, RatioClaim, Selector
from flexroll.schema.grpo import LABELS

# What the backends of the published training are here: its continuous batching trained on paged sdpa.
ROLLOUT = {
    "flex": ("flex",),
    "vllm": ("vllm",),
    "unsloth": ("unsloth",),
    "transformers_cb": ("transformers_cb_sdpa", "transformers_cb"),
    "transformers_generate": ("trl",),
}
STEPS = 10  # of the published runs: a total says nothing about a run of another length
VALUE: dict[str, Callable[[GrpoRun], float | None]] = {
    "train_s": lambda run: run.train_s,
    "step_s": lambda run: run.step_s,
    "train_memory_gb": lambda run: None if run.device_bytes is None else run.device_bytes / 1e9,
    "kl": lambda run: max((kl for kl in run.kl if kl is not None), default=None),
    "reward": lambda run: max((reward for reward in run.reward if reward is not None), default=None),
}
OF_TEXT = ("kl", "reward", "rewards_expected")  # of what random weights write they say nothing


def judge_training(claim: Claim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    """Raises NotRunError with the reason where no run judges it."""
    if isinstance(claim, BooleanClaim):
        row.published = None  # nothing of a run stands beside it yet
    if not run.grpo:
        raise NotRunError("GRPO is not in this run")
    if claim.metric in OF_TEXT and run.model_source == "random":  # type: ignore[union-attr]
        raise NotRunError("the model's weights are random, so its text is noise")
    if isinstance(claim, AbsoluteClaim):
        sides = _sides(claim.cells, run)
        values = [_value(side, claim.metric) for side in sides]
        # Of several backends each has to hold it: the worst counts.
        worst = min if claim.direction == "at_least" else max
        measured = worst(values, key=lambda value: value.value)
        _fill(row, sides, measured)
        _fits(claim, claims, run, sides)
        hold_against(claim, measured, row, distinct=True)
    elif isinstance(claim, RatioClaim):
        over, under = (_one(selector, run) for selector in (claim.over, claim.under))
        a, b = _value(over, claim.metric), _value(under, claim.metric)
        measured = Measured(a.value / b.value, a.low / b.high, a.high / b.low)
        _fill(row, [over, under], measured)
        if {one.device_uuid for one in over.ok} != {one.device_uuid for one in under.ok}:
            raise NotRunError("the two sides ran on different devices, and cards of one model differ")
        _fits(claim, claims, run, [over, under])
        hold_against(claim, measured, row, distinct=claim.value == 1 or not measured.low <= 1 <= measured.high)
    elif isinstance(claim, BooleanClaim):
        _boolean(claim, claims, run, row)


def published_training(claims: ClaimsFile) -> list[PublishedTraining]:
    """The published numbers of single backends' training, to be printed beside ours."""
    return [
        PublishedTraining(
            claim=claim.id,
            source=claim.source,
            section=claim.section,
            backends=list(ROLLOUT[claim.cells.backend]),
            metric=claim.metric,
            value=claim.value,
        )
        for claim in claims.claims
        if isinstance(claim, AbsoluteClaim) and claim.metric in VALUE and isinstance(claim.cells.backend, str)
    ]


def _sides(selector: Selector, run: Run) -> list[GrpoRow]:
    """The row of each backend that a selector names; a claim of three backends is not judged by two."""
    names = selector.backend if isinstance(selector.backend, list) else [selector.backend]
    return [_one(selector.model_copy(update={"backend": name}), run) for name in names]


def _one(selector: Selector, run: Run) -> GrpoRow:
    """The row that stands for the selector's backend. Raises NotRunError where it has no run."""
    stacks = selector.stack if isinstance(selector.stack, list) else [selector.stack or ""]
    wanted = ROLLOUT[str(selector.backend)]
    found = [row for name in wanted if (row := chosen(run.grpo, name, stacks[0])) is not None]
    if not found:
        raise NotRunError(f"nothing is trained on {LABELS[wanted[0]]} in this run")
    side = next((row for row in found if row.ok), found[0])
    if not side.ok:
        raise NotRunError(f"{LABELS[side.backend]}: {side.status}: {side.reason or side.form}")
    return side


def _value(side: GrpoRow, metric: str) -> Measured:
    """The median over seeds, with their range."""
    values = [value for run in side.ok if (value := VALUE[metric](run)) is not None]
    if not values:
        raise NotRunError(f"the records of {LABELS[side.backend]} do not tell it")
    return Measured(median(values), min(values), max(values))


def _fill(row: VerdictRow, sides: list[GrpoRow], measured: Measured) -> None:
    row.measured, row.low, row.high = measured.value, measured.low, measured.high
    _where(row, sides)


def _where(row: VerdictRow, sides: list[GrpoRow]) -> None:
    runs = [run for side in sides for run in side.ok]
    row.files = [run.file for run in runs]
    row.device = devices(sides)


def _fits(claim: AbsoluteClaim | RatioClaim, claims: ClaimsFile, run: Run, sides: list[GrpoRow]) -> None:
    runs = [one for side in sides for one in side.ok]
    reason = unfit(claim, claims, run, sides)
    if reason is None and claim.metric == "train_s" and any(len(one.wall_s) != STEPS for one in runs):
        taken = ", ".join(sorted({str(len(one.wall_s)) for one in runs}))
        reason = f"a total of {taken} steps; published were {STEPS}"
    if reason:
        raise NotRunError(reason)


def _boolean(claim: BooleanClaim, claims: ClaimsFile, run: Run, row: VerdictRow) -> None:
    sides = _sides(claim.cells, run)
    reason = unfit(claim, claims, run, sides)
    if reason:
        raise NotRunError(reason)
    name = "losses_finite" if claim.metric == "losses_finite" else "rewards_in_range"
    facts = [fact for side in sides for one in side.ok if (fact := getattr(one, name)) is not None]
    if not facts:
        raise NotRunError("the records do not tell it")
    _where(row, sides)
    row.published, row.measured = claim.value, all(facts)
    row.verdict = "reproduced" if row.measured == claim.value else "not reproduced"
