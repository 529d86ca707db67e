"""Runs workers and survives them: time limits, crashes, and a result for every cell. Imports no torch.

A cell that hangs or kills its process fails; the cells that are left get a fresh process. An engine that does not start
fails (or, where its backend says that it cannot run here, skips) all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from flexroll.bench.process import describe_exit, event_lines, stop_signals, worker
from flexroll.bench.task import Task
from flexroll.bench.telemetry import Sampler, flags
from flexroll.schema.config import Limits
from flexroll.schema.records import Memory, Round, Sample

CLOSE_S = 60.0  # an engine that has measured everything may take this long to end
BETWEEN_S = 120.0  # from one cell's end to the next one's begin


@dataclass
class CellResult:
    """What became of one cell."""

    status: str = "failed"
    reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    samples: list[Sample] = field(default_factory=list)
    prompt_tokens: int = 0
    start_s: float | None = None
    start_parts: dict[str, float] = field(default_factory=dict)


class Supervisor:
    """Runs a task to its end.

    `report(index, result)` is called once a cell, as soon as its fate is known, `watch(index, round)` once a round.
    """

    def __init__(
        self,
        task: Task,
        task_file: Path,
        log: Path,
        limits: Limits,
        env: dict[str, str],
        report: Callable[[int, CellResult], None],
        watch: Callable[[int, Round], None] = lambda index, done: None,
    ) -> None:
        self.watch = watch
        self.task, self.task_file, self.log, self.limits, self.env, self.report = (
            task,
            task_file,
            log,
            limits,
            env,
            report,
        )
        self.left: list[int] = []
        self.current: int | None = None
        self.result = CellResult()
        self.start_s: float | None = None
        self.sampler: Sampler | None = None

    def run(self) -> None:
        """Every cell of the task is reported when this returns. Raises Stopped on SIGTERM or SIGINT."""
        self.left = list(range(len(self.task.cells)))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with stop_signals():
            while self.left:
                before = len(self.left)
                gpu = self.task.spec["device"] == "cuda"
                with self.log.open("ab") as log, Sampler(gpu, self._note) as self.sampler:
                    reason = self._one_worker(log)
                if len(self.left) == before:  # ended between start and first cell: never try the same thing for ever
                    self._fail(self.left[0], reason)

    def _one_worker(self, log: IO[bytes]) -> str:
        """Start a worker for the cells left and follow it to its end; returns how it ended."""
        self.current, self.start_s = None, None
        indices = list(self.left)
        task = self.task.model_copy(update={"cells": [self.task.cells[i] for i in indices]})
        self.task_file.parent.mkdir(parents=True, exist_ok=True)
        self.task_file.write_text(task.model_dump_json(indent=1))
        log.write(
            f"=== {datetime.now(UTC):%Y-%m-%d %H:%M:%S} worker for {', '.join(c.file for c in task.cells)}\n".encode()
        )
        log.flush()
        command = [sys.executable, "-m", "flexroll.bench.worker", str(self.task_file)]
        with worker(command, log, self.env) as (process, read_end):
            return self._follow(process, read_end, indices)

    def _follow(self, process: subprocess.Popen, read_end: int, indices: list[int]) -> str:
        deadline = time.monotonic() + self.limits.start_s
        for line in event_lines(read_end, process):
            if line is not None:
                deadline = time.monotonic() + self._event(json.loads(line), indices)
            elif time.monotonic() > deadline:
                return self._timed_out()
        return self._ended(process.wait())

    def _event(self, event: dict[str, Any], indices: list[int]) -> float:
        """Take in one event; returns the seconds until the next one must have come."""
        kind = event["event"]
        if kind in ("unavailable", "start_failed"):
            status = "skipped" if kind == "unavailable" else "failed"
            prefix = "" if kind == "unavailable" else "engine did not start: "
            self._all_left(status, prefix + event["reason"])
            return CLOSE_S
        if kind == "started":
            self.start_s = event["start_s"]
            return BETWEEN_S
        if kind == "cell":
            self.current, self.result = indices[event["index"]], CellResult(start_s=self.start_s)
            return self.limits.cell_s
        if kind == "round":
            assert self.sampler is not None
            done = Round.model_validate(event["round"])
            done.telemetry = self.sampler.between(event["begin"], event["end"])
            done.flags = flags(done.telemetry)
            self.result.rounds.append(done)
            assert self.current is not None
            self.watch(self.current, done)
            return self._rest_of_cell()
        if kind in ("cell_done", "cell_failed"):
            assert self.current is not None
            self.result.status = "ok" if kind == "cell_done" else "failed"
            self.result.reason = event.get("reason", "")
            self.result.prompt_tokens = event["prompt_tokens"]
            self.result.memory = Memory.model_validate(event.get("memory") or {})
            self.result.start_parts = event.get("start_parts", {})
            self.result.samples = [Sample.model_validate(s) for s in event.get("samples", [])]
            self._done(self.current, self.result)
            return BETWEEN_S if self.left else CLOSE_S
        return CLOSE_S  # finished

    def _note(self, text: str) -> None:
        """A line of the supervisor's own in the worker's log."""
        with self.log.open("ab") as log:
            log.write(f"=== {text}\n".encode())

    def _rest_of_cell(self) -> float:
        """A round does not extend its cell's limit."""
        return self._cell_deadline - time.monotonic()

    @property
    def current(self) -> int | None:
        return self._current

    @current.setter
    def current(self, index: int | None) -> None:
        self._current = index
        self._cell_deadline = time.monotonic() + self.limits.cell_s

    def _timed_out(self) -> str:
        if self.current is not None:
            reason = f"timeout: the cell took longer than {self.limits.cell_s:g} s (limits.cell_s)"
            self._fail(self.current, reason)
        elif self.start_s is None:
            reason = f"timeout: the engine took longer than {self.limits.start_s:g} s to start (limits.start_s)"
            self._all_left("failed", reason)
        else:
            reason = "timeout: the worker did nothing between cells"
        return reason

    def _ended(self, code: int) -> str:
        reason = describe_exit(code, self.log)
        if self.current is not None:
            self._fail(self.current, reason)
        elif self.start_s is None and self.left:
            self._all_left("failed", f"engine did not start: {reason}")
        return reason

    def _fail(self, index: int, reason: str) -> None:
        result = self.result if self.current == index else CellResult(start_s=self.start_s)
        result.status, result.reason = "failed", reason
        self._done(index, result)

    def _all_left(self, status: str, reason: str) -> None:
        for index in list(self.left):
            self._done(index, CellResult(status=status, reason=reason))

    def _done(self, index: int, result: CellResult) -> None:
        self.left.remove(index)
        self.current = None
        self.report(index, result)
