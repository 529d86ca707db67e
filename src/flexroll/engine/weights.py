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
from flexroll.engine.quantised import (
    MARK,
    QuantisedWeight,
    from_checkpoint,
    is_state,
    quantise,
    share_scratch,
)
from flexroll.errors import FlexrollError

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
Rows = list[tuple[str, list[tuple[str, tuple[int, ...]]]]]


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
    A tied head is the same tensor as `embed`. quantised: fused name -> what stands in its place where it is in NF4.
    """

    config: DecoderConfig
    tensors: dict[str, torch.Tensor]
    slices: dict[str, Slice] = field(default_factory=dict)
    quantised: dict[str, QuantisedWeight] = field(default_factory=dict)

    def view(self, name: str) -> torch.Tensor:
        """The part of a fused tensor that holds checkpoint tensor `name`; writing to it writes the parameter."""
        part = self.slices[name]
        if part.key in self.quantised:
            raise FlexrollError(f"'{name}' is in NF4 and cannot be read or written as a matrix; load without four_bit")
        return self.tensors[part.key][part.start : part.stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of checkpoint tensor `name`, in NF4 or not."""
        part = self.slices[name]
        if part.key in self.quantised:
            return part.stop - part.start, self.quantised[part.key].columns
        return tuple(self.view(name).shape)

    def named_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in self.slices.items():
            if part.key not in self.quantised:
                yield name, self.view(name)

    @property
    def n_bytes(self) -> int:
        """Bytes held; of weights in NF4 the packed values and their scales."""
        tensors = [*self.tensors.values(), *(t for weight in self.quantised.values() for t in weight.tensors)]
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())

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


def layout(config: DecoderConfig) -> Rows:
    """Fused name -> the checkpoint tensors (name, shape) it stacks along dim 0, biases included."""
    h, i, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    rows: Rows = [("embed", [("model.embed_tokens.weight", (config.vocab_size, h))])]
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


def slices_of(rows: Rows) -> dict[str, Slice]:
    """Checkpoint name -> its rows of a fused tensor, for the rows of `layout`, in their order."""
    slices = {}
    for key, parts in rows:
        start = 0
        for name, shape in parts:
            slices[name] = Slice(key, start, start + shape[0])
            start += shape[0]
    return slices


def is_linear(key: str) -> bool:
    """Whether the fused tensor of that name is the weight of a layer's product, which alone may be in NF4."""
    return key.endswith(".weight")


def load_weights(
    folder: Path, dtype: torch.dtype, device: torch.device | str, four_bit: bool = False
) -> DecoderWeights:
    """Load a checkpoint folder onto `device` in `dtype`.

    A checkpoint that is in NF4 (bitsandbytes) stays so. four_bit: one that is not gets its products' weights
    quantised, each fused one as soon as it is whole.

    Raises:
        FlexrollError: unsupported architecture, a missing tensor, a wrong shape, or a tensor the decoder does not know.
    """
    config = read_decoder_config(folder)
    rows = layout(config)
    expected = {name: (key, shape) for key, parts in rows for name, shape in parts}
    stacked = {key: parts for key, parts in rows}
    places = slices_of(rows)
    tensors: dict[str, torch.Tensor] = {}
    quantised: dict[str, QuantisedWeight] = {}
    packed: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    found: set[str] = set()
    for name, tensor in read_tensors(folder):
        if name.endswith(IGNORED_SUFFIXES) or (name == "lm_head.weight" and config.tied_head):
            continue
        if is_state(name):
            owner, _, kind = name.partition(MARK)
            states.setdefault(f"{owner}.weight", {})[kind] = tensor
            continue
        if name not in expected:
            raise FlexrollError(f"{folder}: tensor '{name}' is not part of a {config.model_type} decoder")
        key, shape = expected[name]
        found.add(name)
        if tensor.dtype == torch.uint8 and is_linear(key):
            packed[name] = tensor.to(device)
            continue
        if tuple(tensor.shape) != shape:
            raise FlexrollError(f"{folder}: '{name}' has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        if key not in tensors:
            total = sum(part[1][0] for part in stacked[key])
            tensors[key] = torch.zeros((total, *shape[1:]), dtype=dtype, device=device)
        tensors[key][places[name].start : places[name].stop].copy_(tensor)
        if four_bit and is_linear(key) and all(part in found for part, _ in stacked[key]):
            quantised[key] = quantise(tensors.pop(key), [part[0] for _, part in stacked[key]])
    missing = [name for name in expected if name not in found and not name.endswith(".bias")]
    if missing:
        raise FlexrollError(
            f"{folder}: {len(missing)} tensors are missing, the first is '{missing[0]}'; fetch the checkpoint again"
        )
    if four_bit and packed:
        raise FlexrollError(f"{folder}: this checkpoint is in 4 bits already; leave four_bit out")
    for key in {expected[name][0]: None for name in packed}:
        dense = tensors.pop(key, None)
        quantised[key] = QuantisedWeight(
            [
                from_checkpoint(folder, name, packed.pop(name), states.get(name, {}), shape)
                if name in packed
                else dense[places[name].start : places[name].stop].clone()
                for name, shape in stacked[key]
            ]
        )
    share_scratch(quantised, dtype, device)
    if config.tied_head:
        tensors["head"] = tensors["embed"]
    return DecoderWeights(config, tensors, {name: place for name, place in places.items() if name in found}, quantised)


def load_shard(folder: str | Path | None, dtype: torch.dtype, device: torch.device | str) -> DecoderWeights:
    """Load a checkpoint in NF4. Raises FlexrollError, besides what `load_weights` raises, unless it is one."""
    if folder is None:
        raise FlexrollError("four_bit 'shard' needs a checkpoint in NF4; write one with `flexroll quantise`")
    weights = load_weights(Path(folder), dtype, device)
    if not weights.quantised:
        raise FlexrollError(f"{folder}: no weight in it is in NF4; write one with `flexroll quantise`")
    return weights
