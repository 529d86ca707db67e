"""What the supervisor hands its worker: one engine, and the cells to run on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell, Job


class Task(BaseModel):
    """backend: a name of the catalogue, or `module:Class`, or `file.py:Class`. spec: the fields of EngineSpec.
    mode warmup: every cell is run briefly, so that compilers fill their caches; nothing is measured."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["bench", "warmup"]
    backend: str
    spec: dict[str, Any]
    cells: list[Cell]
    prompts: Path


def engine_spec(
    job: Job,
    first: Cell,
    device: str,
    model: Path,
    adapter: Path | None,
    merged: Path | None,
    shard: Path | None = None,
    replay: Path | None = None,
) -> dict[str, Any]:
    """Fields of EngineSpec for a job: its engine is sized for all of the job's cells. first: the cell to run first."""
    cells = job.cells
    files = {"model": model, "adapter": adapter, "merged": merged, "shard": shard, "replay": replay}
    return {
        **{name: None if path is None else str(path) for name, path in files.items()},
        "adapter_mode": job.adapter,
        "dtype": cells[0].dtype,
        "device": device,
        "max_batch": max(c.running for c in cells),
        "first_batch": first.running,
        "max_model_len": max(c.max_model_len for c in cells),
        "seed": cells[0].seed,
        "dummy": cells[0].dummy,
        "option": cells[0].option_values,
    }


def read_prompts(path: Path) -> dict[str, Any]:
    """The prepared prompts: {sha256, left_out, source, prompts: [{text, ids}]}. Raises FlexrollError."""
    return read_input(path, "prompts", ("sha256", "prompts"))


def read_input(path: Path, command: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """A JSON file that an earlier command wrote. Raises FlexrollError naming that command."""
    try:
        data = json.loads(path.read_text())
        if all(key in data for key in keys):
            return data
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; `flexroll {command}` writes it") from None
    except (OSError, ValueError, TypeError):
        pass
    raise FlexrollError(f"{path}: not what `flexroll {command}` writes; delete it and run that again")
