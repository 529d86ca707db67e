"""The decode kernel options that `flexroll autotune` found, as the flex backend reads them. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError


def read_replay(path: Path | None) -> dict[str, Any]:
    """{options, reason, ...}, as tune.autotune writes it.

    Raises:
        FlexrollError: no file, or not one of those.
    """
    if path is None:
        raise FlexrollError("option replay: no file of autotuned options; `flexroll autotune` writes it")
    try:
        data = json.loads(path.read_text())
        if isinstance(data["options"], dict | None) and isinstance(data["reason"], str):
            return data
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; `flexroll autotune` writes it") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise FlexrollError(f"{path}: not what `flexroll autotune` writes; delete it and run that again")


def replay_problem(path: Path | None) -> str | None:
    """Why there is nothing to replay, or None."""
    data = read_replay(path)
    return None if data["options"] else f"nothing to replay: {data['reason'] or 'autotuning found no options'}"


def replay_options(path: Path | None) -> dict[str, Any]:
    """The options. Raises FlexrollError where there are none."""
    data = read_replay(path)
    if not data["options"]:
        raise FlexrollError(replay_problem(path) or "")
    return dict(data["options"])
