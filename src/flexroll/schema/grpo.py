"""GRPO on any rollout backend: what a config asks for (`grpo:`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from flexroll.schema.base import Strict
from flexroll.schema.sources import Prompts

RolloutBackend = Literal["flex", "vllm", "unsloth", "transformers_cb", "transformers_cb_sdpa", "trl"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
Pool = Literal["kept", "released"]
RewardName = Literal["exact", "format", "distinct"]
# Of `grpo:`, what names, limits, saves or judges runs, and makes none of their numbers.
JUDGING = frozenset({"backends", "reference", "kl_band", "reward_band", "skip_steps", "run_s", "save_every"})
# Whose engine options (`options` of a config) a rollout backend takes.
OPTIONS_OF = {"transformers_cb_sdpa": "transformers_cb", "trl": "transformers_generate"}
LABELS = {
    "flex": "flex",
    "vllm": "vLLM (colocated)",
    "unsloth": "Unsloth",
    "transformers_cb": "transformers CB",
    "transformers_cb_sdpa": "transformers CB, paged sdpa",
    "trl": "transformers generate (TRL's own)",
}


class GrpoUse(Strict):
    """One line of `grpo.backends`: a rollout backend in one or more forms.

    option: a named option of the config, of which the rollout engine's part is used. compile_mode: torch.compile of the
    trained model's and the reference model's forward pass. pool: of the flex engine's KV pool between rollouts, kept or
    given back to the trainer. steps: overrides the experiment's, for what is slow.
    """

    backend: RolloutBackend
    stack: str = "torch2.11"
    option: str = "default"
    compile_mode: CompileMode | None = None
    pool: Pool = "kept"
    steps: int | None = Field(None, ge=1)
    seeds: list[int] | None = Field(None, min_length=1, description="Overrides the experiment's.")

    @model_validator(mode="after")
    def _fits(self) -> GrpoUse:
        if self.compile_mode and self.backend == "vllm":
            raise ValueError("compile_mode: vLLM owns its compilation; leave it out for backend 'vllm'")
        if self.pool == "released" and self.backend != "flex":
            raise ValueError(f"pool 'released' is of the flex engine; backend '{self.backend}' has no such pool")
        return self


class Grpo(Strict):
    """GRPO on several rollout backends that share data, rewards, sampling, seeds and every setting of the trainer.

    A step trains on prompts_per_step * num_generations completions. prompts: the questions, the run's own where left
    out. reference: the backend that the others are held against. kl_band, reward_band: by how much a backend's KL to
    the base model and its mean reward may differ from the reference's, means over the steps after skip_steps.
    """

    prompts: Prompts | None = None
    rewards: list[RewardName] = Field(default_factory=lambda: ["exact", "format"], min_length=1)
    reward_weights: list[float] | None = None
    steps: int = Field(10, ge=1)
    skip_steps: int = Field(3, ge=0, description="First steps, left out of medians.")
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    prompts_per_step: int = Field(4, ge=1)
    num_generations: int = Field(4, ge=2)
    max_completion_length: int = Field(64, ge=1)
    per_device_train_batch_size: int = Field(8, ge=1, description="Sequences of a forward and backward pass.")
    sampling: str = Field("grpo", description="A name of `samplings`.")
    learning_rate: float = Field(1e-5, gt=0)
    beta: float = Field(0.02, ge=0, description="Weight of the KL to the base model; 0 leaves it out.")
    importance_sampling: bool = Field(True, description="Correct for rollout probabilities that differ, where told.")
    gradient_checkpointing: bool = False
    trainer: dict[str, Any] = Field(default_factory=dict, description="More arguments of TRL's GRPOConfig.")
    verify_every: int = Field(5, ge=0, description="Steps from one hash of the base weights to the next; 0: never.")
    save_every: int = Field(10, ge=0, description="Steps from one checkpoint to the next; 0: none but the last.")
    run_s: float = Field(1800, gt=0, description="Time limit of one run, seconds, the engine's start included.")
    reference: RolloutBackend = "trl"
    kl_band: float = Field(0.01, gt=0, description="Nats a token.")
    reward_band: float = Field(0.1, gt=0)
    backends: list[GrpoUse] = Field(min_length=1)

    @field_validator("trainer")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        own = {*cls.model_fields, "max_steps", "temperature", "top_p", "top_k", "min_p", "seed", "use_vllm"}
        for name in value:
            if name in own:
                raise ValueError(f"'{name}' is not set through grpo.trainer; it follows from the config's own keys")
        return value

    @model_validator(mode="after")
    def _workload_fits(self) -> Grpo:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(f"{len(self.reward_weights)} reward_weights for {len(self.rewards)} rewards")
        if self.skip_steps >= self.steps:
            raise ValueError(f"skip_steps {self.skip_steps} leaves none of {self.steps} steps")
        return self
