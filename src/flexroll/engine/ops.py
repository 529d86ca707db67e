"""The pieces of a decoder layer in plain torch: what runs on a CPU, and the reference for the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from flexroll.engine.rope import apply_rope
from flexroll.engine.weights import DecoderWeights

if TYPE_CHECKING:
    from flexroll.engine.decoder import Tokens


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


class TorchOps:
    """One method a piece of `Decoder.forward`. cos, sin: fp32 [positions, head_dim / 2]."""

    def __init__(
        self, weights: DecoderWeights, cos: torch.Tensor, sin: torch.Tensor, low_rank: dict[str, list[LowRank]]
    ) -> None:
        self.config, self.tensors, self.quantised = weights.config, weights.tensors, weights.quantised
        self.cos, self.sin, self.low_rank = cos, sin, low_rank

    def embed(self, ids: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [n] -> (embeddings, their RMSNorm), [n, hidden] each."""
        x = self.tensors["embed"][ids]
        return x, rms_norm(x, norm, self.config.rms_eps)

    def linear(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] through the fused weight `key` -> [n, out]; unmerged updates included."""
        bias, quantised = self.tensors.get(f"{key}.bias"), self.quantised.get(f"{key}.weight")
        y = F.linear(x, self.tensors[f"{key}.weight"], bias) if quantised is None else quantised.product(x, bias)
        for update in self.low_rank.get(f"{key}.weight", ()):
            part = F.linear(F.linear(x, update.a), update.b)
            y[:, update.start : update.stop].add_(part, alpha=update.scale)
        return y

    def gated(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of x [n, in] through a weight that holds both -> [n, intermediate]."""
        gate, up = self.linear(key, x).chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_store(self, layer: int, qkv: torch.Tensor, tokens: Tokens) -> None:
        """Split qkv [n, ...], norm and rotate q and k; q to tokens.q, k and v to the cache."""
        config, tensors, cache = self.config, self.tensors, tokens.cache
        cos, sin = self.cos[tokens.positions], self.sin[tokens.positions]
        q, k, v = (
            part.unflatten(-1, (-1, config.head_dim))
            for part in qkv.split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        )
        if config.qk_norm:
            q = rms_norm(q, tensors[f"{layer}.q_norm"], config.rms_eps)
            k = rms_norm(k, tensors[f"{layer}.k_norm"], config.rms_eps)
        rows = slice(len(q)) if tokens.q_rows is None else tokens.q_rows
        tokens.q[rows] = apply_rope(q, cos, sin)
        addresses = cache.addresses(tokens.slots, tokens.positions)
        # Into the pool as it is, not into a view of it: what torch.compile makes of that writes in place, too.
        cache.keys[layer].index_copy_(2, addresses, apply_rope(k, cos, sin).transpose(0, 1).unsqueeze(0))
        cache.values[layer].index_copy_(2, addresses, v.transpose(0, 1).unsqueeze(0))

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + y, its RMSNorm), [n, hidden] each."""
        x = x + y
        return x, rms_norm(x, norm, self.config.rms_eps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab]."""
        return F.linear(hidden, self.tensors["head"])
