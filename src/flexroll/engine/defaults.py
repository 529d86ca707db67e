"""Kernel options for flex_attention where the caller gives none, by measurement; `Engine` merges them in.

They stand in kernel_defaults.json: part of a GPU's name -> kind of step -> {options, note: what was measured}. The
longest part that a GPU's name holds counts; one that was not measured gets those of the empty name. `flexroll sweep
--write-defaults` adds to the file.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Files beside this one that it reads: they count as its code (provenance.source_hash).
DATA_FILES = ("kernel_defaults.json",)


def kernel_options(kind: str, device: torch.device, page_size: int | None = None) -> dict[str, Any]:
    """Options of kind "decode" or "prefill" for this device; none on a CPU.

    page_size: tokens a KV page, in whole parts of which a kernel reads keys: a larger BLOCK_N is cut to it.
    """
    if device.type != "cuda":
        return {}
    options = dict(options_for(torch.cuda.get_device_name(device), kind, measured()))
    if page_size is not None and "BLOCK_N" in options:
        options["BLOCK_N"] = min(options["BLOCK_N"], page_size)
    return options


def options_for(name: str, kind: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the table says of that kind for a GPU of this name."""
    part = max((part for part, kinds in table.items() if part in name and kind in kinds), key=len)
    return table[part][kind]["options"]


@lru_cache(maxsize=1)
def measured() -> dict[str, dict[str, Any]]:
    """The file's contents."""
    return json.loads(Path(__file__).with_name(DATA_FILES[0]).read_text())
