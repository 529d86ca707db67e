"""Kinds of wrong output and hang that other engines' users reported, and what must not change an output.

On the CPU in fp32, against transformers. The reports are named beside the tests; what is tested is the kind. Attention
is a plain stand-in for compiled flex_attention, block lists included; test_engine.py runs the real one.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import (
    attend_by_lists,
    random_checkpoint,
    reference_greedy,
    reference_logprobs,
    reference_model,
)
from flexroll.engine import Engine, SamplingParams, pipeline, prefill
from flexroll.engine import engine as engine_module
from flexroll.engine.sampling import NOT_FINITE
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.3, top_p=0.95, seed=7)


class Model:
    """One checkpoint: its folder, the engine's weights and transformers' model, each loaded once."""

    def __init__(self, folder):
        self.folder = folder
        self.weights = load_weights(folder, torch.float32, "cpu")
        self.reference = reference_model(folder)
        self._rows = {}

    def engine(self, weights=None, eager=False, **options):
        defaults = {"max_batch": 4, "max_model_len": 64, "page_size": 16, "compiled": False}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "MIN_ROWS", 64)  # quicker here, and passes are cut more often
            if not eager:
                patch.setattr(engine_module, "flex_attention_function", lambda *_: (attend_by_lists, True))
            return Engine(weights or self.weights, **{**defaults, **options})

    def greedy(self, prompts, new_tokens=NEW):
        for prompt in prompts:
            key = (tuple(prompt), new_tokens)
            if key not in self._rows:
                self._rows[key] = reference_greedy(self.folder, [prompt], new_tokens, model=self.reference)[0]
        return [self._rows[tuple(prompt), new_tokens] for prompt in prompts]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return Model(random_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16))


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lengths]


def ids(completions):
    return [c.token_ids for c in completions]


def all_free(engine):
    pages = engine.cache.pages
    return (pages.free_pages, pages.free_slots) == (pages.n_pages, pages.n_slots)


# Lengths and sizes.


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_of_full_pages_again_and_again(qwen3, length):
    """nano-vllm#114."""
    prompts = prompts_of(length) * 2 + prompts_of(length + 1)
    engine = qwen3.engine()
    for _ in range(3):
        assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)
        assert all_free(engine)


@pytest.mark.parametrize("length", [1, 7, 16, 17])
def test_equal_prompts_together_are_continued_alike(qwen3, length):
    """nano-vllm#89: the first row was wrong."""
    prompts = prompts_of(length) * 6
    engine = qwen3.engine(buckets=[1, 2, 4])
    assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)


def test_a_prompt_of_the_maximal_length(qwen3):
    """nano-vllm PR#258."""
    engine = qwen3.engine(max_model_len=32)
    full, longest = prompts_of(32, 31)
    with pytest.raises(FlexrollError, match="has 32 tokens; max_model_len 32 allows 31"):
        engine.generate([longest, full], GREEDY)
    (done,) = engine.generate([longest], GREEDY)
    assert (done.token_ids, done.finish_reason) == (qwen3.greedy([longest], 1)[0], "length")
    assert all_free(engine)


def test_a_sequence_that_just_fits_the_pool_and_one_that_does_not(qwen3):
    """vllm#35541: a prompt larger than the pool hung."""
    engine = qwen3.engine(kv_tokens=39)  # not a multiple of the page: two pages
    assert engine.kv_tokens == 32
    (prompt,) = prompts_of(20)
    for n in (1, 3):
        done = engine.generate([prompt] * 2, dataclasses.replace(GREEDY, n=n))
        assert ids(done) == qwen3.greedy([prompt]) * 2 * n
    for params in (dataclasses.replace(GREEDY, max_new_tokens=13), dataclasses.replace(GREEDY, max_new_tokens=99)):
        with pytest.raises(FlexrollError, match="can never fit the KV pool of 32"):
            engine.generate([prompt], params)
    with pytest.raises(FlexrollError, match="can never fit"):
        engine.generate(prompts_of(33), dataclasses.replace(GREEDY, max_new_tokens=0))
    assert all_free(engine)


def test_an_empty_prompt_is_refused_before_anything_runs(qwen3):
    """vllm#7283."""
    engine = qwen3.engine()
    seen = []
    with pytest.raises(FlexrollError, match="prompt 2 is empty"):
        engine.generate([*prompts_of(3, 4), []], GREEDY, progress=seen.append)
    assert not seen and engine.stats.prefill_tokens == 0
    assert engine.generate([], GREEDY) == []


def test_no_new_tokens_among_others(qwen3):
    """vllm#6521."""
    prompts = prompts_of(5, 6, 7)
    params = [GREEDY, dataclasses.replace(GREEDY, max_new_tokens=0, n=2, logprobs=True), GREEDY]
    done = qwen3.engine().generate(prompts, params)
    first, last = qwen3.greedy([prompts[0], prompts[2]])
    assert ids(done) == [first, [], [], last]
    assert [(c.index, c.sample) for c in done] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert (done[1].finish_reason, done[1].logprobs, done[1].raw_logprobs) == ("length", [], [])


def test_a_stop_token_first(qwen3, monkeypatch):
    """vllm#52693. What was launched beyond the stop is in neither the tokens nor the log probabilities."""
    prompts = prompts_of(9, 10, 11)
    rows = qwen3.greedy(prompts)
    stops = [dataclasses.replace(GREEDY, stop_token_ids=(row[0],), logprobs=True) for row in rows]
    arrive_late(monkeypatch, 3)
    engine = qwen3.engine(max_batch=2)
    done = engine.generate(prompts + prompts, stops + [GREEDY] * 3)
    assert ids(done) == [row[:1] for row in rows] + rows
    assert [c.finish_reason for c in done] == ["stop"] * 3 + ["length"] * 3
    assert [len(c.logprobs) for c in done[:3]] == [1, 1, 1]
    assert all_free(engine)


def test_more_samples_than_any_bucket_and_every_bucket(qwen3):
    """vllm#27178: many buckets; pytorch#152297: a smaller last batch after a larger one."""
    engine = qwen3.engine(max_batch=7, buckets=list(range(1, 8)))
    assert engine.buckets == [1, 2, 3, 4, 5, 6, 7]
    prompts = prompts_of(*range(3, 14))
    expected = qwen3.greedy(prompts, 5)
    params = dataclasses.replace(GREEDY, max_new_tokens=5)
    for count in (11, 7, 6, 1, 2, 5, 3, 4):
        assert ids(engine.generate(prompts[:count], params)) == expected[:count]
    few = qwen3.engine(max_batch=3, buckets=[2])
    assert ids(few.generate(prompts[:7], params)) == expected[:7]
    assert ids(few.generate(prompts[:1], params)) == expected[:1]


@pytest.mark.parametrize("eager", [False, True])
def test_rows_of_padding_stay_finite(qwen3, eager):
    """pytorch#194154, #186775: a row that may see nothing gave NaN."""
    engine = qwen3.engine(max_batch=8, eager=eager)
    engine.generate(prompts_of(17), GREEDY)
    (step,) = engine._steps.values()
    assert len(step.rows) == 8
    assert bool((step.rows.out[:, 0] >= 0).all())
    assert bool(step.rows.out[:, 1:].view(torch.float32).isfinite().all())


def test_another_size_and_back_leaves_nothing_behind(qwen3):
    """transformers#45323: constants of an old graph."""
    engine, prompts = qwen3.engine(), prompts_of(3, 16, 21, 33, 40, 8)
    expected = qwen3.greedy(prompts)
    for max_batch, kv_tokens, pages in ((4, None, 16), (1, 64, 4), (6, 128, 8), (2, None, 8), (4, None, 16)):
        engine.resize(max_batch, kv_tokens)
        assert (engine.cache.pages.n_pages, engine.buckets) == (pages, [max_batch])
        assert ids(engine.generate(prompts, GREEDY)) == expected
        assert all_free(engine)


def test_an_old_pool_is_gone_before_a_new_one_is_taken(qwen3, monkeypatch):
    """Measured: a pool that what ran on it still held made a resize need both at once."""
    engine = qwen3.engine()
    engine.generate(prompts_of(3, 16, 21), GREEDY)
    old, seen = weakref.ref(engine.cache.pool), []
    taken = engine_module.KVCache

    def take(*args):
        seen.append(old())
        return taken(*args)

    monkeypatch.setattr(engine_module, "KVCache", take)
    engine.resize(2)
    assert seen == [None]


def test_slots_forget_how_the_last_call_sampled(qwen3):
    engine, prompts = qwen3.engine(), prompts_of(6, 7, 8, 9)
    expected = qwen3.greedy(prompts)
    sampled = ids(engine.generate(prompts, SAMPLED))
    assert ids(engine.generate(prompts[:2], GREEDY)) == expected[:2]
    mixed = engine.generate(prompts, [GREEDY, SAMPLED, GREEDY, SAMPLED])
    assert ids(mixed) == [expected[0], sampled[1], expected[2], sampled[3]]
    assert ids(engine.generate(prompts, SAMPLED)) == sampled


# Where a completion ends.


@pytest.mark.parametrize("where", ["config", "generation_config", "list", "neither"])
def test_end_of_text_of_base_and_chat_checkpoints(qwen3, tmp_path, where):
    """Qwen3#927: base and chat checkpoints of one family name different tokens, in either file or in both."""
    prompts = prompts_of(9, 14, 23)
    rows = qwen3.greedy(prompts)
    end = rows[0][3]
    named = {
        "config": (end, 96),
        "generation_config": (1, end),
        "list": (1, [96, end]),
        "neither": (None, None),
    }[where]
    folder = shutil.copytree(qwen3.folder, tmp_path / "model")
    for name, value in zip(("config.json", "generation_config.json"), named, strict=True):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
    ends = {end, 1, 96} if where != "neither" else set()
    ends &= {t for value in named for t in (value if isinstance(value, list) else [value])}

    def cut(row):
        at = next((i for i, t in enumerate(row) if t in ends), None)
        return (row, "length") if at is None else (row[: at + 1], "stop")

    engine = qwen3.engine(load_weights(folder, torch.float32, "cpu"), max_batch=2)
    done = engine.generate(prompts, dataclasses.replace(GREEDY, ignore_eos=False))
    assert [(c.token_ids, c.finish_reason) for c in done] == [cut(row) for row in rows]
    assert (done[0].finish_reason == "stop") == (where != "neither")


# Calls that fail.


def fail(completion):
    raise RuntimeError("of the caller's own")


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failing_call_leaves_the_engine_as_it_was(qwen3, monkeypatch, depth):
    arrive_late(monkeypatch, depth)
    engine, prompts = qwen3.engine(max_prefill_tokens=16), prompts_of(8, 33, 10, 45, 12)
    first = dataclasses.replace(GREEDY, max_new_tokens=2, n=3)
    for bad, params, error in (
        (prompts, [first, *[dataclasses.replace(GREEDY, n=2)] * 4], RuntimeError),
        ([*prompts, []], GREEDY, FlexrollError),
        ([*prompts, [97]], GREEDY, FlexrollError),
        ([[-1], *prompts], GREEDY, FlexrollError),
        (prompts, [GREEDY] * 4, FlexrollError),
    ):
        with pytest.raises(error):
            engine.generate(bad, params, progress=fail)
        assert all_free(engine)
        assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)


def test_weights_that_are_not_finite_are_an_error_and_no_token(qwen3):
    """The weights may be mended after that: a trainer that writes into them."""
    engine, prompts = qwen3.engine(), prompts_of(8, 20)
    norm = qwen3.weights.tensors["1.mlp_norm"]
    kept = norm.clone()
    try:
        norm[3] = float("nan")
        for params in (GREEDY, SAMPLED):
            with pytest.raises(FlexrollError, match="not finite") as caught:
                engine.generate(prompts, params)
            assert str(caught.value) == NOT_FINITE
            assert all_free(engine)
    finally:
        norm.copy_(kept)
    assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)


@pytest.mark.parametrize("eager", [False, True])
def test_the_cache_forgets_values_that_were_not_finite(qwen3, eager):
    """NaN keys and values of a failed call lie in pages that later calls fill only in part: 0 * NaN is NaN."""
    engine, prompts = qwen3.engine(eager=eager), prompts_of(8, 20)
    norm = qwen3.weights.tensors["0.attn_norm"]
    kept = norm.clone()
    try:
        norm[3] = float("nan")
        with pytest.raises(FlexrollError, match="not finite"):
            engine.generate(prompts, GREEDY)
    finally:
        norm.copy_(kept)
    assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)


# Properties: what must not change an output.


def arrive_late(monkeypatch, depth):
    """Steps in flight up to `depth`, read only when it is reached or the engine waits, as on a slow GPU."""
    monkeypatch.setattr(pipeline, "DEPTH", depth)

    def read(self, wait):
        if self._in_flight and (wait or len(self._in_flight) >= pipeline.DEPTH):
            self._read_oldest()

    monkeypatch.setattr(pipeline.Pipeline, "read", read)


@dataclasses.dataclass(frozen=True)
class Run:
    """How an engine is set up, none of which may be seen in its output."""

    max_batch: int
    buckets: tuple[int, ...]
    page_size: int
    kv_pages: int | None
    max_prefill_tokens: int
    q_block: int
    depth: int
    placement: int

    def generate(self, model, prompts, params):
        with pytest.MonkeyPatch.context() as patch:
            arrive_late(patch, self.depth)
            engine = model.engine(
                max_batch=self.max_batch,
                buckets=self.buckets,
                page_size=self.page_size,
                kv_tokens=self.kv_pages and self.kv_pages * self.page_size,
                max_prefill_tokens=self.max_prefill_tokens,
                prefill_kernel_options={"BLOCK_M": self.q_block},
            )
            order = random.Random(self.placement)
            order.shuffle(engine.cache.pages._free_pages)
            order.shuffle(engine.cache.pages._free_slots)
            engine.cache.pool.uniform_(-9, 9)  # what other sequences left behind
            done = engine.generate(prompts, params)
        assert all_free(engine)
        return done


# Lengths on both sides of a page, with room for NEW tokens in four pages of 16: where preemption is drawn, it happens.
POOL = prompts_of(1, 15, 16, 17, 30, 33)


@st.composite
def runs(draw):
    page_size = draw(st.sampled_from([8, 16, 32]))
    longest = -(-(len(POOL[-1]) + NEW) // page_size)
    return Run(
        draw(st.integers(1, 5)),
        tuple(draw(st.sets(st.integers(1, 5), max_size=3))),
        page_size,
        draw(st.one_of(st.none(), st.integers(longest, longest + 3))),
        draw(st.sampled_from([1, 7, 16, 100])),
        draw(st.sampled_from([16, 64])),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 9)),
    )


chosen = st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=6)


@settings(max_examples=40)
@given(run=runs(), which=chosen, samples=st.sampled_from([1, 1, 2, 5]))
def test_greedy_output_is_a_function_of_the_prompt(qwen3, run, which, samples):
    prompts = [POOL[i] for i in which]
    done = run.generate(qwen3, prompts, dataclasses.replace(GREEDY, n=samples))
    assert [(c.index, c.sample) for c in done] == [(i, s) for i in range(len(which)) for s in range(samples)]
    assert ids(done) == [row for row in qwen3.greedy(prompts) for _ in range(samples)]


@pytest.fixture(scope="module")
def sampled(qwen3):
    """Three samples of each prompt of the pool, in an engine without any haste."""
    done = qwen3.engine(max_batch=1).generate(POOL, dataclasses.replace(SAMPLED, n=3))
    return {(c.index, c.sample): c.token_ids for c in done}


@settings(max_examples=40)
@given(run=runs(), count=st.integers(1, len(POOL)), samples=st.integers(1, 3), others=st.booleans())
def test_sampled_output_is_a_function_of_seed_request_and_sample(qwen3, sampled, run, count, samples, others):
    """Fewer samples are the first of many, and the rest of the batch may be anything."""
    params = [dataclasses.replace(SAMPLED, n=samples)] * count
    prompts = POOL[:count]
    if others and count > 1:
        prompts = [POOL[-1], *prompts[1:]]
        params = [dataclasses.replace(SAMPLED, temperature=0.4, seed=3), *params[1:]]
    done = run.generate(qwen3, prompts, params)
    kept = {(c.index, c.sample): c.token_ids for c in done if not (others and count > 1 and c.index == 0)}
    assert kept == {key: sampled[key] for key in kept}
    assert len(kept) == samples * (count - (others and count > 1))


def test_samples_prompts_and_seeds_differ(qwen3, sampled):
    assert len({tuple(row) for row in sampled.values()}) == len(sampled)
    (prompt,) = prompts_of(5)
    rows = ids(qwen3.engine().generate([prompt] * 3, dataclasses.replace(SAMPLED, n=2)))
    assert len({tuple(row) for row in rows}) == 6  # equal prompts are requests of their own
    seeds = [dataclasses.replace(SAMPLED, seed=seed) for seed in (0, 1, 2**32, 2**63 - 1, -1)]
    alone = [qwen3.engine().generate([prompt], p)[0].token_ids for p in seeds]
    assert len({tuple(row) for row in alone}) == 5


# Samples of one prompt.


def spy(monkeypatch, engine):
    """What the engine launches, in order: ("prefill", [(index, start, stop)]) and ("decode", indices, pages in use)."""
    events = []
    run, launch, pages = engine._prefill.run, engine._pipeline.launch, engine.cache.pages

    def prefill_pass(chunks):
        events.append(("prefill", [(s.index, start, stop) for s, start, stop in chunks]))
        run(chunks)

    def decode(batch):
        events.append(("decode", [s.index for s in batch], pages.n_pages - pages.free_pages))
        launch(batch)

    monkeypatch.setattr(engine._prefill, "run", prefill_pass)
    monkeypatch.setattr(engine._pipeline, "launch", decode)
    return events


@pytest.mark.parametrize(
    ("length", "pages"),
    # Each sample's NEW tokens end in the page after the shared ones; the token that is decoded first is not shared.
    [(1, 4), (16, 4 * 2), (17, 1 + 4), (18, 1 + 4), (33, 2 + 4), (34, 2 + 4)],
)
def test_samples_share_the_pages_of_their_prompt(qwen3, monkeypatch, length, pages):
    (prompt,) = prompts_of(length)
    engine = qwen3.engine()
    events = spy(monkeypatch, engine)
    done = engine.generate([prompt], dataclasses.replace(GREEDY, n=4))
    assert ids(done) == qwen3.greedy([prompt]) * 4
    assert max(e[2] for e in events if e[0] == "decode") == pages
    assert engine.stats.prefill_tokens == length - 1
    assert all_free(engine)


@pytest.mark.parametrize("length", [1, 16, 17, 30])
def test_more_samples_than_slots_prefill_their_prompt_once(qwen3, length):
    prompts = prompts_of(length, length)
    engine = qwen3.engine(max_batch=3)
    params = dataclasses.replace(SAMPLED, n=7)
    done = engine.generate(prompts, params)
    assert engine.stats.prefill_tokens == 2 * (length - 1)
    alone = qwen3.engine(max_batch=14).generate(prompts, params)
    assert ids(done) == ids(alone)
    assert len({tuple(row) for row in ids(done)}) == 14


@pytest.mark.parametrize("length", [1, 16, 17])
def test_samples_survive_preemption(qwen3, length):
    prompts = prompts_of(length, length)
    params = dataclasses.replace(SAMPLED, n=3, max_new_tokens=40, logprobs=True)
    engine = qwen3.engine(max_batch=6, kv_tokens=112)
    done = engine.generate(prompts, params)
    assert engine.stats.preemptions > 0 and all_free(engine)
    calm = qwen3.engine(max_batch=6).generate(prompts, params)
    assert ids(done) == ids(calm)
    for mine, theirs in zip(done, calm, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_finished_samples_make_room_for_those_that_wait(qwen3):
    """Samples that end at different lengths: a slot freed early is given to a sample that shares its prompt."""
    (prompt,) = prompts_of(18)
    stop = tuple(range(2, 97, 9))
    params = dataclasses.replace(SAMPLED, n=9, stop_token_ids=stop, temperature=1.0, max_new_tokens=20)
    engine = qwen3.engine(max_batch=2)
    done = engine.generate([prompt], params)
    assert ids(done) == ids(qwen3.engine(max_batch=9).generate([prompt], params))
    assert len({len(row) for row in ids(done)}) > 2
    for c in done:
        assert (c.token_ids[-1] in stop) == (c.finish_reason == "stop")
        assert not set(c.token_ids[:-1]) & set(stop)
    assert engine.stats.prefill_tokens == 17


# Log probabilities.


@pytest.mark.parametrize("kv_tokens", [None, 80], ids=["calm", "preempted"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.5, "top_k": 9},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=lambda how: "-".join(how) or "greedy",
)
def test_log_probabilities_are_those_of_transformers(qwen3, how, kv_tokens):
    """trl#4159: log probabilities that ignore the temperature."""
    prompts = prompts_of(14, 15, 13, 16)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=True, seed=5, **how)
    engine = qwen3.engine(kv_tokens=kv_tokens)
    done = engine.generate(prompts, params)
    assert (engine.stats.preemptions > 0) == (kv_tokens is not None)
    for prompt, c in zip(prompts, done, strict=True):
        raw, processed = reference_logprobs(qwen3.reference, prompt, c.token_ids, **how)
        assert c.raw_logprobs == pytest.approx(raw, abs=1e-4)
        assert c.logprobs == pytest.approx(processed, abs=1e-4)
        assert (c.logprobs != c.raw_logprobs) == bool(how)


def test_log_probabilities_only_for_those_who_ask(qwen3):
    prompts = prompts_of(5, 6)
    first, second = qwen3.engine().generate(prompts, [dataclasses.replace(GREEDY, logprobs=True), GREEDY])
    assert len(first.logprobs) == len(first.raw_logprobs) == NEW
    assert second.logprobs is None and second.raw_logprobs is None


# Prefill beside decoding.


def test_a_long_prompt_does_not_stall_those_that_run(qwen3, monkeypatch):
    """The long prompt takes the slot of one that ends early; every pass of its chunks is followed by a step of 0."""
    prompts = prompts_of(4, 5, 50)
    params = [
        dataclasses.replace(GREEDY, max_new_tokens=30),
        dataclasses.replace(GREEDY, max_new_tokens=2),
        GREEDY,
    ]
    engine = qwen3.engine(max_batch=2, max_prefill_tokens=8)
    events = spy(monkeypatch, engine)
    done = engine.generate(prompts, params)
    expected = qwen3.greedy(prompts, 30)
    assert ids(done) == [expected[0], expected[1][:2], expected[2][:NEW]]
    chunks = [i for i, e in enumerate(events) if e[0] == "prefill" and any(c[0] == 2 for c in e[1])]
    assert len(chunks) == 7  # 49 tokens by 8
    for i in chunks:
        assert events[i + 1][0] == "decode" and events[i + 1][1] == ([0, 2] if i == chunks[-1] else [0])
    assert sum(len(e[1]) for e in events if e[0] == "decode") == engine.stats.decode_tokens


def test_prefill_takes_no_more_than_its_budget_and_repeats_nothing(qwen3, monkeypatch):
    prompts = prompts_of(20, 1, 33, 16)
    engine = qwen3.engine(max_prefill_tokens=10)
    events = spy(monkeypatch, engine)
    assert ids(engine.generate(prompts, GREEDY)) == qwen3.greedy(prompts)
    passes = [e[1] for e in events if e[0] == "prefill"]
    assert all(0 < sum(stop - start for _, start, stop in chunks) <= 10 for chunks in passes)
    seen = {i: [] for i in range(4)}
    for index, start, stop in (chunk for chunks in passes for chunk in chunks):
        seen[index] += range(start, stop)
    assert seen == {i: list(range(len(p) - 1)) for i, p in enumerate(prompts)}
    assert engine.stats.prefill_tokens == sum(len(p) - 1 for p in prompts)


def test_the_largest_budgets_start_first(qwen3):
    """A long sequence that starts last would run on alone; equal budgets keep the order they came in."""
    prompts, budgets = prompts_of(5, 6, 7, 8, 9), [2, 9, 4, 9, 3]
    params = [SamplingParams(max_new_tokens=b, ignore_eos=True) for b in budgets]
    ended = []
    engine = qwen3.engine(max_batch=1)
    done = engine.generate(prompts, params, progress=lambda c: ended.append(c.index))
    assert ended == [1, 3, 2, 4, 0]
    assert [len(c.token_ids) for c in done] == budgets
