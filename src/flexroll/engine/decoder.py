"""The forward pass of the decoder over a flat run of tokens; prefill and decode share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexroll.engine.kv_cache import KVCache
from flexroll.engine.ops import LowRank, TorchOps
from flexroll.engine.rope import rope_tables
from flexroll.engine.weights import DecoderWeights

Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a forward pass are: ids, slots and positions, int64 [n] each, and the cache they write to.

    q: [at least n, heads, head_dim], where queries go; q_rows: int64 [n], to which row each, None for their own order.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cache: KVCache
    q: torch.Tensor
    q_rows: torch.Tensor | None = None


class Decoder:
    """Weights, rotary tables for max_length positions, and an optional unmerged adapter.

    fused: use the Triton kernels; the default is to on CUDA.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        max_length: int,
        low_rank: dict[str, list[LowRank]] | None = None,
        fused: bool | None = None,
    ) -> None:
        self.weights, self.config = weights, weights.config
        self.low_rank = low_rank or {}
        cos, sin = rope_tables(self.config, max_length, weights.device)
        self.fused = weights.device.type == "cuda" if fused is None else fused
        if self.fused:
            from flexroll.engine.kernels.ops import TritonOps  # late: not every CPU build of torch has Triton

            self.ops: TorchOps = TritonOps(weights, cos, sin, self.low_rank)
        else:
            self.ops = TorchOps(weights, cos, sin, self.low_rank)

    def forward(self, tokens: Tokens, attend: Attend, cache_only: bool = False) -> torch.Tensor | None:
        """Run every layer; K and V of the tokens go to the pool in place.

        attend(layer, qkv) stores K and V and returns [n, heads * head_dim]. Returns the normalised hidden states
        [n, hidden]; with cache_only None, and what only they need is not computed: the last layer from its attention
        on.
        """
        ops, tensors, last = self.ops, self.weights.tensors, self.config.n_layers - 1
        x, h = ops.embed(tokens.ids, tensors["0.attn_norm"])
        for layer in range(self.config.n_layers):
            qkv = ops.linear(f"{layer}.qkv", h)
            if cache_only and layer == last:
                ops.rope_store(layer, qkv, tokens)
                return None
            y = ops.linear(f"{layer}.o", attend(layer, qkv))
            x, h = ops.add_norm(x, y, tensors[f"{layer}.mlp_norm"])
            y = ops.linear(f"{layer}.down", ops.gated(f"{layer}.gate_up", h))
            x, h = ops.add_norm(x, y, tensors["norm" if layer == last else f"{layer + 1}.attn_norm"])
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden], in the model's dtype."""
        return self.ops.head(hidden)
