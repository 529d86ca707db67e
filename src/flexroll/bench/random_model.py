"""Random weights for a config.json: the same speed as the real checkpoint, and text that is noise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flexroll.bench.checkpoint import read_config, sha256_file
from flexroll.errors import FlexrollError
from flexroll.schema.architecture import tensors

SHARD_BYTES = 4_000_000_000
STD = 0.02
STAMP = "flexroll-random.json"


def write_random(source: Path, folder: Path, dtype: str, seed: int) -> None:
    """Write a checkpoint of normal(0, 0.02) weights and unit norms, the same for the same config, dtype and seed.

    Args:
        source: a config.json or the folder that holds one; its tokenizer files are copied along.
        folder: where the checkpoint goes. An own earlier result is kept if it is the same, anything else is refused.
    """
    import torch
    from safetensors.torch import save_file

    source = source.parent if source.is_file() else source
    config = read_config(source)
    stamp = {"config_sha256": sha256_file(source / "config.json"), "dtype": dtype, "seed": seed, "version": 1}
    done = folder / STAMP
    if done.exists() and json.loads(done.read_text()) == stamp:
        return
    if source.resolve() == folder.resolve() or (any(folder.glob("*.safetensors")) and not _is_ours(folder)):
        raise FlexrollError(f"{folder} holds another checkpoint; give model.name another name")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flexroll-random.part").touch()
    done.unlink(missing_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()

    kind = getattr(torch, dtype)
    shards: list[list[str]] = []
    shard: dict[str, Any] = {}
    size = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            save_file(shard, folder / f"shard-{len(shards) + 1}.part", metadata={"format": "pt"})
            shards.append(list(shard))
            shard, size = {}, 0

    for index, (name, shape) in enumerate(tensors(config)):
        if len(shape) == 1 and name.endswith("norm.weight"):
            value = torch.ones(shape, dtype=kind)
        else:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            value = torch.empty(shape, dtype=torch.float32).normal_(0, STD, generator=generator).to(kind)
        if size and size + value.nbytes > SHARD_BYTES:
            flush()
        shard[name] = value
        size += value.nbytes
    flush()

    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
        )
    for number, name in enumerate(names, 1):
        (folder / f"shard-{number}.part").replace(folder / name)
    for pattern in ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "special_tokens_map.json"):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    written = json.loads((folder / "config.json").read_text()) | {"torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    done.write_text(json.dumps(stamp) + "\n")
    (folder / "flexroll-random.part").unlink()


def _is_ours(folder: Path) -> bool:
    return (folder / STAMP).exists() or (folder / "flexroll-random.part").exists()
