"""The records of a sweep, one JSON line each, on disk before the next begins.

An interrupted sweep goes on from them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

FIELDS = {"stage", "group", "new_tokens", "rounds", "outcomes", "seconds", "cut"}


class Journal:
    """FOLDER/sweep.jsonl: a line with the sweep's key and facts, then a line a measurement."""

    def __init__(self, path: Path, key: str, facts: dict[str, Any]) -> None:
        """Begin, or go on. Raises FlexrollError where the file belongs to another sweep, or is none."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists() and b"\n" in path.read_bytes():
            begin, self.records, whole = read_journal(path)
            if begin["key"] != key:
                differ = [name for name in facts if facts[name] != begin["facts"].get(name)]
                raise FlexrollError(
                    f"{path}: of another sweep (other {', '.join(differ) or 'code'}); give another --out, or delete it"
                )
            if whole < path.stat().st_size:  # what a killed process left half written
                with path.open("r+b") as file:
                    file.truncate(whole)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._append({"key": key, "facts": facts})

    def add(self, record: dict[str, Any]) -> None:
        self._append(record)
        self.records.append(record)

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """(first line, records, bytes of whole lines). Raises FlexrollError where it is no sweep's."""
    try:
        data = path.read_bytes()
    except OSError:
        raise FlexrollError(f"{path}: no such sweep; `flexroll sweep` writes it") from None
    whole = data.rfind(b"\n") + 1
    try:
        begin, *records = (json.loads(line) for line in data[:whole].splitlines())
        if not isinstance(begin["key"], str) or not isinstance(begin["facts"], dict):
            raise ValueError
        if not all(isinstance(r, dict) and set(r) >= FIELDS for r in records):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise FlexrollError(f"{path}: not what `flexroll sweep` writes; give another --out, or delete it") from None
    return begin, records, whole
