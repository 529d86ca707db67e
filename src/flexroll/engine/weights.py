"""The decoder's parameters: fused for speed, addressable by checkpoint name.

q, k and v of a layer lie in one matrix, gate and up in another, so that a layer has four products. `view` gives the
rows that belong to one checkpoint tensor: loading, merging and hashing go through it and need not know the fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flexroll.engine.checkpoint import read_tensors
from flexroll.engine.decoder_config import DecoderConfig, read_decoder_config
from flexroll.errors import FlexrollError

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Slice:
    """Rows [start, stop) of the fused tensor `key`."""

    key: str
    start: int
    stop: int


@dataclass
class DecoderWeights:
    """Parameters on one device. tensors: fused name -> tensor; slices: checkpoint name -> rows of a fused tensor.

    Fused names of layer i: `{i}.qkv`, `{i}.o`, `{i}.gate_up`, `{i}.down` with `.weight` [out, in] or `.bias` [out],
    `{i}.attn_norm`, `{i}.mlp_norm`, `{i}.q_norm`, `{i}.k_norm`; besides them `embed`, `norm`, `head`.
    A tied head is the same tensor as `embed`.
    """

    config: DecoderConfig
    tensors: dict[str, torch.Tensor]
    slices: dict[str, Slice] = field(default_factory=dict)

    def view(self, name: str) -> torch.Tensor:
        """The part of a fused tensor that holds checkpoint tensor `name`; writing to it writes the parameter."""
        part = self.slices[name]
        return self.tensors[part.key][part.start : part.stop]

    def named_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.slices:
            yield name, self.view(name)

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in self.tensors.values()}.values())

    @property
    def device(self) -> torch.device:
        return self.tensors["embed"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["embed"].dtype

    def copy_for_merging(self, names: list[str]) -> DecoderWeights:
        """An inference copy: fused tensors that hold any of `names` are cloned, all others shared with this one."""
        touched = {self.slices[name].key for name in names}
        tensors = {key: t.clone() if key in touched else t for key, t in self.tensors.items()}
        return DecoderWeights(self.config, tensors, self.slices)


def layout(config: DecoderConfig) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Fused name -> the checkpoint tensors (name, shape) it stacks along dim 0, biases included."""
    h, i, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    rows: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = [
        ("embed", [("model.embed_tokens.weight", (config.vocab_size, h))])
    ]
    for n in range(config.n_layers):
        prefix = f"model.layers.{n}"
        products = (
            ("qkv", "self_attn", (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), h),
            ("o", "self_attn", (("o_proj", h),), q),
            ("gate_up", "mlp", (("gate_proj", i), ("up_proj", i)), h),
            ("down", "mlp", (("down_proj", h),), i),
        )
        for key, block, parts, width in products:
            rows.append((f"{n}.{key}.weight", [(f"{prefix}.{block}.{p}.weight", (out, width)) for p, out in parts]))
            rows.append((f"{n}.{key}.bias", [(f"{prefix}.{block}.{p}.bias", (out,)) for p, out in parts]))
        rows.append((f"{n}.attn_norm", [(f"{prefix}.input_layernorm.weight", (h,))]))
        rows.append((f"{n}.mlp_norm", [(f"{prefix}.post_attention_layernorm.weight", (h,))]))
        if config.qk_norm:
            rows.append((f"{n}.q_norm", [(f"{prefix}.self_attn.q_norm.weight", (config.head_dim,))]))
            rows.append((f"{n}.k_norm", [(f"{prefix}.self_attn.k_norm.weight", (config.head_dim,))]))
    rows.append(("norm", [("model.norm.weight", (h,))]))
    if not config.tied_head:
        rows.append(("head", [("lm_head.weight", (config.vocab_size, h))]))
    return rows


def slices_of(rows: list[tuple[str, list[tuple[str, tuple[int, ...]]]]]) -> dict[str, Slice]:
    """Checkpoint name -> its rows of a fused tensor, for the rows of `layout`, in their order."""
    slices = {}
    for key, parts in rows:
        start = 0
        for name, shape in parts:
            slices[name] = Slice(key, start, start + shape[0])
            start += shape[0]
    return slices


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device | str) -> DecoderWeights:
    """Load a checkpoint folder onto `device` in `dtype`.

    Raises:
        FlexrollError: unsupported architecture, a missing tensor, a wrong shape, or a tensor the decoder does not know.
    """
    config = read_decoder_config(folder)
    rows = layout(config)
    expected = {name: (key, shape) for key, parts in rows for name, shape in parts}
    stacked = {key: parts for key, parts in rows}
    places = slices_of(rows)
    tensors: dict[str, torch.Tensor] = {}
    found: set[str] = set()
    for name, tensor in read_tensors(folder):
        if name.endswith(IGNORED_SUFFIXES) or (name == "lm_head.weight" and config.tied_head):
            continue
        if name not in expected:
            raise FlexrollError(f"{folder}: tensor '{name}' is not part of a {config.model_type} decoder")
        key, shape = expected[name]
        if tuple(tensor.shape) != shape:
            raise FlexrollError(f"{folder}: '{name}' has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        if key not in tensors:
            total = sum(part[1][0] for part in stacked[key])
            tensors[key] = torch.zeros((total, *shape[1:]), dtype=dtype, device=device)
        tensors[key][places[name].start : places[name].stop].copy_(tensor)
        found.add(name)
    missing = [name for name in expected if name not in found and not name.endswith(".bias")]
    if missing:
        raise FlexrollError(
            f"{folder}: {len(missing)} tensors are missing, the first is '{missing[0]}'; fetch the checkpoint again"
        )
    if config.tied_head:
        tensors["head"] = tensors["embed"]
    return DecoderWeights(config, tensors, {name: place for name, place in places.items() if name in found})
