"""Measures points in worker processes: a crash or a hang costs the point that met it. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexroll.bench.process import describe_exit, end_group, event_lines, start_worker, tail
from flexroll.errors import FlexrollError
from flexroll.tune.grid import Point
from flexroll.tune.plan import Outcome

START_S = 900.0  # torch's import and the weights


class WorkerEvaluator:
    """Rollouts in `python -m flexroll.tune.sweep_worker`, one process for many points until it breaks.

    Args:
        python: the interpreter, of an environment with torch.
        setup: model, dtype, dummy, device, batch, prompt_tokens, new_tokens (the most), page_size, compiled, seed;
            reference: file of the default's tokens, which the first measurement of the default writes.
        folder: for the setup and the log.
    """

    def __init__(self, python: Path, setup: dict[str, Any], folder: Path, env: dict[str, str]) -> None:
        self.python, self.setup, self.folder, self.env = python, setup, folder, env
        self.log = folder / "sweep.log"
        self.facts: dict[str, Any] = {}
        self._process: subprocess.Popen | None = None
        self._events: Any = None
        self._read_end = -1

    def start(self) -> dict[str, Any]:
        """Start a worker unless one is there: {torch, device}. Raises FlexrollError where it does not start."""
        if self._process is not None:
            return self.facts
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / "setup.json"
        place.write_text(json.dumps(self.setup, indent=1) + "\n")
        command = [str(self.python), "-m", "flexroll.tune.sweep_worker", str(place)]
        with self.log.open("ab") as log:
            self._process, self._read_end = start_worker(command, log, self.env, stdin=subprocess.PIPE)
        self._events = event_lines(self._read_end, self._process)
        hello = self._next(time.monotonic() + START_S)
        if hello is None or hello["event"] != "hello":
            why = self._ended()
            raise FlexrollError(f"the sweep's worker did not start: {why}; see {self.log}")
        self.facts = {name: hello[name] for name in ("torch", "device")}
        return self.facts

    def measure(
        self, points: Sequence[Point], new_tokens: int, rounds: int, check: bool, limit_s: float
    ) -> tuple[dict[str, Outcome], float]:
        """See plan.Evaluator."""
        begun = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two measurements, which is no point's fault
        self.start()
        found = {p.id: Outcome() for p in points}
        request = {
            "points": [p.engine_arguments for p in points],
            "new_tokens": new_tokens,
            "rounds": rounds,
            "check": check,
        }
        with suppress(OSError):  # it has ended meanwhile: the next event says so
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        current = points[0]
        while True:
            event = self._next(begun + limit_s)
            if event is None:
                alive = self._process is not None and self._process.poll() is None
                why = f"took longer than {limit_s:.0f} s" if alive else self._ended()
                if not found[current.id].reason:  # else it said so itself, and could not go on
                    found[current.id] = Outcome(reason=why, timed_out=alive)
                self.close()
                break
            if event["event"] == "done":
                break
            current = points[event["index"]]
            found[current.id] = _entered(found[current.id], event)
        return found, time.monotonic() - begun

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._process is None:
            return
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        end_group(self._process)
        os.close(self._read_end)
        self._process = self._events = None

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """The next event; None where the time is over or the process has ended."""
        for line in self._events:
            if line is not None:
                return json.loads(line)
            if time.monotonic() > deadline:
                return None
        return None

    def _ended(self) -> str:
        """How the worker ended, which is closed."""
        process = self._process
        if process is None:
            return "no worker"
        code = process.poll()
        self.close()
        if code is None:
            return "it did not answer"
        return describe_exit(code, self.log) if code else "it ended: " + (tail(self.log) or ["without a word"])[-1]


def _entered(outcome: Outcome, event: dict[str, Any]) -> Outcome:
    """The outcome with what an event says about its point."""
    if event["event"] == "failed":
        return Outcome(reason=event["reason"], agreement=event["agreement"])
    if event["event"] == "ready":
        return Outcome(agreement=event["agreement"])
    if event["event"] == "round":
        return Outcome([*outcome.tps, event["tps"]], outcome.run_s + event["seconds"], outcome.agreement)
    return outcome
