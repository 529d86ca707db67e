"""The parts of tuning that need torch: the call that is tuned, a sweep's rollouts, and what defaults become."""

from __future__ import annotations

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")

from engine_models import random_checkpoint
from flexroll.backends.base import EngineSpec
from flexroll.backends.flex import FlexBackend, engine_arguments
from flexroll.engine import defaults
from flexroll.errors import FlexrollError
from flexroll.tune import autotune_worker, sweep_worker


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of two layers: rollouts of it cost next to nothing."""
    return random_checkpoint(tmp_path_factory.mktemp("small"), "qwen3", head_dim=8)


def test_the_tuned_call_has_the_shape_of_the_engines_decode_step(tiny_gsm, monkeypatch):
    """And nothing is given that would not be tuned then."""
    seen = []

    def spy(q, k, v, **rest):
        seen.append((q.shape, k.shape, v.shape, rest["block_mask"].shape, rest["kernel_options"], rest["enable_gqa"]))
        return torch.zeros_like(q)

    monkeypatch.setattr(autotune_worker.torch, "compile", lambda function, **options: spy)
    task = {"model": str(tiny_gsm), "dtype": "float32", "batch": 3, "max_model_len": 40, "page_size": 16}
    task |= {"kv_tokens": None, "device": "cpu"}
    out = autotune_worker.decode_call(task, autotune_worker.MODE, {"FORCE_USE_FLEX_ATTENTION": True})
    (q, k, v, mask, options, gqa), n_pages = seen[0], 3 * 3 + 1
    config = autotune_worker.read_decoder_config(tiny_gsm)
    assert q == (3, config.n_heads, 1, config.head_dim)
    assert k == v == (1, config.n_kv_heads, n_pages * 16, config.head_dim)
    assert mask == (3, 1, 1, n_pages * 16)
    assert options == {"FORCE_USE_FLEX_ATTENTION": True} and gqa
    assert out.shape == (3, config.n_heads * config.head_dim)


def test_torch_without_the_log_says_so(monkeypatch, capsys, tmp_path):
    from torch._inductor import select_algorithm

    assert autotune_worker.logs_tuning() == hasattr(select_algorithm, "get_flex_attention_log_filename")
    monkeypatch.setattr(autotune_worker, "logs_tuning", lambda: False)
    (tmp_path / "t.json").write_text("{}")
    assert autotune_worker.main([str(tmp_path / "t.json")]) == autotune_worker.NO_LOG
    assert f"torch {torch.__version__} writes no log" in capsys.readouterr().out


def spec_of(tmp_path, device, options, **option):
    replay = tmp_path / "torch2.11-plain.json"
    replay.write_text(json.dumps({"options": options, "reason": "" if options else "no decode step in the log"}))
    return EngineSpec(tmp_path, "none", None, None, "bfloat16", device, 4, 64, 0, replay=replay, option=option)


def test_a_replay_runs_with_the_logged_options_and_is_skipped_without_any(tmp_path):
    found = {"num_warps": 8, "FORCE_USE_FLEX_ATTENTION": True}
    spec = spec_of(tmp_path, "cuda", found, replay="plain", decode_kernel_options={"PRESCALE_QK": True})
    assert FlexBackend.unavailable(spec) is None
    assert engine_arguments(spec)["decode_kernel_options"] == {**found, "PRESCALE_QK": True}
    without = spec_of(tmp_path, "cuda", None, replay="plain")
    assert FlexBackend.unavailable(without) == "nothing to replay: no decode step in the log"
    other = spec_of(tmp_path, "cuda", None, decode_kernel_options={"num_warps": 2})
    assert engine_arguments(other)["decode_kernel_options"] == {"num_warps": 2}
    assert FlexBackend.unavailable(spec_of(tmp_path, "cpu", found, replay="plain"))


def test_the_longest_part_of_a_gpus_name_counts_and_key_blocks_fit_a_page(monkeypatch):
    def entry(warps, **more):
        return {"options": {"num_warps": warps, **more}, "note": ""}

    table = {
        "": {"decode": entry(1), "prefill": entry(1)},
        "H200": {"decode": entry(2, BLOCK_N=64), "prefill": entry(2)},
        "NVIDIA H200 NVL": {"decode": entry(3)},
    }
    assert defaults.options_for("NVIDIA H200", "decode", table)["num_warps"] == 2
    assert defaults.options_for("NVIDIA H200 NVL", "decode", table)["num_warps"] == 3
    assert defaults.options_for("NVIDIA H200 NVL", "prefill", table)["num_warps"] == 2
    assert defaults.options_for("NVIDIA B200", "prefill", table)["num_warps"] == 1
    monkeypatch.setattr(defaults, "measured", lambda: table)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda")
    assert defaults.kernel_options("decode", device, 32) == {"num_warps": 2, "BLOCK_N": 32}
    assert defaults.kernel_options("decode", device, 128) == {"num_warps": 2, "BLOCK_N": 64}
    assert table["H200"]["decode"]["options"]["BLOCK_N"] == 64
    assert defaults.kernel_options("decode", torch.device("cpu")) == {}


@pytest.fixture
def bench(small, tmp_path):
    """A sweep's engines on the CPU, and the events they tell."""
    setup = {"model": str(small), "dtype": "float32", "dummy": False, "device": "cpu", "batch": 2}
    setup |= {"prompt_tokens": 12, "new_tokens": 8, "page_size": 16, "compiled": False, "seed": 0}
    told = []

    class Events:
        def send(self, event, **values):
            told.append((event, values))

    found = sweep_worker.Bench(setup | {"reference": str(tmp_path / "reference.json")}, Events())
    return found, told


def test_points_are_measured_interleaved_and_checked_against_the_default(bench):
    engines, told = bench
    assert engines.measure([{}, {"page_size": 32}], 8, 2, True)
    ready = {values["index"]: values["agreement"] for event, values in told if event == "ready"}
    assert ready == {0: 1.0, 1: 1.0}  # in fp32 the page size changes no token
    rounds = [values for event, values in told if event == "round"]
    assert sorted(r["index"] for r in rounds) == [0, 0, 1, 1]
    assert {r["index"] for r in rounds[:2]} == {0, 1}
    assert all(r["tps"] * r["seconds"] == pytest.approx(16) for r in rounds)
    assert told[-1] == ("done", {})


def test_a_point_that_raises_or_says_other_tokens_is_out_and_the_rest_goes_on(bench, monkeypatch):
    engines, told = bench
    assert engines.measure([{}], 4, 1, True)
    told.clear()
    real = engines._check

    def check(engine, default):
        if engine.options.page_size == 32:  # what a kernel that reads other sequences' keys would do
            for keys in engine.cache.keys:
                keys.fill_(3.0)
            monkeypatch.setattr(engine.cache, "place", lambda slots: engine.cache.table.fill_(1))
        return real(engine, default)

    monkeypatch.setattr(engines, "_check", check)
    assert engines.measure([{}, {"page_size": 24}, {"page_size": 32}, {"page_size": 64}], 4, 1, True)
    failed = {values["index"]: values["reason"] for event, values in told if event == "failed"}
    assert set(failed) == {1, 2} or set(failed) == {2}  # pages of 24 may run eagerly
    assert "wrong tokens" in failed[2]
    assert {values["index"] for event, values in told if event == "round"} >= {0, 3}


@pytest.mark.slow
def test_a_sweep_on_the_cpu_from_end_to_end(small, tmp_path, monkeypatch, root):
    """Two page sizes, a real worker process; interrupted in the middle, then taken up."""
    from flexroll.tune import evaluator, sweep

    monkeypatch.setattr(sweep, "device_class", lambda: "cpu")
    request = sweep.Request(
        small,
        "engine",
        tmp_path / "out",
        batch=2,
        prompt_tokens=12,
        new_tokens=4,
        rounds=3,
        dtype="float32",
        compiled=False,
        only={"page_size": ["16", "32"], "max_prefill_tokens": ["512"]},
    )
    calls = []
    real = evaluator.WorkerEvaluator.measure

    def measure(self, points, *rest):
        if len(calls) == 2:
            calls.append(None)
            raise KeyboardInterrupt
        calls.append([p.id for p in points])
        return real(self, points, *rest)

    monkeypatch.setattr(evaluator.WorkerEvaluator, "measure", measure)
    (tmp_path / "containers").mkdir()
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(request, tmp_path, None)
    summary = sweep.sweep(request, tmp_path, None)
    done = [tuple(call) for call in calls if call]
    assert len(done) == len(set(done)) == 5  # the default, two points, the final, the duel: none of them twice
    assert summary.winner.values["page_size"] in (16, 32) and len(summary.winner.duel) == 3
    assert all(row.agreement == 1.0 and row.stage == "final" for row in summary.ranking)
    assert sweep.read_summary(tmp_path / "out" / "sweep.json") == summary
    with pytest.raises(FlexrollError, match=r"another sweep \(other new_tokens, plan_new_tokens\)"):
        sweep.sweep(dataclasses.replace(request, new_tokens=7), tmp_path, None)
