"""The decode step's Triton kernels against torch: on a GPU as they are, elsewhere under Triton's interpreter.

The interpreter multiplies the raw bits of bfloat16, so there everything is fp32.
"""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import interpreter
from engine_models import attend_by_lists, random_checkpoint, reference_greedy
from flexroll.engine import Engine, SamplingParams, prefill
from flexroll.engine import engine as engine_module
from flexroll.engine.decoder import Tokens
from flexroll.engine.decoder_config import DecoderConfig, Rope
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import DecodeMask
from flexroll.engine.ops import LowRank, TorchOps
from flexroll.engine.page_table import PageTable
from flexroll.engine.rope import rope_tables
from flexroll.engine.slots import Rows, Slots
from flexroll.engine.slots import advance as advance_torch
from flexroll.engine.slots import prepare as prepare_torch
from flexroll.engine.weights import DecoderWeights
from flexroll.errors import FlexrollError
from interpreter import INTERPRETED, NATIVE, run_interpreted, runs_kernel, starts_interpreter

DEVICE = torch.device(interpreter.DEVICE)
DTYPES = [torch.float32, torch.bfloat16] if NATIVE else [torch.float32]
QWEN3_4B = [
    ("qkv", 6144, 2560),
    ("o", 2560, 4096),
    ("gate_up", 19456, 2560),
    ("down", 2560, 9728),
    ("head", 151936, 2560),
]
POISON = 1e4  # in every page that a sequence does not own, and behind its last token

if INTERPRETED or NATIVE:
    from flexroll.engine.kernels import linear, paged_attention, paged_prefill, step
    from flexroll.engine.kernels.linear import Tiles, tiles_for
    from flexroll.engine.kernels.ops import TritonOps
    from flexroll.engine.kernels.paged_attention import PagedAttention
    from flexroll.engine.kernels.pdl import launch_options


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def noise(*shape, seed=0, dtype=torch.float32, std=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(DEVICE, dtype)


def assert_close(mine, theirs, scale=1.0):
    """Equal up to the rounding of their type: sums in another order, and a value on the edge rounded the other way."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[theirs.dtype] * scale
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def config_of(group=2, kv_heads=2, head_dim=16, hidden=48, intermediate=40, qk_norm=True):
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=97,
        hidden_size=hidden,
        intermediate_size=intermediate,
        n_layers=1,
        n_heads=group * kv_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=1e-6,
        rope=Rope(10000.0, "default", {}),
        qk_norm=qk_norm,
        tied_head=True,
        eos_ids=(1,),
    )


def both_ops(config, dtype, max_length=64, bias=False, low_rank=None):
    """(TorchOps, TritonOps) of one random layer."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "embed": (config.vocab_size, h),
        "0.qkv.weight": (config.q_size + 2 * config.kv_size, h),
        "0.gate_up.weight": (2 * i, h),
        "0.attn_norm": (h,),
    }
    if bias:
        shapes["0.gate_up.bias"] = (2 * i,)
    if config.qk_norm:
        shapes |= {"0.q_norm": (d,), "0.k_norm": (d,)}
    tensors = {key: noise(*shape, seed=n, dtype=dtype, std=0.5) for n, (key, shape) in enumerate(shapes.items())}
    tensors["head"] = tensors["embed"]
    tables = rope_tables(config, max_length, DEVICE)
    weights = DecoderWeights(config, tensors)
    return tuple(kind(weights, *tables, low_rank or {}) for kind in (TorchOps, TritonOps))


def cache_of(config, lengths, page_size, dtype=torch.float32, max_blocks=None, n_slots=None, seed=0):
    """A poisoned cache in which slot i + 1 has pages for lengths[i] tokens, page by page in turn and at random."""
    blocks = [-(-n // page_size) for n in lengths]
    pages = PageTable(n_slots or len(lengths), sum(blocks) + 3, page_size, max_blocks or max(blocks))
    random.Random(seed).shuffle(pages._free_pages)
    slots = [pages.take_slot() for _ in lengths]
    for block in range(max(blocks)):
        for slot, n in zip(slots, lengths, strict=True):
            assert pages.reserve(slot, min(n, (block + 1) * page_size))
    cache = KVCache(config, pages, dtype, DEVICE)
    cache.pool.fill_(POISON)
    cache.place(slots)
    return cache, slots


def positions_tensor(values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


# Products.


@runs_kernel
@pytest.mark.parametrize(("splits", "gated"), [(1, True), (1, False), (2, False), (3, False), (4, False)])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_linear(rows, splits, gated):
    """Row tiles that are not full, and partial sums over slices of the depth, which add up to the product.

    Depth 160 is five blocks: two slices of it are uneven, of four the last is empty.
    """
    dtype = DTYPES[-1]  # natively in the 16 bits that the kernel is for
    x, w = noise(rows, 160, dtype=dtype), noise(96, 160, seed=1, dtype=dtype, std=0.3)
    y = linear.product(x, w, Tiles(16, 16, 32, 2, splits=splits), gated, **launch_options(DEVICE))
    product = x.float() @ w.float().T
    if gated:
        gate, up = product.to(dtype).chunk(2, dim=-1)
        assert_close(y[0], torch.nn.functional.silu(gate) * up, scale=10)
        return
    assert y.shape == (splits, rows, 96)
    assert_close(y.float().sum(0).to(dtype), product.to(dtype))
    depth = -(-5 // splits) * 32
    for i, part in enumerate(y):
        a, b = (t.float()[:, i * depth : (i + 1) * depth] for t in (x, w))
        assert_close(part, (a @ b.T).to(part.dtype))


@runs_kernel
def test_tiles_fit_the_product_they_are_chosen_for():
    """Every shape that gets tiles is divided by them without a rest; the kernel masks rows only."""

    def tiles(place, m, n, k, dtype=torch.bfloat16):
        return tiles_for(place, torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, device="meta"))

    for place, table in linear.TILES.items():
        gated, chosen = place == "gate_up", set()
        for m in (0, 1, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257):
            for n in (32, 64, 96, 100, 1024, 2560, 6144, 19456, 151936, 128256):
                for k in (48, 64, 128, 192, 256, 2560, 9728):
                    cut = tiles(place, m, n, k)
                    assert tiles(place, m, n, k, torch.float32) is None
                    if cut is None:
                        continue
                    assert 0 < m <= max(table) and k % cut.k == 0 and (n // 2 if gated else n) % cut.n == 0
                    assert 1 <= cut.splits <= k // cut.k and (cut.splits == 1 or place not in ("gate_up", "head"))
                    chosen.add(dataclasses.replace(cut, splits=1))
        assert chosen == set(table.values())
    splits = {place: tiles(place, 16, n, k).splits for place, n, k in QWEN3_4B}
    assert splits == {"qkv": 4, "o": 3, "gate_up": 1, "down": 3, "head": 1}  # those that were measured


@runs_kernel
def test_a_weight_that_no_descriptor_can_name_is_left_to_the_library():
    x, weight = noise(4, 128, dtype=torch.bfloat16), noise(2560 * 128 + 1, dtype=torch.bfloat16)
    assert tiles_for("qkv", x, weight[:-1].view(2560, 128)) is not None
    assert tiles_for("qkv", x, weight[1:].view(2560, 128)) is None


# Norm and activation.


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 64])
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_embed(rows, hidden, dtype):
    plain, fused = both_ops(config_of(hidden=hidden), dtype)
    ids = torch.arange(rows, device=DEVICE) * 5 % 97
    norm = plain.tensors["0.attn_norm"]
    for mine, theirs in zip(fused.embed(ids, norm), plain.embed(ids, norm), strict=True):
        assert mine.shape == (rows, hidden)
        assert_close(mine, theirs)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [None, 1, 2, 3])
@pytest.mark.parametrize(("rows", "hidden"), [(0, 48), (1, 64), (5, 48), (17, 48)])
def test_add_norm(rows, hidden, parts, dtype):
    """parts: fp32 partial sums; None: a finished product in the model's type."""
    plain, fused = both_ops(config_of(hidden=hidden), dtype)
    x, norm = noise(rows, hidden, dtype=dtype), plain.tensors["0.attn_norm"]
    if parts is None:
        y = whole = noise(rows, hidden, seed=1, dtype=dtype)
    else:
        y = noise(parts, rows, hidden, seed=1)
        whole = y.sum(0).to(dtype)
    theirs = plain.add_norm(x, whole, norm)
    mine = fused.add_norm(x.clone(), y, norm)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b)


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["plain", "bias", "low_rank"])
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_gated(rows, case, dtype, monkeypatch):
    """The activation of a product that has no kernel of its own; in blocks, the last of which is not full."""
    monkeypatch.setattr("flexroll.engine.kernels.ops.SILU_BLOCK", 16)
    update = LowRank(3, 30, noise(4, 48, seed=8, dtype=dtype), noise(27, 4, seed=9, dtype=dtype), 0.5)
    low_rank = {"0.gate_up.weight": [update]} if case == "low_rank" else None
    plain, fused = both_ops(config_of(), dtype, bias=case == "bias", low_rank=low_rank)
    x = noise(rows, 48, dtype=dtype)
    mine, theirs = fused.gated("0.gate_up", x), plain.gated("0.gate_up", x)
    assert mine.shape == (rows, 40)
    assert_close(mine, theirs, scale=10)


# Rotary embedding, and keys and values into the cache.


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "scattered"), [(None, False), (None, True), (2, False)])
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "qk_norm"),
    [
        (1, 16, 16, True),
        (2, 64, 64, True),
        (3, 16, 64, False),
        (4, 64, 16, False),
        (5, 16, 16, True),
        (8, 16, 16, True),
    ],
)
def test_rope_store(group, head_dim, page_size, qk_norm, parts, scattered, dtype):
    """Places of many pages in any order; queries in the tokens' order, or scattered to rows of their own."""
    config = config_of(group=group, head_dim=head_dim, qk_norm=qk_norm)
    lengths = [1, page_size - 1, page_size, page_size + 1, 3 * page_size]
    plain, fused = both_ops(config, dtype, max_length=4 * page_size)
    places = [(s, p) for s, n in enumerate(lengths, 1) for p in {0, n // 2, n - 1}] + [(0, 0)]  # a padded row at last
    random.Random(group).shuffle(places)
    n, width = len(places), config.q_size + 2 * config.kv_size
    if parts is None:
        qkv = whole = noise(n, width, dtype=dtype)
    else:
        qkv = noise(parts, n, width)
        whole = qkv.sum(0).to(dtype)
    results = []
    for ops, given in ((plain, whole), (fused, qkv)):
        cache, slots = cache_of(config, lengths, page_size, dtype)
        rows = positions_tensor([[0, *slots][s] for s, _ in places])
        q = torch.full((2 * n, config.n_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
        q_rows = torch.arange(n, device=DEVICE).flip(0) * 2 + 1 if scattered else None
        tokens = Tokens(rows, rows, positions_tensor([p for _, p in places]), cache, q, q_rows)
        ops.rope_store(0, given, tokens)
        written = torch.zeros(cache.keys[0].shape[2], dtype=torch.bool, device=DEVICE)
        written[cache.addresses(tokens.slots, tokens.positions)] = True
        assert bool((cache.pool[..., ~written, :] == POISON).all())
        assert bool((q[slice(0, None, 2) if scattered else slice(n, None)] == 7).all())
        results.append((q, cache.pool))
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert_close(mine, theirs)


# Attention.


def attention_by_torch(cache, q, slots, positions):
    """fp64, sequence by sequence: keys and values gathered by address, no mask, no page."""
    group = cache.config.n_heads // cache.config.n_kv_heads
    out = []
    for row, slot, position in zip(q, slots.tolist(), positions.tolist(), strict=True):
        places = torch.arange(position + 1, device=DEVICE)
        at = cache.addresses(torch.full_like(places, slot), places)
        k, v = (x[0][0][:, at].double().repeat_interleave(group, dim=0) for x in (cache.keys, cache.values))
        scores = torch.einsum("hd,htd->ht", row.double(), k) * cache.config.head_dim**-0.5
        out.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v).flatten())
    return torch.stack(out).to(q.dtype)


def filled(config, lengths, page_size, dtype):
    """A cache with keys and values of all of `lengths` tokens but the last, all else poisoned; slots and positions of
    the last."""
    cache, slots = cache_of(config, lengths, page_size, dtype)
    for slot, n in zip(slots, lengths, strict=True):
        places = torch.arange(n - 1, device=DEVICE)
        at = cache.addresses(torch.full_like(places, slot), places)
        for seed, pool in enumerate((cache.keys, cache.values)):
            pool[0][0][:, at] = noise(config.n_kv_heads, n - 1, config.head_dim, seed=2 * slot + seed, dtype=dtype)
    return cache, positions_tensor(slots), positions_tensor(lengths) - 1


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "block", "parts"),
    [
        (1, 16, 16, 16, None),
        (2, 64, 64, 64, 2),
        (3, 16, 64, 16, None),
        (4, 16, 16, 64, 2),
        (5, 64, 16, 32, None),
        (7, 16, 64, 32, 3),
        (8, 16, 16, 64, 1),
    ],
)
def test_paged_attention(group, head_dim, page_size, block, parts, splits, dtype, monkeypatch):
    """Lengths around a page, beside one of many; more splits than a short sequence has blocks. qkv in partial sums."""
    config = config_of(group=group, head_dim=head_dim, qk_norm=group != 3)
    plain, fused = both_ops(config, dtype, max_length=10 * page_size)
    lengths = [1, page_size - 1, page_size, page_size + 1, 9 * page_size + 2]
    n, width = len(lengths), config.q_size + 2 * config.kv_size
    qkv = noise(n, width, dtype=dtype) if parts is None else noise(parts, n, width)
    whole = qkv if parts is None else qkv.sum(0).to(dtype)

    cache, slots, positions = filled(config, lengths, page_size, dtype)
    q = torch.empty(n, config.n_heads, head_dim, dtype=dtype, device=DEVICE)
    plain.rope_store(0, whole, Tokens(slots, slots, positions, cache, q))
    expected = attention_by_torch(cache, q, slots, positions)
    stored = cache.pool

    cache, *_ = filled(config, lengths, page_size, dtype)
    monkeypatch.setattr(paged_attention, "PROGRAMS", 10**6 if splits > 1 else 0)
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", splits)
    monkeypatch.setattr(paged_attention, "FEW_BLOCK", block)
    monkeypatch.setattr(paged_attention, "MANY_BLOCK", block)
    attend = PagedAttention(cache, n)
    assert attend.splits == splits
    attend.partial.fill_(POISON)
    attend.stats.fill_(POISON)
    first = attend(fused, 0, qkv, slots, positions)
    assert_close(first, expected)
    assert_close(cache.pool, stored)
    assert not bool(attend.arrived.any())
    assert torch.equal(attend(fused, 0, qkv, slots, positions), first)  # on the scratch as the first left it
    assert not bool(attend.arrived.any())
    few = attend(fused, 0, qkv[..., 3:, :].contiguous(), slots[3:], positions[3:])  # a row's result is its own
    assert torch.equal(few, first[3:])


@runs_kernel
def test_paged_attention_of_padding_rows(monkeypatch):
    """They see themselves alone, whatever page 0 holds, and write nowhere else."""
    monkeypatch.setattr(paged_attention, "PROGRAMS", 10**6)
    config = config_of()
    _, fused = both_ops(config, torch.float32)
    cache, slots, positions = filled(config, [20], 16, torch.float32)
    before = cache.pool.clone()
    qkv = noise(5, config.q_size + 2 * config.kv_size)
    qkv[[0, 2, 4]] = qkv[0].clone()  # as in a step: the same token in every padded row
    rows, places = slots.new_zeros(5), positions.new_zeros(5)
    rows[1], places[1] = slots[0], positions[0]
    rows[3], places[3] = slots[0], positions[0] - 1
    out = PagedAttention(cache, 5)(fused, 0, qkv, rows, places)
    value = qkv[0, -config.kv_size :].view(2, 1, 16).expand(2, 2, 16).flatten()
    for row in (0, 2, 4):
        assert_close(out[row], value)
    written = torch.zeros(cache.keys[0].shape[2], dtype=torch.bool, device=DEVICE)
    written[cache.addresses(rows, places)] = True
    assert int(written.sum()) == 3
    assert torch.equal(cache.pool[..., ~written, :], before[..., ~written, :])


def prompts_in_cache(group, head_dim, page_size, lengths, dtype=torch.float32):
    """Keys and values of all tokens of `lengths`: the cache, its slots, {slot: queries [tokens, heads, head_dim]}."""
    config = config_of(group=group, head_dim=head_dim)
    cache, slots, _ = filled(config, [n + 1 for n in lengths], page_size, dtype)
    slots = slots.tolist()
    queries = {s: noise(n, config.n_heads, head_dim, seed=s, dtype=dtype) for s, n in zip(slots, lengths, strict=True)}
    return cache, slots, queries


def attended(cache, queries, chunks, spare_rows=0):
    """{(slot, position): result} of a prefill's attention over (slot, start, stop) chunks, in that order."""
    _, ops = both_ops(cache.config, cache.pool.dtype)
    n = sum(stop - start for _, start, stop in chunks)
    block = paged_prefill.query_block(cache)
    rows = sum(-(-(stop - start) // block) for _, start, stop in chunks) * block + spare_rows * block
    held = prefill._PagedPass(SimpleNamespace(ops=ops), cache, block, rows)
    held.stage_attention(chunks)
    held._out.fill_(POISON)
    held._q[:n] = torch.cat([queries[slot][start:stop] for slot, start, stop in chunks])
    for runs in (held._runs[:, : held._n_runs], held._runs):  # as many as there are, and with padding as in a graph
        paged_prefill.prefill_attention(ops, cache, 0, held._q, runs, held._out)
        assert bool((held._out[n:] == POISON).all())
    places = [(slot, position) for slot, start, stop in chunks for position in range(start, stop)]
    return dict(zip(places, held._out[:n], strict=True))


@runs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"), [(1, 16, 16), (2, 64, 64), (3, 16, 64), (4, 32, 16), (7, 16, 16), (16, 16, 32)]
)
def test_prefill_attention(group, head_dim, page_size, dtype):
    """Lengths around a query block and a page; the same bits whatever chunks a prompt comes in, and in what company."""
    lengths = [1, page_size - 1, page_size + 1, 2 * page_size + 5]
    cache, slots, queries = prompts_in_cache(group, head_dim, page_size, lengths, dtype)
    whole = attended(cache, queries, [(s, 0, n) for s, n in zip(slots, lengths, strict=True)], spare_rows=3)
    for slot, n in zip(slots, lengths, strict=True):
        places = torch.arange(n, device=DEVICE)
        expected = attention_by_torch(cache, queries[slot], torch.full_like(places, slot), places)
        assert_close(torch.stack([whole[slot, i] for i in range(n)]), expected)
    cuts = {s: sorted({0, n // 3, n // 2, n}) for s, n in zip(slots, lengths, strict=True)}
    chunks = [(s, a, b) for s in reversed(slots) for a, b in zip(cuts[s], cuts[s][1:], strict=False)]
    parts = attended(cache, queries, chunks)
    assert parts.keys() == whole.keys() and all(torch.equal(parts[place], whole[place]) for place in whole)


# The step's first and last act.


def slots_of(cache, slots, lengths):
    """Slots whose last known token is not cached yet, each with sampling of its own."""
    state = Slots(cache.pages.n_slots, DEVICE)
    params = [
        SamplingParams(temperature=0.5 + n, top_p=0.9 - n / 100, min_p=n / 100, top_k=3 * n, seed=2**40 + n)
        for n in range(len(slots))
    ]
    tokens = [11 + n for n in range(len(slots))]
    tokens[-1] = -1  # a row that was not finite
    samples = list(range(5, 5 + len(slots)))
    state.write(slots, tokens, [n - 1 for n in lengths], params, [2**33 + s for s in samples], samples)
    return state


def stage(rows, cache, slots, lengths):
    slots, lengths = list(slots), list(lengths)
    pages = [int(cache.pages.table[s, (n - 1) // cache.pages.page_size]) for s, n in zip(slots, lengths, strict=True)]
    rows.staged.zero_()
    rows.staged[0, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    rows.staged[1, : len(slots)] = torch.tensor(pages, dtype=torch.int32)


def listed(pair):
    """Page lists as far as their counts say."""
    count, pages = pair
    return [row[:n].tolist() for row, n in zip(pages[:, 0, 0], count[:, 0, 0].tolist(), strict=True)]


def state_of(rows, slots, cache):
    tensors = [rows.ids, rows.slots, rows.positions, rows.out, slots.tokens, slots.lengths, cache.table, cache.block_of]
    for columns in (rows.columns, slots.columns):
        tensors += [columns.reals, columns.ints, columns.longs]
    return tensors


@runs_kernel
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("bucket", [6, 17, 130])
def test_prepare_and_advance(bucket, page_size, with_mask):
    """Over the edge of a page: pages that the table does not know yet are entered by the step that needs them."""
    config = config_of()
    lengths = [1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size - 1]
    made = []
    for prepare, advance in ((prepare_torch, advance_torch), (step.prepare, step.advance)):
        cache, slots = cache_of(config, lengths, page_size, max_blocks=5, n_slots=8)
        state, rows = slots_of(cache, slots, lengths), Rows(bucket, DEVICE)
        mask = DecodeMask(cache, rows.slots, rows.positions, True) if with_mask else None
        fused = () if prepare is step.prepare else (False,)
        made.append((cache, slots, state, rows, mask, prepare, advance, fused))
    now = list(lengths)
    for turn in range(3):
        which = range(len(lengths)) if turn < 2 else [4, 1]  # a smaller batch last, in another order
        sampled = torch.arange(bucket, device=DEVICE) + 20
        logprobs = noise(bucket, 2, seed=turn)
        for cache, slots, state, rows, mask, prepare, advance, fused in made:
            for i in which:
                assert cache.pages.reserve(slots[i], now[i])
            stage(rows, cache, [slots[i] for i in which], [now[i] for i in which])
            prepare(rows, state, cache, mask, *fused)
            used = len(which)
            assert rows.positions.tolist() == [now[i] - 1 for i in which] + [0] * (bucket - used)
            assert rows.slots.tolist() == [slots[i] for i in which] + [0] * (bucket - used)
            assert int(rows.ids.min()) >= 0
            for i in which:
                mine = cache.pages.table[slots[i], : int(cache.pages.n_blocks[slots[i]])].tolist()
                assert cache.table[slots[i], : len(mine)].tolist() == mine
                assert cache.block_of[mine].tolist() == list(range(len(mine)))
            if mask is not None:
                filled_lists = listed(mask.full), listed(mask.partial)
                mask.fill()
                assert filled_lists == (listed(mask.full), listed(mask.partial))
            advance(rows, state, sampled, logprobs, *fused)
            assert rows.out[:, 0].tolist() == sampled.tolist()
            assert torch.equal(rows.out[:, 1:].view(torch.float32), logprobs)
            assert (int(state.tokens[0]), int(state.lengths[0])) == (0, 0)
            for row, i in enumerate(which):
                assert (int(state.tokens[slots[i]]), int(state.lengths[slots[i]])) == (20 + row, now[i])
        theirs, mine = (state_of(rows, state, cache) for cache, _, state, rows, *_ in made)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
        for i in which:
            now[i] += 1


# The whole engine.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lengths]


def engine_of(folder, **options):
    """On the stand-in for compiled flex_attention, which goes by the block lists that the kernels fill."""
    defaults = {"max_batch": 4, "max_model_len": 64, "page_size": 16, "cuda_graphs": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "flex_attention_function", lambda *_: (attend_by_lists, True))
        patch.setattr(prefill, "MIN_ROWS", 64)  # quicker here
        return Engine.from_pretrained(folder, dtype=torch.float32, device=DEVICE, **{**defaults, **options})


GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)


@runs_kernel
@pytest.mark.parametrize(
    "options",
    [
        {"fused": True, "attention": "triton"},
        {"fused": True, "attention": "flex"},
        {"fused": True, "attention": "triton", "prefill_kernel_options": {"BLOCK_M": 16}},
        {"fused": True, "attention": "triton", "kv_tokens": 48, "max_prefill_tokens": 7, "buckets": [1, 2]},
    ],
    ids=["all", "flex", "flex-prefill", "short-of-pages"],
)
def test_engine_equals_transformers(folder, options, monkeypatch):
    monkeypatch.setattr(paged_attention, "PROGRAMS", 10**6)  # splits on a CPU too
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 2)
    prompts = prompts_of(3, 14, 30, 1)
    engine = engine_of(folder, **options)
    assert (engine.attention, engine.decoder.fused) == (options["attention"], options["fused"])
    paged = options["attention"] == "triton" and "prefill_kernel_options" not in options
    assert (engine._prefill.flex is None) == paged
    assert all(step.paged is None or step.paged.splits == 2 for step in engine._steps.values())
    done = engine.generate(prompts, [GREEDY, dataclasses.replace(GREEDY, n=3), GREEDY, GREEDY])
    expected = reference_greedy(folder, prompts, 5)
    assert [c.token_ids for c in done] == [expected[c.index] for c in done]
    assert len(done) == 6
    assert (engine.stats.preemptions > 0) == ("kv_tokens" in options)


@runs_kernel
@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("qwen2", {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}),
        ("llama", {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}),
        ("llama", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 1, "mlp_bias": True}),
    ],
)
def test_families_equal_transformers(tmp_path, model_type, shape):
    folder = random_checkpoint(tmp_path, model_type, **shape)
    prompts = prompts_of(3, 17)
    done = engine_of(folder, fused=True, attention="triton").generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == reference_greedy(folder, prompts, 5)


@runs_kernel
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"head_dim": 24}, "head_dim 24 is not a power of two"),
        ({"head_dim": 8}, "head_dim 8 is not a power of two of at least 16"),
        ({"head_dim": 16, "num_attention_heads": 17, "num_key_value_heads": 1}, "17 query heads share a KV head"),
    ],
)
def test_models_that_the_attention_kernel_cannot_serve(tmp_path, shape, words):
    folder = random_checkpoint(tmp_path, "qwen3", **shape)
    with pytest.raises(FlexrollError, match=words):
        engine_of(folder, fused=True, attention="triton")
    assert engine_of(folder, fused=False).attention == "flex"


@runs_kernel
def test_a_head_size_that_is_no_power_of_two(tmp_path):
    """The attention kernel cannot serve it, the fused operations must: they are the default on a GPU."""
    folder = random_checkpoint(tmp_path, "qwen3", head_dim=24)
    prompts = prompts_of(3, 17)
    done = engine_of(folder, fused=True).generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == reference_greedy(folder, prompts, 5)


@runs_kernel
def test_the_attention_kernel_goes_with_the_fused_operations(folder):
    """It takes q, k and v as they leave the product: without the fused operations attention is flex_attention's."""
    engine = engine_of(folder, fused=False)
    engine._on_gpu = True
    assert engine._choose_attention() == "flex"
    with pytest.raises(FlexrollError, match="fused"):
        engine_of(folder, fused=False, attention="triton")
