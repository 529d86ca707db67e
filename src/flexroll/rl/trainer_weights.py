"""A trainer's model as the engine sees it: its frozen base is the pristine copy, its live LoRA layers the adapter.

So a training process holds two copies of the weights, the trainer's and the merged one that generates, never three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flexroll.engine.decoder_config import read_decoder_config
from flexroll.engine.weights import DecoderWeights, layout, slices_of
from flexroll.errors import FlexrollError
from flexroll.lora.adapter import AdapterWeights
from flexroll.lora.merge import MergedCopy

WRAPPING = ("base_model.model.", "module.")


class TrainerWeights(DecoderWeights):
    """The frozen parameters of a transformers model under PEFT, read where they lie; nothing here writes them.

    tensors holds them by checkpoint name, and `embed` for device and dtype.
    """

    def view(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def copy_for_merging(self, names: list[str]) -> DecoderWeights:
        """An inference copy in the engine's fused layout.

        A matrix that an adapter touches, or that is fused of several, is a copy; embeddings, norms, head and a matrix
        of its own that no adapter touches are the trainer's.
        """
        touched, fused = set(names), {}
        for key, parts in layout(self.config):
            held = [self.tensors[name] for name, _ in parts if name in self.tensors]
            if held:
                own = len(held) == 1 and parts[0][0] not in touched
                fused[key] = held[0] if own else torch.cat(held)
        if self.config.tied_head:
            fused["head"] = fused["embed"]
        return DecoderWeights(self.config, fused, self.slices)


def trainer_weights(model: Any, folder: Path) -> TrainerWeights:
    """The base of a PEFT model that was loaded from a checkpoint folder, of which config.json is read.

    Raises:
        FlexrollError: a parameter of the decoder is missing, has another shape, or is being trained itself.
    """
    config = read_decoder_config(folder)
    found = {plain_name(name): parameter for name, parameter in model.named_parameters() if ".lora_" not in name}
    rows = layout(config)
    tensors: dict[str, torch.Tensor] = {}
    for _, parts in rows:
        for name, shape in parts:
            parameter = found.get(name)
            if parameter is None:
                if name.endswith(".bias"):
                    continue
                raise FlexrollError(f"the trainer's model has no '{name}'; is it the model of {folder}?")
            if tuple(parameter.shape) != shape:
                raise FlexrollError(
                    f"'{name}' of the trainer's model is {tuple(parameter.shape)}, {folder} asks for {shape}"
                )
            if parameter.requires_grad:
                raise FlexrollError(f"'{name}' is trained itself; the flex engine serves a frozen base with LoRA")
            tensors[name] = parameter.detach()
    places = {name: place for name, place in slices_of(rows).items() if name in tensors}
    tensors["embed"] = tensors["model.embed_tokens.weight"]
    return TrainerWeights(config, tensors, places)


def live_adapter(model: Any, name: str = "default") -> AdapterWeights:
    """The LoRA layers of a PEFT model, sharing their memory: what an optimiser writes, the next refresh reads.

    Raises:
        FlexrollError: no such adapter, or one that no plain low-rank update expresses.
    """
    settings = getattr(model, "peft_config", {}).get(name)
    if settings is None:
        raise FlexrollError(f"the trainer's model has no adapter '{name}'; give the trainer a LoRA peft_config")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    scales = set()
    for path, module in model.named_modules():
        if name in getattr(module, "lora_A", {}):
            if getattr(module, "use_dora", {}).get(name) or module.lora_A[name].bias is not None:
                raise FlexrollError(f"'{path}' is no plain LoRA layer (DoRA, a bias); use plain LoRA")
            halves[plain_name(path)] = {
                half: getattr(module, half)[name].weight.detach() for half in ("lora_A", "lora_B")
            }
            scales.add(float(module.scaling[name]))
    if len(scales) != 1:
        raise FlexrollError(f"adapter '{name}' has scales {sorted(scales)}; the flex engine takes one for all modules")
    return AdapterWeights(scales.pop(), {path: (both["lora_A"], both["lora_B"]) for path, both in halves.items()})


def double_copy(model: Any, folder: Path, name: str = "default") -> MergedCopy:
    """The merged copy of a trainer's model, which `Engine(copy.weights, merged=copy)` generates with."""
    return MergedCopy(trainer_weights(model, folder), live_adapter(model, name))


def plain_name(name: str) -> str:
    """A parameter's or module's name in the checkpoint: without what PEFT and wrappers put around it."""
    for prefix in WRAPPING:
        name = name.removeprefix(prefix)
    return name.replace(".base_layer", "")
