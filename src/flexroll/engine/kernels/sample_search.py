"""What the sampling kernel does to a row of logits: read it, weigh it, bisect for a threshold, list what is above one.

`source` is a pointer to n logits of any float dtype, read in tiles of BLOCK as fp32. peak is the row's largest logit,
scale is log2(e) / temperature, and a token's weight its likelihood relative to the peak's, exp2((x - peak) * scale).
SHIFT is the number of bits in which neighbours of the logits' dtype differ once both are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_tile(source, start, n, BLOCK: tl.constexpr):
    """fp32 [BLOCK] from source[start]; -inf beyond n."""
    offsets = start + tl.arange(0, BLOCK)
    return tl.load(source + offsets, mask=offsets < n, other=-INFINITY).to(tl.float32)


@triton.jit
def weigh(x, threshold, peak, scale):
    """Likelihood of x relative to the peak's, 0 below the threshold; NaN stays NaN."""
    return tl.where(x < threshold, 0.0, tl.exp2((x - peak) * scale))


@triton.jit
def total_weight(source, n, threshold, peak, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """float64: the weights from the threshold on, summed."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        sums += weigh(load_tile(source, start, n, BLOCK), threshold, peak, scale)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int64 that orders as the float x does; rounds down to the dtype that SHIFT stands for."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float whose `_key` this is."""
    # A negative float's lowest bits are all set in its key.
    filled = (key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = filled.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivot(low, high, j: tl.constexpr, by_value, SHIFT: tl.constexpr):
    """(key, float) of the j-th of four pivots in [low, high), counted from 1."""
    key = low + (high - low) * j // 5
    if by_value:
        bottom = _value(low, SHIFT)
        key = _key(bottom + (_value(high, SHIFT) - bottom) * (j / 5), SHIFT)
        key = tl.minimum(tl.maximum(key, low), high - 1)
    return key, _value(key, SHIFT)


@triton.jit
def search(
    source,
    n,
    lowest,
    target,
    peak,
    scale,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Largest threshold from `lowest` on whose tokens measure at least target: their number, or BY_MASS their weight.

    `lowest` itself is the answer if none above it measures enough.
    """
    low = _key(lowest, SHIFT)
    high = _key(peak, SHIFT) + 1
    by_value = True
    while high - low > 1:
        # Nothing lies evenly between -inf or inf and a number.
        ends = _value(high, SHIFT) - _value(low, SHIFT)
        even = by_value & (ends < INFINITY)
        k1, p1 = _pivot(low, high, 1, even, SHIFT)
        k2, p2 = _pivot(low, high, 2, even, SHIFT)
        k3, p3 = _pivot(low, high, 3, even, SHIFT)
        k4, p4 = _pivot(low, high, 4, even, SHIFT)
        a1 = tl.zeros([BLOCK], tl.float32)
        a2 = tl.zeros([BLOCK], tl.float32)
        a3 = tl.zeros([BLOCK], tl.float32)
        a4 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, n, BLOCK, num_stages=STAGES):
            x = load_tile(source, start, n, BLOCK)
            w = tl.full([BLOCK], 1.0, tl.float32)
            if BY_MASS:
                w = tl.exp2((x - peak) * scale)
            a1 += tl.where(x >= p1, w, 0.0)
            a2 += tl.where(x >= p2, w, 0.0)
            a3 += tl.where(x >= p3, w, 0.0)
            a4 += tl.where(x >= p4, w, 0.0)
        m1 = tl.sum(a1.to(tl.float64), 0) >= target
        m2 = tl.sum(a2.to(tl.float64), 0) >= target
        m3 = tl.sum(a3.to(tl.float64), 0) >= target
        m4 = tl.sum(a4.to(tl.float64), 0) >= target
        high = tl.where(m1, tl.where(m2, tl.where(m3, tl.where(m4, high, k4), k3), k2), k1)
        low = tl.where(m4, k4, tl.where(m3, k3, tl.where(m2, k2, tl.where(m1, k1, low))))
        by_value = by_value ^ True
    return tl.maximum(_value(low, SHIFT), lowest)


@triton.jit
def compact(source, n, bound, values, ids, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Write the values from bound on and their indices to values, ids, in order; int32: how many there are.

    At most BLOCK are written.
    """
    count = tl.zeros([], tl.int32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        x = load_tile(source, start, n, BLOCK)
        keep = (x >= bound).to(tl.int32)
        found = tl.sum(keep, 0)
        if (found > 0) & (count <= BLOCK):
            place = count + tl.cumsum(keep, 0) - 1
            fits = (keep > 0) & (place < BLOCK)
            tl.store(values + place, x.to(values.dtype.element_ty), mask=fits)
            tl.store(ids + place, start + tl.arange(0, BLOCK), mask=fits)
        count += found
    return count
