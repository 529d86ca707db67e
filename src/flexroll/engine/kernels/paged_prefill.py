"""Attention of prompt tokens over the paged pool: any mix of sequences and chunks in one launch.

Queries lie token by token, as they leave the product, and the result does too: nothing is gathered or padded. One
program serves a run of queries of one sequence and the query heads that share a KV head, so keys and values are read
once for all of them. Tiles of keys begin at multiples of their size within a sequence, whatever chunk is computed, so
a token's result does not depend on the chunks its prompt came in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from flexroll.engine.kernels.pdl import launch_dependents, wait
from flexroll.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from flexroll.engine.kernels.ops import TritonOps

LOG2E = tl.constexpr(1.4426950408889634)
# A tile of queries: tokens times the heads that share a KV head, for 16-bit heads of WIDTH. Measured on an NVIDIA H200
# with 8,155 tokens in 63 prompts at Qwen3-4B's shape: 106 us a layer, 128 rows 129 us, 8 warps or 3 stages no better.
ROWS, WIDTH = 64, 128
BLOCK_T = 64
WARPS, STAGES = 4, 2


def query_block(cache: KVCache) -> int:
    """Tokens whose queries, of all heads that share a KV head, make one tile."""
    config = cache.config
    rows = ROWS * WIDTH * 2 // (max(WIDTH, config.head_dim) * cache.pool.element_size())
    return max(1, rows // triton.next_power_of_2(config.n_heads // config.n_kv_heads))


def prefill_attention(
    ops: TritonOps, cache: KVCache, layer: int, q: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor
) -> None:
    """out [tokens, heads * head_dim] = causal attention of q [tokens, heads, head_dim] over the sequences' pages.

    blocks int32 [4, n], a column a run of at most `query_block` tokens: its first token, how many, their slot, and the
    first one's position. A run of 0 tokens is padding. K and V of all tokens are stored already.
    """
    config = cache.config
    group = config.n_heads // config.n_kv_heads
    prefill_attention_kernel[(blocks.shape[1], config.n_kv_heads)](
        q,
        cache.keys[layer],
        cache.values[layer],
        out,
        blocks,
        cache.table,
        blocks.stride(0),
        config.head_dim**-0.5,
        cache.table.shape[1],
        cache.keys[layer].shape[2],
        GROUP=group,
        HEADS=triton.next_power_of_2(group),
        HEAD_DIM=config.head_dim,
        PAGE=cache.pages.page_size,
        BLOCK_Q=query_block(cache),
        BLOCK_T=min(BLOCK_T, cache.pages.page_size),
        num_warps=WARPS,
        num_stages=STAGES,
        **ops.launch,
    )


@triton.jit
def prefill_attention_kernel(
    q,
    keys,
    values,
    out,
    blocks,
    table,
    block_stride,
    scale,
    max_blocks,
    pool_tokens,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """q, out [tokens, kv_heads * GROUP, HEAD_DIM]; the pools [kv_heads, pool_tokens, HEAD_DIM]; table int32
    [slots, max_blocks]; blocks int32 [4, runs], its rows block_stride apart. Grid (runs, kv_heads). HEADS is GROUP
    rounded up to a power of two."""
    run, head = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    first = tl.load(blocks + run)
    count = tl.load(blocks + block_stride + run)
    slot = tl.load(blocks + 2 * block_stride + run).to(tl.int64)
    start = tl.load(blocks + 3 * block_stride + run)
    if PDL:
        wait()
        launch_dependents()
    if count > 0:
        row, d, t = tl.arange(0, BLOCK_Q * HEADS), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_T)
        token, shared = row // HEADS, row % HEADS
        used = ((token < count) & (shared < GROUP))[:, None]
        at = ((first + token).to(tl.int64) * kv_heads + head) * GROUP + shared
        at = at[:, None] * HEAD_DIM + d[None, :]
        query = tl.load(q + at, mask=used, other=0.0)
        position = (start + token)[:, None]
        pages = table + slot * max_blocks
        pool = head.to(tl.int64) * pool_tokens * HEAD_DIM
        key_at = keys + pool + d[:, None] + t[None, :] * HEAD_DIM
        value_at = values + pool + t[:, None] * HEAD_DIM + d[None, :]
        top = tl.full((BLOCK_Q * HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q * HEADS,), tl.float32)
        acc = tl.zeros((BLOCK_Q * HEADS, HEAD_DIM), tl.float32)
        for tile in range(0, tl.cdiv(start + count, BLOCK_T)):
            begin = tile * BLOCK_T
            page = tl.load(pages + begin // PAGE).to(tl.int64)
            offset = (page * PAGE + begin % PAGE) * HEAD_DIM
            scores = tl.dot(query, tl.load(key_at + offset), input_precision="ieee") * (scale * LOG2E)
            scores = tl.where((begin + t)[None, :] <= position, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weight = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weight, 1)
            value = tl.load(value_at + offset)
            acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)
