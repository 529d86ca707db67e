"""A GrpoStep at the end of every optimiser step, from the clock and from what TRL logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from flexroll.bench.coherence import before_end, judge
from flexroll.bench.memory import MemoryWatch
from flexroll.rl.clock import Clock
from flexroll.rl.rewards import RolloutLog, text_of
from flexroll.schema.grpo_records import GrpoStep, RewardOf
from flexroll.schema.records import Sample

SAMPLES = 4
# Fields of a step and TRL's names of them.
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "reward": "reward",
    "reward_std": "reward_std",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio": "clip_ratio/region_mean",
    "completion_length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "logprob_difference": "sampling/sampling_logp_difference/mean",
    "logprob_difference_max": "sampling/sampling_logp_difference/max",
    "importance_ratio": "sampling/importance_sampling_ratio/mean",
}
MUST_BE_FINITE = ("loss", "grad_norm")


class StatisticsCallback(TrainerCallback):
    """Tells `report` of every step, as soon as TRL has logged it, which is before a checkpoint of it is saved.

    Trainer calls on_step_begin, on_step_end (which ends the step's time) and then on_log with the step's metrics.

    Args:
        clock: what the trainer puts its seconds in.
        report: is called with each GrpoStep.
        log: what the reward functions were given; cleared when a step begins, so that the last step's is left.
        verify_every: steps from one hash of the base to the next, the last step always; 0 takes none.
        device: "cpu" or "cuda", whose peak memory is told; of a CPU, the resident set of this process and children.
    """

    def __init__(
        self,
        clock: Clock,
        report: Callable[[GrpoStep], None],
        log: RolloutLog,
        verify_every: int = 0,
        device: str = "cpu",
    ) -> None:
        self.clock, self.report, self.log = clock, report, log
        self.verify_every, self.device = verify_every, device
        self.rollout: Any = None
        self.device_bytes: int | None = None
        self._watch: MemoryWatch | None = None
        self._step: dict[str, Any] | None = None
        self._begun = 0.0
        self._ended: float | None = None  # end of the step before, on the same clock; hashing moves it

    def attach(self, rollout: Any) -> None:
        """The rollout backend, which tells hashes of the base and what it survived."""
        self.rollout = rollout

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The filter would log the mean of earlier losses in place of one that is not finite.
        args.logging_nan_inf_filter = False
        self.clock.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log.clear()
        self.clock.synchronise()
        self._watch = MemoryWatch(self.device, self.rollout.child_pids if self.rollout else None)
        self._watch.__enter__()
        self.clock.take()
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.clock.synchronise()
        ended = time.perf_counter()
        memory = self.close()
        step = {
            "step": state.global_step,
            "wall_s": ended - self._begun,
            "gap_s": 0.0 if self._ended is None else self._begun - self._ended,
            **self.clock.take(),
            "tokens": self.log.tokens,
            "peak_bytes": None if memory is None else memory.peak_allocated,
            "faults": self.rollout.take_faults() if self.rollout else [],
        }
        if memory is not None and memory.device_total is not None:
            self.device_bytes = max(self.device_bytes or 0, memory.device_total)
        if self._to_verify(state):
            step["base_sha256"] = self.rollout.base_hash()
            ended = time.perf_counter()  # a hash is no part of the training
        self._ended = ended
        self._step = step
        control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._step is None or not logs or "loss" not in logs:
            return  # Trainer's summary at the end
        step, self._step = self._step, None
        self.report(GrpoStep.model_validate(step | told(logs, step["faults"])))

    def close(self) -> Any:
        """End what watches the memory; its result, None where nothing is watched. Safe to call twice."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        watch.__exit__(None, None, None)
        return watch.result({})

    def _to_verify(self, state: Any) -> bool:
        due = self.verify_every and (state.global_step % self.verify_every == 0 or state.global_step >= state.max_steps)
        return bool(due and self.rollout)


def told(logs: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Fields of a GrpoStep out of what TRL logs of one step. What is not finite is None; of a loss or a gradient it is
    a fault too."""
    found: dict[str, Any] = {"faults": list(faults)}
    for field, name in LOGGED.items():
        value = logs.get(name)
        finite = value is not None and math.isfinite(value)
        found[field] = float(value) if finite else None
        if field in MUST_BE_FINITE and value is not None and not finite:
            found["faults"].append(f"{field} is not finite ({value})")
    found["rewards"] = {
        name: RewardOf(mean=mean, std=std)
        for key, mean in logs.items()
        if key.startswith("rewards/") and key.endswith("/mean") and mean is not None and math.isfinite(mean)
        for name in [key.removeprefix("rewards/").removesuffix("/mean")]
        if (std := logs.get(f"rewards/{name}/std")) is not None and math.isfinite(std)
    }
    return found


def samples(log: RolloutLog, ends: list[int]) -> list[Sample]:
    """The first completions of the last step, with a verdict on each up to its end token. ends: end token ids."""
    found = []
    for prompt, completion, ids in list(zip(log.prompts, log.completions, log.ids, strict=True))[:SAMPLES]:
        text = text_of(completion)
        verdict = judge(before_end(ids, ends), text)
        found.append(Sample(prompt=text_of(prompt), text=text, tokens=len(ids), coherence=verdict))
    return found
