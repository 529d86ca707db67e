"""Residual add, RMSNorm and the gated activation: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from flexroll.engine.kernels.pdl import launch_dependents, wait


@triton.jit
def add_norm_kernel(
    x,
    y,
    weight,
    out,
    ids,
    M,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += sum of y's PARTS [PARTS, M, HIDDEN]; out = RMSNorm(x) * weight. All [M, HIDDEN].

    EMBED: x = y[ids] instead, y then being the embedding [vocab, HIDDEN]. Rounded to x's type after the sum, after the
    residual add and before the norm's weight, where the unfused chain rounds.
    """
    row = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    inside = h < HIDDEN
    gain = tl.load(weight + h, mask=inside, other=0.0)
    if PDL:
        wait()
        launch_dependents()
    at = row.to(tl.int64) * HIDDEN + h
    kind = x.dtype.element_ty
    if EMBED:
        token = tl.load(ids + row).to(tl.int64)
        value = tl.load(y + token * HIDDEN + h, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(y + part * M * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + total.to(kind).to(tl.float32)
    value = value.to(kind)
    tl.store(x + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    normed = (wide * scale).to(kind).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + at, normed.to(kind), mask=inside)


@triton.jit
def silu_mul(gate, up, kind: tl.constexpr):
    """silu(gate) * up of fp32 values of type kind, rounded to it after silu, where the unfused chain rounds."""
    return (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up


@triton.jit
def silu_mul_kernel(x, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [M, N] = silu(x[:, :N]) * x[:, N:]; grid (M, blocks of N)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    if PDL:
        wait()
        launch_dependents()
    gate = tl.load(x + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * N + n, silu_mul(gate, up, kind).to(kind), mask=inside)
