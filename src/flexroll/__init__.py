"""flexroll: rollouts on flex_attention, and a pipeline that measures them against other engines."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "Tokenizer", "__version__"]

_HOME = {"Engine": "engine", "SamplingParams": "engine", "Tokenizer": "tokenizer"}


def __getattr__(name: str) -> Any:
    # By name and not by an import statement: the engine needs torch, and no backend's source hash may follow from here.
    if name in _HOME:
        return getattr(importlib.import_module(f"flexroll.{_HOME[name]}"), name)
    raise AttributeError(f"module 'flexroll' has no attribute '{name}'")
