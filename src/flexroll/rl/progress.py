"""What a training run leaves on disk as it goes, so that it can be stopped at any moment and gone on with.

In the run's folder: steps.jsonl, a GrpoStep a line, written before a checkpoint of that step is; Trainer's
checkpoint-<step> folders, each marked when it is complete; adapter/, the trained adapter of a run that ended well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexroll.schema.grpo_records import GrpoStep
from flexroll.schema.records import write_json

STEPS = "steps.jsonl"
ADAPTER = "adapter"
MARK = "flexroll-complete.json"  # {file: bytes} of a checkpoint, written last
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def append_step(folder: Path, step: GrpoStep) -> None:
    """Add a line to steps.jsonl; it is on the disk when this returns."""
    with (folder / STEPS).open("a") as file:
        file.write(step.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_steps(folder: Path) -> list[GrpoStep]:
    """The steps there are, in order, up to the first line that is cut short or out of order."""
    steps: list[GrpoStep] = []
    try:
        lines = (folder / STEPS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return steps
    for line in lines:
        try:
            step = GrpoStep.model_validate_json(line)
        except ValidationError:
            break
        if step.step != len(steps) + 1:
            break
        steps.append(step)
    return steps


def mark_complete(checkpoint: Path) -> None:
    """Say that every file of a checkpoint is written, and how long each is."""
    write_json(checkpoint / MARK, json.dumps(_sizes(checkpoint), indent=1) + "\n")


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is marked, and its files are as long as they were then."""
    try:
        wanted = json.loads((checkpoint / MARK).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(wanted, dict) and bool(wanted) and wanted == _sizes(checkpoint)


def go_back(folder: Path) -> Path | None:
    """Make the folder as it was when its last complete checkpoint was written: later steps and checkpoints, and those
    that are not complete, are removed. Returns that checkpoint; None, and then nothing is left, where there is none."""
    steps, found = read_steps(folder), None
    for number, checkpoint in sorted(checkpoints(folder), reverse=True):
        if found is None and number <= len(steps) and is_complete(checkpoint):
            found, steps = checkpoint, steps[:number]
        elif found is None:
            shutil.rmtree(checkpoint)
    kept = steps if found is not None else []
    write_json(folder / STEPS, "".join(step.model_dump_json() + "\n" for step in kept))
    return found


def begin_anew(folder: Path) -> None:
    """Remove steps and checkpoints."""
    remove_checkpoints(folder)
    (folder / STEPS).unlink(missing_ok=True)


def step_of(checkpoint: Path) -> int:
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint there, complete or not."""
    if not folder.is_dir():
        return []
    return [(step_of(path), path) for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir()]


def remove_checkpoints(folder: Path) -> None:
    for _, checkpoint in checkpoints(folder):
        shutil.rmtree(checkpoint)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the PEFT adapter of a model to folder/adapter; one that is there is replaced when the new one is whole."""
    part, target = folder / f"{ADAPTER}.part", folder / ADAPTER
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARK
    }
