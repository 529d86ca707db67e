"""A checkpoint folder: is it whole, and what are its hashes. Reads headers itself, so it needs no torch."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

KEPT = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # what belongs to a checkpoint; also asked of the hub
MAX_HEADER = 100_000_000  # the format's own limit, bytes


def check_checkpoint(folder: Path) -> None:
    """Raises FlexrollError unless config.json and all safetensors files are there and whole."""
    if not folder.is_dir():
        raise FlexrollError(f"{folder}: no such checkpoint folder; set model.path, or model.source: hub")
    read_config(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _sharded(index)
    else:
        names = {path.name: set() for path in sorted(folder.glob("*.safetensors"))}
        if not names:
            raise FlexrollError(f"{folder}: no *.safetensors file; flexroll loads no other format")
    for name, tensors in sorted(names.items()):
        missing = tensors - set(safetensors_header(folder / name))
        if missing:
            raise FlexrollError(
                f"{folder / name}: lacks tensor {sorted(missing)[0]} which {index.name} promises; fetch the file again"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises FlexrollError unless it is a model's."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; a checkpoint folder holds config.json and *.safetensors") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{path}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise FlexrollError(f"{path}: no model_type in it; this is not a model's config.json")
    return config


def safetensors_header(path: Path) -> dict[str, Any]:
    """{tensor: {dtype, shape, data_offsets}} of a safetensors file, once its length agrees with them.

    Raises:
        FlexrollError: missing, cut short, or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER + 1
            if length > MAX_HEADER or length + 8 > size:
                raise FlexrollError(f"{path}: not a whole safetensors file ({size} bytes); fetch it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; fetch the checkpoint again") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise FlexrollError(f"{path}: its safetensors header is damaged; fetch it again") from None
    if size != needed:
        raise FlexrollError(
            f"{path}: {size} bytes where its header says {needed}; it was cut or damaged, fetch it again"
        )
    return header


def hash_files(folder: Path, progress: Callable[[str], None] | None = None) -> dict[str, str]:
    """{name: sha256} of the checkpoint's files."""
    files = {}
    for path in sorted({p for pattern in KEPT for p in folder.glob(pattern) if p.is_file()}):
        if progress and path.stat().st_size > 1 << 30:
            progress(f"hashing {path.name}")
        files[path.name] = sha256_file(path)
    return files


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Files beside the weights that change what a model computes, tokenizer and generation defaults included.
_DECIDES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")


def fingerprint(files: dict[str, str]) -> str:
    """One hash for a checkpoint, from its files' hashes; a readme or a questions file beside it does not count."""
    chosen = sorted((n, h) for n, h in files.items() if n.endswith(".safetensors") or n in _DECIDES)
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()


def _sharded(index: Path) -> dict[str, set[str]]:
    try:
        names: dict[str, set[str]] = {}
        for tensor, name in json.loads(index.read_text())["weight_map"].items():
            names.setdefault(name, set()).add(tensor)
        return names
    except (ValueError, KeyError, AttributeError, TypeError):
        raise FlexrollError(f"{index}: not a valid index; fetch it again") from None
