"""Small GRPO runs on the embedded checkpoint, shared by the tests of rollouts and of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexroll.rl.clock import Clock
from flexroll.rl.spec import GrpoSpec
from flexroll.schema.config import Adapter, Sampling
from flexroll.schema.grpo import Grpo
from flexroll.schema.grpo_records import GrpoTarget


def small_spec(
    model: Path,
    folder: Path,
    backend: str = "flex",
    *,
    steps: int = 2,
    seed: int = 0,
    pool: str = "kept",
    dtype: str = "float32",
    device: str = "cpu",
    option: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **grpo: Any,
) -> GrpoSpec:
    """2 prompts of 4 completions of 12 tokens a step."""
    settings = {
        "steps": steps,
        "skip_steps": 0,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "backends": [{"backend": backend}],
        **grpo,
    }
    return GrpoSpec(
        target=GrpoTarget(
            stack="torch2.11", backend=backend, steps=steps, seed=seed, pool=pool, option_values=option or {}
        ),
        grpo=Grpo.model_validate(settings),
        adapter=Adapter(rank=8, alpha=16),
        sampling=Sampling(**(sampling or {"temperature": 1.0})),
        model=model,
        dtype=dtype,
        device=device,
        max_model_len=256,
        questions=folder / "questions.json",
        folder=folder / "run",
    )


def questions(model: Path, count: int = 12) -> list[dict[str, Any]]:
    rows = json.loads((model / "gsm_test.json").read_text())[:count]
    return [{"prompt": [{"role": "user", "content": row["q"]}], "answer": row["a"]} for row in rows]


def distinct(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(c[0]["content"])) / 100 for c in completions]


def built(spec: GrpoSpec, count: int = 12, clock: Clock | None = None, **more: Any) -> Any:
    from flexroll.rl.trainer import build_trainer

    return build_trainer(spec, clock or Clock(), [distinct], questions(spec.model, count), **more)


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    """What TRL logged of each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trained(trainer: Any) -> dict[str, Any]:
    """Copies of the adapter's tensors."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
