"""Training runs as processes that are stopped, killed and gone on with, and their records; real trainers and fakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import grpo_fakes
from engine_models import random_checkpoint
from flexroll.bench.process import Stopped
from flexroll.bench.worker import Events
from flexroll.errors import FlexrollError
from flexroll.launch import running_stack
from flexroll.rl import progress
from flexroll.rl.clock import Clock
from flexroll.rl.data import prepare_questions, read_questions
from flexroll.rl.own import own_config, prepare_own
from flexroll.rl.rewards import RolloutLog, reward_functions
from flexroll.rl.rollouts.base import trl_missing
from flexroll.rl.run import adapter_folder, grpo
from flexroll.rl.spec import GrpoSpec
from flexroll.rl.trainer import build_trainer
from flexroll.rl.worker import GrpoTask, run
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import grpo_targets, read_grpo
from flexroll.schema.load import parse_config
from flexroll.schema.records import write_json

STACK = running_stack() or "torch2.11"
needs_trl = pytest.mark.skipif(trl_missing() is not None, reason=str(trl_missing()))
FAKES = grpo_fakes.__file__


def config_of(tiny_gsm: Path, **changes) -> Config:
    grpo_values = {
        "steps": 5,
        "skip_steps": 1,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "save_every": 1,
        "verify_every": 2,
        "backends": [{"backend": "flex", "option": "eager", "stack": STACK}, {"backend": "trl", "stack": STACK}],
    } | changes.pop("grpo", {})
    return parse_config(
        {
            "run": "r",
            "model": {"name": "tiny_gsm", "path": str(tiny_gsm), "dtype": "float32"},
            "prompts": {"path": str(tiny_gsm / "gsm_test.json"), "field": "q", "answer": "a", "count": 6},
            "max_model_len": 200,
            "adapter": {"rank": 4, "alpha": 8},
            "drift": {"stacks": []},
            "samplings": {"grpo": {"temperature": 1.0}},
            "options": {"eager": {"flex": {"compile": False}}},
            "grpo": grpo_values,
        }
        | changes
    )


class Place:
    """A run's folders and its prepared questions."""

    def __init__(self, tmp_path: Path, tiny_gsm: Path, root: Path, **changes) -> None:
        self.config, self.work, self.root = config_of(tiny_gsm, **changes), tmp_path / "work", root
        self.out = tmp_path / "results" / "grpo" / "record.json"
        model = self.work / "model.json"
        write_json(model, json.dumps({"path": str(tiny_gsm), "files": {"model.safetensors": "0"}}))
        prepare_questions(self.config, model, self.work / "grpo" / "questions.json", root)

    def name(self, backend="flex"):
        return next(t.name for t in grpo_targets(self.config) if t.backend == backend)

    def folder(self, backend="flex") -> Path:
        return self.work / "grpo" / self.name(backend)

    def grpo(self, builder="well", backend="flex", **more):
        builder = f"{FAKES}:{builder}" if builder else None
        arguments = {"work": self.work, "out": self.out, "root": self.root, "stack": STACK, "builder": builder} | more
        grpo(self.config, self.name(backend), **arguments)
        return read_grpo(self.out)

    def spec(self, backend="flex", **more) -> GrpoSpec:
        target = next(t for t in grpo_targets(self.config) if t.backend == backend)
        values = {
            "target": target,
            "grpo": self.config.grpo,
            "adapter": self.config.adapter,
            "sampling": self.config.samplings["grpo"],
            "model": self.root / read_questions(self.work / "grpo" / "questions.json")["model"],
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": self.config.max_model_len,
            "questions": self.work / "grpo" / "questions.json",
            "folder": self.folder(backend),
        }
        return GrpoSpec(**values | more)


@pytest.fixture
def root(tmp_path, root):
    """A tree of its own, so that nobody else's measurement is waited for."""
    own = tmp_path / "tree"
    own.mkdir()
    for name in ("containers", "src"):
        (own / name).symlink_to(root / name)
    return own


@pytest.fixture
def place(tmp_path, tiny_gsm, root):
    return Place(tmp_path, tiny_gsm, root)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("random"), "qwen3", head_dim=16)


WORDS = {"source": "random", "count": 6, "lengths": [3, 9]}


@pytest.fixture
def tiny_place(tmp_path, random_model, root):
    """Random weights and prompts: quick to train, and rewards that are not all alike."""
    return Place(
        tmp_path, random_model, root, prompts=WORDS, grpo={"rewards": ["distinct"], "max_completion_length": 16}
    )


class Kept(Events):
    """Events kept in a list; from `gone_at` on, the step whose event finds nobody to read it."""

    def __init__(self, gone_at: int | None = None) -> None:
        self.events: list[dict] = []
        self.gone_at = gone_at

    def send(self, event, **values):
        if event == "step" and values["step"]["step"] == self.gone_at:
            raise BrokenPipeError
        self.events.append({"event": event, **json.loads(json.dumps(values))})

    @property
    def last(self):
        return self.events[-1]


def train(spec: GrpoSpec, rewards=None, gone_at=None, builder=None) -> Kept:
    spec.folder.mkdir(parents=True, exist_ok=True)
    events = Kept(gone_at)
    task = GrpoTask(spec=spec, rewards=list(rewards or spec.grpo.rewards), **({"builder": builder} if builder else {}))
    run(task, events)
    return events


def trajectory(folder: Path):
    """What must repeat to the last bit: every number of a step that is not a time or a size."""
    timed = {"wall_s", "gap_s", "peak_bytes", "rollout_s", "refresh_s", "reward_s", "loss_s", "optimizer_s"}
    steps = [step.model_dump(exclude=timed) for step in progress.read_steps(folder)]
    return steps, (folder / "adapter" / "adapter_model.safetensors").read_bytes()


# --- processes, with fakes


@needs_trl
def test_a_run_that_ends_well(place):
    record = place.grpo()
    assert record.status == "ok" and record.reason == "" and len(record.steps) == 5
    assert record.base_sha256 == "base" and record.base_identical is True and record.notes == ["a note"]
    assert [s.base_sha256 for s in record.steps] == [None, "base", None, "base", "base"]
    assert [s.tokens for s in record.steps] == [5] * 5 and record.steps[0].reward == 0.25
    assert record.weights_bytes == 10 and record.kv_bytes == 20 and record.resumed_at == []
    assert all(s.rollout_s >= 0.002 and s.wall_s >= s.rollout_s and s.peak_bytes > 0 for s in record.steps)
    assert record.steps[0].gap_s == 0 and all(s.gap_s > 0 for s in record.steps[1:])
    assert record.train_s == pytest.approx(sum(s.wall_s + s.gap_s for s in record.steps))
    assert record.samples[0].text == "#### 1" and record.samples[0].tokens == 3 and record.samples[0].coherence.ok
    assert record.environment.stack == STACK and record.key and record.settings["skip_steps"] == 1
    assert progress.checkpoints(place.folder()) == []
    target = grpo_targets(place.config)[0]
    assert (adapter_folder(place.work, target) / "adapter_model.safetensors").exists()
    assert len(place.grpo(keep_checkpoints=True).steps) == 5  # again, and anew
    assert len(progress.checkpoints(place.folder())) == 5


@needs_trl
@pytest.mark.parametrize(
    ("builder", "reason", "steps"),
    [
        ("raises", "RuntimeError: no luck at all", 1),
        ("dies", "crashed: signal 9 (SIGKILL", 2),
    ],
)
def test_a_run_that_fails_is_a_record_with_its_steps(place, builder, reason, steps):
    record = place.grpo(builder)
    assert record.status == "failed" and reason in record.reason and "\n" not in record.reason
    assert [s.step for s in record.steps] == list(range(1, steps + 1))
    assert (place.out.parent.parent / record.log).exists()


@needs_trl
@pytest.mark.slow
def test_the_time_limit_and_going_on_after_it(tmp_path, tiny_gsm, root):
    place = Place(tmp_path, tiny_gsm, root, grpo={"run_s": 25, "save_every": 2})
    record = place.grpo("hangs_once")
    assert record.status == "failed"
    assert record.reason.startswith("timeout: the run took longer than 25 s (grpo.run_s), with 3 of 5 steps done")
    first = record.steps
    record = place.grpo("hangs_once")
    assert record.status == "ok" and record.resumed_at == [2] and [s.step for s in record.steps] == [1, 2, 3, 4, 5]
    assert record.steps[:2] == first[:2] and record.steps[2] != first[2] and record.base_sha256 == "base"


@needs_trl
def test_another_setting_begins_anew(place, tiny_gsm):
    assert place.grpo("dies").status == "failed"
    place.config = config_of(tiny_gsm, grpo={"learning_rate": 2e-3})
    record = place.grpo()
    assert record.status == "ok" and record.resumed_at == []


@needs_trl
def test_a_run_may_begin_anew(place):
    for resume, resumed_at in ((True, None), (True, 1), (False, None)):
        events = train(place.spec(resume=resume), builder=f"{FAKES}:raises")
        assert events.events[0]["resumed_at"] == resumed_at
        assert events.last == {"event": "failed", "reason": "RuntimeError: no luck at all"}


@needs_trl
def test_a_trainer_that_does_not_stand(place):
    events = train(place.spec(), builder=f"{FAKES}:does_not_stand")
    assert events.events == [{"event": "failed", "reason": "ValueError: no such thing"}]


@needs_trl
def test_what_was_survived_is_in_the_step(place):
    assert train(place.spec(), builder=f"{FAKES}:survives").last["event"] == "done"
    steps = progress.read_steps(place.folder())
    assert steps[1].loss is None and steps[1].faults == ["memory ran out; half as many", "loss is not finite (nan)"]
    assert all(step.faults == [] and step.loss == 0.5 for step in steps if step.step != 2)


@needs_trl
def test_a_base_that_moved_is_seen(place):
    events = train(place.spec(), builder=f"{FAKES}:moves_the_base")
    taken = {s.base_sha256 for s in progress.read_steps(place.folder())}
    assert events.events[0]["base_sha256"] == "base" and taken == {None, "another"}


@needs_trl
def test_sigterm_leaves_a_record_and_nobody_behind(place, tmp_path):
    def stop():
        while not progress.read_steps(place.folder())[1:]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        place.grpo("hangs")
    thread.join()
    record = read_grpo(place.out)
    assert record.status == "failed" and len(record.steps) == 2
    assert record.reason.startswith("stopped (signal 15) with 2 of 5 steps done")


@needs_trl
def test_inputs_that_are_missing_are_one_line(place):
    (place.work / "grpo" / "questions.json").rename(place.work / "elsewhere")
    with pytest.raises(FlexrollError, match="`flexroll grpo-questions` writes it"):
        place.grpo()
    data = json.loads((place.work / "elsewhere").read_text()) | {"model": "gone"}
    write_json(place.work / "grpo" / "questions.json", json.dumps(data))
    with pytest.raises(FlexrollError, match="gone: the checkpoint is missing"):
        place.grpo()


@needs_trl
def test_what_cannot_run_here_is_skipped_with_the_reason(tmp_path, tiny_gsm, root):
    use = {"backend": "flex", "option": "replayed", "stack": STACK}
    options = {"replayed": {"flex": {"replay": "plain"}}}
    place = Place(tmp_path, tiny_gsm, root, options=options, grpo={"backends": [use]})
    record = place.grpo()
    assert record.status == "skipped" and record.reason.startswith("replay:") and record.steps == []
    assert record.train_s is None and record.log


# --- the data


def test_questions_hold_answers(place):
    data = read_questions(place.work / "grpo" / "questions.json")
    assert len(data["questions"]) == 6
    assert all(row["prompt"][0]["role"] == "user" and row["answer"].isdigit() for row in data["questions"])


def test_answers_of_dotted_keys_and_parquet(tmp_path, tiny_gsm, root):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"q": [{"role": "user", "content": f"What is {i}?"}], "reward_model": {"ground_truth": str(i)}, "x": 0}
        for i in range(4)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = {"path": str(tmp_path / "rows.parquet"), "field": "q", "count": 4}
    place = Place(tmp_path, tiny_gsm, root, prompts=prompts | {"answer": "reward_model.ground_truth"})
    found = read_questions(place.work / "grpo" / "questions.json")["questions"]
    assert [row["answer"] for row in found] == ["0", "1", "2", "3"]
    with pytest.raises(FlexrollError, match=r"no 'reward_model.truth' but ground_truth; set prompts.answer"):
        Place(tmp_path, tiny_gsm, root, prompts=prompts | {"answer": "reward_model.truth"})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"q": "a"}], "row 0 has no 'a' but q; set prompts.answer"),
        ([{"q": "a", "a": " "}], "row 0: its answer 'a' is neither"),
        ([{"q": "a", "a": "1"}, {"q": "a", "a": "1"}], "1 usable questions .* 1 repeated"),
        ([{"q": "", "a": "1"}], "prompt 0 is empty"),
    ],
)
def test_bad_questions_are_named(tmp_path, tiny_gsm, root, rows, message):
    (tmp_path / "q.json").write_text(json.dumps(rows))
    with pytest.raises(FlexrollError, match=message):
        Place(tmp_path, tiny_gsm, root, prompts={"path": str(tmp_path / "q.json"), "field": "q", "answer": "a"})


def test_random_prompts_are_read_as_the_tokens_meant(tmp_path, tiny_gsm, root):
    from transformers import AutoTokenizer

    prompts = {"source": "random", "count": 4, "lengths": [3, 9]}
    place = Place(tmp_path, tiny_gsm, root, prompts=prompts, grpo={"rewards": ["distinct"]})
    data = read_questions(place.work / "grpo" / "questions.json")
    tokenizer = AutoTokenizer.from_pretrained(root / data["model"])
    for row in data["questions"]:
        words = row["prompt"].split()
        ids = tokenizer(row["prompt"])["input_ids"]
        assert 3 <= len(ids) <= 9 and ids == [int(word.removeprefix("t")) for word in words]
        assert tokenizer.decode(ids) == row["prompt"]
    ends = json.loads((tiny_gsm / "config.json").read_text())["eos_token_id"]
    end = ends[0] if isinstance(ends, list) else ends
    assert tokenizer.eos_token_id == end and tokenizer.decode([5, end], skip_special_tokens=True).strip() == "t5"


# --- real trainers


@needs_trl
@pytest.mark.parametrize("backend", ["flex", "trl"])
def test_a_resumed_run_is_the_run_itself(tiny_place, backend):
    """Interrupted in the second pass over the data, between a step and its checkpoint; the last checkpoint harmed."""
    whole = tiny_place.spec(backend, folder=tiny_place.work / "whole")
    assert train(whole).last["event"] == "done"
    spec = tiny_place.spec(backend)
    with pytest.raises(BrokenPipeError):
        train(spec, gone_at=5)
    assert [s.step for s in progress.read_steps(spec.folder)] == [1, 2, 3, 4, 5]
    adapter = next((spec.folder / "checkpoint-4").glob("adapter_model.safetensors"))
    if backend == "flex":
        adapter.write_bytes(adapter.read_bytes()[:-100])
    events = train(spec)
    assert events.last["event"] == "done"
    started = next(e for e in events.events if e["event"] == "started")
    assert started["resumed_at"] == (3 if backend == "flex" else 4)
    assert trajectory(spec.folder) == trajectory(whole.folder)
    steps = progress.read_steps(spec.folder)
    assert all(step.loss is not None and step.tokens for step in steps) and len({step.loss for step in steps}) > 1
    assert {s.base_sha256 for s in steps if s.base_sha256} == {started["base_sha256"]}
    parts = [s.rollout_s + s.refresh_s + s.reward_s + s.loss_s + s.optimizer_s for s in steps]
    assert all(0 < total <= step.wall_s for total, step in zip(parts, steps, strict=True))


@needs_trl
@pytest.mark.slow
def test_kill_9_and_the_same_command(tiny_place):
    """As a person meets it: supervisor and worker are killed in the middle, and the same command goes on."""
    whole = tiny_place.grpo(builder=None)
    assert whole.status == "ok"
    adapter = adapter_folder(tiny_place.work, grpo_targets(tiny_place.config)[0]) / "adapter_model.safetensors"
    expected = adapter.read_bytes()
    shutil.rmtree(tiny_place.folder()), tiny_place.out.unlink()
    config = tiny_place.work / "config.json"
    write_json(config, tiny_place.config.model_dump_json(exclude_unset=True))
    command = [sys.executable, "-m", "flexroll", "grpo", "--config", str(config), "--run-name", tiny_place.name()]
    command += ["--work", str(tiny_place.work), "--out", str(tiny_place.out)]
    process = subprocess.Popen(
        command, cwd=tiny_place.root, env=os.environ | {"PYTHONPATH": str(tiny_place.root / "src")}
    )
    while len(progress.checkpoints(tiny_place.folder())) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    record = tiny_place.grpo(builder=None)
    assert record.status == "ok" and len(record.resumed_at) == 1 and 0 < record.resumed_at[0] < 5
    same = {"loss", "grad_norm", "reward", "rewards", "kl", "entropy", "tokens", "base_sha256"}
    assert [s.model_dump(include=same) for s in record.steps] == [s.model_dump(include=same) for s in whole.steps]
    assert adapter.read_bytes() == expected


@needs_trl
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('no')", "reward 'mine' in step 1 failed, completion 0: KeyError: 'no'"),
        (
            "return [float('nan')] * len(completions)",
            "reward 'mine' in step 1, completion 0: nan is no number in [0, 1]",
        ),
        ("return []", "reward 'mine' in step 1 returned 0 rewards for 4 completions"),
    ],
)
def test_a_bad_reward_is_never_trained_on(tiny_place, tmp_path, body, message):
    file = tmp_path / "rewards.py"
    file.write_text(f"def mine(completions, **_):\n    {body}\n")
    events = train(tiny_place.spec(), rewards=["format", f"{file}:mine"])
    assert events.last == {"event": "failed", "reason": message}
    assert progress.read_steps(tiny_place.spec().folder) == [] and not (tiny_place.folder() / "adapter").exists()


def build_and(change):
    """A builder that changes the trainer which build_trainer makes."""

    def build(*arguments):
        from flexroll.rl.trainer import build_trainer

        trainer = build_trainer(*arguments)
        change(trainer)
        return trainer

    return build


@pytest.fixture
def changed(monkeypatch):
    """Train with a changed trainer: change(trainer) -> events."""

    def run_changed(spec, change, **more):
        monkeypatch.setattr("flexroll.rl.worker.load_backend", lambda reference: build_and(change))
        return train(spec, **more)

    return run_changed


@needs_trl
def test_completions_that_end_at_once(tiny_place, changed):
    def end_at_once(trainer):
        end = trainer.eos_token_ids[0]
        rows = lambda prompts, *_, **__: (prompts, [[end]] * len(prompts), [[[-1.0]]] * len(prompts), None)  # noqa: E731
        trainer.rollout.generate = rows

    events = changed(tiny_place.spec(), end_at_once)
    assert events.last["event"] == "done" and events.last["samples"][0]["coherence"]["notes"] == ["ended at once"]
    steps = progress.read_steps(tiny_place.folder())
    assert [s.tokens for s in steps] == [4] * 5 and all(s.loss is not None and s.reward_std == 0 for s in steps)


@needs_trl
def test_a_rollout_out_of_memory_is_noted_and_changes_nothing(tiny_place, changed):
    whole = tiny_place.spec(folder=tiny_place.work / "whole")
    train(whole)

    def fail_once(trainer):
        engine, count = trainer.rollout.engine, iter(range(10))
        generate = engine.generate

        def out_of_memory(*arguments, **named):
            if next(count) == 1:
                raise torch.OutOfMemoryError("no room")
            return generate(*arguments, **named)

        engine.generate = out_of_memory

    events = changed(tiny_place.spec(), fail_once)
    assert events.last["event"] == "done"
    steps = progress.read_steps(tiny_place.folder())
    assert [bool(step.faults) for step in steps] == [False, True, False, False, False]
    assert "memory" in steps[1].faults[0]
    assert [s.tokens for s in steps] == [s.tokens for s in progress.read_steps(whole.folder)]


@needs_trl
def test_a_loss_that_is_not_finite_is_told(tiny_place, changed):
    def spoil(trainer):
        inner, count = trainer.compute_loss, iter(range(100))

        def compute_loss(*arguments, **named):
            loss = inner(*arguments, **named)
            return loss * float("nan") if next(count) == 2 else loss  # the second step's first pass

        trainer.compute_loss = compute_loss
        trainer.args.max_grad_norm = 0.0

    changed(tiny_place.spec("trl"), spoil)
    steps = progress.read_steps(tiny_place.spec("trl").folder)
    assert steps[0].loss is not None and steps[1].loss is None
    assert any("loss is not finite" in fault for fault in steps[1].faults)


@needs_trl
@pytest.mark.slow
def test_compile_mode_counts_what_torch_did(tmp_path, root):
    folder = random_checkpoint(tmp_path / "random", "qwen3", head_dim=16, num_hidden_layers=1)
    use = {"backend": "flex", "option": "eager", "stack": STACK, "compile_mode": "default"}
    values = {"steps": 1, "skip_steps": 0, "backends": [use], "rewards": ["distinct"], "per_device_train_batch_size": 4}
    values["max_completion_length"] = 16
    place = Place(tmp_path, folder, root, grpo=values, prompts=WORDS)
    plain = place.spec().model_copy(update={"folder": tmp_path / "plain"})
    plain = plain.model_copy(update={"target": plain.target.model_copy(update={"compile_mode": None})})
    assert train(plain).last["compile"] is None
    events = train(place.spec())
    assert events.last["event"] == "done"
    counts = events.last["compile"]
    assert counts["mode"] == "default" and counts["graphs"] >= 1
    assert bool(counts["graph_breaks"]) == any(r.startswith("graph break") for r in counts["reasons"])
    assert bool(counts["recompiles"]) == any(r.startswith("recompile") for r in counts["reasons"])
    (ours,), (other,) = (progress.read_steps(spec.folder) for spec in (place.spec(), plain))
    assert ours.tokens == other.tokens and ours.reward == other.reward > 0
    assert (ours.grad_norm, ours.entropy) == pytest.approx((other.grad_norm, other.entropy), rel=1e-3, abs=1e-5)


def test_graph_breaks_and_recompiles_are_counted_with_reasons():
    from flexroll.rl.compile_debugger import CompileDebugger

    class Model(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

    torch._dynamo.reset()
    debugger, model = CompileDebugger("default"), Model()
    debugger.watch(model)
    elsewhere = torch.compile(lambda x: x - 1, backend="eager")
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 4.0))
    elsewhere(torch.ones(3))
    elsewhere(torch.ones(3, dtype=torch.int64))
    counts = debugger.counts()
    assert (counts.graphs, counts.graph_breaks, counts.recompiles) == (2, 1, 0)
    model(torch.ones(3, dtype=torch.float64))
    counts = debugger.counts()
    assert counts.recompiles == 2 and counts.graphs == 4
    assert any(r.startswith("graph break (") for r in counts.reasons)
    assert any(r.startswith("recompile (") for r in counts.reasons)
    torch._dynamo.reset()


# --- a person's own run


ROWS = [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"}]
SETTINGS = {"steps": 2, "seeds": [0], "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8}


def own(tiny_gsm, questions, rewards=None, backend="flex", field=None, answer=None, temperature=1.0, **more):
    return own_config(
        STACK, backend, tiny_gsm, questions, field, answer, rewards, SETTINGS | more, temperature, 4, "float32"
    )


def test_a_run_of_ones_own_finds_its_keys(tmp_path, tiny_gsm, root):
    questions = tmp_path / "q.json"
    questions.write_text(json.dumps(ROWS))
    config = prepare_own(own(tiny_gsm, questions), tmp_path / "work", root)
    assert (config.prompts.field, config.prompts.answer, config.prompts.count) == ("question", "answer", 2)
    rows = read_questions(tmp_path / "work" / "grpo" / "questions.json")["questions"]
    assert [row["answer"] for row in rows] == ["4", "6"] and rows[0]["prompt"][0]["content"] == "2 + 2?"
    assert [t.name for t in grpo_targets(config)] == [f"{STACK}-flex-default-seed0"]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (ROWS, {"backend": "flux"}, "unknown rollout backend 'flux'"),
        (ROWS, {"rewards": ["exakt"]}, "unknown reward 'exakt'"),
        (ROWS, {"temperature": 0.0}, "samples of a prompt are all alike"),
        (ROWS, {"learning_rate": -1.0}, "grpo.learning_rate: Input should be greater than 0"),
        ([{"x": 1}], {}, "which of x is the question"),
        ([{"q": "a"}], {}, "which of q is the answer"),
        (["text"], {}, "expected rows"),
    ],
)
def test_what_a_person_gets_wrong_is_one_line(tmp_path, tiny_gsm, rows, more, message):
    questions = tmp_path / "q.json"
    questions.write_text(json.dumps(rows))
    with pytest.raises(FlexrollError, match=message) as error:
        own(tiny_gsm, questions, **more)
    assert "\n" not in str(error.value)
    with pytest.raises(FlexrollError, match="no such file with questions"):
        own(tiny_gsm, tmp_path / "none.json")


@needs_trl
def test_the_script_of_the_docs_trains(tiny_place):
    """docs/grpo.md: the engine in a TRL script of one's own, as it stands there."""
    text = (Path(__file__).parents[1] / "docs" / "grpo.md").read_text()
    code = next(part for part in text.split("```python\n")[1:] if "double_copy" in part).split("```")[0]
    spec, log = tiny_place.spec("trl"), RolloutLog()
    trainer = build_trainer(
        spec,
        Clock(),
        reward_functions(["distinct"], log),
        read_questions(spec.questions)["questions"],
    )
    exec(code, {"trainer": trainer, "checkpoint": spec.model})
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 5 and log.tokens > 0
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in losses)
    assert losses[-1]["kl"] > 0
