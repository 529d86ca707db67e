"""Matrix products of a decode step: few rows, weights streamed once at memory speed.

With up to a few dozen rows a product is bound by reading its weights. One program takes BLOCK_N weight rows and a
K-slice; slices (split-K) keep all multiprocessors reading where a product has few rows of weights, and leave fp32
partial sums that the next kernel of the layer adds in a fixed order: no atomics, so the result is a function of the
inputs alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flexroll.engine.kernels.norm import silu_mul
from flexroll.engine.kernels.pdl import launch_dependents, wait


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: rows, weight rows and depth of a tile, pipeline stages, warps, splits of the depth."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    splits: int = 1

    def shared_memory(self, gated: bool) -> int:
        """Bytes that the pipeline's tiles of 16-bit numbers take."""
        return 2 * self.k * (self.m + self.n * (2 if gated else 1)) * self.stages


# Measured on an NVIDIA H200 with Qwen3-4B's shapes, each against cuBLAS in one run; more rows are cuBLAS's.
GATED = {16: Tiles(16, 32, 64, 5, 4), 32: Tiles(32, 64, 128, 3, 4), 64: Tiles(64, 64, 64, 4, 4)}
WIDE = {16: Tiles(16, 128, 128, 3, 4), 32: Tiles(32, 128, 128, 3, 4), 64: Tiles(64, 128, 64, 3, 4)}
NARROW = {16: Tiles(16, 32, 128, 4, 4, splits=2)}
WIDE_ROWS = 32768  # weight rows from which on tiles fill a GPU many times over: an lm_head


def tiles_for(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> Tiles | None:
    """How to cut x [m, k] @ weight [n, k].T, or None where the library's product is the better or the only one."""
    m, k = x.shape
    n = weight.shape[0]
    if x.element_size() != 2 or m == 0:
        return None
    table = GATED if gated else WIDE if n >= WIDE_ROWS else NARROW
    tiles = next((t for rows, t in table.items() if m <= rows), None)
    if tiles is None or (n // 2 if gated else n) % tiles.n or k % (tiles.k * tiles.splits):
        return None
    return tiles if tiles.shared_memory(gated) <= _shared_memory(x.device) else None


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have of it."""
    if device.type != "cuda":
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit
def linear_kernel(
    x,
    w,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x @ w.T of x [M, K], w [N, K].

    GATED: w [2 * N, K] holds gate and up rows, y = silu(gate) * up; otherwise y [SPLIT_K, M, N], partial sums over K.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = K // SPLIT_K
    start = tl.program_id(1) * width
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        wait()
    k = start + tl.arange(0, BLOCK_K)
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
    w_at = w + n[None, :].to(tl.int64) * K + k[:, None]
    rows = m[:, None] < M
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, width, BLOCK_K):
        a = tl.load(x_at, mask=rows, other=0.0)
        acc = tl.dot(a, tl.load(w_at), acc)
        if GATED:
            up = tl.dot(a, tl.load(w_at + N.to(tl.int64) * K), up)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if PDL:
        launch_dependents()  # late: programs of the next kernel would take the place of this one's
    kind: tl.constexpr = y.dtype.element_ty
    if GATED:
        acc = silu_mul(acc.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind)
    y_at = y + (tl.program_id(1) * M + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(y_at, acc.to(kind), mask=rows)
