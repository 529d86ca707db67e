"""The flex engine behind the backend protocol: sizes follow the cell, counts are exact, adapters take effect."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from engine_models import gsm_prompts, reference_greedy
from flexroll.backends import load
from flexroll.backends.base import EngineSpec
from flexroll.lora.adapter import write_adapter
from flexroll.schema.config import Sampling


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
        result = backend.generate(prompts[:batch], Sampling(), 8, True, 0)
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
        tokens[mode] = backend.generate(prompts, Sampling(), 8, True, 0).tokens
        weights[mode] = backend.memory()["weights"]
    assert tokens["merged"] == tokens["unmerged"] != tokens["none"]
    assert weights["none"] < weights["unmerged"] < weights["merged"]
