"""The rollout engine: torch only, no knowledge of benchmarks. Start reading at `engine.Engine`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Completion", "Engine", "SamplingParams"]

_HOME = {"Completion": "requests", "Engine": "engine", "SamplingParams": "sampling"}


def __getattr__(name: str) -> Any:
    # By name and not by an import statement: who reads a checkpoint need not depend on the attention kernels' source.
    if name in _HOME:
        return getattr(importlib.import_module(f"flexroll.engine.{_HOME[name]}"), name)
    raise AttributeError(f"module 'flexroll.engine' has no attribute '{name}'")
