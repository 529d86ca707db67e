"""Matrix products of a decode step: few rows, weights streamed once at memory speed.

With up to a few dozen rows a product is bound by reading its weights, which tensor descriptors (TMA) do with the fewest
instructions. One program takes BLOCK_N weight rows and a K-slice; slices (split-K) keep all multiprocessors reading
where a product has few rows of weights, and leave fp32 partial sums that the next kernel of the layer adds in a fixed
order: no atomics, so the result is a function of the inputs alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flexroll.engine.kernels.norm import silu_mul
from flexroll.engine.kernels.pdl import launch_dependents, wait


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: rows, weight rows and depth of a tile, pipeline stages, warps, splits of the depth.

    load: programs a multiprocessor that a table asks for, from which `tiles_for` gets the splits; 0: no splits.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int = 4
    load: float = 0
    splits: int = 1

    def shared_memory(self, gated: bool) -> int:
        """Bytes that the pipeline's tiles of 16-bit numbers take."""
        return 2 * self.k * (self.m + self.n * (2 if gated else 1)) * self.stages


# By a product's place in the decoder and the most rows it may have; the library's product is the faster one elsewhere.
# Measured on an NVIDIA H200 with Qwen3-4B's shapes: alone, with the kernel after it, and within a decode step.
TILES: dict[str, dict[int, Tiles]] = {
    "qkv": {
        16: Tiles(16, 128, 128, 3, load=1.5),
        32: Tiles(32, 128, 128, 3, load=1.5),
        64: Tiles(64, 32, 128, 4),
    },
    "o": {
        16: Tiles(16, 64, 256, 4, load=1),
        32: Tiles(32, 32, 128, 6, load=2),
        64: Tiles(64, 32, 128, 4, load=2),
    },
    "gate_up": {
        16: Tiles(16, 64, 128, 3),
        32: Tiles(32, 64, 128, 3),
        64: Tiles(64, 32, 64, 4),
        128: Tiles(64, 64, 64, 3),
    },
    "down": {
        16: Tiles(16, 64, 256, 4, load=1),
        32: Tiles(32, 64, 128, 6, load=1),
        64: Tiles(64, 64, 128, 5, load=1),
        128: Tiles(128, 64, 128, 4, load=1),
        256: Tiles(128, 128, 64, 6, load=1),
    },
    "head": {16: Tiles(16, 128, 128, 3), 32: Tiles(32, 128, 128, 5), 64: Tiles(64, 128, 64, 3)},
}
MAX_SPLITS = 8
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a tensor's start


def tiles_for(place: str, x: torch.Tensor, weight: torch.Tensor) -> Tiles | None:
    """How to cut x [m, k] @ weight [n, k].T, or None where the library's product is the better or the only one.

    place: a key of TILES; "gate_up" is the gated product.
    """
    m, k = x.shape
    gated = place == "gate_up"
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if x.element_size() != 2 or m == 0:
        return None
    tiles = next((t for rows, t in TILES[place].items() if m <= rows), None)
    if tiles is None or n % tiles.n or k % tiles.k or weight.data_ptr() % DESCRIPTOR_ALIGNMENT:
        return None
    processors, shared_memory = _limits(x.device)
    programs = triton.cdiv(m, tiles.m) * (n // tiles.n)
    splits = min(int(tiles.load * processors) // programs, k // tiles.k, MAX_SPLITS)
    return replace(tiles, splits=max(1, splits)) if tiles.shared_memory(gated) <= shared_memory else None


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may have)."""
    if device.type != "cuda":
        return 132, 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def product(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, gated: bool, **launch: Any) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T as [splits, m, n], partial sums in fp32 where there are several.

    gated: weight holds gate and up rows, [2 * n, k], and the result [1, m, n] is silu(gate) * up.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty(tiles.splits, m, n, dtype=x.dtype if tiles.splits == 1 else torch.float32, device=x.device)
    linear_kernel[(triton.cdiv(m, tiles.m), n // tiles.n, tiles.splits)](
        TensorDescriptor.from_tensor(x, [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(weight, [tiles.n, tiles.k]),
        y,
        m,
        n,
        k,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        SPLIT_K=tiles.splits,
        GATED=gated,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch,
    )
    return y


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
    """y = x @ w.T; x [M, K] and w [N, K] are tensor descriptors, which the hardware reads in whole tiles.

    GATED: w [2 * N, K] holds gate and up rows, y = silu(gate) * up; otherwise y [SPLIT_K, M, N], partial sums over K.
    Grid (blocks of M, blocks of N, SPLIT_K): programs that share rows of w run side by side, so memory is read once.
    """
    row = tl.program_id(0) * BLOCK_M
    column = tl.program_id(1) * BLOCK_N
    depth = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    start = tl.program_id(2) * depth
    end = tl.minimum(start + depth, K)
    if PDL:
        wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, end, BLOCK_K):
        a = x.load([row, k])
        acc = tl.dot(a, w.load([column, k]).T, acc)
        if GATED:
            up = tl.dot(a, w.load([N + column, k]).T, up)
    if PDL:
        launch_dependents()  # late: programs of the next kernel would take the place of this one's
    kind: tl.constexpr = y.dtype.element_ty
    if GATED:
        acc = silu_mul(acc.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind)
    m = row + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    y_at = y + (tl.program_id(2) * M + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(y_at, acc.to(kind), mask=m[:, None] < M)
