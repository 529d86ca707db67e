"""The pieces of a decoder layer on Triton kernels, each equal in meaning to that of `flexroll.engine.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from flexroll.engine.kernels.linear import Tiles, product, tiles_for
from flexroll.engine.kernels.norm import add_norm_kernel, silu_mul_kernel
from flexroll.engine.kernels.pdl import launch_options
from flexroll.engine.kernels.rope_store import rope_store_kernel
from flexroll.engine.ops import LowRank, TorchOps
from flexroll.engine.weights import DecoderWeights

if TYPE_CHECKING:
    from flexroll.engine.decoder import Tokens

SILU_BLOCK = 1024
Pair = tuple[torch.Tensor, torch.Tensor]


class TritonOps(TorchOps):
    """As TorchOps. `linear` may return fp32 partial sums [parts, n, out], which the kernel after it adds up."""

    def __init__(
        self, weights: DecoderWeights, cos: torch.Tensor, sin: torch.Tensor, low_rank: dict[str, list[LowRank]]
    ) -> None:
        super().__init__(weights, cos, sin, low_rank)
        self.launch: dict[str, Any] = launch_options(weights.device)

    def embed(self, ids: torch.Tensor, norm: torch.Tensor) -> Pair:
        table = self.tensors["embed"]
        x = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
        return self._norm(x, table, norm, ids)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: torch.Tensor) -> Pair:
        return self._norm(x, y, norm, None)

    def _norm(self, x: torch.Tensor, y: torch.Tensor, norm: torch.Tensor, ids: torch.Tensor | None) -> Pair:
        n, hidden = x.shape
        out = torch.empty_like(x)
        if n:
            add_norm_kernel[(n,)](
                x,
                y,
                norm,
                out,
                ids,
                n,
                self.config.rms_eps,
                HIDDEN=hidden,
                BLOCK=triton.next_power_of_2(hidden),
                PARTS=y.shape[0] if y.dim() == 3 else 1,
                EMBED=ids is not None,
                num_warps=4 if hidden <= 1024 else 8,
                **self.launch,
            )
        return x, out

    def linear(self, key: str, x: torch.Tensor) -> torch.Tensor:
        tiles = self._tiles(key, x)
        if tiles is None:
            return super().linear(key, x)
        return product(x, self.tensors[f"{key}.weight"], tiles, gated=False, **self.launch)

    def gated(self, key: str, x: torch.Tensor) -> torch.Tensor:
        tiles = self._tiles(key, x)
        if tiles is not None:
            return product(x, self.tensors[f"{key}.weight"], tiles, gated=True, **self.launch)[0]
        both = super().linear(key, x)
        n, width = both.shape[0], both.shape[1] // 2
        out = torch.empty(n, width, dtype=x.dtype, device=x.device)
        if n:
            grid = (n, triton.cdiv(width, SILU_BLOCK))
            silu_mul_kernel[grid](both, out, width, BLOCK=SILU_BLOCK, **self.launch)
        return out

    def rope_store(self, layer: int, qkv: torch.Tensor, tokens: Tokens) -> None:
        config, cache = self.config, tokens.cache
        n, group = qkv.shape[-2], config.n_heads // config.n_kv_heads
        if n:
            rope_store_kernel[(n, config.n_kv_heads)](
                qkv,
                self.tensors.get(f"{layer}.q_norm"),
                self.tensors.get(f"{layer}.k_norm"),
                self.cos,
                self.sin,
                tokens.q,
                cache.keys[layer],
                cache.values[layer],
                cache.table,
                tokens.slots,
                tokens.positions,
                tokens.q_rows,
                n,
                config.rms_eps,
                cache.table.shape[1],
                cache.keys[layer].shape[2],
                GROUP=group,
                HEADS=triton.next_power_of_2(group + 2),
                HEAD_DIM=config.head_dim,
                LANES=triton.next_power_of_2(config.head_dim // 2),
                PAGE=cache.pages.page_size,
                PARTS=qkv.shape[0] if qkv.dim() == 3 else 1,
                num_warps=2,
                **self.launch,
            )

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.tensors["head"]
        tiles = tiles_for("head", hidden, weight)
        if tiles is None:
            return F.linear(hidden, weight)
        return product(hidden, weight, tiles, gated=False, **self.launch)[0]

    def _tiles(self, key: str, x: torch.Tensor) -> Tiles | None:
        """How to cut the product with that weight; None where something is added to it, it is in NF4, or the library
        is faster."""
        if f"{key}.weight" in self.low_rank or f"{key}.bias" in self.tensors or f"{key}.weight" in self.quantised:
            return None
        return tiles_for(key.rpartition(".")[2], x, self.tensors[f"{key}.weight"])
