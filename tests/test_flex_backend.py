"""The flex engine behind the backend protocol: sizes follow the cell, counts are exact, adapters take effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from engine_models import gsm_prompts, reference_greedy
from flexroll.backends import load
from flexroll.backends.base import EngineSpec
from flexroll.backends.flex import engine_arguments
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
