"""The engine's options: the same tokens as transformers under each, or one line that says why it cannot be."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from engine_models import attend_by_lists, random_checkpoint, reference_greedy
from flexroll.engine import Engine, SamplingParams, prefill
from flexroll.engine import attention as attention_module
from flexroll.engine import decode as decode_module
from flexroll.engine import engine as engine_module
from flexroll.engine.attention import FLASH_BLOCKS, check_flash, compile_problem, flash_missing
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import BoundsMask, PrefillMask
from flexroll.engine.page_table import ContiguousPageTable
from flexroll.errors import FlexrollError

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
FLASH = {"prefill_kernel_options": {"BACKEND": "FLASH"}, "page_size": FLASH_BLOCKS[1], "unchecked": True}

compiles = pytest.mark.skipif(
    compile_problem(CPU) is not None, reason=f"flex_attention cannot be compiled here: {compile_problem(CPU)}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


def engine_of(folder, function=None, **options):
    """function: stands for compiled flex_attention, whose block lists count; without it the eager one runs."""
    defaults = {"max_batch": 3, "max_model_len": 64, "page_size": 16, "compiled": False}
    with pytest.MonkeyPatch.context() as patch:
        if function is not None:
            patch.setattr(engine_module, "flex_attention_function", lambda *_: (function, True))
        return Engine.from_pretrained(folder, dtype=torch.float32, device="cpu", **{**defaults, **options})


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lengths]


def ids(completions):
    return [c.token_ids for c in completions]


class Recorder:
    """Stands for compiled flex_attention, and keeps what it was called with: (queries, options, block sizes)."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, *, block_mask, enable_gqa, kernel_options):
        self.calls.append((q.shape[2], kernel_options, block_mask.BLOCK_SIZE))
        return attend_by_lists(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, kernel_options=kernel_options)

    @property
    def prefill(self):
        return [call for call in self.calls if call[0] > 1]

    @property
    def decode(self):
        return [call for call in self.calls if call[0] == 1]


# torch.compile.


@compiles
def test_a_compiled_forward_pass_is_one_graph_that_copies_no_cache(folder):
    """Compiled prefill by bounds beside it, both autotuned: everything there is to compile, compiled once."""
    prompts = prompts_of(17, 3, 30, 9)
    options = {"compile_mode": "max-autotune-no-cudagraphs", "contiguous": True, "prefill_mask": "bounds"}
    engine = engine_of(folder, compiled=True, compile_forward=True, max_batch=2, max_prefill_tokens=24, **options)
    assert engine.compiled and engine.attention == "flex" and not engine.decoder.fused
    torch._dynamo.utils.counters.clear()
    completions, code = run_and_get_code(lambda: engine.generate(prompts, GREEDY))
    assert ids(completions) == reference_greedy(folder, prompts, 8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(code) == 2  # prefill's attention, decode steps
    assert not torch._dynamo.utils.counters["graph_break"]
    tokens = engine.cache.keys[0].shape[2]
    made = [line for text in code for line in text.splitlines() if "empty_strided_cpu(" in line]
    assert made and not any(f" {tokens}," in line for line in made)  # no buffer is as long as the pool


def test_what_is_compiled_and_in_which_mode(folder, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append((f.__name__, options)) or f)
    monkeypatch.setattr(attention_module, "compile_problem", lambda device: None)
    flex = {"dynamic": False, "fullgraph": True}
    for options, expected in (
        ({}, [("flex_attention", {**flex, "mode": "default"})]),
        ({"compile_mode": "max-autotune"}, [("flex_attention", {**flex, "mode": "max-autotune"})]),
        (
            {"compile_forward": True, "compile_mode": "max-autotune-no-cudagraphs"},
            [
                ("flex_attention", {**flex, "mode": "max-autotune-no-cudagraphs"}),
                ("_forward", {"dynamic": False, "mode": "max-autotune-no-cudagraphs"}),
            ],
        ),
    ):
        compiled.clear()
        engine_of(folder, compiled=True, **options)
        assert compiled == expected


def test_flex_attention_itself_is_called_only_while_a_graph_is_compiled(folder, monkeypatch):
    """Were it called when dynamo gave the step back to Python, it would run eagerly and pass over the block lists."""
    recorder, prompts = Recorder(), prompts_of(5, 20)
    monkeypatch.setattr(decode_module.torch, "compile", lambda f, **_: f)
    engine = engine_of(folder, recorder, compiled=True, compile_forward=True)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(folder, prompts, 8)
    assert recorder.decode
    plain = Recorder()
    monkeypatch.setattr(attention_module.flex, "flex_attention", plain)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    engine.generate(prompts, GREEDY)
    assert plain.decode


def test_without_a_compiler_a_compiled_forward_pass_runs_eagerly(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match="runs eagerly"):
        engine = engine_of(folder, compiled=True, compile_forward=True)
    prompts = prompts_of(6)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(folder, prompts, 8)


# Masks of prefill.


@pytest.mark.parametrize(
    ("function", "chunk"),
    [(None, 16), (None, 2048), *((attend_by_lists, chunk) for chunk in (1, 7, 16, 33, 2048))],
    ids=lambda value: {None: "eager", attend_by_lists: "lists"}.get(value, value),
)
def test_bounds_give_the_tokens_of_transformers(folder, monkeypatch, function, chunk):
    monkeypatch.setattr(prefill, "MIN_ROWS", 64)
    prompts = prompts_of(45, 7, 16, 33, 1, 50)
    expected = reference_greedy(folder, prompts, 8)
    engine = engine_of(folder, function, contiguous=True, prefill_mask="bounds", max_prefill_tokens=chunk)
    for _ in range(2):  # again on used pages
        assert ids(engine.generate(prompts, GREEDY)) == expected
    masks = [held._mask for held in engine._prefill._passes.values()]
    assert masks and all(isinstance(mask, BoundsMask) for mask in masks)


class OnlyCompared:
    """A key's position that can be compared with tensors of bounds, and nothing else: no arithmetic, no lookup."""

    def __init__(self, position):
        self._position = position

    def __ge__(self, other):
        return other <= self._position

    def __le__(self, other):
        return other >= self._position


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bounds_see_what_the_logical_mask_sees_without_a_lookup_by_key(config, data):
    page_size, q_block, n_slots, max_blocks = 16, 8, 3, 3
    pages = ContiguousPageTable(n_slots, page_size, max_blocks)
    cache = KVCache(config, pages, torch.float32, CPU)
    spans = []
    for slot in data.draw(st.permutations([pages.take_slot() for _ in range(n_slots)])):
        stop = data.draw(st.integers(1, page_size * max_blocks))
        pages.reserve(slot, stop)
        start = data.draw(st.integers(0, stop - 1))
        spans.append((slot, start, stop))
    cache.place([slot for slot, _, _ in spans])
    n_rows = 160  # more than three sequences of 48 tokens take
    slots, positions = torch.zeros(n_rows, dtype=torch.int64), torch.full((n_rows,), -1, dtype=torch.int64)
    at = 0
    for slot, start, stop in spans:
        slots[at : at + stop - start] = slot
        positions[at : at + stop - start] = torch.arange(start, stop)
        at += prefill.whole_blocks(stop - start, q_block)
    logical, bounds = (kind(cache, slots, positions, False, q_block) for kind in (PrefillMask, BoundsMask))
    for mask in (logical, bounds):
        mask.fill(spans)
    rows, keys = torch.arange(n_rows)[:, None], torch.arange(cache.keys[0].shape[2])
    seen = torch.broadcast_to(bounds.visible(rows, OnlyCompared(keys)), (n_rows, len(keys)))
    assert torch.equal(seen, torch.broadcast_to(logical.visible(rows, keys), seen.shape))
    assert seen.sum(1).tolist() == (positions + 1).tolist()
    for mine, theirs in zip(bounds.partial + bounds.full, logical.partial + logical.full, strict=True):
        assert torch.equal(mine, theirs)
    assert bounds.first.storage_offset() == bounds.last.storage_offset() == 0


@pytest.fixture(scope="module")
def config(folder):
    return engine_of(folder).config


# Kernel options, and flash-attention's kernels.


@pytest.mark.parametrize("chunk", [31, 2048])
def test_flash_gets_its_blocks_and_only_its_own_options(folder, chunk):
    recorder, prompts = Recorder(), prompts_of(45, 7, 16, 33)
    engine = engine_of(folder, recorder, contiguous=True, prefill_mask="bounds", max_prefill_tokens=chunk, **FLASH)
    assert ids(engine.generate(prompts, GREEDY)) == reference_greedy(folder, prompts, 8)
    assert engine._prefill.q_block == FLASH_BLOCKS[0]
    for rows, options, blocks in recorder.prefill:
        assert options == {"BACKEND": "FLASH"} and blocks == FLASH_BLOCKS and rows % FLASH_BLOCKS[0] == 0
    assert recorder.prefill and {options and tuple(options) for _, options, _ in recorder.decode} == {None}


def test_defaults_of_the_gpu_are_not_given_to_flash(folder, monkeypatch):
    engine = engine_of(folder, page_size=128)
    engine.device, engine.options.unchecked = torch.device("cuda"), True
    monkeypatch.setattr(engine_module, "kernel_options", lambda *_: {"num_warps": 4})
    flash = engine._options_of("prefill", {"BACKEND": "FLASH"}, torch.bfloat16)
    assert flash == {"BACKEND": "FLASH"}
    plain = engine._options_of("prefill", {"num_stages": 2}, torch.bfloat16)
    assert plain == {"num_warps": 4, "num_stages": 2, "BLOCK_N": 64, "BLOCK_M": 64}
    assert engine._options_of("decode", {"num_warps": 8}, torch.bfloat16) == {"num_warps": 8, "BLOCK_N": 64}


@pytest.fixture
def flash_fits(monkeypatch, config):
    """Arguments of check_flash that it takes; a test changes one of them, or the GPU, or what is installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention_module, "flash_missing", lambda: None)
    fitting = replace(config, head_dim=128)
    device = torch.device("cuda")
    arguments = {"kind": "prefill", "config": fitting, "dtype": torch.bfloat16, "device": device, "page_size": 128}
    check_flash(**arguments, compiled=True)
    return {**arguments, "compiled": True}


def refusal(arguments):
    with pytest.raises(FlexrollError) as caught:
        check_flash(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "decode"}, "decode_kernel_options: BACKEND FLASH serves prefill alone"),
        ({"compiled": False}, "needs compiled flex_attention"),
        ({"device": CPU}, "needs a GPU of compute capability 9, 10 or 11"),
        ({"dtype": torch.float32}, "computes in bfloat16 or float16"),
        ({"page_size": 64}, "blocks of 128; give page_size 128"),
    ],
)
def test_what_flash_cannot_do_is_refused(flash_fits, change, words):
    assert words in refusal({**flash_fits, **change})


@pytest.mark.parametrize("head_dim", [256, 100])
def test_a_head_flash_cannot_take_is_refused(flash_fits, head_dim):
    changed = {**flash_fits, "config": replace(flash_fits["config"], head_dim=head_dim)}
    assert "head_dim of at most 128, a multiple of 8" in refusal(changed)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_a_gpu_without_flash_is_refused(flash_fits, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert "needs a GPU of compute capability 9, 10 or 11" in refusal(flash_fits)


def test_flash_that_is_not_installed_is_refused(flash_fits, monkeypatch):
    monkeypatch.setattr(attention_module, "flash_missing", lambda: "no package")
    assert refusal(flash_fits) == "prefill_kernel_options: no package"


def test_flash_asks_for_its_package(monkeypatch):
    if not hasattr(torch.nn.attention.flex_attention, "FlexKernelOptions"):
        pytest.skip("this torch declares no kernel options")
    if "BACKEND" not in torch.nn.attention.flex_attention.FlexKernelOptions.__annotations__:
        assert "has no kernel option 'BACKEND'" in flash_missing()
        return
    for found, words in ((None, "flash-attn-4"), (ImportError, "flash-attn-4"), (object(), None)):

        def find_spec(name, found=found):
            assert name == "flash_attn.cute"
            if found is ImportError:
                raise found
            return found

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        assert flash_missing() is None if words is None else words in flash_missing()


def test_flash_is_checked_where_the_engine_starts(folder):
    with pytest.raises(FlexrollError, match="prefill_kernel_options: ") as caught:
        engine_of(folder, prefill_kernel_options={"BACKEND": "FLASH"})
    assert "\n" not in str(caught.value)


def test_unchecked_options_go_to_torch_as_they_are(folder):
    recorder, wrong = Recorder(), {"NUM_WARPS": 4, "BLOCKS_ARE_CONTIGUOUS": True}
    with pytest.raises(FlexrollError):
        engine_of(folder, recorder, decode_kernel_options=wrong)
    engine = engine_of(folder, recorder, decode_kernel_options=wrong, prefill_kernel_options=wrong, unchecked=True)
    engine.generate(prompts_of(5), GREEDY)
    assert recorder.prefill and recorder.decode and all(options == wrong for _, options, _ in recorder.calls)


# Which options go together.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile_mode": "fast"}, "unknown compile_mode 'fast'; choose default or max-autotune or"),
        ({"prefill_mask": "pages"}, "unknown prefill_mask 'pages'; choose logical or bounds"),
        ({"prefill_mask": "bounds"}, "'bounds' needs pages that lie one after another; give contiguous=True"),
        ({"compile_forward": True, "compiled": True, "fused": True}, "leave fused=True out"),
        ({"compile_forward": True, "compiled": True, "attention": "triton"}, "leave attention 'triton' out"),
        ({"compile_forward": True}, "need compiled=True"),
        ({"compile_mode": "max-autotune"}, "need compiled=True"),
        ({"compile_mode": "max-autotune", "compiled": True, "attention": "triton"}, "attention 'triton' takes none"),
        ({"contiguous": True, "kv_tokens": 64}, "leave kv_tokens out"),
    ],
)
def test_options_that_do_not_go_together_end_in_one_line(folder, options, words):
    with pytest.raises(FlexrollError, match=words) as caught:
        engine_of(folder, **options)
    assert "\n" not in str(caught.value)


def test_what_flex_attention_alone_heeds_is_not_given_to_the_paged_kernels(folder):
    engine = engine_of(folder)
    engine._on_gpu, engine.decoder.fused, engine.options.compiled = True, True, True
    assert engine._choose_attention() == "triton"
    engine.options.compile_mode = "max-autotune-no-cudagraphs"
    assert engine._choose_attention() == "flex"
