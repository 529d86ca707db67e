"""QK-norm, rotary embedding, and the store of K and V into the paged pool, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from flexroll.engine.kernels.pdl import launch_dependents, wait
from flexroll.engine.kernels.rope import load_halves, normed, rotated


@triton.jit
def rope_store_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    q,
    keys,
    values,
    table,
    slots,
    positions,
    q_rows,
    M,
    eps,
    max_blocks,
    pool_tokens,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """From qkv's PARTS [PARTS, M, (heads + 2 kv_heads) * HEAD_DIM], summed: q [rows, heads, HEAD_DIM] at row q_rows[m]
    (m where q_rows is None), K and V into the pools [kv_heads, pool_tokens, HEAD_DIM] at the place of position
    positions[m] of slot slots[m].

    Grid (M, kv_heads): a program has one token's GROUP query heads, its key and its value head; HEADS is GROUP + 2 and
    LANES HEAD_DIM / 2, rounded up to a power of two. cos, sin fp32 [positions, HEAD_DIM / 2]. q_norm and k_norm may
    be None.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    g, d = tl.arange(0, HEADS), tl.arange(0, LANES)
    lane = d < HALF
    inside = lane[None, :]
    is_query, is_key = (g < GROUP)[:, None], (g == GROUP)[:, None]
    used = (g < GROUP + 2)[:, None] & inside
    # Which head of the fused row: the group's queries, then one of the keys, then one of the values.
    place = tl.where(g < GROUP, head * GROUP + g, kv_heads * GROUP + head + (g - GROUP) * kv_heads)
    column = place[:, None] * HEAD_DIM + d[None, :]
    width = kv_heads * (GROUP + 2) * HEAD_DIM
    kind: tl.constexpr = q.dtype.element_ty
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    page = tl.load(table + slot * max_blocks + position // PAGE).to(tl.int64)
    c = tl.load(cos + position * HALF + d, mask=lane, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + d, mask=lane, other=0.0)[None, :]
    if PDL:
        wait()
        launch_dependents()

    at = qkv + row.to(tl.int64) * width + column
    first, second = load_halves(at, used, width.to(tl.int64) * M, HALF, PARTS, kind)
    a, b = first, second
    if q_norm is not None:
        q_a, q_b = tl.load(q_norm + d, mask=lane, other=0.0), tl.load(q_norm + HALF + d, mask=lane, other=0.0)
        k_a, k_b = tl.load(k_norm + d, mask=lane, other=0.0), tl.load(k_norm + HALF + d, mask=lane, other=0.0)
        gain_a = tl.where(is_query, q_a[None, :], k_a[None, :])
        gain_b = tl.where(is_query, q_b[None, :], k_b[None, :])
        a, b = normed(a, b, gain_a, gain_b, eps, HEAD_DIM, kind)
    turned_a, turned_b = rotated(a, b, c, s, kind)

    q_row = row.to(tl.int64)
    if q_rows is not None:
        q_row = tl.load(q_rows + row)
    q_at = q + (q_row * kv_heads * GROUP + place[:, None]) * HEAD_DIM + d[None, :]
    tl.store(q_at, turned_a, mask=is_query & inside)
    tl.store(q_at + HALF, turned_b, mask=is_query & inside)
    address = (head.to(tl.int64) * pool_tokens + page * PAGE + position % PAGE) * HEAD_DIM + d[None, :]
    address = address + tl.zeros((HEADS, 1), tl.int64)
    tl.store(keys + address, turned_a, mask=is_key & inside)
    tl.store(keys + address + HALF, turned_b, mask=is_key & inside)
    is_value = (g == GROUP + 1)[:, None] & inside
    tl.store(values + address, first.to(kind), mask=is_value)
    tl.store(values + address + HALF, second.to(kind), mask=is_value)
