"""What one training process needs to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flexroll.schema.config import Adapter, Sampling
from flexroll.schema.grpo import Grpo
from flexroll.schema.grpo_records import GrpoTarget


class GrpoSpec(BaseModel):
    """One GRPO run, complete; written as JSON by `flexroll grpo` and read by its worker.

    model: checkpoint folder. questions: file of `flexroll grpo-questions`. folder: scratch of this run, which holds its
    checkpoints (`checkpoint-<step>`). adapter: rank, alpha and targets of the LoRA that is trained; it starts as PEFT
    draws it from the seed, with B = 0. resume: go on from the last complete checkpoint in folder, where there is one.
    """

    model_config = ConfigDict(extra="forbid")

    target: GrpoTarget
    grpo: Grpo
    adapter: Adapter
    sampling: Sampling
    model: Path
    dtype: str
    device: str
    max_model_len: int
    questions: Path
    folder: Path
    resume: bool = True

    @property
    def seed(self) -> int:
        return self.target.seed

    @property
    def option(self) -> dict[str, Any]:
        """Values of the rollout engine's option."""
        return self.target.option_values
