"""The trainer: what a step is, where its seconds go, what is alike on all backends, and what a resumed run repeats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from flexroll.errors import FlexrollError
from flexroll.rl.clock import Clock
from flexroll.rl.rollout_trainer import EpochSampler
from flexroll.rl.trainer import build_trainer, grpo_config, pass_size, trainer_arguments
from grpo_specs import built, small_spec, steps_of, trained


def note_prompts(trainer):
    """Prompts and completions of every rollout, as TRL passes them on."""
    seen = []
    generate = trainer._generate_single_turn

    def noted(prompts, *more, **named):
        made = generate(prompts, *more, **named)
        seen.append((prompts, made[0]))
        return made

    trainer._generate_single_turn = noted
    return seen


@pytest.fixture(scope="module")
def runs(tiny_gsm, tmp_path_factory):
    """Two steps on each of two backends, with what they saw."""
    found = {}
    for backend in ("flex", "trl"):
        clock = Clock()
        trainer = built(small_spec(tiny_gsm, tmp_path_factory.mktemp(backend), backend), clock=clock)
        before, prompts = trained(trainer), note_prompts(trainer)
        clock.take()
        trainer.train()
        found[backend] = trainer, before, prompts, clock.take()
    return found


@pytest.mark.parametrize("backend", ["flex", "trl"])
def test_two_steps_train_the_adapter_and_tell_where_their_seconds_went(runs, backend):
    trainer, before, prompts, spent = runs[backend]
    steps = steps_of(trainer)
    assert len(steps) == 2 and len(prompts) == 2  # a rollout a step
    assert all(math.isfinite(step[name]) for step in steps for name in ("loss", "grad_norm", "kl", "reward", "entropy"))
    assert steps[0]["kl"] == 0  # B is zero: the policy is the base
    after = trained(trainer)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert {p.dtype for p in after.values()} == {torch.float32}
    for part in ("rollout_s", "reward_s", "loss_s", "optimizer_s"):
        assert spent[part] > 0
    assert (spent["refresh_s"] > 0) == (backend == "flex")


def test_data_adapter_and_settings_are_alike_on_all_backends(runs):
    (flex, flex_before, flex_prompts, _), (trl, trl_before, trl_prompts, _) = runs["flex"], runs["trl"]
    assert [prompts for prompts, _ in flex_prompts] == [prompts for prompts, _ in trl_prompts]
    assert all(len(completions) == 8 for _, completions in flex_prompts + trl_prompts)
    assert flex_before.keys() == trl_before.keys()
    assert all(torch.equal(flex_before[name], trl_before[name]) for name in flex_before)
    settings = [trainer.args.to_dict() for trainer in (flex, trl)]
    differ = {name for name in settings[0] if settings[0][name] != settings[1][name]}
    assert differ <= {"output_dir", "logging_dir"}


def test_the_engines_probabilities_are_told_and_corrected_for(runs):
    flex, trl = steps_of(runs["flex"][0]), steps_of(runs["trl"][0])
    for step in flex:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert not any(name.startswith("sampling/") for step in trl for name in step)


def test_without_importance_sampling_there_is_no_correction(tiny_gsm, tmp_path):
    trainer = built(small_spec(tiny_gsm, tmp_path, steps=1, importance_sampling=False))
    trainer.train()
    assert not any(name.startswith("sampling/") for name in steps_of(trainer)[0])


def test_completions_that_end_at_once_train_without_harm(tiny_gsm, tmp_path):
    trainer = built(small_spec(tiny_gsm, tmp_path))
    eos = trainer.eos_token_ids[0]
    generate = trainer.rollout.generate

    def ends_at_once(prompts, *more, **named):
        told, rows, logprobs, ids = generate(prompts, *more, **named)
        return told, [[eos] for _ in rows], [row[:1] for row in logprobs], ids

    trainer.rollout.generate = ends_at_once
    trainer.train()
    for step in steps_of(trainer):
        assert math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])
        assert step["completions/mean_length"] == 1 and step["completions/clipped_ratio"] == 0
        assert step["reward"] == 0 and step["reward_std"] == 0
    assert all(torch.isfinite(p).all() for p in trained(trainer).values())


@given(st.integers(1, 60), st.integers(1, 70))
def test_passes_divide_a_step_and_a_note_says_what_was_adjusted(completions, wanted):
    size, notes = pass_size(completions, wanted)
    assert completions % size == 0 and size <= wanted
    assert bool(notes) == (size != wanted)
    assert all(completions % n for n in range(size + 1, min(wanted, completions) + 1))


@pytest.mark.parametrize(("prompts", "generations", "batch"), [(2, 4, 4), (3, 5, 4), (1, 2, 8), (5, 3, 2)])
def test_trl_takes_any_sizes_and_a_step_is_one_rollout(tiny_gsm, tmp_path, prompts, generations, batch):
    spec = small_spec(
        tiny_gsm, tmp_path, prompts_per_step=prompts, num_generations=generations, per_device_train_batch_size=batch
    )
    arguments, notes = trainer_arguments(spec, {})
    config = grpo_config(arguments)
    assert config.generation_batch_size == prompts * generations
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == prompts * generations
    assert config.steps_per_generation == config.gradient_accumulation_steps
    assert bool(notes) == (config.per_device_train_batch_size != batch)


def test_adjusted_sizes_stand_in_the_trainers_notes(tiny_gsm, tmp_path):
    trainer = built(small_spec(tiny_gsm, tmp_path, "trl", per_device_train_batch_size=3))
    assert trainer.notes == [
        "per_device_train_batch_size 3 does not divide the 8 completions of a step "
        "(prompts_per_step * num_generations); 2 was used"
    ]


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"loss_typ": "grpo"}, "TRL's GRPOConfig has no 'loss_typ'; did you mean 'loss_type'?"),
        ({"zzz": 1}, "TRL's GRPOConfig has no 'zzz'"),
        ({"steps_per_generation": 1, "generation_batch_size": 3}, "TRL refuses these settings"),
    ],
)
def test_a_setting_that_trl_does_not_take_is_one_line(tiny_gsm, tmp_path, trainer, message):
    with pytest.raises(FlexrollError) as error:
        built(small_spec(tiny_gsm, tmp_path, "trl", trainer=trainer))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_settings_of_the_users_own_come_last(tiny_gsm, tmp_path):
    spec = small_spec(tiny_gsm, tmp_path, trainer={"loss_type": "dr_grpo", "lr_scheduler_type": "linear"})
    config = grpo_config(trainer_arguments(spec, {})[0])
    assert config.loss_type == "dr_grpo" and config.lr_scheduler_type == "linear"


def test_too_few_questions_and_a_missing_checkpoint_are_one_line(tiny_gsm, tmp_path):
    with pytest.raises(FlexrollError, match="1 questions are fewer than the 2 of one step"):
        built(small_spec(tiny_gsm, tmp_path, "trl"), count=1)
    spec = small_spec(tiny_gsm, tmp_path, "trl").model_copy(update={"model": tmp_path / "none"})
    with pytest.raises(FlexrollError, match="not a checkpoint folder"):
        build_trainer(spec, Clock(), [], [])


def order_of(epoch):
    sampler = EpochSampler(range(9), mini_repeat_count=2, batch_size=3, repeat_count=1, shuffle=True, seed=4)
    for n in range(epoch + 1):  # those before leave no trace
        sampler.set_epoch(n)
        found = list(sampler)
    return found


def test_an_epochs_order_depends_on_seed_and_epoch_alone():
    late = EpochSampler(range(9), mini_repeat_count=2, batch_size=3, repeat_count=1, shuffle=True, seed=4)
    late.set_epoch(2)
    assert list(late) == order_of(2)
    assert len({tuple(order_of(epoch)) for epoch in range(3)}) == 3
    assert sorted(order_of(1)) == sorted([*range(9)] * 2)


@pytest.mark.parametrize("backend", ["flex", "trl"])
def test_a_run_resumed_in_a_later_epoch_repeats_bit_by_bit(tiny_gsm, tmp_path, backend):
    """6 questions are three steps an epoch; the checkpoint is that of step 4."""
    settings = {"steps": 5, "save_every": 4, "num_generations": 2, "max_completion_length": 6}
    whole = built(small_spec(tiny_gsm, tmp_path / "whole", backend, **settings), count=6)
    seen = note_prompts(whole)
    whole.train()
    resumed = built(small_spec(tiny_gsm, tmp_path / "resumed", backend, **settings), count=6)
    seen_again = note_prompts(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / "checkpoint-4"))
    assert seen_again == seen[4:]
    same = ("loss", "grad_norm", "kl", "reward", "entropy")
    last, again = steps_of(whole)[-1], steps_of(resumed)[-1]
    assert {name: last[name] for name in same} == {name: again[name] for name in same}
    after, after_again = trained(whole), trained(resumed)
    assert all(torch.equal(after[name], after_again[name]) for name in after)
