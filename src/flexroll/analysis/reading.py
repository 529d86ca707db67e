"""Records that are one file a target of the config, read so that a bad one is a row with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flexroll.errors import FlexrollError


class OneFile(Protocol):
    """What a config asks for, with the path of its record relative to results/<run>."""

    @property
    def file(self) -> str: ...


class Named(Protocol):
    """A record that knows whose it is."""

    def is_of(self, target: Any) -> bool: ...


Found = TypeVar("Found", bound=Named)


def read_or_why(results: Path, target: OneFile, read: Callable[[Path], Found], another: str) -> Found | tuple[str, str]:
    """The target's record, or (status, reason) where there is none to read.

    another: what a record of another target holds, in words.
    """
    path = results / target.file
    try:
        record = read(path)
    except FlexrollError as error:
        status = "unreadable" if path.exists() else "missing"
        return status, str(error).replace(str(path), target.file)
    except OSError as error:
        return "unreadable", f"{target.file}: {error.strerror or error}"
    if not record.is_of(target):
        return "unreadable", f"{target.file}: holds {another}; remove it and run again"
    return record
