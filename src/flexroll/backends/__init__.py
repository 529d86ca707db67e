"""The engines under test behind one protocol (base.Backend); each has a module of its own, imported when needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexroll.errors import FlexrollError

if TYPE_CHECKING:
    from flexroll.backends.base import Backend

CLASSES = {
    "flex": "flexroll.backends.flex:FlexBackend",
    "transformers_generate": "flexroll.backends.transformers_generate:TransformersGenerate",
    "transformers_cb": "flexroll.backends.transformers_cb:TransformersCb",
    "vllm": "flexroll.backends.vllm:Vllm",
    "unsloth": "flexroll.backends.unsloth:Unsloth",
}


def load(name: str) -> type[Backend]:
    """The class of a backend, by its name in the config.

    Raises:
        FlexrollError: no backend has that name.
    """
    return load_class(name, CLASSES, "backend")


def load_class(name: str, classes: dict[str, str], kind: str) -> Any:
    """The class `module:Class` of that name, its module imported now. Raises FlexrollError where there is none."""
    if name not in classes:
        raise FlexrollError(f"unknown {kind} '{name}'; choose from {', '.join(classes)}")
    module, attribute = classes[name].split(":")
    return getattr(import_module(module), attribute)
