"""Sampling as one Triton kernel: a program a row, several passes over the row, no sort and no atomics.

The first pass finds the peak, its index and the sum of exponentials. A row that only wants the peak ends there. A
filter is a threshold on the logit (see `flexroll.engine.sampling`), found by bisection with four pivots a pass, spaced
evenly by value and by floating-point number in turn: the former is quick on real logits, the latter always ends.

Few rows search the whole vocabulary. Each lane of the block remembers the largest logit it met; the k-th largest of
those is a lower bound of the row's k-th largest, and the lanes' mass bounds top-p likewise. The tokens at or above such
a bound, if they fit one block, move to a scratch list in vocabulary order, and everything after works on that list.

A row's result depends on the row alone: the block and the number of warps are the same for every batch. Searching for
thresholds instead of sorting is FlashInfer's idea (flashinfer.ai/2025/03/10/sampling.html); the rest is our own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexroll.engine.kernels.sample_search import INFINITY, compact, load_tile, search, total_weight, weigh
from flexroll.engine.sampling import LOG2E, MAX_SCALE, SamplingColumns

# Logits a tile; also the most tokens that the scratch list holds. Results depend on it in the last bits of the sums.
BLOCK = 8192
WARPS = 16
# How many loads ahead of the arithmetic a pass runs.
STAGES = 3
# Bits in which two neighbours of a dtype differ once both are fp32.
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

LOG2_E = tl.constexpr(LOG2E)
LARGEST_SCALE = tl.constexpr(MAX_SCALE)


def sample_rows(
    logits: torch.Tensor, columns: SamplingColumns, positions: torch.Tensor, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [n], log probabilities fp32 [n, 2] and thresholds fp32 [n]: `flexroll.engine.sampling.sample`.

    logits: bf16, fp16 or fp32 [n, vocab], each row contiguous. block: a power of two. The threshold of a row that is
    greedy or not finite is its peak; two thresholds are the same if they keep the same tokens.
    """
    n, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    logprobs = torch.empty(n, 2, dtype=torch.float32, device=device)
    thresholds = torch.empty(n, dtype=torch.float32, device=device)
    values = torch.empty(n, block, dtype=logits.dtype, device=device)
    ids = torch.empty(n, block, dtype=torch.int32, device=device)
    if n == 0:
        return tokens, logprobs, thresholds
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    reals, ints, longs = (t.contiguous() for t in (columns.reals, columns.ints, columns.longs))
    _sample[(n,)](
        logits,
        logits.stride(0),
        vocab,
        reals,
        ints,
        longs,
        positions,
        tokens,
        logprobs,
        thresholds,
        values,
        ids,
        SHIFT=SHIFTS[logits.dtype],
        BLOCK=block,
        TILES=triton.next_power_of_2(triton.cdiv(vocab, block)),
        STAGES=STAGES,
        num_warps=WARPS,
    )
    return tokens, logprobs, thresholds


@triton.jit
def _sample(
    logits,
    stride,
    vocab,
    reals,
    ints,
    longs,
    positions,
    tokens,
    logprobs,
    thresholds,
    values,
    ids,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Row program_id(0) of `sample_rows`; columns as in SamplingColumns, [fields, n]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    source = logits + row * stride
    temperature = tl.load(reals + row)
    lanes, peak, token, total = _peak(source, vocab, BLOCK, STAGES)
    raw = -tl.log(total)
    final = raw
    threshold = peak
    if total != total:
        token = -1
    elif temperature > 0:
        u = _uniform(tl.load(longs + row), tl.load(longs + n + row), tl.load(ints + n + row), tl.load(positions + row))
        token, above, mass, threshold = _draw(
            source,
            vocab,
            lanes,
            peak,
            temperature,
            tl.load(ints + row),
            tl.load(reals + n + row),
            tl.load(reals + 2 * n + row),
            u,
            values + row * BLOCK,
            ids + row * BLOCK,
            SHIFT,
            BLOCK,
            TILES,
            STAGES,
        )
        raw = above - tl.log(total)
        final = above / temperature - tl.log(mass)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + 2 * row, raw.to(tl.float32))
    tl.store(logprobs + 2 * row + 1, final.to(tl.float32))
    tl.store(thresholds + row, threshold)


@triton.jit
def _uniform(seed, request, sample, position):
    """`flexroll.engine.philox.uniform` of one row."""
    first, second, _, _ = tl.philox(
        seed, position.to(tl.uint32), request.to(tl.uint32), (request >> 32).to(tl.uint32), sample.to(tl.uint32)
    )
    bits = ((first.to(tl.int64) << 21) ^ (second.to(tl.int64) >> 11)) & 0x1FFFFFFFFFFFFF
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _peak(source, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(each lane's largest value [BLOCK], the largest of all, its lowest index, float64 sum of exp(x - largest)).

    The sum is NaN if a value is NaN or +inf, or all are -inf.
    """
    # One pass is enough if the sum can be taken relative to the first tile's peak.
    guess = tl.max(load_tile(source, 0, n, BLOCK), 0)
    lanes = tl.full([BLOCK], -INFINITY, tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        x = load_tile(source, start, n, BLOCK)
        first = tl.where(x > lanes, start, first)
        lanes = tl.where(x > lanes, x, lanes)
        sums += weigh(x, -INFINITY, guess, LOG2_E)
    peak = tl.max(lanes, 0)
    index = tl.min(tl.where(lanes == peak, first + tl.arange(0, BLOCK), n), 0)
    total = tl.sum(sums.to(tl.float64), 0) * tl.exp2((guess - peak) * LOG2_E)
    if not (peak - guess < 40.0):
        total = total_weight(source, n, -INFINITY, peak, LOG2_E, BLOCK, STAGES)
    return lanes, peak, index, total


@triton.jit
def _draw(
    source,
    n,
    lanes,
    peak,
    temperature,
    top_k,
    top_p,
    min_p,
    u,
    values,
    ids,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(token, its logit less the peak, float64 mass kept, threshold) of one row; n: its vocabulary."""
    scale = tl.minimum(LOG2_E / temperature, LARGEST_SCALE)
    limited = (top_k > 0) & (top_k < n)
    nucleus = top_p < 1
    floor = -INFINITY
    if min_p > 0:
        floor = (peak + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))).to(tl.float32)

    # A bound that no threshold is below, if one is cheap.
    bound = floor
    mass = tl.zeros([], tl.float64)
    if limited | nucleus:
        tl.store(values + tl.arange(0, BLOCK), lanes.to(values.dtype.element_ty))
        tl.debug_barrier()
        lowest = tl.min(lanes, 0)
        if limited:
            # The mass that top-p speaks of is that of all top-k tokens, so min-p's bound must not cut into them.
            bound = -INFINITY
            if top_k <= BLOCK:
                bound = search(values, BLOCK, lowest, top_k, peak, scale, False, SHIFT, BLOCK, STAGES)
        else:
            mass = total_weight(source, n, -INFINITY, peak, scale, BLOCK, STAGES)
            # All tokens below this logit together weigh less than what top-p may drop.
            tail = peak + (tl.log2((1 - top_p) / n) - 0.01) / scale
            bound = tl.maximum(bound, tail)
            if tl.sum(weigh(lanes, -INFINITY, peak, scale).to(tl.float64), 0) >= top_p * mass:
                by_lanes = search(values, BLOCK, lowest, top_p * mass, peak, scale, True, SHIFT, BLOCK, STAGES)
                bound = tl.maximum(bound, by_lanes)
        tl.debug_barrier()

    # From here on `source` is the row, or the list of its candidates. The list ends in -inf up to a multiple of 16, so
    # that loads stay wide whichever it is.
    listed = False
    count = n
    if bound > -INFINITY:
        tl.store(values + tl.arange(0, BLOCK), tl.full([BLOCK], -INFINITY, tl.float32).to(values.dtype.element_ty))
        tl.debug_barrier()
        count = compact(source, n, bound, values, ids, BLOCK, STAGES)
        tl.debug_barrier()
        if count <= BLOCK:
            listed = True
            source = values
            n = tl.minimum(tl.cdiv(count, 16) * 16, BLOCK)

    threshold = bound
    if limited:
        if count > top_k:
            threshold = search(source, n, bound, top_k, peak, scale, False, SHIFT, BLOCK, STAGES)
        if nucleus:
            mass = total_weight(source, n, threshold, peak, scale, BLOCK, STAGES)
        threshold = tl.maximum(threshold, floor)
    reached = mass
    if nucleus & (threshold == floor):
        # Often min-p has cut deeper already.
        reached = total_weight(source, n, floor, peak, scale, BLOCK, STAGES)
    if nucleus & (reached > top_p * mass):
        threshold = search(source, n, threshold, top_p * mass, peak, scale, True, SHIFT, BLOCK, STAGES)

    place, chosen, kept = _inverse_cdf(source, n, threshold, peak, scale, u, BLOCK, TILES, STAGES)
    token = place
    if listed:
        token = tl.load(ids + place)
    return token, (chosen - peak).to(tl.float64), kept, threshold


@triton.jit
def _inverse_cdf(source, n, threshold, peak, scale, u, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr):
    """(index, value, float64 mass of all): the first token at which the mass from the start exceeds u times all."""
    tile = tl.arange(0, TILES)
    masses = tl.zeros([TILES], tl.float64)
    for i in tl.range(0, tl.cdiv(n, BLOCK), num_stages=STAGES):
        w = weigh(load_tile(source, i * BLOCK, n, BLOCK), threshold, peak, scale)
        masses = tl.where(tile == i, tl.sum(w, 0).to(tl.float64), masses)
    mass = tl.sum(masses, 0)
    target = u * mass
    # Rounding may put the target on the last step of a sum: stay on tiles and tokens that have a weight.
    crossed = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0), tile, TILES), 0)
    crossed = tl.minimum(crossed, tl.max(tl.where(masses > 0, tile, 0), 0))
    before = tl.sum(tl.where(tile < crossed, masses, 0.0), 0)

    lane = tl.arange(0, BLOCK)
    x = load_tile(source, crossed * BLOCK, n, BLOCK)
    w = weigh(x, threshold, peak, scale).to(tl.float64)
    index = tl.min(tl.where((before + tl.cumsum(w, 0) > target) & (w > 0), lane, BLOCK), 0)
    index = tl.minimum(index, tl.max(tl.where(w > 0, lane, 0), 0))
    value = tl.sum(tl.where(lane == index, x, 0.0), 0)
    return crossed * BLOCK + index, value, mass
