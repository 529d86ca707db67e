"""A record of GRPO -> one row of the analysis. A bad file is a row with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from flexroll.analysis.collect import is_gpu
from flexroll.analysis.model import GrpoRun
from flexroll.analysis.reading import read_or_why
from flexroll.schema.grpo import Grpo
from flexroll.schema.grpo_records import GrpoRecord, GrpoStep, GrpoTarget, read_grpo
from flexroll.schema.records import Environment

PARTS = ("rollout", "refresh", "reward", "loss", "optimizer", "other")
ROUNDING = 1e-6  # of means of rewards that are 0 or 1


def read_run(results: Path, target: GrpoTarget, asked: Grpo, random: bool) -> tuple[GrpoRun, Environment | None]:
    """A run, whatever became of it, and what it ran in. random: weights are, so that its text is noise."""
    found = read_or_why(results, target, read_grpo, "another run")
    return _run(target, found, asked, random), found.environment if isinstance(found, GrpoRecord) else None


def _run(target: GrpoTarget, found: GrpoRecord | tuple[str, str], asked: Grpo, random: bool) -> GrpoRun:
    identity = {"seed": target.seed, "file": target.file, "asked": target.steps}
    if isinstance(found, tuple):
        return GrpoRun(**identity, status=found[0], reason=found[1])  # type: ignore[arg-type]
    steps, own = found.steps, found.steps[asked.skip_steps :]
    status, reason = found.status, " ".join(found.reason.split())
    if status == "ok" and not own:
        status, reason = "failed", "the record says ok but holds no measured step"
    waited = sum(step.rollout_s + step.refresh_s for step in own)
    environment, counts = found.environment, found.compile
    return GrpoRun(
        **identity,
        status=status,
        reason=reason,
        wall_s=[step.wall_s for step in steps],
        tokens=[step.tokens for step in steps],
        reward=[step.reward for step in steps],
        kl=[step.kl for step in steps],
        seconds={part: fmean(getattr(step, f"{part}_s") for step in own) for part in PARTS} if own else {},
        start_s=found.start_s,
        train_s=found.train_s,
        step_s=median(step.wall_s for step in own) if own else None,
        tps=sum(step.tokens for step in own) / waited if waited else None,
        weights_bytes=found.weights_bytes,
        kv_bytes=found.kv_bytes,
        peak_bytes=over(max, (step.peak_bytes for step in steps)),
        device_bytes=found.device_bytes,
        logprob_difference=over(fmean, (step.logprob_difference for step in own)),
        importance_ratio=over(fmean, (step.importance_ratio for step in own)),
        losses_finite=found.losses_finite if steps else None,
        rewards_in_range=in_range(steps, asked),
        coherent=None if random or not found.samples else all(sample.coherence.ok for sample in found.samples),
        base_identical=found.base_identical,
        graphs=counts.graphs if counts else None,
        graph_breaks=counts.graph_breaks if counts else None,
        recompiles=counts.recompiles if counts else None,
        resumed=len(found.resumed_at),
        notes=found.notes,
        faults=[f"step {step.step}: {fault}" for step in steps for fault in step.faults],
        device=environment.device if environment else None,
        device_uuid=environment.device_uuid if environment else None,
        on_gpu=is_gpu(environment) if environment else None,
    )


def in_range(steps: Sequence[GrpoStep], asked: Grpo) -> bool | None:
    """Whether each function's mean is in [0, 1] and their weighted sum in what that allows; None where none is told."""
    weights = asked.reward_weights or [1.0] * len(asked.rewards)
    low, high = (
        sum(end(0.0, weight) for weight in weights) - sign for end, sign in ((min, ROUNDING), (max, -ROUNDING))
    )
    sums = [low <= step.reward <= high for step in steps if step.reward is not None]
    parts = [-ROUNDING <= one.mean <= 1 + ROUNDING for step in steps for one in step.rewards.values()]
    return all(sums + parts) if sums else None


def over(function: Callable[[Any], Any], values: Iterable[Any]) -> Any:
    """Of the values that were told; None where none was."""
    told = [value for value in values if value is not None]
    return function(told) if told else None
