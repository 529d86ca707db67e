"""Reading safetensors checkpoints, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flexroll.errors import FlexrollError


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: those of its index, or `model.safetensors`.

    Raises:
        FlexrollError: there is none, or the index names a shard that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError):
            raise FlexrollError(f"{index}: not a safetensors index; fetch the checkpoint again") from None
        for name in names:
            if not (folder / name).exists():
                raise FlexrollError(f"{folder}: shard {name} is missing; fetch the checkpoint again")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.exists():
        raise FlexrollError(
            f"{folder}: no model.safetensors and no index; a checkpoint in safetensors format is needed"
        )
    return [single]


def read_tensors(folder: Path, files: list[Path] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on the CPU) over the checkpoint's files, or some of them; one tensor is in memory at a time.

    Raises:
        FlexrollError: a file is cut short or not safetensors.
    """
    for path in checkpoint_files(folder) if files is None else files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FlexrollError(f"{path}: cannot be read ({error}); the file is corrupt, fetch it again") from None
