"""The supervisor of one training process, from its start to the record. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flexroll.bench.console import say
from flexroll.bench.process import describe_exit, event_lines, worker
from flexroll.rl.progress import read_steps, remove_checkpoints
from flexroll.rl.spec import GrpoSpec
from flexroll.schema.grpo_records import GrpoRecord, GrpoStep
from flexroll.schema.records import write_json

CLOSE_S = 60.0  # a trainer that has told everything may take this long to end
STATE = "run.json"  # {key, base_sha256, resumed_at} of the run whose steps and checkpoints lie beside it


class Supervised:
    """One worker process from its start to the record."""

    def __init__(self, record: GrpoRecord, spec: GrpoSpec, out: Path, log: Path, keep_checkpoints: bool) -> None:
        self.record, self.spec, self.out, self.log = record, spec, out, log
        self.keep_checkpoints = keep_checkpoints
        self.state = read_state(spec.folder) if spec.resume else {}
        self.state = {"key": record.key, "base_sha256": None, "resumed_at": []} | self.state
        self.found: dict[str, Any] = {}  # fields of the record that the worker told
        self.outcome: dict[str, Any] | None = None

    @property
    def where(self) -> str:
        """How far it is, and that the same command goes on from there, for a reason."""
        done = len(read_steps(self.spec.folder))
        return f"with {done} of {self.spec.target.steps} steps done; the same command goes on from the last checkpoint"

    def supervise(self, task: dict[str, Any], env: dict[str, str]) -> None:
        """Run the worker to its end, and write the record."""
        write_state(self.spec.folder, self.state)
        task_file = self.spec.folder / "task.json"
        write_json(task_file, json.dumps(task, indent=1))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flexroll.rl.worker", str(task_file)]
        mode = "ab" if self.spec.resume else "wb"
        with self.log.open(mode) as output, worker(command, output, env) as (process, read_end):
            outcome = self._follow(process, read_end)
        self.end(outcome)

    def _follow(self, process: subprocess.Popen, read_end: int) -> dict[str, Any]:
        limit = self.spec.grpo.run_s
        deadline = time.monotonic() + limit
        for line in event_lines(read_end, process):
            if line is not None:
                event = json.loads(line)
                getattr(self, f"_on_{event.pop('event')}")(**event)
                if self.outcome is not None:
                    deadline = time.monotonic() + CLOSE_S
            elif time.monotonic() > deadline:
                late = f"timeout: the run took longer than {limit:g} s (grpo.run_s), {self.where}"
                return self.outcome or {"status": "failed", "reason": late}
        return self.outcome or {"status": "failed", "reason": describe_exit(process.wait(), self.log)}

    def _on_started(self, base_sha256: str | None, resumed_at: int | None, **found: Any) -> None:
        self.found |= found
        if resumed_at is None:
            self.state |= {"base_sha256": base_sha256, "resumed_at": []}
        else:
            self.state["resumed_at"].append(resumed_at)
            say(f"{self.spec.target.name}: goes on after step {resumed_at}")
        write_state(self.spec.folder, self.state)
        for note in found["notes"]:
            say(f"{self.spec.target.name}: {note}")

    def _on_step(self, step: dict[str, Any], device_bytes: int | None) -> None:
        self.found["device_bytes"] = device_bytes
        say(f"{self.spec.target.name}: {step_line(GrpoStep.model_validate(step), self.spec.target.steps)}")

    def _on_done(self, **found: Any) -> None:
        self.found |= found
        self.outcome = {"status": "ok", "reason": ""}

    def _on_failed(self, reason: str) -> None:
        self.outcome = {"status": "failed", "reason": reason}

    def _on_skipped(self, reason: str) -> None:
        self.outcome = {"status": "skipped", "reason": reason}

    def end(self, outcome: dict[str, Any]) -> None:
        """Write the record with the steps that are on disk; of a run that ended well, remove what only resuming
        needs."""
        folder, wanted = self.spec.folder, self.spec.target.steps
        steps = read_steps(folder)
        if outcome["status"] == "ok" and len(steps) != wanted:
            outcome = {"status": "failed", "reason": f"the trainer ended after {len(steps)} of {wanted} steps"}
        values = self.record.model_dump() | self.found | outcome
        values |= {
            "steps": steps,
            "train_s": sum(step.wall_s + step.gap_s for step in steps) if steps else None,
            "base_sha256": self.state["base_sha256"],
            "resumed_at": self.state["resumed_at"],
        }
        self.record = GrpoRecord.model_validate(values)
        write_json(self.out, self.record.model_dump_json(indent=1) + "\n")
        if outcome["status"] == "ok":
            (folder / STATE).unlink(missing_ok=True)  # the same command then trains anew
            if not self.keep_checkpoints:
                remove_checkpoints(folder)
        say(f"{self.spec.target.name}: {summary(self.record)}")


def step_line(step: GrpoStep, steps: int) -> str:
    """A step for a person: `step 3/10: 4.1 s (rollout 2.2, loss 1.5), 310 tok/s, reward 0.25, KL 0.0003`."""
    parts = {"rollout": step.rollout_s + step.refresh_s, "loss": step.loss_s, "optimizer": step.optimizer_s}
    split = ", ".join(f"{name} {seconds:.2g}" for name, seconds in parts.items())
    told = [f"step {step.step}/{steps}: {step.wall_s:.3g} s ({split})"]
    told += [f"{step.tps:.0f} tok/s"] if step.tps else []
    told += [f"reward {step.reward:.3f}"] if step.reward is not None else []
    told += [f"KL {step.kl:.2g}"] if step.kl is not None else []
    return "; ".join([", ".join(told), *step.faults])


def summary(record: GrpoRecord) -> str:
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    median = f", {record.step_s:.3g} s a step" if record.step_s is not None else ""
    return f"{len(record.steps)} steps in {record.train_s or 0:.0f} s{median}"


def read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_text())
        return state if isinstance(state, dict) else {}
    except (OSError, ValueError):
        return {}


def write_state(folder: Path, state: dict[str, Any]) -> None:
    write_json(folder / STATE, json.dumps(state, indent=1) + "\n")
