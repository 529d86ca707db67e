"""The canonical adapter: a PEFT LoRA folder that every backend reads, made from a seed and written without PEFT."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flexroll.engine.decoder_config import read_decoder_config
from flexroll.engine.weights import DecoderWeights, layout
from flexroll.errors import FlexrollError

PREFIX = "base_model.model."


@dataclass
class AdapterWeights:
    """A LoRA adapter. pairs: module name in the checkpoint (without `.weight`) -> (A [rank, in], B [out, rank]).

    The update of a module's weight is scale * B @ A (Hu et al., arXiv 2106.09685), scale = alpha / rank, or
    alpha / sqrt(rank) for rank-stabilised adapters.
    """

    scale: float
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> AdapterWeights:
        moved = {n: (a.to(device, dtype), b.to(device, dtype)) for n, (a, b) in self.pairs.items()}
        return AdapterWeights(self.scale, moved)

    def delta(self, name: str) -> torch.Tensor:
        """scale * B @ A in fp32, [out, in]."""
        a, b = self.pairs[name]
        return self.scale * (b.float() @ a.float())


def write_adapter(
    model_dir: Path,
    out: Path,
    *,
    rank: int = 32,
    alpha: int = 64,
    targets: list[str],
    b_std: float = 1e-2,
    seed: int = 0,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors for the checkpoint in model_dir.

    lora_A is uniform in +-1/sqrt(in), PEFT's own initialisation; lora_B is N(0, b_std^2) instead of zeros, so that the
    adapter is no no-op and its merge survives bf16. Values are rounded to bf16 once here, so that backends that hold
    adapters in fp32 and in bf16 use the same numbers.
    """
    config = read_decoder_config(model_dir)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for _, parts in layout(config):
        for name, shape in parts:
            module = name.removesuffix(".weight")
            if name == module or module.rsplit(".", 1)[-1] not in targets:
                continue
            width, bound = shape[1], 1 / math.sqrt(shape[1])
            a = (torch.rand(rank, width, generator=generator) * 2 - 1) * bound
            b = torch.randn(shape[0], rank, generator=generator) * b_std
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.bfloat16()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.bfloat16()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")


def read_adapter(folder: Path) -> AdapterWeights:
    """Read a PEFT LoRA folder.

    Raises:
        FlexrollError: no such adapter, a corrupt file, or a kind of adapter that a plain low-rank update cannot express
            (DoRA, modules_to_save, per-module ranks or alphas, trained biases).
    """
    try:
        settings = json.loads((folder / "adapter_config.json").read_text())
    except FileNotFoundError:
        raise FlexrollError(f"{folder}: not an adapter folder (no adapter_config.json)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{folder}/adapter_config.json: not valid JSON ({error})") from None
    _check_kind(settings, folder)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError:
        raise FlexrollError(
            f"{folder}: adapter_model.safetensors is missing; save the adapter with safetensors"
        ) from None
    except (SafetensorError, OSError) as error:
        raise FlexrollError(
            f"{folder}/adapter_model.safetensors: cannot be read ({error}); save the adapter again"
        ) from None
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    return AdapterWeights(scale, _pair(tensors, rank, folder))


def _check_kind(settings: dict, folder: Path) -> None:
    problems = {
        f"peft_type is {settings.get('peft_type')}": settings.get("peft_type") != "LORA",
        "it is a DoRA adapter (use_dora)": settings.get("use_dora"),
        "it saves whole modules (modules_to_save)": settings.get("modules_to_save"),
        "ranks differ by module (rank_pattern)": settings.get("rank_pattern"),
        "alphas differ by module (alpha_pattern)": settings.get("alpha_pattern"),
        "it trains biases (bias)": settings.get("bias", "none") != "none",
        "weights are transposed (fan_in_fan_out)": settings.get("fan_in_fan_out"),
    }
    for problem, present in problems.items():
        if present:
            raise FlexrollError(f"{folder}: not supported, {problem}; use a plain LoRA adapter")
    if not settings.get("r") or "lora_alpha" not in settings:
        raise FlexrollError(f"{folder}/adapter_config.json: r or lora_alpha is missing")


def _pair(tensors: dict[str, torch.Tensor], rank: int, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Join lora_A and lora_B by module; accepts PEFT's file names and those with an adapter name (`.default.`)."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".default")
        module, _, half = name.rpartition(".")
        if half not in ("lora_A", "lora_B"):
            raise FlexrollError(f"{folder}: tensor '{key}' is not part of a plain LoRA adapter")
        halves.setdefault(module, {})[half] = tensor
    pairs = {}
    for module, both in halves.items():
        if len(both) != 2:
            raise FlexrollError(f"{folder}: '{module}' has only one of lora_A and lora_B")
        a, b = both["lora_A"], both["lora_B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise FlexrollError(f"{folder}: '{module}' has A {tuple(a.shape)} and B {tuple(b.shape)}, not rank {rank}")
        pairs[module] = (a, b)
    if not pairs:
        raise FlexrollError(f"{folder}: the adapter holds no tensors")
    return pairs


def check_fits(adapter: AdapterWeights, weights: DecoderWeights, folder: Path) -> None:
    """Raise FlexrollError, naming the first module, unless every update fits a weight of the decoder."""
    for module, (a, b) in adapter.pairs.items():
        name = f"{module}.weight"
        if name not in weights.slices:
            raise FlexrollError(f"{folder}: the base model has no '{module}'; this adapter is for another base")
        if weights.slices[name].key in ("embed", "head", "norm") or len(weights.shape(name)) != 2:
            raise FlexrollError(
                f"{folder}: an adapter on '{module}' is not supported; target attention and MLP projections"
            )
        shape = weights.shape(name)
        if shape != (b.shape[0], a.shape[1]):
            raise FlexrollError(
                f"{folder}: '{module}' is updated by a {b.shape[0]} x {a.shape[1]} matrix but is "
                f"{shape[0]} x {shape[1]}; this adapter is for another base"
            )
