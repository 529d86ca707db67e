"""`flexroll --stack STACK`: go on in that stack's interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flexroll.errors import FlexrollError
from flexroll.images.here import check, image_file
from flexroll.schema.load import known_stacks

STAMP = "flexroll-stack.json"


def running_stack() -> str | None:
    """The stack this interpreter belongs to: the container image's, else its environment's stamp's, else None."""
    image = image_file()
    return str(image["stack"]) if image else _stack_named_in(Path(sys.prefix) / STAMP)


def require_stack(stack: str, command: str) -> None:
    """Raises FlexrollError unless this interpreter is `stack`'s."""
    running = running_stack()
    if running != stack:
        here = f"this is stack {running}" if running else "this interpreter belongs to no stack"
        raise FlexrollError(f"{command} needs stack {stack}, but {here}; run `flexroll --stack {stack} {command} ...`")


def enter_stack(stack: str, root: Path, arguments: Sequence[str]) -> None:
    """Return if this is the stack's interpreter, else replace this process by `python -m flexroll ARGUMENTS` in it.

    Raises:
        FlexrollError: the stack is unknown, or not (completely) set up, or this is another one's image.
    """
    check(root, stack)
    if running_stack() == stack:
        return
    known = known_stacks(root)
    if stack not in known:
        raise FlexrollError(
            f"unknown stack '{stack}'; known: {', '.join(known) or 'none'} (the folders of containers/)"
        )
    folder = root / ".stacks" / stack
    python = folder / "bin" / "python"
    if not python.exists():
        raise FlexrollError(f"stack {stack} is not set up; run `make stack STACK={stack}`")
    if _stack_named_in(folder / STAMP) != stack:
        raise FlexrollError(f"set-up of stack {stack} did not finish; run `make stack STACK={stack}`")
    _become(python, ["-m", "flexroll", *arguments])


def without_stack(arguments: Sequence[str]) -> list[str]:
    """The command line without its --stack option, which comes before the command."""
    for index, argument in enumerate(arguments):
        if argument == "--stack":
            return [*arguments[:index], *arguments[index + 2 :]]
        if argument.startswith("--stack="):
            return [*arguments[:index], *arguments[index + 1 :]]
    return list(arguments)


def _become(python: Path, arguments: list[str]) -> NoReturn:
    env = dict(os.environ)
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    env["PYTHONNOUSERSITE"] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, [str(python), *arguments], env)


def _stack_named_in(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["stack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
