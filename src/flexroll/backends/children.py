"""Processes that an engine starts beside this one: which they are, and how none of them is left."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

GRACE_S = 10.0  # for them to end by themselves, then again before they are killed


def descendants() -> list[Any]:
    """This process's descendants, without Python's resource tracker, which is not the engine's and ends with us."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in part for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def with_descendants(children: list[Any]) -> list[Any]:
    """The processes and what they started themselves."""
    import psutil

    family = list(children)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            family += child.children(recursive=True)
    return family


def end(family: list[Any]) -> None:
    """Wait for the processes to end, then terminate, then kill those that are left."""
    import psutil

    _, left = psutil.wait_procs(family, timeout=GRACE_S)
    for stop in ("terminate", "kill"):
        for child in left:
            with suppress(psutil.NoSuchProcess):
                getattr(child, stop)()
        _, left = psutil.wait_procs(left, timeout=GRACE_S) if left else ([], [])
