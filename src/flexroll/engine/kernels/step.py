"""First and last kernel of a decode step: from slots to rows, and from sampled tokens back to slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from flexroll.engine.kv_cache import KVCache
    from flexroll.engine.masks import DecodeMask
    from flexroll.engine.slots import Rows, Slots


@triton.jit
def prepare_kernel(
    staged,
    tokens,
    lengths,
    table,
    block_of,
    ids,
    slots,
    positions,
    full_count,
    full_list,
    partial_count,
    partial_list,
    reals,
    ints,
    longs,
    row_reals,
    row_ints,
    row_longs,
    n_slots,
    max_blocks,
    pages,
    B,
    PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Row b of a step, for slot staged[0, b]: its token, its position, its sampling parameters, and its pages.

    staged int32 [2, B]: slots, and the page of each slot's position, entered into table and block_of here, for a
    sequence grows by at most one page a step. reals, ints, longs: SamplingColumns of n_slots slots; of rows for row_*.
    LISTS: fill flex_attention's block lists too, [B, pages] each, BLOCKS being max_blocks rounded up to a power of two.
    """
    b = tl.program_id(0)
    slot = tl.load(staged + b).to(tl.int64)
    page = tl.load(staged + B + b)
    position = tl.load(lengths + slot)
    block = (position // PAGE).to(tl.int32)
    tl.store(table + slot * max_blocks + block, page)
    tl.store(block_of + page, block)
    tl.store(ids + b, tl.maximum(tl.load(tokens + slot), 0))
    tl.store(slots + b, slot)
    tl.store(positions + b, position)
    for column in tl.static_range(3):
        tl.store(row_reals + column * B + b, tl.load(reals + column * n_slots + slot))
    for column in tl.static_range(2):
        tl.store(row_ints + column * B + b, tl.load(ints + column * n_slots + slot))
        tl.store(row_longs + column * B + b, tl.load(longs + column * n_slots + slot))
    if LISTS:
        n = tl.arange(0, BLOCKS)
        held = tl.load(table + slot * max_blocks + n, mask=n < block, other=0)
        held = tl.where(n == block, page, held)
        tl.store(full_list + b.to(tl.int64) * pages + n, held, mask=(n < max_blocks) & (n < pages))
        full = ((position + 1) // PAGE).to(tl.int32)
        tl.store(full_count + b, full)
        tl.store(partial_count + b, ((position + 1) % PAGE != 0).to(tl.int32))
        tl.store(partial_list + b.to(tl.int64) * pages, page)


@triton.jit
def advance_kernel(sampled, logprobs, slots, positions, tokens, lengths, out, B, BLOCK: tl.constexpr):
    """tokens[slot] = sampled, lengths[slot] += 1 (never the padding slot's); out int32 [B, 3]: token, both logprobs."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    slot = tl.load(slots + b, mask=inside, other=0)
    token = tl.load(sampled + b, mask=inside, other=0)
    used = inside & (slot > 0)
    tl.store(tokens + slot, token, mask=used)
    tl.store(lengths + slot, tl.load(positions + b, mask=inside, other=0) + 1, mask=used)
    tl.store(out + b * 3, token.to(tl.int32), mask=inside)
    raw = tl.load(logprobs + b * 2, mask=inside, other=0.0)
    kept = tl.load(logprobs + b * 2 + 1, mask=inside, other=0.0)
    tl.store(out + b * 3 + 1, raw.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + b * 3 + 2, kept.to(tl.int32, bitcast=True), mask=inside)


def prepare(rows: Rows, slots: Slots, cache: KVCache, mask: DecodeMask | None) -> None:
    """`flexroll.engine.slots.prepare` in one launch."""
    max_blocks, pages = cache.table.shape[1], len(cache.block_of)
    unused = rows.staged  # a place-holder pointer where there is no mask
    prepare_kernel[(len(rows),)](
        rows.staged,
        slots.tokens,
        slots.lengths,
        cache.table,
        cache.block_of,
        rows.ids,
        rows.slots,
        rows.positions,
        mask.full[0] if mask is not None else unused,
        mask.full[1] if mask is not None else unused,
        mask.partial[0] if mask is not None else unused,
        mask.partial[1] if mask is not None else unused,
        slots.columns.reals,
        slots.columns.ints,
        slots.columns.longs,
        rows.columns.reals,
        rows.columns.ints,
        rows.columns.longs,
        len(slots.columns),
        max_blocks,
        pages,
        len(rows),
        PAGE=cache.pages.page_size,
        BLOCKS=triton.next_power_of_2(max_blocks),
        LISTS=mask is not None,
        num_warps=1,
    )


def advance(rows: Rows, slots: Slots, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    """`flexroll.engine.slots.advance` in one launch."""
    block = 128
    advance_kernel[(triton.cdiv(len(rows), block),)](
        tokens,
        logprobs,
        rows.slots,
        rows.positions,
        slots.tokens,
        slots.lengths,
        rows.out,
        len(rows),
        BLOCK=block,
        num_warps=4,
    )
