"""The flex engine behind the backend protocol: sizes follow the cell, counts are exact, adapters take effect."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from engine_models import gsm_prompts, reference_greedy
from flexroll.backends import flex as backend_module
from flexroll.backends import load
from flexroll.backends.base import EngineSpec
from flexroll.backends.flex import FlexBackend, engine_arguments
from flexroll.lora.adapter import write_adapter
from flexroll.schema.config import Sampling
from flexroll.schema.options import FlexOptions


def backend_of(folder, adapter=None, mode="none", **option):
    spec = EngineSpec(
        model=folder,
        adapter_mode=mode,
        adapter=adapter,
        merged=None,
        dtype="float32",
        device="cpu",
        max_batch=4,
        max_model_len=160,
        seed=0,
        option={"compile": False, **option},
    )
    assert load("flex").unavailable(spec) is None
    return load("flex")(spec)


def test_pool_follows_the_batch_and_counts_are_exact(tiny_gsm):
    backend, prompts = backend_of(tiny_gsm, page_size=32), gsm_prompts(tiny_gsm, 4)
    expected = reference_greedy(tiny_gsm, prompts, 8)
    reserved = []
    for batch in (2, 4):
        backend.prepare(batch)
        assert backend.engine.max_batch == batch
        result = backend.generate(prompts[:batch], Sampling(), [8] * batch, True, 0)
        assert result.tokens == expected[:batch]
        assert result.prefill_s > 0 and result.decode_s > 0
        reserved.append(backend.memory()["kv_reserved"])
    token = 2 * 6 * 4 * 64 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert reserved == [(batch * 160 + 32) * token for batch in (2, 4)]


def test_adapter_forms_agree_and_are_counted(tiny_gsm, tmp_path):
    write_adapter(tiny_gsm, tmp_path, targets=["q_proj", "down_proj"], rank=8, b_std=0.2)
    prompts, tokens, weights = gsm_prompts(tiny_gsm, 2), {}, {}
    for mode in ("none", "merged", "unmerged"):
        backend = backend_of(tiny_gsm, None if mode == "none" else tmp_path, mode)
        backend.prepare(2)
        tokens[mode] = backend.generate(prompts, Sampling(), [8, 8], True, 0).tokens
        weights[mode] = backend.memory()["weights"]
    assert tokens["merged"] == tokens["unmerged"] != tokens["none"]
    assert weights["none"] < weights["unmerged"] < weights["merged"]


def test_lengths_and_samples_are_each_prompts_own(tiny_gsm):
    backend, prompts = backend_of(tiny_gsm), gsm_prompts(tiny_gsm, 3)
    expected = reference_greedy(tiny_gsm, prompts, 8)
    backend.prepare(2)
    result = backend.generate(prompts, Sampling(), [8, 1, 5], True, 0)
    assert result.tokens == [row[:n] for row, n in zip(expected, [8, 1, 5], strict=True)]
    hot = backend.generate(prompts[:2], Sampling(temperature=2.0), [8, 4], True, 0, 3)
    assert [len(row) for row in hot.tokens] == [8] * 3 + [4] * 3 and len({tuple(r) for r in hot.tokens}) == 6


def test_options_reach_the_engine_and_what_is_left_open_is_left_to_it(tiny_gsm):
    spec = EngineSpec(tiny_gsm, "none", None, None, "bfloat16", "cpu", 4, 160, 0)
    plain = engine_arguments(replace(spec, option=FlexOptions().model_dump()))
    assert not {"attention", "max_prefill_tokens", "dummy", "kv_tokens"} & set(plain)
    assert plain["compiled"] and plain["cuda_graphs"] and plain["page_size"] == 64
    chosen = FlexOptions(attention="triton", cuda_graphs=False, max_prefill_tokens=128, compile=False)
    given = engine_arguments(replace(spec, option=chosen.model_dump(), dummy=True))
    assert (given["attention"], given["max_prefill_tokens"], given["dummy"]) == ("triton", 128, True)
    assert not given["cuda_graphs"] and not given["compiled"] and given["dtype"] == torch.bfloat16


def test_a_cell_of_the_same_size_keeps_the_pool(tiny_gsm):
    backend = backend_of(tiny_gsm, kv_tokens=128)  # started for one sequence
    cache = backend.engine.cache
    backend.prepare(1)
    assert backend.engine.cache is cache and backend.engine.max_batch == 1
    backend.prepare(3)
    assert backend.engine.cache is not cache and backend.engine.max_batch == 3
    assert backend.engine.kv_tokens == 128


def spec_of(folder, device="cpu", **option):
    return EngineSpec(
        folder, "none", None, None, "bfloat16", device, 4, 160, 0, option=FlexOptions(**option).model_dump()
    )


def test_options_of_the_laboratory_reach_the_engine(tiny_gsm):
    plain = engine_arguments(spec_of(tiny_gsm))
    assert "fused" not in plain and not plain["contiguous"] and not plain["compile_forward"] and not plain["unchecked"]
    assert (plain["compile_mode"], plain["prefill_mask"]) == ("default", "logical")
    chosen = {
        "compile_mode": "max-autotune",
        "compile_forward": True,
        "fused": False,
        "contiguous": True,
        "prefill_mask": "bounds",
        "unchecked": True,
        "page_size": 128,
    }
    given = engine_arguments(spec_of(tiny_gsm, **chosen))
    assert {name: given[name] for name in chosen} == chosen


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"decode_kernel_options": {"num_warps": 4}}, "decode_kernel_options: kernel options are those of GPU kernels"),
        ({"prefill_kernel_options": {"BACKEND": "FLASH"}, "unchecked": True}, "prefill_kernel_options: kernel options"),
        ({"replay": "tma"}, "replay: kernel options are those of GPU kernels"),
        ({"fused": True}, "fused: the fused kernels are Triton's and need a GPU"),
        ({"attention": "triton"}, "need a GPU"),
    ],
)
def test_what_changes_nothing_on_a_cpu_is_skipped_with_a_reason(tiny_gsm, option, words):
    reason = FlexBackend.unavailable(spec_of(tiny_gsm, **option))
    assert words in reason and "\n" not in reason
    if not {"prefill_kernel_options", "replay"} & set(option):  # on a GPU these ask for files and packages
        assert FlexBackend.unavailable(spec_of(tiny_gsm, "cuda", **option)) is None


def test_torchs_cpu_kernel_reads_no_declared_kernel_option():
    """What the reason for skipping says, of the torch that is installed."""
    declared = typing.get_type_hints(getattr(torch.nn.attention.flex_attention, "FlexKernelOptions", object))
    source = inspect.getsource(importlib.import_module("torch._inductor.kernel.flex.flex_cpu"))
    read = set(re.findall(r"""kernel_options(?:\[|\.get\()["'](\w+)""", source))
    assert read and not read & set(declared)


@pytest.mark.parametrize(
    "option",
    [
        {"compile_mode": "max-autotune"},
        {"compile_forward": True},
        {"contiguous": True, "prefill_mask": "bounds"},
        {"fused": False},
        {"unchecked": True},
    ],
)
def test_what_runs_on_a_cpu_is_not_skipped(tiny_gsm, option):
    assert FlexBackend.unavailable(spec_of(tiny_gsm, **option)) is None


def test_flash_without_what_it_needs_is_skipped_with_a_reason(tiny_gsm, monkeypatch):
    option = {"prefill_kernel_options": {"BACKEND": "FLASH"}, "page_size": 128}
    monkeypatch.setattr(backend_module, "flash_missing", lambda: "no flash-attn-4")
    assert FlexBackend.unavailable(spec_of(tiny_gsm, "cuda", **option)) == "no flash-attn-4"
    assert FlexBackend.unavailable(spec_of(tiny_gsm, "cuda", **option, unchecked=True)) is None
    monkeypatch.setattr(backend_module, "flash_missing", lambda: None)
    assert FlexBackend.unavailable(spec_of(tiny_gsm, "cuda", **option)) is None


def test_a_cell_by_bounds_on_contiguous_pages(tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 3)
    backend = backend_of(tiny_gsm, contiguous=True, prefill_mask="bounds", page_size=32, max_prefill_tokens=64)
    expected = reference_greedy(tiny_gsm, prompts, 8)
    for batch in (1, 3):
        backend.prepare(batch)
        assert backend.generate(prompts[:batch], Sampling(), [8] * batch, True, 0).tokens == expected[:batch]
        assert backend.engine.options.contiguous and not backend.engine.cache.pages.shares
