"""What generates a trainer's completions: one module a rollout backend, imported when needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flexroll.backends import load_class

if TYPE_CHECKING:
    from flexroll.rl.rollouts.base import Rollout
    from flexroll.rl.spec import GrpoSpec

CLASSES = {
    "flex": "flexroll.rl.rollouts.flex:FlexRollout",
    "vllm": "flexroll.rl.rollouts.vllm:VllmRollout",
    "unsloth": "flexroll.rl.rollouts.unsloth:UnslothRollout",
    "transformers_cb": "flexroll.rl.rollouts.transformers:ContinuousBatching",
    "transformers_cb_sdpa": "flexroll.rl.rollouts.transformers:ContinuousBatchingSdpa",
    "trl": "flexroll.rl.rollouts.transformers:TrlGenerate",
}


def load(name: str) -> type[Rollout]:
    """The class of a rollout backend, by its name in the config.

    Raises:
        FlexrollError: no backend has that name.
    """
    return load_class(name, CLASSES, "rollout backend")


def unavailable(spec: GrpoSpec) -> str | None:
    """One line saying why this run cannot be made here (its record is then `skipped`), or None. Loads no model."""
    from flexroll.rl.rollouts.base import trl_missing

    return trl_missing() or load(spec.target.backend).unavailable(spec)


def make_ready(spec: GrpoSpec) -> None:
    """Call this before anything imports transformers: the environment of the run, and imports that must be first."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    load(spec.target.backend).make_ready(spec)
