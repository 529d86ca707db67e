"""Rollout backends in the trainer: whose weights, whose probabilities, which order, what memory."""

from __future__ import annotations

import subprocess
import sys
import weakref
from importlib import metadata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from engine_models import gsm_prompts, reference_greedy, reference_logprobs
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.lora.drift import wrong_weights
from flexroll.rl import rollouts
from flexroll.rl.generation import use_flex
from flexroll.rl.rollouts.base import grouped, held_bytes, rollout_seed
from flexroll.rl.trainer import grpo_config, trainer_arguments
from grpo_specs import built, distinct, questions, small_spec, steps_of


@pytest.fixture(scope="module")
def trainer(tiny_gsm, tmp_path_factory):
    """A flex trainer after two steps at a high learning rate: its adapter is no no-op."""
    made = built(small_spec(tiny_gsm, tmp_path_factory.mktemp("flex"), learning_rate=1e-2))
    made.train()
    made.rollout.sync_weights()
    return made


@pytest.fixture
def rollout(trainer):
    """Its rollout; what a test changes of the trainer's sampling is undone."""
    names = ("temperature", "top_k", "top_p", "min_p", "eos_token_ids")
    before = {name: getattr(trainer, name) for name in names}
    yield trainer.rollout
    for name, value in before.items():
        setattr(trainer, name, value)


def repeated(prompts, times):
    return [prompt for prompt in prompts for _ in range(times)]


def with_sampling(rollout, **sampling):
    for name, value in sampling.items():
        setattr(rollout.trainer, name, value)


def teacher_forced(trainer, prompt, tokens):
    """The trainer's own log probabilities of given tokens, at its temperature."""
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), len(tokens))
    return logps[0].tolist()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=9))
def test_groups_put_together_again_are_the_prompts(prompts):
    groups = grouped(prompts)
    assert [prompt for prompt, times in groups for _ in range(times)] == prompts
    assert all(one[0] != other[0] for one, other in pairwise(groups))


@given(st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)), st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)))
def test_two_steps_share_a_seed_only_if_they_are_the_same_step(one, other):
    assert (rollout_seed(*one) == rollout_seed(*other)) == (one == other)


def test_refreshed_weights_are_the_base_and_the_live_adapter_merged(trainer, tiny_gsm):
    wrong, _ = wrong_weights(trainer.rollout.generation.copy, load_weights(tiny_gsm, torch.float32, "cpu"))
    assert wrong == 0
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            assert parameter.abs().max() > 0


def test_greedy_rollouts_are_those_of_the_trained_model(trainer, rollout, tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 3)
    with_sampling(rollout, temperature=0.0)
    _, got, _, _ = rollout.generate(repeated(prompts, 2), None, 2)
    trainer.model.eval()
    want = reference_greedy(tiny_gsm, prompts, 12, eos=2, model=trainer.model)
    assert got == repeated(want, 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_trainers_probabilities(trainer, rollout, tiny_gsm, temperature):
    prompts = gsm_prompts(tiny_gsm, 2)
    with_sampling(rollout, temperature=temperature)
    told, rows, logprobs, _ = rollout.generate(repeated(prompts, 3), None, 3)
    assert told == repeated(prompts, 3) and len({tuple(row) for row in rows}) > 2
    for prompt, row, given_ in zip(told, rows, logprobs, strict=True):
        want = teacher_forced(trainer, prompt, row)
        assert [one[0] for one in given_] == pytest.approx(want, abs=1e-4)


def test_filters_count_in_the_probabilities_as_vllm_counts_them(trainer, rollout, tiny_gsm):
    sampling = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
    with_sampling(rollout, **sampling)
    told, rows, logprobs, _ = rollout.generate(repeated(gsm_prompts(tiny_gsm, 2), 2), None, 2)
    trainer.model.eval()
    for prompt, row, given_ in zip(told, rows, logprobs, strict=True):
        _, want = reference_logprobs(trainer.model, prompt, row, **sampling)
        assert [one[0] for one in given_] == pytest.approx(want, abs=1e-4)


def test_rows_keep_the_order_of_prompts_that_repeat_unevenly(rollout, tiny_gsm):
    a, b, c = gsm_prompts(tiny_gsm, 3)
    with_sampling(rollout, temperature=0.0)
    alone = {tuple(p): rollout.generate([p], None, 1)[1][0] for p in (a, b, c)}
    prompts = [a, a, b, a, c, c, c]
    assert rollout.generate(prompts, None, 2)[1] == [alone[tuple(p)] for p in prompts]


def test_a_completion_ends_with_its_stop_token_or_at_the_full_length(trainer, rollout, tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 4)
    with_sampling(rollout, temperature=0.0)
    first = rollout.generate(prompts, None, 1)[1]
    ends = trainer.eos_token_ids
    trainer.eos_token_ids = [first[0][3], *ends]
    stopped = rollout.generate(prompts, None, 1)[1]
    assert stopped[0] == first[0][: first[0].index(first[0][3]) + 1]
    for row in stopped:
        assert row[-1] in (first[0][3], *ends) or len(row) == 12


def test_a_prompt_that_leaves_no_room_is_refused_and_not_cut(rollout):
    with pytest.raises(FlexrollError, match="exceed max_model_len 256; raise it"):
        rollout.generate([[5] * 250], None, 1)


def test_out_of_memory_is_survived_once_with_the_same_tokens(tiny_gsm, tmp_path, monkeypatch):
    # Each size of the pool would be compiled for.
    trainer = built(small_spec(tiny_gsm, tmp_path, option={"compile": False}, max_completion_length=4))
    rollout, prompts = trainer.rollout, repeated(gsm_prompts(tiny_gsm, 2), 4)
    want = rollout.generate(prompts, None, 4)
    engine = rollout.generation.engine
    generate = engine.generate

    def fails(times):
        left = [times]

        def generate_or_fail(*given):
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
            return generate(*given)

        monkeypatch.setattr(engine, "generate", generate_or_fail)

    def same(got, want):
        """But for the rounding of another batch size."""
        assert got[:2] == want[:2]
        for one, other in zip(got[2], want[2], strict=True):
            assert [x[0] for x in one] == pytest.approx([x[0] for x in other], abs=1e-4)

    fails(1)
    same(rollout.generate(prompts, None, 4), want)
    assert engine.max_batch == 4 and not engine.released
    [fault] = rollout.take_faults()
    assert "out of memory in a rollout of 8 sequences" in fault and "repeated with 4" in fault
    assert rollout.take_faults() == []
    fails(2)
    with pytest.raises(FlexrollError, match="ran out of memory again with 2 sequences at once"):
        rollout.generate(prompts, None, 4)
    fails(0)
    same(rollout.generate(prompts, None, 4), want)
    rollout.generation.running_at_once = 1
    fails(1)
    with pytest.raises(FlexrollError, match="one sequence at a time"):
        rollout.generate(prompts, None, 4)


def test_a_released_pool_is_gone_between_rollouts_and_changes_no_token(tiny_gsm, tmp_path):
    prompts = repeated(gsm_prompts(tiny_gsm, 2), 4)
    kept = built(small_spec(tiny_gsm, tmp_path / "kept")).rollout.generation
    released = built(small_spec(tiny_gsm, tmp_path / "released", pool="released")).rollout.generation
    assert released.engine.released and not kept.engine.released
    assert (released.weights_bytes, released.kv_bytes) == (kept.weights_bytes, kept.kv_bytes)
    seen = []
    generate = released.engine.generate

    def noted(*given):
        seen.append(weakref.ref(released.engine.cache.pool))
        return generate(*given)

    released.engine.generate = noted
    for _ in range(2):
        assert released.generate(prompts, None, 4)[1:3] == kept.generate(prompts, None, 4)[1:3]
        assert released.engine.released and seen[-1]() is None
    with pytest.raises(FlexrollError, match="released; call resize first"):
        generate(prompts)
    released.close()
    released.close()


def test_there_are_two_copies_of_the_weights_and_no_third(trainer, tiny_gsm):
    generation, model = trainer.rollout.generation, trainer.model
    touched = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".base_layer.weight" in name)
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    assert trainer.rollout.memory()["weights"] == generation.weights_bytes == everything + touched
    # Nothing but these holds a tensor of that size: neither the base's view nor the adapter's.
    assert held_bytes(model.parameters(), generation.copy.base.tensors.values()) == everything
    pairs = [t for pair in generation.copy.adapter.pairs.values() for t in pair]
    assert held_bytes(model.parameters(), pairs) == everything
    shared = {t.data_ptr() for t in model.parameters()}
    assert all(generation.engine.weights.tensors[key].data_ptr() in shared for key in ("embed", "head", "norm"))


def test_the_base_is_bit_identical_after_training_and_alike_for_all_backends(trainer, tiny_gsm, tmp_path):
    fresh = built(small_spec(tiny_gsm, tmp_path, "trl"))
    before = fresh.rollout.base_hash()
    assert trainer.rollout.base_hash() == before
    fresh.train()
    assert fresh.rollout.base_hash() == before
    with torch.no_grad():
        next(p for p in fresh.model.parameters() if not p.requires_grad).view(-1)[0] += 1
    assert fresh.rollout.base_hash() != before


def test_continuous_batching_leaves_adapter_and_attention_as_they_were(tiny_gsm, tmp_path):
    trainer = built(small_spec(tiny_gsm, tmp_path, "transformers_cb_sdpa", dtype="bfloat16", steps=1))
    seen, generate_batch = [], trainer.model.get_base_model().generate_batch

    def noted(*given, **named):
        seen.append(trainer.model.get_base_model().config._attn_implementation)
        return generate_batch(*given, **named)

    trainer.model.get_base_model().generate_batch = noted
    trainer.train()
    assert seen == ["paged|sdpa"]
    assert trainer.model.get_base_model().config._attn_implementation == "sdpa"
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert trainer.args.bf16 and any("rounds the whole model" in note for note in trainer.notes)
    assert trainer.rollout.memory()["kv_reserved"] > 0
    assert steps_of(trainer)[0]["loss"] == pytest.approx(0, abs=1)


@pytest.mark.parametrize(
    ("backend", "option", "reason"),
    [
        ("flex", {"four_bit": "on_the_fly"}, "nothing to merge into"),
        ("flex", {"load_format": "dummy"}, "read from files"),
        ("flex", {"replay": "plain"}, "autotuned"),
        ("flex", {"attention": "triton"}, "need a GPU"),
        ("trl", {"four_bit": "shard"}, "leave it out"),
        ("transformers_cb", {"compile": "default"}, "compile_mode"),
        ("transformers_cb_sdpa", {"driver": "sync"}, "manager alone"),
        ("transformers_cb", {"cuda_graph": True}, "needs a GPU"),
        ("vllm", {"load_format": "dummy"}, "from files"),
        ("unsloth", {}, "Unsloth needs a CUDA GPU"),
    ],
)
def test_what_cannot_run_here_says_why(tiny_gsm, tmp_path, backend, option, reason):
    spec = small_spec(tiny_gsm, tmp_path, backend, option=option)
    assert reason in rollouts.unavailable(spec)
    with pytest.raises(FlexrollError, match=reason):
        built(spec)


def test_trls_colocated_vllm_gets_what_trl_has_no_argument_for(tiny_gsm, tmp_path, monkeypatch):
    vllm_generation = pytest.importorskip("trl.generation.vllm_generation")
    option = {"kv_cache_memory_bytes": 12345, "gpu_memory_utilization": None, "enforce_eager": True}
    rollout = rollouts.load("vllm")(small_spec(tiny_gsm, tmp_path, "vllm", option=option, device="cuda"))
    made = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: made.append(given), raising=False)
    plain = vllm_generation.LLM
    with rollout.building():
        vllm_generation.LLM(model="m", max_num_batched_tokens=4096)
    assert vllm_generation.LLM is plain
    given = {"kv_cache_memory_bytes": 12345, "enforce_eager": True, "dtype": "float32"}
    assert made == [{"model": "m", "max_num_batched_tokens": 4096, **given}]
    arguments = rollout.arguments()
    assert arguments["use_vllm"] and arguments["vllm_mode"] == "colocate" and not rollout.hook
    assert "vllm_gpu_memory_utilization" not in arguments  # TRL's own share
    config = grpo_config(trainer_arguments(rollout.spec.model_copy(update={"device": "cpu"}), arguments)[0])
    assert config.vllm_max_model_length == 256


@pytest.mark.parametrize(("version", "reason"), [(None, "not installed here"), ("0.29.1", "this environment has 0.29")])
def test_without_a_trl_that_fits_nothing_runs(tiny_gsm, tmp_path, monkeypatch, version, reason):
    def found(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    assert reason in rollouts.unavailable(small_spec(tiny_gsm, tmp_path))


def test_a_trainer_of_ones_own_generates_with_the_engine(tiny_gsm, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6}
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}

    def own(**more):
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_gsm, dtype=torch.float32),
            reward_funcs=[distinct],
            args=GRPOConfig(**arguments, **settings, **more),
            train_dataset=Dataset.from_list(questions(tiny_gsm)),
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )

    trainer = own()
    generation = use_flex(trainer, tiny_gsm, max_model_len=256, compiled=False)
    assert trainer.vllm_generation is generation and generation.running_at_once == 4
    prompts = repeated(gsm_prompts(tiny_gsm, 2), 2)
    generation.sync_weights()
    ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 2)
    assert len(ids) == len(logprobs) == 4 and all(len(a) == len(b) for a, b in zip(ids, logprobs, strict=True))
    with pytest.raises(FlexrollError, match="make it without use_vllm"):
        use_flex(trainer, tiny_gsm)
    with pytest.raises(FlexrollError, match="no repetition_penalty"):
        use_flex(own(repetition_penalty=1.1), tiny_gsm)
    with pytest.raises(FlexrollError, match="choose kept or released"):
        use_flex(own(), tiny_gsm, pool="lost")
    with pytest.raises(FlexrollError, match="serves text models"):
        generation.generate(prompts, [None] * 4, 2)


def test_an_unknown_backend_is_named():
    with pytest.raises(FlexrollError, match="unknown rollout backend 'flux'; choose from flex, vllm"):
        rollouts.load("flux")


VLLM = """
import sys
from pathlib import Path
from grpo_specs import built, distinct, questions, small_spec, steps_of
spec = small_spec(Path(sys.argv[1]), Path(sys.argv[2]), "vllm", learning_rate=0.02, option={"enforce_eager": True})
trainer = built(spec)
before = trainer.rollout.base_hash()
trainer.train()
memory = trainer.rollout.memory()
assert memory["weights"] > 0 and memory["kv_reserved"] > 0, memory
assert trainer.rollout.base_hash() == before
steps = steps_of(trainer)
assert steps[1]["kl"] > 0, steps
for step in steps:  # the second is sampled with the adapter of the first
    assert step["sampling/sampling_logp_difference/mean"] < 1e-3, step
trainer.rollout.close()
trainer.rollout.close()
print("done")
"""


def test_vllm_on_a_cpu_samples_with_the_present_adapter(tiny_gsm, tmp_path, root):
    if (reason := rollouts.unavailable(small_spec(tiny_gsm, tmp_path, "vllm"))) is not None:
        pytest.skip(reason)
    # A process of its own: vLLM sets up torch.distributed and the environment for good.
    code = f"import sys; sys.path[:0] = {[str(root / 'tests'), str(root / 'src')]!r}\n{VLLM}"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tiny_gsm), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0 and "done" in run.stdout, run.stderr[-3000:]
