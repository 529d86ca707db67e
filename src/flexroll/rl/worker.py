"""The process that trains: build the trainer, train, tell the supervisor by one JSON line an event.

Started as `python -m flexroll.rl.worker TASK_FILE EVENT_FD`. Steps, checkpoints and the adapter go to the run's folder
(flexroll.rl.progress); the record is the supervisor's, for a process that hangs or is killed could not write one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel, ConfigDict

from flexroll.bench.worker import Events, load_backend, serve
from flexroll.errors import FlexrollError, one_line
from flexroll.rl.clock import Clock
from flexroll.rl.data import read_questions
from flexroll.rl.progress import append_step, begin_anew, go_back, mark_complete, save_adapter, step_of
from flexroll.rl.rewards import RolloutLog, reward_functions
from flexroll.rl.rollouts import make_ready, unavailable
from flexroll.rl.spec import GrpoSpec
from flexroll.schema.grpo_records import GrpoStep

BUILDER = "flexroll.rl.trainer:build_trainer"


class GrpoTask(BaseModel):
    """rewards: names, or file.py:function. builder: module:function or file.py:function, for tests another
    than build_trainer."""

    model_config = ConfigDict(extra="forbid")

    spec: GrpoSpec
    rewards: list[str]
    builder: str = BUILDER


def main(arguments: list[str]) -> int:
    return serve(arguments, GrpoTask, run)


def run(task: GrpoTask, events: Events) -> int:
    """Train, and tell: skipped | started, a step each, done | failed."""
    reason = unavailable(task.spec)
    if reason is not None:
        events.send("skipped", reason=reason)
        return 0
    try:
        train(task, events)
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        events.send("failed", reason=one_line(error))
    return 0


def train(task: GrpoTask, events: Events) -> None:
    """Raises whatever the trainer, the rollout engine or a reward raises."""
    make_ready(task.spec)  # Unsloth rewrites what is imported after it
    from flexroll.rl.compile_debugger import CompileDebugger
    from flexroll.rl.statistics import StatisticsCallback, samples

    begun, spec, log = perf_counter(), task.spec, RolloutLog()
    clock = Clock(synchronise(spec.device))
    checkpoint = go_back(spec.folder) if spec.resume else begin_anew(spec.folder)

    def report(step: GrpoStep) -> None:
        append_step(spec.folder, step)
        events.send("step", step=step.model_dump(), device_bytes=statistics.device_bytes)

    statistics = StatisticsCallback(clock, report, log, spec.grpo.verify_every, spec.device)
    rewards = reward_functions(task.rewards, log)
    rows = read_questions(spec.questions)["questions"]
    build: Callable[..., Any] = load_backend(task.builder)
    trainer = build(spec, clock, rewards, rows, [statistics, checkpoint_callback()])
    try:
        statistics.attach(trainer.rollout)
        debugger = None
        if spec.target.compile_mode is not None:
            debugger = CompileDebugger(spec.target.compile_mode)
            debugger.attach(trainer)
        events.send(
            "started",
            start_s=perf_counter() - begun,
            weights_bytes=trainer.rollout.memory()["weights"],
            base_sha256=trainer.rollout.base_hash() if spec.grpo.verify_every else None,
            notes=list(trainer.notes),
            resumed_at=None if checkpoint is None else step_of(checkpoint),
        )
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        save_adapter(trainer.model, spec.folder)
        events.send(
            "done",
            kv_bytes=trainer.rollout.memory()["kv_reserved"],
            compile=None if debugger is None else debugger.counts().model_dump(),
            samples=[s.model_dump() for s in samples(log, list(trainer.eos_token_ids))],
        )
    finally:
        statistics.close()
        trainer.rollout.close()


def checkpoint_callback() -> Any:
    """A callback that marks each checkpoint when Trainer has written the whole of it."""
    from transformers import TrainerCallback

    class MarkComplete(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return MarkComplete()


def synchronise(device: str) -> Callable[[], None]:
    """What waits until the device has done its work.

    Raises:
        FlexrollError: a GPU is asked for and torch finds none.
    """
    if device == "cpu":
        return lambda: None
    import torch

    if not torch.cuda.is_available():
        raise FlexrollError("device cuda: torch finds no GPU here; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return torch.cuda.synchronize


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
