"""Which GRPO runs a config makes, and the record of one: of the same family as a benchmark's.

A record is self-contained, and a run that fails or cannot start is a record too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flexroll.schema.config import Config
from flexroll.schema.grpo import OPTIONS_OF, CompileMode, Pool, RolloutBackend
from flexroll.schema.records import Base, Environment, Sample, read_strictly

FOLDER = "grpo"  # of records, under results/<run>; of what runs need while they last, under work/<run>


class GrpoTarget(BaseModel):
    """One run: a rollout backend in one form, with one seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stack: str
    backend: RolloutBackend
    option: str = "default"
    option_values: dict[str, Any] = {}
    compile_mode: CompileMode | None = None
    pool: Pool = "kept"
    steps: int
    seed: int

    @property
    def form(self) -> str:
        """Name of the run without its seed."""
        parts = [self.stack, self.backend, self.option, self.compile_mode or "", "released" * (self.pool == "released")]
        return "-".join(part for part in parts if part)

    @property
    def name(self) -> str:
        return f"{self.form}-seed{self.seed}"

    @property
    def file(self) -> str:
        """Path of its record relative to results/<run>."""
        return f"{FOLDER}/{self.name}.json"


def grpo_targets(config: Config, stacks: Iterable[str] | None = None) -> list[GrpoTarget]:
    """What a run trains, in document order; [] where the config asks for none. stacks: only these."""
    if config.grpo is None:
        return []
    wanted = None if stacks is None else set(stacks)
    found = [
        GrpoTarget(
            stack=use.stack,
            backend=use.backend,
            option=use.option,
            option_values=config.option(use.option).for_backend(OPTIONS_OF.get(use.backend, use.backend)),
            compile_mode=use.compile_mode,
            pool=use.pool,
            steps=use.steps or config.grpo.steps,
            seed=seed,
        )
        for use in config.grpo.backends
        for seed in use.seeds or config.grpo.seeds
        if wanted is None or use.stack in wanted
    ]
    return list({target.name: target for target in found}.values())


class RewardOf(Base):
    """Mean and spread of one reward function over a step's completions."""

    mean: float
    std: float


class GrpoStep(Base):
    """One optimiser step, from its first rollout token to the updated adapter. Seconds are wall-clock.

    wall_s: the whole step; rollout_s, refresh_s, reward_s, loss_s (loss, its log probabilities and backward) and
    optimizer_s: its parts; what is left is the trainer's own work. loss, kl, entropy, clip_ratio as TRL logs them.
    """

    step: int = Field(ge=1)
    wall_s: float = Field(gt=0)
    gap_s: float = Field(
        0,
        ge=0,
        description="Since the step before, hashing of the base left out: the log, a checkpoint, the next data.",
    )
    rollout_s: float = Field(ge=0)
    refresh_s: float = Field(0, ge=0, description="Bringing the adapter to the rollout engine.")
    reward_s: float = Field(ge=0)
    loss_s: float = Field(ge=0)
    optimizer_s: float = Field(ge=0)
    tokens: int = Field(ge=0, description="Completion tokens of its rollout.")
    loss: float | None = Field(None, description="None: not finite; see `faults`.")
    grad_norm: float | None = None
    reward: float | None = Field(None, description="Mean of the weighted sum over completions.")
    reward_std: float | None = None
    rewards: dict[str, RewardOf] = Field(default_factory=dict)
    kl: float | None = Field(None, description="To the base model, nats a token; None where beta is 0.")
    entropy: float | None = None
    clip_ratio: float | None = None
    completion_length: float | None = Field(None, description="Mean, tokens.")
    truncated: float | None = Field(None, description="Share of completions cut at max_completion_length.")
    logprob_difference: float | None = Field(
        None, description="Mean |rollout - trainer log probability| of the sampled tokens, where the engine tells them."
    )
    logprob_difference_max: float | None = None
    importance_ratio: float | None = Field(None, description="Mean of the correction's weights, where it applies.")
    peak_bytes: int | None = Field(None, description="Most memory allocated in the step, by the trainer's process.")
    base_sha256: str | None = Field(None, description="Hash of the frozen base after this step, where verified.")
    faults: list[str] = Field(default_factory=list, description="What went wrong and was survived, in words.")

    @property
    def other_s(self) -> float:
        parts = self.rollout_s + self.refresh_s + self.reward_s + self.loss_s + self.optimizer_s
        return max(0.0, self.wall_s - parts)

    @property
    def tps(self) -> float | None:
        """Completion tokens per second of rollout, the refresh included: what a trainer waits for."""
        waited = self.rollout_s + self.refresh_s
        return self.tokens / waited if waited else None


class CompileCounts(Base):
    """What torch.compile did in one run: graphs compiled, breaks and recompiles, with the reasons torch gave."""

    mode: CompileMode
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    reasons: list[str] = Field(default_factory=list)


class GrpoRecord(Base):
    """results/<run>/grpo/<target>.json: one training run."""

    schema_version: int = 1
    stack: str
    backend: RolloutBackend
    option: str
    option_values: dict[str, Any]
    compile_mode: CompileMode | None = None
    pool: Pool = "kept"
    seed: int
    settings: dict[str, Any] = Field(description="The config's `grpo`, without its backends.")
    model: str
    dtype: str
    status: Literal["ok", "failed", "skipped"]
    reason: str = ""
    notes: list[str] = Field(default_factory=list, description="What was adjusted, in words.")
    key: str = Field("", description="Staleness key when it was run.")
    device: str = Field("", description="Class of device.")
    start_s: float | None = Field(None, description="Until the trainer and the rollout engine stood ready.")
    train_s: float | None = Field(None, description="From the first step's begin to the last one's end.")
    steps: list[GrpoStep] = Field(default_factory=list)
    resumed_at: list[int] = Field(default_factory=list, description="Steps after which a new process went on.")
    weights_bytes: int | None = Field(None, description="Of the trainer's model and the rollout engine together.")
    kv_bytes: int | None = Field(None, description="Of the rollout engine's KV cache.")
    device_bytes: int | None = Field(None, description="Most in use on the device, by everything, over the run.")
    base_sha256: str | None = Field(None, description="Hash of the frozen base before the first step.")
    compile: CompileCounts | None = None
    samples: list[Sample] = Field(default_factory=list, description="Completions of the last step.")
    environment: Environment | None = None
    log: str = ""

    def is_of(self, target: GrpoTarget) -> bool:
        names = ("stack", "backend", "option", "compile_mode", "pool", "seed")
        return all(getattr(self, name) == getattr(target, name) for name in names)

    @property
    def measured(self) -> list[GrpoStep]:
        """Steps after those that the settings leave out."""
        return self.steps[self.settings.get("skip_steps", 0) :]

    @property
    def step_s(self) -> float | None:
        """Median seconds of a measured step."""
        return statistics.median(s.wall_s for s in self.measured) if self.measured else None

    @property
    def base_identical(self) -> bool | None:
        """Whether every hash taken equals the first; None where none was."""
        taken = [step.base_sha256 for step in self.steps if step.base_sha256]
        return None if not taken or self.base_sha256 is None else all(h == self.base_sha256 for h in taken)

    @property
    def losses_finite(self) -> bool:
        return bool(self.steps) and all(s.loss is not None and math.isfinite(s.loss) for s in self.steps)


def read_grpo(path: Path) -> GrpoRecord:
    """Read and validate one; see records.read_strictly."""
    return read_strictly(path, GrpoRecord, "GRPO record", "remove it and run again", "run the pipeline again")
