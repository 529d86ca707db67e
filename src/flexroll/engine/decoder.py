"""The forward pass of the decoder over a flat run of tokens; prefill and decode share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flexroll.engine.kv_cache import KVCache
from flexroll.engine.rope import apply_rope, rope_tables
from flexroll.engine.weights import DecoderWeights

Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LowRank:
    """A LoRA update that is not merged: y[:, start:stop] += scale * (x @ a.T) @ b.T.

    a: [rank, in], b: [stop - start, rank].
    """

    start: int
    stop: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) over the last dimension; statistics in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Decoder:
    """Weights, rotary tables for max_length positions, and an optional unmerged adapter."""

    def __init__(
        self, weights: DecoderWeights, max_length: int, low_rank: dict[str, list[LowRank]] | None = None
    ) -> None:
        self.weights, self.config = weights, weights.config
        self.low_rank = low_rank or {}
        self.cos, self.sin = rope_tables(self.config, max_length, weights.device)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        addresses: torch.Tensor,
        cache: KVCache,
        attend: Attend,
    ) -> torch.Tensor:
        """Run every layer; K and V of the tokens go to the pool at `addresses`.

        ids, positions, addresses: int64 [n]. attend(layer, q [n, n_heads, head_dim]) -> [n, n_heads * head_dim].
        Returns the normalised hidden states [n, hidden].
        """
        config, tensors = self.config, self.weights.tensors
        cos, sin = self.cos[positions], self.sin[positions]
        x = tensors["embed"][ids]
        for layer in range(config.n_layers):
            h = rms_norm(x, tensors[f"{layer}.attn_norm"], config.rms_eps)
            q, k, v = self._linear(f"{layer}.qkv", h).split((config.q_size, config.kv_size, config.kv_size), dim=-1)
            q = q.unflatten(-1, (config.n_heads, config.head_dim))
            k = k.unflatten(-1, (config.n_kv_heads, config.head_dim))
            v = v.unflatten(-1, (config.n_kv_heads, config.head_dim))
            if config.qk_norm:
                q = rms_norm(q, tensors[f"{layer}.q_norm"], config.rms_eps)
                k = rms_norm(k, tensors[f"{layer}.k_norm"], config.rms_eps)
            cache.write(layer, addresses, apply_rope(k, cos, sin), v)
            x = x + self._linear(f"{layer}.o", attend(layer, apply_rope(q, cos, sin)))
            h = rms_norm(x, tensors[f"{layer}.mlp_norm"], config.rms_eps)
            gate, up = self._linear(f"{layer}.gate_up", h).chunk(2, dim=-1)
            x = x + self._linear(f"{layer}.down", F.silu(gate) * up)
        return rms_norm(x, tensors["norm"], config.rms_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden], in the model's dtype."""
        return F.linear(hidden, self.weights.tensors["head"])

    def _linear(self, key: str, x: torch.Tensor) -> torch.Tensor:
        tensors = self.weights.tensors
        y = F.linear(x, tensors[f"{key}.weight"], tensors.get(f"{key}.bias"))
        for update in self.low_rank.get(f"{key}.weight", ()):
            part = F.linear(F.linear(x, update.a), update.b)
            y[:, update.start : update.stop].add_(part, alpha=update.scale)
        return y
