"""The engine against transformers in fp32, token by token, and the awkward sizes that paged engines get wrong."""

from __future__ import annotations

import contextlib
import typing
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention

from engine_models import gsm_prompts, random_checkpoint, reference_greedy
from flexroll.engine import Engine, SamplingParams
from flexroll.engine.attention import check_kernel_options, with_block_sizes
from flexroll.engine.masks import Q_BLOCK
from flexroll.errors import FlexrollError

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def tiny_engine(folder, **options):
    defaults = {
        "dtype": torch.float32,
        "device": "cpu",
        "max_batch": 4,
        "max_model_len": 64,
        "page_size": 16,
        "compiled": False,
    }
    return Engine.from_pretrained(folder, **{**defaults, **options})


def ids(completions):
    return [c.token_ids for c in completions]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lengths]


def test_32_prompts_equal_transformers_compiled(tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 32)
    engine = Engine.from_pretrained(
        tiny_gsm, dtype=torch.float32, device="cpu", max_batch=12, max_model_len=320, max_prefill_tokens=512
    )
    assert engine.compiled
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=32))
    assert [c.index for c in completions] == list(range(32))
    assert ids(completions) == reference_greedy(tiny_gsm, prompts, 32, eos=2)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "shard": "20KB"}),
        ("qwen2", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope": "llama3"}),
        ("llama", {"rope": "linear"}),
        ("qwen3", {"head_dim": 16, "rope": "yarn"}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 6}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_every_family_equals_transformers(tmp_path, model_type, changes):
    folder = random_checkpoint(tmp_path, model_type, **changes)
    prompts = prompts_of(3, 17, 30, 9, 16, 41)
    engine = tiny_engine(folder, max_batch=2)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(folder, prompts, 12)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_prompt_lengths_around_a_page(qwen3, length):
    prompts = prompts_of(length, length)
    expected = reference_greedy(qwen3, prompts, 20)
    engine = tiny_engine(qwen3)
    for _ in range(2):  # again on used pages
        assert ids(engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))) == expected


def test_more_prompts_than_slots_come_back_in_order(qwen3):
    prompts = prompts_of(*range(2, 15))
    params = [SamplingParams(max_new_tokens=1 + n % 7, ignore_eos=True) for n in range(13)]
    finished = []
    completions = tiny_engine(qwen3, max_batch=3).generate(prompts, params, progress=finished.append)
    assert [c.index for c in completions] == list(range(13))
    assert sorted(c.index for c in finished) == list(range(13))
    expected = reference_greedy(qwen3, prompts, 7)
    assert ids(completions) == [row[: p.max_new_tokens] for row, p in zip(expected, params, strict=True)]


def test_long_prompts_are_prefilled_in_chunks(qwen3):
    prompts = prompts_of(45, 7, 50, 33)
    engine = tiny_engine(qwen3, max_prefill_tokens=16)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(qwen3, prompts, 12)


def test_preemption_recomputes_and_changes_nothing(qwen3):
    prompts = prompts_of(14, 15, 13, 16)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    engine = tiny_engine(qwen3, kv_tokens=80)
    assert ids(engine.generate(prompts, params)) == reference_greedy(qwen3, prompts, 40)
    assert engine.stats.preemptions > 0
    assert engine.cache.pages.free_pages == engine.cache.pages.n_pages


def test_an_adversarial_placement_changes_nothing(qwen3):
    prompts = prompts_of(20, 35, 18)
    engine = tiny_engine(qwen3)
    expected = ids(engine.generate(prompts, GREEDY))
    engine.cache.pages._free_pages[::2], engine.cache.pages._free_pages[1::2] = (
        engine.cache.pages._free_pages[1::2],
        engine.cache.pages._free_pages[::2],
    )
    for pool in engine.cache.keys + engine.cache.values:
        pool.uniform_(-9, 9)  # what other sequences left behind
    assert ids(engine.generate(prompts, GREEDY)) == expected


def test_eos_at_the_first_token_and_stop_ids(qwen3):
    prompt = prompts_of(10)[0]
    first, second, third = reference_greedy(qwen3, [prompt], 3)[0]
    engine = tiny_engine(qwen3)
    engine.config = engine.config.__class__(**{**engine.config.__dict__, "eos_ids": (first,)})
    stopped = engine.generate([prompt], SamplingParams(max_new_tokens=9))[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop")
    ignored = engine.generate([prompt], SamplingParams(max_new_tokens=3, ignore_eos=True))[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([first, second, third], "length")
    by_id = engine.generate([prompt], SamplingParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=(third,)))[0]
    assert by_id.token_ids == [first, second, third][: [first, second, third].index(third) + 1]
    assert by_id.finish_reason == "stop"


def test_zero_and_one_new_token(qwen3):
    prompts = prompts_of(5, 6)
    engine = tiny_engine(qwen3)
    assert ids(engine.generate(prompts, SamplingParams(max_new_tokens=0))) == [[], []]
    one = engine.generate(prompts, SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert ids(one) == reference_greedy(qwen3, prompts, 1)
    assert engine.stats.decode_tokens == 2 and engine.stats.prefill_tokens == 9  # a prompt's last token is decoded
    first = engine.stats.first_token_s
    engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert 0 < engine.stats.first_token_s < engine.stats.prefill_s + engine.stats.decode_s and first > 0
    assert engine.generate([], GREEDY) == []


def test_generation_ends_at_max_model_len(qwen3):
    prompt = prompts_of(60)[0]
    completion = tiny_engine(qwen3).generate([prompt], SamplingParams(max_new_tokens=50, ignore_eos=True))[0]
    assert completion.finish_reason == "length"
    assert completion.token_ids == reference_greedy(qwen3, [prompt], 4)[0]
    longest = prompts_of(63)[0]
    assert ids(tiny_engine(qwen3).generate([longest], GREEDY)) == reference_greedy(qwen3, [longest], 1)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5], []], {}, "prompt 1 is empty"),
        ([[5, 97]], {}, "outside the vocabulary"),
        ([list(range(2, 66))], {}, "max_model_len 64 allows 63"),
        ([[5] * 30], {"kv_tokens": 32}, "can never fit the KV pool of 32"),
    ],
)
def test_bad_prompts_end_in_one_line(qwen3, prompts, options, words):
    engine = tiny_engine(qwen3, **options)
    with pytest.raises(FlexrollError, match=words) as caught:
        engine.generate(prompts, GREEDY)
    assert "\n" not in str(caught.value)
    good = prompts_of(4)
    assert ids(engine.generate(good, SamplingParams(max_new_tokens=4, ignore_eos=True))) == reference_greedy(
        qwen3, good, 4
    )


def test_an_interrupted_call_leaves_the_engine_usable(qwen3):
    engine, prompts = tiny_engine(qwen3), prompts_of(8, 9, 10, 11, 12)

    def stop(completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, GREEDY, progress=stop)
    assert engine.cache.pages.free_slots == 4
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(qwen3, prompts, 12)


def test_nothing_but_the_request_decides_its_sample(qwen3):
    """The same seed gives the same tokens whatever the batch size, page size or preemptions; another seed does not."""
    prompts = prompts_of(14, 15, 13, 16)
    params = SamplingParams(max_new_tokens=30, temperature=1.3, top_p=0.95, seed=7, ignore_eos=True)
    first = ids(tiny_engine(qwen3).generate(prompts, params))
    assert ids(tiny_engine(qwen3, max_batch=1, page_size=32).generate(prompts, params)) == first
    preempting = tiny_engine(qwen3, kv_tokens=80)
    assert ids(preempting.generate(prompts, params)) == first
    assert preempting.stats.preemptions > 0
    other = SamplingParams(max_new_tokens=30, temperature=1.3, top_p=0.95, seed=8, ignore_eos=True)
    assert ids(tiny_engine(qwen3).generate(prompts, other)) != first


def test_equal_prompts_in_one_call_draw_different_samples(qwen3):
    prompts = prompts_of(9) * 4
    rows = ids(
        tiny_engine(qwen3).generate(prompts, SamplingParams(max_new_tokens=16, temperature=1.5, ignore_eos=True))
    )
    assert len({tuple(row) for row in rows}) == 4
    greedy = ids(tiny_engine(qwen3).generate(prompts, GREEDY))
    assert len({tuple(row) for row in greedy}) == 1


def test_buckets_are_a_matter_of_speed_alone(qwen3):
    prompts = prompts_of(5, 9, 14, 3, 8)
    expected = reference_greedy(qwen3, prompts, 12)
    for buckets, padded in ((None, [4]), ([1, 2], [1, 2, 4]), ([3, 99], [3, 4])):
        engine = tiny_engine(qwen3, buckets=buckets)
        assert engine.buckets == padded
        assert ids(engine.generate(prompts, GREEDY)) == expected


def test_nothing_runs_first_within_a_graph(qwen3, monkeypatch):
    """Kernels are chosen and compiled by a product's shape, and nothing can be compiled while a graph is recorded."""
    engine = tiny_engine(qwen3, max_prefill_tokens=200, buckets=[1, 2])
    warm, recorded = set(), set()
    seen = warm
    linear = torch.nn.functional.linear

    def spy(x, weight, *rest):
        seen.add((tuple(x.shape), tuple(weight.shape)))
        return linear(x, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    parts = [*engine._steps.values(), engine._prefill]
    for part in parts:
        part.warm_up()
    seen = recorded
    for part in parts:
        part.capture(None)
    assert {rows for (rows, _), _ in recorded} >= {1, 2, 4, 64, 128, 192}
    assert recorded <= warm


def test_unknown_kernel_option_is_named(qwen3):
    with pytest.raises(FlexrollError, match="no kernel option 'NUM_WARPS'"):
        tiny_engine(qwen3, decode_kernel_options={"NUM_WARPS": 4})


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_contiguous_blocks_are_refused(qwen3, kind):
    """Pages come from a free list: the flag would read other sequences' keys. Switched off it may be named."""
    with pytest.raises(
        FlexrollError, match="BLOCKS_ARE_CONTIGUOUS needs a sequence's pages to lie one after"
    ) as caught:
        tiny_engine(qwen3, **{f"{kind}_kernel_options": {"BLOCKS_ARE_CONTIGUOUS": True}})
    assert str(caught.value).startswith(f"{kind}_kernel_options: ") and "\n" not in str(caught.value)
    tiny_engine(qwen3, **{f"{kind}_kernel_options": {"BLOCKS_ARE_CONTIGUOUS": False}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_model_len": 1}, "max_model_len at least 2"),
        ({"buckets": [0, 2]}, "buckets must be at least 1"),
        ({"attention": "paged"}, "unknown attention 'paged'; choose flex or triton"),
        ({"kv_tokens": 15}, "kv_tokens 15 is less than one page of 16 tokens"),
    ],
)
def test_bad_options_end_in_one_line(qwen3, options, words):
    with pytest.raises(FlexrollError, match=words) as caught:
        tiny_engine(qwen3, **options)
    assert "\n" not in str(caught.value)


def test_the_triton_kernel_needs_a_gpu(qwen3, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(FlexrollError, match="attention 'triton' needs a GPU"):
        tiny_engine(qwen3, attention="triton")


def test_without_a_compiler_the_engine_warns_and_runs_eagerly(qwen3, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match="install g\\+\\+"):
        engine = tiny_engine(qwen3, compiled=True)
    assert not engine.compiled
    prompts = prompts_of(6)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(qwen3, prompts, 12)


def test_eager_prefill_passes_are_small(qwen3):
    """Uncompiled flex_attention holds a score for each head, query and position of the pool."""
    assert tiny_engine(qwen3).max_prefill_tokens == 256
    assert tiny_engine(qwen3, max_prefill_tokens=512).max_prefill_tokens == 512
    engine = tiny_engine(qwen3, max_model_len=352, max_batch=2)
    prompts = prompts_of(300, 40)
    made = engine.generate(prompts, GREEDY)
    assert engine.stats.prefill_tokens == 338 and ids(made) == reference_greedy(qwen3, prompts, 12)


def test_a_gpu_kernel_block_divides_that_of_the_mask():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for page, block in ((16, 16), (32, 32), (64, 64), (128, 64), (256, 64)):
        assert with_block_sizes({}, cuda, page, prefill=False) == {"BLOCK_N": block}
        assert with_block_sizes({}, cuda, page, prefill=True) == {"BLOCK_N": block, "BLOCK_M": Q_BLOCK}
    for given in ({"BLOCK_N": 32}, {"fwd_BLOCK_N": 128, "num_warps": 8}):
        assert with_block_sizes(given, cuda, 64, prefill=False) == given
    for given in ({"BLOCK_N": 32, "BLOCK_M": 16}, {"fwd_BLOCK_N": 128, "fwd_BLOCK_M": 128}):
        assert with_block_sizes(given, cuda, 64, prefill=True) == given
    assert with_block_sizes({"num_warps": 4}, cpu, 64, prefill=True) == {"num_warps": 4}


def test_a_kernel_option_may_be_named_for_the_forward_pass():
    declared = getattr(flex_attention, "FlexKernelOptions", None)
    if declared is None:
        pytest.skip("this torch declares no kernel options")

    def checked(options, contiguous=True):
        return check_kernel_options(options, "decode_kernel_options", contiguous)

    for name in typing.get_type_hints(declared):
        assert checked({name: 64}) == checked({f"fwd_{name}": 64}) == {name: 64}
        with pytest.raises(FlexrollError, match=f"'{name}' and 'fwd_{name}' are the same here"):
            checked({name: 64, f"fwd_{name}": 128})
    with pytest.raises(FlexrollError, match="BLOCKS_ARE_CONTIGUOUS needs"):
        checked({"fwd_BLOCKS_ARE_CONTIGUOUS": True}, contiguous=False)
    for key in ("fwd_BLOCK_NN", "bwd_BLOCK_N", "forward_BLOCK_N"):
        with pytest.raises(FlexrollError, match="no kernel option"):
            checked({key: 64})


def test_options_of_flex_attention_are_never_given_to_another(qwen3):
    for options, compiled, expected in (
        ({}, True, "triton"),
        ({"decode_kernel_options": {"num_warps": 4}}, True, "flex"),
        ({}, False, "flex"),
    ):
        engine = tiny_engine(qwen3, **options)
        engine._on_gpu, engine.decoder.fused, engine.options.compiled = True, True, compiled
        assert engine._choose_attention() == expected
    with pytest.raises(FlexrollError, match="attention 'triton' takes none"):
        tiny_engine(qwen3, attention="triton", decode_kernel_options={"num_warps": 4})
