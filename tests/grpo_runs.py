"""Synthetic GRPO runs for the tests of analysis, report and check: records with a chosen trajectory, no trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import synthetic
from flexroll.provenance import hash_json
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import CompileCounts, GrpoRecord, GrpoStep, GrpoTarget, RewardOf, grpo_targets
from flexroll.schema.records import write_json

SPEED = {"flex": 1.0, "vllm": 1.25, "trl": 4.0, "transformers_cb": 3.0, "transformers_cb_sdpa": 2.9, "unsloth": 2.5}
GRPO: dict[str, Any] = {
    "rewards": ["exact", "format"],
    "steps": 8,
    "skip_steps": 3,
    "seeds": [0, 1, 2],
    "kl_band": 0.002,
    "reward_band": 0.2,
    "backends": [
        {"backend": "flex"},
        {"backend": "flex", "pool": "released", "seeds": [0]},
        {"backend": "vllm"},
        {"backend": "transformers_cb", "compile_mode": "default"},
        {"backend": "unsloth"},
        {"backend": "trl"},
    ],
}
SETTINGS: dict[str, Any] = {
    "prompts": synthetic.CONFIG["prompts"] | {"answer": "a"},
    "samplings": synthetic.CONFIG["samplings"] | {"grpo": {"temperature": 1.0}},
}


def config(**changes: Any) -> Config:
    """A config that trains, and measures nothing unless `changes` says so."""
    nothing = {"experiments": {}, "drift": {"stacks": []}, "options": {}}
    return synthetic.config(**(SETTINGS | nothing | {"grpo": GRPO} | changes))


def step(number: int, seconds: float, kl: float | None, reward: float, **changes: Any) -> GrpoStep:
    """A step of `seconds`, of which half are rollout."""
    values: dict[str, Any] = {
        "step": number,
        "wall_s": seconds,
        "rollout_s": seconds / 2,
        "refresh_s": seconds / 20,
        "reward_s": seconds / 100,
        "loss_s": seconds / 4,
        "optimizer_s": seconds / 50,
        "tokens": 1000,
        "loss": 0.01 * number,
        "reward": reward,
        "rewards": {"exact": RewardOf(mean=reward / 2, std=0.1), "format": RewardOf(mean=reward / 2, std=0.1)},
        "kl": kl,
        "logprob_difference": 0.001,
        "importance_ratio": 1.0,
        "peak_bytes": 10**9,
        "base_sha256": "f" * 64 if number % 5 == 0 else None,
    }
    return GrpoStep(**(values | changes))


def record(
    target: GrpoTarget,
    config: Config,
    *,
    gpu: str | None = None,
    kl: float = 0.0,
    reward: float = 0.0,
    noise: float = 1e-4,
    **changes: Any,
) -> GrpoRecord:
    """A run whose KL grows by 0.001 a step and whose reward is about 0.5, off by `kl` and `reward`.

    noise: sd of what backend and seed do to the KL; that of the reward is a hundred times it. Seeds differ ten times as
    much between themselves, alike on all backends.
    """
    assert config.grpo is not None
    own, shared = random.Random(f"{target.form} {target.seed}"), random.Random(target.seed)
    both, alone = shared.gauss(0, 10 * noise), own.gauss(0, noise)
    steps = []
    for number in range(1, target.steps + 1):
        seconds = SPEED[target.backend] * (4.0 if number <= 3 else 1.0) * (1 + own.gauss(0, 0.01))
        off = both + alone + own.gauss(0, noise / 10)
        told = None if not config.grpo.beta else max(0.0, 0.01 + 0.001 * number + kl + off)
        most = float(len(config.grpo.rewards))
        steps.append(step(number, seconds, told, min(most, max(0.0, 0.5 + reward + 100 * off))))
    environment = synthetic.environment(target.stack, gpu)
    values: dict[str, Any] = {
        "settings": config.grpo.model_dump(mode="json", exclude={"backends"}) | {"steps": target.steps},
        "model": config.model.name,
        "dtype": config.model.dtype,
        "status": "ok",
        "key": hash_json(target.model_dump(mode="json")),
        "device": gpu or "cpu",
        "start_s": 5.0,
        "train_s": sum(one.wall_s for one in steps),
        "steps": steps,
        "weights_bytes": 2 * 10**9,
        "kv_bytes": 10**9,
        "device_bytes": (120 if target.backend == "vllm" else 20) * 10**9,
        "base_sha256": "f" * 64,
        "compile": CompileCounts(mode=target.compile_mode, graphs=3, graph_breaks=1) if target.compile_mode else None,
        "samples": [synthetic.sample()],
        "environment": environment,
    }
    if target.backend == "unsloth" and gpu is None:
        values |= {"status": "skipped", "reason": "needs a CUDA GPU", "steps": [], "samples": [], "train_s": None}
    names = ("stack", "backend", "option", "option_values", "compile_mode", "pool", "seed")
    return GrpoRecord(**({name: getattr(target, name) for name in names} | values | changes))


def write(results: Path, config: Config, make: Callable[[GrpoTarget], GrpoRecord | None]) -> list[GrpoTarget]:
    """Write `make(target)` for every run of the config; None writes nothing. Returns the targets."""
    targets = grpo_targets(config)
    for target in targets:
        made = make(target)
        if made is not None:
            write_json(results / target.file, made.model_dump_json(indent=1) + "\n")
    return targets
