"""Read results/<run>/drift/<stack>.json, one file a stack of the drift verification."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from flexroll.analysis.model import DriftRow, PeftCycle
from flexroll.schema.config import Config

KNOWN = frozenset(DriftRow.model_fields) - {"stack", "status", "reason", "file", "peft"}


def read_drift(config: Config, results: Path, stacks: list[str]) -> list[DriftRow]:
    """One row for each stack that the config verifies and this run includes, whatever became of it."""
    return [_read(results, stack) for stack in config.drift.stacks if stack in stacks]


def _read(results: Path, stack: str) -> DriftRow:
    file = f"drift/{stack}.json"
    try:
        data = json.loads((results / file).read_text())
        known = {key: value for key, value in data.items() if key in KNOWN}
        peft = [PeftCycle(**{key: cycle[key] for key in PeftCycle.model_fields}) for cycle in data["peft"]["cycles"]]
        return DriftRow(stack=stack, status="ok", file=file, peft=peft, **known)
    except FileNotFoundError:
        reason = f"{file} is missing; run `flexroll --stack {stack} drift` or the pipeline again"
        return DriftRow(stack=stack, status="missing", file=file, reason=reason)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = f"{file}: not complete JSON ({error}); remove it and run again"
        return DriftRow(stack=stack, status="unreadable", file=file, reason=reason)
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        reason = f"{file}: not a drift record ({what}); remove it and run again"
        return DriftRow(stack=stack, status="unreadable", file=file, reason=reason)
