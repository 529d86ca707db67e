"""Why an engine cannot run here, asked before a process is started for it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexroll.backends import load
from flexroll.backends.base import option_problem
from flexroll.backends.flex_support import problem
from flexroll.bench.worker import spec_of


def cannot_run(backend: str, values: dict[str, Any]) -> str | None:
    """The reason, in one line and in the words of the backend itself, or None. The worker asks again and may know more.

    backend: a name of the catalogue; another class (`file.py:Class`) is for the worker to load.
    values: the fields of EngineSpec.
    """
    if ":" in backend:
        return None
    spec = spec_of(values)
    # flex's module imports torch; those of the other backends import their libraries when an engine starts.
    reason = problem(spec) if backend == "flex" else load(backend).unavailable(spec)
    return reason or option_problem(spec)


def note_skip(log: Path, reason: str) -> None:
    """The line that stands where a worker's output would."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"=== skipped, no process was started: {reason}\n")
