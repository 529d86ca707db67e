"""QK-norm and rotary embedding of heads held as two halves; shared by the kernels that need them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_halves(at, used, part_stride, HALF: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr):
    """Both halves, fp32, of heads that begin at pointers `at` less the lane: PARTS partial sums, added and rounded."""
    first = tl.load(at, mask=used, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=used, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        first += tl.load(at + part * part_stride, mask=used, other=0.0).to(tl.float32)
        second += tl.load(at + part * part_stride + HALF, mask=used, other=0.0).to(tl.float32)
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def normed(a, b, gain_a, gain_b, eps, HEAD_DIM: tl.constexpr, kind: tl.constexpr):
    """RMSNorm over the last dimension of heads [n, lanes] + [n, lanes], rounded where the unfused chain rounds.

    Lanes beyond the half head hold 0.
    """
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
    a = ((a * scale).to(kind).to(tl.float32) * gain_a.to(tl.float32)).to(kind).to(tl.float32)
    b = ((b * scale).to(kind).to(tl.float32) * gain_b.to(tl.float32)).to(kind).to(tl.float32)
    return a, b


@triton.jit
def rotated(a, b, c, s, kind: tl.constexpr):
    """Heads [n, half] + [n, half] turned by cos c and sin s [1, half]."""
    return (a * c - b * s).to(kind), (b * c + a * s).to(kind)
