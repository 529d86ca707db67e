"""Paged split-KV attention for decoding: one query a sequence, grouped-query heads, keys and values read once.

QK-norm, rotation and the store of the new key and value happen on the way, for their inputs are the query's.

One program serves a (sequence, KV head, split): the query heads that share a KV head form one tile, padded to the 16
rows a matrix instruction has. Splits divide each sequence's own pages evenly, so a short sequence beside a long one
is divided as well as the long one; the last program of a sequence to finish adds the splits up, always in their order,
so the result does not depend on who came last. Splitting over keys follows Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from flexroll.engine.kernels.pdl import launch_dependents, wait
from flexroll.engine.kernels.rope import load_halves, normed, rotated
from flexroll.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from flexroll.engine.kernels.ops import TritonOps

LOG2E = tl.constexpr(1.4426950408889634)
PROGRAMS = 2  # a multiprocessor; with fewer, each sequence is divided further
MAX_SPLITS = 16
# Measured on an NVIDIA H200 at 330 to 440 tokens a sequence: one warp with a deep pipeline beat 2 and 4 warps at every
# batch from 8 to 256, by 1 to 30 %; with few programs a longer step was the faster one, with many a shorter one.
WARPS, STAGES = 1, 5
FEW, FEW_BLOCK, MANY_BLOCK = 256, 32, 16


class PagedAttention:
    """Decode attention of one bucket of `rows` sequences: the kernel, and its scratch for partial sums."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        config, device = cache.config, cache.device
        self.cache = cache
        pairs = rows * config.n_kv_heads
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        wanted = triton.next_power_of_2(max(1, PROGRAMS * processors // pairs))
        self.splits = min(wanted, MAX_SPLITS, triton.next_power_of_2(cache.table.shape[1]))
        self.block = min(FEW_BLOCK if pairs <= FEW else MANY_BLOCK, cache.pages.page_size)
        scratch = (rows, config.n_kv_heads, self.splits)
        self.partial = torch.empty(*scratch, 16, config.head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(*scratch, 2, 16, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(scratch[:2], dtype=torch.int32, device=device)

    def __call__(
        self,
        ops: TritonOps,
        layer: int,
        qkv: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """qkv [rows, ...] or [parts, rows, ...] of the tokens at positions int64 [rows] of slots int64 [rows].

        Returns [rows, heads * head_dim]; K and V are stored.
        """
        cache, config = self.cache, self.cache.config
        n = qkv.shape[-2]
        out = torch.empty(n, config.q_size, dtype=cache.pool.dtype, device=qkv.device)
        grid = (n, config.n_kv_heads, self.splits)
        decode_attention_kernel[grid](
            qkv,
            ops.tensors.get(f"{layer}.q_norm"),
            ops.tensors.get(f"{layer}.k_norm"),
            ops.cos,
            ops.sin,
            cache.keys[layer],
            cache.values[layer],
            out,
            self.partial,
            self.stats,
            self.arrived,
            cache.table,
            slots,
            positions,
            n,
            config.rms_eps,
            config.head_dim**-0.5,
            cache.table.shape[1],
            cache.keys[layer].shape[2],
            GROUP=config.n_heads // config.n_kv_heads,
            HEAD_DIM=config.head_dim,
            PAGE=cache.pages.page_size,
            BLOCK_T=self.block,
            SPLITS=self.splits,
            PARTS=qkv.shape[0] if qkv.dim() == 3 else 1,
            num_warps=WARPS,
            num_stages=STAGES,
            **ops.launch,
        )
        return out


def unsupported(cache: KVCache) -> str | None:
    """Why the kernel cannot serve this model, or None."""
    config = cache.config
    if config.head_dim & (config.head_dim - 1) or config.head_dim < 16:
        return f"head_dim {config.head_dim} is not a power of two of at least 16"
    if config.n_heads // config.n_kv_heads > 16:
        return f"{config.n_heads // config.n_kv_heads} query heads share a KV head; the kernel takes 16"
    return None


@triton.jit
def decode_attention_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    keys,
    values,
    out,
    partial,
    stats,
    arrived,
    table,
    slots,
    positions,
    B,
    eps,
    scale,
    max_blocks,
    pool_tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [B, heads, HEAD_DIM] = softmax(scale q k.T) v over positions 0..positions[b] of slot slots[b].

    qkv [PARTS, B, (heads + 2 kv_heads) * HEAD_DIM], summed over PARTS, holds q, k and v of position positions[b]
    before QK-norm (q_norm, k_norm may be None) and rotation; its K and V are stored to the pools
    [kv_heads, pool_tokens, HEAD_DIM] by the way. cos, sin fp32 [positions, HEAD_DIM / 2]; table int32
    [slots, max_blocks]. partial fp32 [B, kv_heads, SPLITS, 16, HEAD_DIM], stats fp32 [B, kv_heads, SPLITS, 2, 16],
    arrived int32 [B, kv_heads], zero before and after: scratch, unused where SPLITS is 1.
    """
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    kind: tl.constexpr = out.dtype.element_ty
    # Where a sequence lies was settled kernels ago; only qkv comes from the one before.
    position = tl.load(positions + b)
    cached = position.to(tl.int32)
    pages = table + tl.load(slots + b).to(tl.int64) * max_blocks
    g, d, half, t = tl.arange(0, 16), tl.arange(0, HEAD_DIM), tl.arange(0, HALF), tl.arange(0, BLOCK_T)
    c = tl.load(cos + position * HALF + half)[None, :]
    s = tl.load(sin + position * HALF + half)[None, :]
    pool = head.to(tl.int64) * pool_tokens * HEAD_DIM
    n_blocks = tl.cdiv(cached, BLOCK_T)
    each = tl.cdiv(n_blocks, SPLITS)
    first = split * each
    last = tl.minimum(first + each, n_blocks)
    if PDL:
        wait()
        launch_dependents()

    group = (g < GROUP)[:, None]
    width = kv_heads * (GROUP + 2) * HEAD_DIM
    token = qkv + b.to(tl.int64) * width
    stride = width.to(tl.int64) * B
    heads_at = token + (head * GROUP + g[:, None]) * HEAD_DIM + half[None, :]
    q_a, q_b = load_halves(heads_at, group, stride, HALF, PARTS, kind)
    if q_norm is not None:
        q_a, q_b = normed(
            q_a, q_b, tl.load(q_norm + half)[None, :], tl.load(q_norm + HALF + half)[None, :], eps, HEAD_DIM, kind
        )
    q_a, q_b = rotated(q_a, q_b, c, s, kind)
    query = tl.reshape(tl.permute(tl.join(q_a, q_b), (0, 2, 1)), (16, HEAD_DIM))

    key_at = keys + pool + d[:, None] + t[None, :] * HEAD_DIM
    value_at = values + pool + t[:, None] * HEAD_DIM + d[None, :]
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, HEAD_DIM), tl.float32)
    for block in range(first, last):
        start = block * BLOCK_T
        page = tl.load(pages + start // PAGE).to(tl.int64)
        offset = (page * PAGE + start % PAGE) * HEAD_DIM
        scores = tl.dot(query, tl.load(key_at + offset), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where((start + t)[None, :] < cached, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(value_at + offset)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    if split == SPLITS - 1:  # the new token: its share, and its place in the pool
        key = token + (kv_heads * GROUP + head) * HEAD_DIM + half[None, :]
        always = half[None, :] < HALF
        k_a, k_b = load_halves(key, always, stride, HALF, PARTS, kind)
        v_a, v_b = load_halves(key + kv_heads * HEAD_DIM, always, stride, HALF, PARTS, kind)
        if k_norm is not None:
            k_a, k_b = normed(
                k_a, k_b, tl.load(k_norm + half)[None, :], tl.load(k_norm + HALF + half)[None, :], eps, HEAD_DIM, kind
            )
        k_a, k_b = rotated(k_a, k_b, c, s, kind)
        page = tl.load(pages + cached // PAGE).to(tl.int64)
        place = pool + (page * PAGE + cached % PAGE) * HEAD_DIM + half[None, :]
        tl.store(keys + place, k_a)
        tl.store(keys + place + HALF, k_b)
        tl.store(values + place, v_a.to(kind))
        tl.store(values + place + HALF, v_b.to(kind))
        score = tl.sum(q_a.to(tl.float32) * k_a.to(tl.float32), 1) + tl.sum(q_b.to(tl.float32) * k_b.to(tl.float32), 1)
        score = score * (scale * LOG2E)
        new_top = tl.maximum(top, score)
        weight = tl.exp2(score - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weight
        value = tl.reshape(tl.permute(tl.join(v_a, v_b), (0, 2, 1)), (1, HEAD_DIM))
        acc = acc * shrink[:, None] + weight[:, None] * value
        top = new_top

    rows = (b * kv_heads + head) * GROUP + g
    at = rows[:, None].to(tl.int64) * HEAD_DIM + d[None, :]
    if SPLITS == 1:
        tl.store(out + at, (acc / total[:, None]).to(kind), mask=group)
    else:
        pair = (b * kv_heads + head).to(tl.int64)
        tl.store(partial + ((pair * SPLITS + split) * 16 + g[:, None]) * HEAD_DIM + d[None, :], acc)
        tl.store(stats + (pair * SPLITS + split) * 32 + g, top)
        tl.store(stats + (pair * SPLITS + split) * 32 + 16 + g, total)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            highest = tl.full((16,), float("-inf"), tl.float32)
            for i in range(SPLITS):
                highest = tl.maximum(highest, tl.load(stats + (pair * SPLITS + i) * 32 + g, cache_modifier=".cg"))
            total = tl.zeros((16,), tl.float32)
            acc = tl.zeros((16, HEAD_DIM), tl.float32)
            for i in range(SPLITS):
                one = pair * SPLITS + i
                factor = tl.exp2(tl.load(stats + one * 32 + g, cache_modifier=".cg") - highest)
                total += factor * tl.load(stats + one * 32 + 16 + g, cache_modifier=".cg")
                part = tl.load(partial + (one * 16 + g[:, None]) * HEAD_DIM + d[None, :], cache_modifier=".cg")
                acc += factor[:, None] * part
            tl.store(out + at, (acc / total[:, None]).to(kind), mask=group)
            tl.store(arrived + pair, 0)
