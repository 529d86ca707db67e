"""`flexroll quantise`: the checkpoint in NF4, as transformers saves it, for every engine that reads one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flexroll.backends.base import four_bit_missing
from flexroll.backends.nf4 import nf4_config
from flexroll.bench.checkpoint import hash_files, read_config
from flexroll.bench.inputs import MERGED_FILES
from flexroll.errors import FlexrollError
from flexroll.schema.architecture import tensors
from flexroll.schema.records import write_json

COPIED = (".json", ".jinja", ".txt", ".model")
WRITTEN = ("config.json", "model.safetensors.index.json", MERGED_FILES)  # never the base's


def quantise(checkpoint: Path, out: Path, *, dtype: str, skip: list[str], device: str) -> None:
    """Write `checkpoint` in NF4 to the folder `out`, in place of what is there; interrupted, it leaves that alone.

    Embeddings, norms and the head stay in `dtype`, as do the modules that `skip` names. A tied head is not written.
    config.json is the base's with transformers' quantization_config: other releases of transformers than the one that
    writes read it, and each release renames keys in what it saves.

    Raises:
        FlexrollError: no bitsandbytes, or `skip` names what is no module of the model.
    """
    if (reason := four_bit_missing()) is not None:
        raise FlexrollError(reason)
    base = read_config(checkpoint)
    dense = dense_modules(base, skip)
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _save(checkpoint, part, dtype, dense, device)
    for path in checkpoint.iterdir():
        if path.is_file() and path.suffix in COPIED and path.name not in WRITTEN:
            shutil.copyfile(path, part / path.name)
    saved = read_config(part)["quantization_config"]
    config = base | {"quantization_config": saved, "dtype": dtype, "torch_dtype": dtype}
    (part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_json(part / MERGED_FILES, json.dumps(hash_files(part), indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def dense_modules(config: dict[str, Any], skip: list[str]) -> list[str]:
    """Full names of the linear modules that stay dense: the head, and those that have an entry of `skip` in their name.

    An entry is whole parts of a name: layers.1 means layer 1 and not 10. Full names, for transformers matches a short
    one by its prefix or suffix only, and each release in its own way.

    Raises:
        FlexrollError: an entry that is in no module's name.
    """
    modules = [
        name.removesuffix(".weight")
        for name, shape in tensors(config)
        if len(shape) == 2 and "embed_tokens" not in name and name != "lm_head.weight"
    ]
    chosen = ["lm_head"]
    for part in skip:
        found = [name for name in modules if f".{part}." in f".{name}."]
        if not found and part != "lm_head":
            raise FlexrollError(f"four_bit.skip: no module of the model has '{part}' in its name; one is {modules[0]}")
        chosen += found
    return list(dict.fromkeys(chosen))


def _save(checkpoint: Path, folder: Path, dtype: str, dense: list[str], device: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=getattr(torch, dtype),
        quantization_config=nf4_config(dtype, dense),
        device_map={"": device},
        local_files_only=True,
    )
    model.save_pretrained(folder)
