"""The fp32 model that every configuration is held against: transformers' greedy tokens and their distributions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.backends.base import EngineSpec
from flexroll.bench.console import say
from flexroll.bench.lease import device_lease
from flexroll.bench.task import read_input, read_prompts
from flexroll.errors import FlexrollError
from flexroll.provenance import device_class, variant
from flexroll.schema.config import Config, Sampling


@dataclass(frozen=True)
class Reference:
    """prompts, tokens: ids of each prompt and of its greedy continuation, up to an end token or new_tokens.
    full: fp32 [tokens of all continuations, vocab], log probabilities at each place, prompt by prompt.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    full: Any

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.prompts, self.tokens]).encode()).hexdigest()


def write_reference(config: Config, *, work: Path, adapted: bool, out: Path, root: Path) -> None:
    """Write the reference as safetensors: `full`, and prompts and tokens in its metadata.

    Args:
        config: whose `quality` it is for; with a model of the scoring's own, Config.for_quality.
        work: folder with model.json, prompts.json and, where `adapted`, adapter/, whose LoRA layers stay unmerged.
    """
    import torch
    from safetensors.torch import save_file

    from flexroll.backends.transformers_generate import TransformersGenerate

    if config.quality is None:
        raise FlexrollError("this config asks for no scoring; add `quality: {}`")
    folder = root / read_input(work / "model.json", "model", ("path",))["path"]
    held = read_prompts(work / "prompts.json")["prompts"]
    count, new = config.quality.count, config.quality.new_tokens
    if len(held) < count:
        raise FlexrollError(f"{work / 'prompts.json'}: {len(held)} prompts, quality.count is {count}; lower it")
    prompts = [p["ids"] for p in held[:count]]
    device = device_class()
    with device_lease(root, device):
        spec = EngineSpec(
            model=folder,
            adapter_mode="unmerged" if adapted else "none",
            adapter=work / "adapter" if adapted else None,
            merged=None,
            dtype="float32",
            device=variant(device),
            max_batch=count,
            max_model_len=max(map(len, prompts)) + new,
            seed=config.seed,
        )
        model = TransformersGenerate(spec)
        tokens = model.generate(prompts, Sampling(), [new] * count, False, config.seed).tokens
        scores = model.score(prompts, tokens)
    reference = Reference(prompts, tokens, torch.cat([s.full for s in scores]).contiguous())
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    save_file({"full": reference.full}, part, {"prompts": json.dumps(prompts), "tokens": json.dumps(tokens)})
    part.replace(out)
    say(f"reference of {count} prompts, {sum(map(len, tokens))} tokens, {'with' if adapted else 'without'} adapter")


def read_reference(path: Path) -> Reference:
    """Raises FlexrollError where it is missing or not what `flexroll quality-reference` writes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return Reference(json.loads(metadata["prompts"]), json.loads(metadata["tokens"]), file.get_tensor("full"))
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; `flexroll quality-reference` writes it") from None
    except (SafetensorError, OSError, KeyError, ValueError):
        raise FlexrollError(f"{path}: not what `flexroll quality-reference` writes; delete it and run that") from None
