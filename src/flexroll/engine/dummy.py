"""Random weights for a config.json, drawn where they will be used: for measuring speed, where values do not matter."""

from __future__ import annotations

from pathlib import Path

import torch

from flexroll.engine.decoder_config import read_decoder_config
from flexroll.engine.quantised import quantise, share_scratch
from flexroll.engine.weights import DecoderWeights, is_linear, layout, slices_of

STD = 0.02


def random_weights(
    folder: Path, dtype: torch.dtype, device: torch.device | str, seed: int = 0, four_bit: bool = False
) -> DecoderWeights:
    """Weights normal(0, 0.02^2), norms one, without biases, for the folder's config.json; four_bit: then in NF4.

    Raises:
        FlexrollError: no config, or an unsupported architecture.
    """
    config = read_decoder_config(folder)
    generator = torch.Generator(device).manual_seed(seed)
    rows = [(key, parts) for key, parts in layout(config) if not key.endswith(".bias")]
    tensors, quantised = {}, {}
    for key, parts in rows:
        shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            tensor.normal_(0, STD, generator=generator)
        if four_bit and is_linear(key):
            quantised[key] = quantise(tensor, [shape[0] for _, shape in parts])
        else:
            tensors[key] = tensor
    share_scratch(quantised, dtype, device)
    if config.tied_head:
        tensors["head"] = tensors["embed"]
    return DecoderWeights(config, tensors, slices_of(rows), quantised)
