"""The adapter, its merge and the drift check, against PEFT in fp32 and bit by bit in bf16."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")

from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_models import gsm_prompts, random_checkpoint, reference_greedy
from flexroll.engine import Engine, SamplingParams
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.lora import drift
from flexroll.lora.adapter import read_adapter, write_adapter
from flexroll.lora.merge import MergedCopy, write_merged
from flexroll.schema.catalogue import LORA_TARGETS

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def engine_of(folder, **options):
    return Engine.from_pretrained(
        folder,
        dtype=torch.float32,
        device="cpu",
        max_batch=4,
        max_model_len=160,
        page_size=32,
        compiled=False,
        **options,
    )


@pytest.fixture(scope="module")
def adapter(tiny_gsm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(tiny_gsm, folder, targets=list(LORA_TARGETS), b_std=0.05)
    return folder


@pytest.fixture
def copied(adapter, tmp_path):
    for path in adapter.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_peft_reads_the_adapter_as_it_was_written(tiny_gsm, adapter):
    model = AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32)
    wrapped = PeftModel.from_pretrained(model, adapter)
    state = {k.replace(".default", ""): v for k, v in wrapped.state_dict().items() if "lora_" in k}
    ours = load_file(adapter / "adapter_model.safetensors")
    assert set(state) == set(ours) and len(ours) == 6 * 7 * 2
    for key, value in ours.items():
        assert torch.equal(state[key].float(), value.float()), key
    config = wrapped.peft_config["default"]
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (32, 64, set(LORA_TARGETS))


@pytest.mark.parametrize("mode", ["merged", "unmerged"])
def test_adapter_equals_pefts_forward(tiny_gsm, adapter, mode):
    prompts = gsm_prompts(tiny_gsm, 6)
    model = AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32)
    plain = reference_greedy(tiny_gsm, prompts, 16, model=model)
    wrapped = PeftModel.from_pretrained(model, adapter)
    expected = reference_greedy(tiny_gsm, prompts, 16, model=wrapped)
    assert expected != plain  # the adapter matters
    engine = engine_of(tiny_gsm, adapter=adapter, adapter_mode=mode)
    assert [c.token_ids for c in engine.generate(prompts, GREEDY)] == expected


def test_merged_checkpoint_equals_the_merged_copy(tiny_gsm, adapter, tmp_path):
    write_merged(tiny_gsm, adapter, tmp_path / "merged")
    written = load_weights(tmp_path / "merged", torch.bfloat16, "cpu")
    copy = MergedCopy(load_weights(tiny_gsm, torch.bfloat16, "cpu"), read_adapter(adapter))
    for name, view in copy.weights.named_views():
        assert torch.equal(view, written.view(name)), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "qwen3"


def test_refresh_writes_in_place_and_shares_what_no_adapter_touches(tiny_gsm, adapter):
    base = load_weights(tiny_gsm, torch.bfloat16, "cpu")
    before = drift.weights_sha256(base)
    copy = MergedCopy(base, read_adapter(adapter))
    places = {key: t.data_ptr() for key, t in copy.weights.tensors.items()}
    for a, _ in copy.adapter.pairs.values():
        a.mul_(1.5)
    stale = drift.weights_sha256(copy.weights)
    copy.refresh()
    assert drift.weights_sha256(copy.weights) != stale
    assert {key: t.data_ptr() for key, t in copy.weights.tensors.items()} == places
    assert drift.weights_sha256(base) == before
    shared = {key for key, t in copy.weights.tensors.items() if t is base.tensors[key]}
    assert shared == {k for k in base.tensors if "norm" in k or k in ("embed", "head")}
    embed = base.tensors["embed"].numel() * 2
    assert base.n_bytes < copy.n_bytes < 2 * (2 * base.n_bytes - embed)


def test_drift_is_none_here_and_some_in_pefts_round_trip(tiny_gsm, adapter):
    report = drift.verify(tiny_gsm, adapter, cycles=3)
    assert report["base_identical"] and report["base_sha256_before"] == report["base_sha256_after"]
    assert report["inference_identical"] and report["merged_exact"] and report["merged_wrong"] == 0
    assert 0 < report["rounding_ties"] < 0.02 * report["weights_checked"]
    assert report["weights_checked"] == 4 * 6 * (256 * 512 * 2 + 256 * 256 * 2 + 3 * 256 * 768)
    cycles = report["peft"]["cycles"]
    assert [c["cycle"] for c in cycles] == [1, 2, 3]
    assert cycles[-1]["max_abs_diff"] > 0 and cycles[-1]["share_changed"] > 0


@pytest.mark.parametrize("fault", ["base", "merged", "restore"])
def test_the_drift_check_can_fail(tiny_gsm, adapter, monkeypatch, fault):
    """Each of the three statements is false when the thing it speaks of is broken."""
    honest = MergedCopy.refresh
    calls = []

    def broken(self):
        honest(self)
        calls.append(1)
        module = next(iter(self.adapter.pairs))
        if fault == "base" and len(calls) == 2:
            self.base.view("model.norm.weight")[0] += 1
        if fault == "merged" and len(calls) == 2:
            self.weights.view(f"{module}.weight")[0, 0] += 1
        if fault == "restore" and len(calls) == 4:
            self.weights.view(f"{module}.weight")[0, 0] += 1

    monkeypatch.setattr(MergedCopy, "refresh", broken)
    report = drift.verify(tiny_gsm, adapter, cycles=2, peft=False)
    # norm weights are shared, so a base that changed shows in the inference copy too
    assert report["base_identical"] == (fault != "base")
    assert report["merged_exact"] == (fault != "merged")
    assert report["inference_identical"] == (fault == "merged")


@pytest.fixture(scope="module")
def trained(tiny_gsm, adapter):
    """A merged copy whose fp32 adapter has left the bf16 grid, as after a training step, and the pristine weights."""
    base = load_weights(tiny_gsm, torch.bfloat16, "cpu")
    copy = MergedCopy(base, read_adapter(adapter).to("cpu", torch.float32))
    drift._perturb(copy.adapter, 1e-3, torch.Generator().manual_seed(1))
    return copy, base


def merge_by(copy, base, how):
    """Overwrite the inference copy with how(base weight, A, B, scale) of each module."""
    for module, (a, b) in copy.adapter.pairs.items():
        name = f"{module}.weight"
        copy.weights.view(name).copy_(how(base.view(name), a, b, copy.adapter.scale))


def as_tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


FAULTS = {
    "stale": lambda w, a, b, s: w.float() + s * ((0.99 * b) @ a),
    "never merged": lambda w, a, b, s: w,
    "delta rounded first": lambda w, a, b, s: w + (s * (b @ a)).bfloat16(),
    "bf16 operands": lambda w, a, b, s: w.float() + s * (b.bfloat16() @ a.bfloat16()).float(),
    "tf32": lambda w, a, b, s: w.float() + s * (as_tf32(b) @ as_tf32(a)),
    "cut off": lambda w, a, b, s: ((w.float() + s * (b @ a)).view(torch.int32) & ~0xFFFF).view(torch.float32),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_merged_in_another_way_are_wrong(trained, fault):
    merge_by(*trained, FAULTS[fault])
    wrong, _ = drift.wrong_weights(*trained)
    assert wrong > 100


def test_any_order_of_the_sum_is_right(trained):
    """Orders that differ in fp32 now and then round differently; fp64 tells those weights from wrong ones."""
    copy, base = trained

    def backwards(w, a, b, s):
        total = torch.zeros(w.shape)
        for k in reversed(range(len(a))):
            total += b[:, k : k + 1] * a[k]
        return w.float() + s * total

    copy.refresh()
    usual = {name: view.clone() for name, view in copy.weights.named_views()}
    merge_by(copy, base, backwards)
    differ = sum(int((view != usual[name]).sum()) for name, view in copy.weights.named_views())
    wrong, ties = drift.wrong_weights(copy, base)
    assert wrong == 0 and 0 < differ <= ties < 0.02 * base.n_bytes / 2
    assert drift.wrong_weights(copy, base, block=1000) == (wrong, ties)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_one_wrong_weight_is_counted(trained, value):
    copy, base = trained
    copy.refresh()
    copy.weights.view(next(f"{module}.weight" for module in copy.adapter.pairs))[-1, -1] = value
    assert drift.wrong_weights(copy, base)[0] == 1


def test_without_triton_the_merge_is_the_same(tiny_gsm, adapter, monkeypatch):
    base = load_weights(tiny_gsm, torch.bfloat16, "cpu")
    expected = drift.weights_sha256(MergedCopy(base, read_adapter(adapter)).weights)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "flexroll.lora.merge_kernel", raising=False)
    monkeypatch.delattr("flexroll.lora.merge_kernel", raising=False)
    assert drift.weights_sha256(MergedCopy(base, read_adapter(adapter)).weights) == expected


def test_refresh_without_a_merged_adapter_says_so(tiny_gsm, adapter):
    for options in ({}, {"adapter": adapter, "adapter_mode": "unmerged"}):
        with pytest.raises(FlexrollError, match="no merged adapter"):
            engine_of(tiny_gsm, **options).refresh()


def edit_settings(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 16}, "not rank 16"),
    ],
)
def test_adapters_of_another_kind(tiny_gsm, copied, changes, words):
    edit_settings(copied, **changes)
    with pytest.raises(FlexrollError, match=words) as caught:
        engine_of(tiny_gsm, adapter=copied)
    assert "\n" not in str(caught.value)


def test_an_adapter_for_another_base(tmp_path, adapter, tiny_gsm):
    other = random_checkpoint(tmp_path / "other", "qwen3", head_dim=16)
    with pytest.raises(FlexrollError, match="another base"):
        engine_of(other, adapter=adapter)
    deeper = random_checkpoint(tmp_path / "deeper", "qwen3", head_dim=16, num_hidden_layers=3)
    write_adapter(deeper, tmp_path / "deep", targets=["q_proj"], rank=4)
    with pytest.raises(FlexrollError, match=r"has no 'model\.layers\.2"):
        engine_of(other, adapter=tmp_path / "deep")


def test_broken_adapter_files(tiny_gsm, copied, tmp_path_factory):
    with pytest.raises(FlexrollError, match=r"no adapter_config\.json"):
        engine_of(tiny_gsm, adapter=tmp_path_factory.mktemp("empty"))
    path = copied / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(k for k in tensors if "lora_A" in k)
    save_file({k: v for k, v in tensors.items() if k != key}, path)
    with pytest.raises(FlexrollError, match="only one of"):
        engine_of(tiny_gsm, adapter=copied)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(FlexrollError, match="not part of a plain LoRA"):
        engine_of(tiny_gsm, adapter=copied)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FlexrollError, match="cannot be read"):
        engine_of(tiny_gsm, adapter=copied)
    path.unlink()
    with pytest.raises(FlexrollError, match="is missing"):
        engine_of(tiny_gsm, adapter=copied)


def test_unknown_mode_is_named(tiny_gsm, adapter):
    with pytest.raises(FlexrollError, match="'fused'"):
        engine_of(tiny_gsm, adapter=adapter, adapter_mode="fused")
