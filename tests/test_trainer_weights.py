"""A trainer's model generates through the engine from its own base and adapter, and nothing of it is written."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from engine_models import gsm_prompts, reference_greedy
from flexroll.engine import Engine, SamplingParams
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.lora.drift import weights_sha256, wrong_weights
from flexroll.rl.trainer_weights import double_copy, trainer_weights

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(max_new_tokens=12)


def trained_model(folder, dtype, targets):
    """A PEFT model whose adapter is no no-op, as after some steps."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    step(model)
    return model


def step(model, std=0.02):
    """What an optimiser's step does to the adapter: it writes in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * std)


def engine_of(model, folder):
    copy = double_copy(model, folder)
    return copy, Engine(copy.weights, merged=copy, max_batch=4, max_model_len=320, compiled=False)


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj"], ["down_proj"]], ids=["all", "two", "one"])
def test_it_generates_what_the_trainers_model_would_before_and_after_a_step(tiny_gsm, targets):
    model = trained_model(tiny_gsm, torch.float32, targets)
    prompts = gsm_prompts(tiny_gsm, 4)
    copy, engine = engine_of(model, tiny_gsm)
    before = weights_sha256(copy.base)
    seen = []
    for _ in range(2):
        engine.refresh()
        got = [c.token_ids for c in engine.generate(prompts, GREEDY)]
        assert got == reference_greedy(tiny_gsm, prompts, 12, model=model)
        seen.append(weights_sha256(copy.weights))
        step(model, 0.2)
    assert seen[0] != seen[1]
    assert weights_sha256(copy.base) == before == weights_sha256(load_weights(tiny_gsm, torch.float32, "cpu"))


def test_merged_weights_are_the_base_and_the_delta_rounded_once(tiny_gsm):
    model = trained_model(tiny_gsm, torch.bfloat16, ALL)
    copy, engine = engine_of(model, tiny_gsm)
    pristine = load_weights(tiny_gsm, torch.bfloat16, "cpu")
    for _ in range(3):
        step(model)
        engine.refresh()
        wrong, _ = wrong_weights(copy, pristine)
        assert wrong == 0


def test_there_are_two_copies_of_the_weights_and_not_three(tiny_gsm):
    model = trained_model(tiny_gsm, torch.bfloat16, ALL)
    copy, _ = engine_of(model, tiny_gsm)
    theirs = {p.data_ptr() for p in model.parameters()}
    assert {t.data_ptr() for t in copy.base.tensors.values()} <= theirs
    shared = {key for key, t in copy.weights.tensors.items() if t.data_ptr() in theirs}
    assert shared == {key for key in copy.weights.tensors if "norm" in key or key in ("embed", "head")}
    own = sum(t.numel() * t.element_size() for key, t in copy.weights.tensors.items() if key not in shared)
    assert own < load_weights(tiny_gsm, torch.bfloat16, "cpu").n_bytes


def test_an_untouched_matrix_of_its_own_is_the_trainers(tiny_gsm):
    model = trained_model(tiny_gsm, torch.bfloat16, ["q_proj"])
    theirs = {p.data_ptr() for p in model.parameters()}
    tensors = double_copy(model, tiny_gsm).weights.tensors
    assert tensors["0.down.weight"].data_ptr() in theirs and tensors["0.o.weight"].data_ptr() in theirs
    assert tensors["0.qkv.weight"].data_ptr() not in theirs


def test_what_cannot_serve_is_said_in_one_line(tiny_gsm):
    plain = AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32)
    with pytest.raises(FlexrollError, match="is trained itself"):
        trainer_weights(plain, tiny_gsm)
    plain.requires_grad_(False)
    with pytest.raises(FlexrollError, match="no adapter 'default'"):
        double_copy(plain, tiny_gsm)
    mixed = LoraConfig(r=8, lora_alpha=16, alpha_pattern={"q_proj": 8}, target_modules=ALL, task_type="CAUSAL_LM")
    with pytest.raises(FlexrollError, match="takes one for all modules"):
        double_copy(get_peft_model(plain, mixed), tiny_gsm)
