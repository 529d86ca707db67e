"""Rewards by hand, what is never trained on, and what a stopped run leaves on disk. Needs no torch."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexroll.bench.retry import retry
from flexroll.errors import FlexrollError
from flexroll.rl import progress
from flexroll.rl.data import write_words
from flexroll.rl.rewards import REWARDS, RolloutLog, final_answer, reward_functions
from flexroll.rl.run import find_grpo_target, grpo_key
from flexroll.rl.supervise import step_line
from flexroll.schema.grpo_records import GrpoRecord, GrpoStep, grpo_targets
from flexroll.schema.load import parse_config


def exact(text, answer="57"):
    return REWARDS["exact"](completions=[text], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("9+48=57 tubes\n#### 57", "57", 1),
        ("#### 57", "58", 0),
        ("it is 57.", "57", 1),
        ("48+9=57 of 60", "57", 0),
        ("#### 12\n#### 57", "57", 1),
        ("#### $1,234.50", "1234.5", 1),
        ("57 in all\n#### none", "57", 0),
        ("66-5", "5", 1),
        ("it is -5", "-5", 1),
        ("it is -5", "5", 0),
        ("#### 57.0", "57", 1),
        ("#### 57", "They are 9 and 48.\n#### 57", 1),
        ("#### Paris", "paris", 1),
        ("", "57", 0),
        ("no number", "57", 0),
    ],
)
def test_exact_by_hand(text, answer, reward):
    assert exact(text, answer) == reward
    assert exact([{"role": "assistant", "content": text}], answer) == reward


def test_nothing_is_never_right():
    assert final_answer("") is None and exact("", "") == 0


@given(st.text(max_size=40), st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=0, max_value=1e6))
def test_the_last_marked_number_counts_whatever_comes_before(before, number):
    assert exact(f"{before}\n#### {number}", str(number)) == 1
    assert exact(f"{before}\n#### {number}", str(number + 1)) == 0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        *[("a\n#### 57", 1), ("a\n#### 57\n", 1), ("#### 57\nb", 0.5), ("#### 1\n#### 2", 0.5), ("57", 0), ("", 0)],
        *[("#### x", 0), ("#### $57.", 1), ("so #### 57", 0)],
    ],
)
def test_format_by_hand(text, reward):
    assert REWARDS["format"](completions=[text]) == [reward]


def test_distinct_by_hand():
    assert REWARDS["distinct"](completion_ids=[[1, 2, 3, 1], [5], []]) == [0.75, 1.0, 0.0]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_every_reward_of_any_text_is_in_its_range(texts):
    ids = [[ord(c) for c in text] for text in texts]
    for reward in reward_functions(list(REWARDS)):
        found = reward(texts, texts, ids, answer=["1"] * len(texts))
        assert len(found) == len(texts) and all(0 <= value <= 1 for value in found)


def own(tmp_path, body, name="mine"):
    file = tmp_path / "rewards.py"
    file.write_text(f"import math\ndef {name}(completions, **_):\n    {body}\n")
    return reward_functions([f"{file}:{name}"])[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1 / len(c) for c in completions]", "reward 'mine' in step 4 failed, completion 1: ZeroDivisionError"),
        ("return [1.0, math.nan]", r"reward 'mine' in step 4, completion 1: nan is no number in \[0, 1\]"),
        ("return [1.5, 1.0]", r"completion 0: 1.5 is no number in \[0, 1\]"),
        ("return [0.5, -0.1]", "completion 1: -0.1"),
        ("return [0.5, None]", "completion 1: None"),
        ("return [0.5, 'x']", "completion 1: 'x'"),
        ("return [0.5]", "returned 1 rewards for 2 completions"),
        ("return 0.5", "returned float, not a list"),
        ("assert len(completions) == 1", "reward 'mine' in step 4 failed: AssertionError"),
    ],
)
def test_what_is_no_reward_ends_the_run_in_one_line(tmp_path, body, message):
    with pytest.raises(FlexrollError, match=message) as error:
        own(tmp_path, body)(["p", "p"], ["ab", ""], [[1], [2]], trainer_state=SimpleNamespace(global_step=3))
    assert "\n" not in str(error.value)


def test_ones_own_reward_gets_what_trl_gives(tmp_path):
    reward = own(tmp_path, "return [float(c == a) for c, a in zip(completions, _['answer'])]")
    assert reward.__name__ == "mine"
    assert reward(["p", "p"], ["a", "b"], [[1], [2]], answer=["a", "a"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[("exakt", "unknown reward 'exakt'"), ("no.py:f", "no such file"), ("{file}:g", "has no function 'g'")],
        *[("{file}:later", "is async"), ("{broken}:f", "cannot be loaded")],
    ],
)
def test_a_reward_that_cannot_be_had(tmp_path, name, message):
    (tmp_path / "ok.py").write_text("def f(**_): return []\nasync def later(**_): return []\n")
    (tmp_path / "broken.py").write_text("raise ImportError('nothing')\n")
    with pytest.raises(FlexrollError, match=message):
        reward_functions([name.format(file=tmp_path / "ok.py", broken=tmp_path / "broken.py")])


def test_the_log_is_told_once():
    log = RolloutLog()
    for reward in reward_functions(["format", "distinct"], log):
        reward(["p", "q"], ["a", "b"], [[1, 2], [3]])
    assert log.tokens == 3 and log.completions == ["a", "b"]


def step(number, **more):
    return GrpoStep(step=number, wall_s=2, rollout_s=1, reward_s=0, loss_s=0.5, optimizer_s=0, tokens=8, **more)


def checkpoint(folder, number, complete=True):
    path = folder / f"checkpoint-{number}"
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    (path / "trainer_state.json").write_text("{}")
    if complete:
        progress.mark_complete(path)
    return path


def test_a_run_goes_back_to_its_last_complete_checkpoint(tmp_path):
    for number in range(1, 6):
        progress.append_step(tmp_path, step(number))
    checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    assert progress.go_back(tmp_path) == tmp_path / "checkpoint-4"
    assert [s.step for s in progress.read_steps(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("harm", ["cut", "unmarked", "missing file", "mark cut", "steps missing"])
def test_half_a_checkpoint_is_not_used(tmp_path, harm):
    for number in range(1, 5):
        progress.append_step(tmp_path, step(number))
    checkpoint(tmp_path, 2)
    last = checkpoint(tmp_path, 4, complete=harm != "unmarked")
    if harm == "cut":
        (last / "adapter_model.safetensors").write_bytes(b"x" * 60)
    elif harm == "missing file":
        (last / "trainer_state.json").unlink()
    elif harm == "mark cut":
        (last / progress.MARK).write_text('{"adapter')
    elif harm == "steps missing":
        lines = (tmp_path / progress.STEPS).read_text()
        (tmp_path / progress.STEPS).write_text(lines[:-20])
    assert progress.go_back(tmp_path) == tmp_path / "checkpoint-2"
    assert [s.step for s in progress.read_steps(tmp_path)] == [1, 2] and not last.exists()


def test_without_a_checkpoint_a_run_begins_anew(tmp_path):
    progress.append_step(tmp_path, step(1))
    checkpoint(tmp_path, 1, complete=False)
    assert progress.go_back(tmp_path) is None
    assert progress.read_steps(tmp_path) == [] and progress.checkpoints(tmp_path) == []


CONFIG = {
    "run": "r",
    "model": {"name": "tiny_gsm", "path": "models/tiny-gsm", "dtype": "float32"},
    "prompts": {"path": "models/tiny-gsm/gsm_test.json", "field": "q", "answer": "a"},
    "drift": {"stacks": []},
    "samplings": {"grpo": {"temperature": 1.0}},
    "grpo": {"backends": [{"backend": "flex"}, {"backend": "trl"}]},
}


def key_of(root, changes=None, backend="flex", **more):
    config = parse_config(CONFIG | {"grpo": CONFIG["grpo"] | (changes or {})} | more)
    target = next(t for t in grpo_targets(config) if t.backend == backend)
    return grpo_key(root, target, config, "cpu")


def test_the_key_follows_what_a_run_computes(root):
    first = key_of(root)
    assert first == key_of(root, {"run_s": 5, "save_every": 3, "kl_band": 0.5, "reference": "flex"})
    assert first == key_of(root, adapter={"seed": 5, "b_std": 0.5})  # of an adapter that is not this one
    others = [{"learning_rate": 1}, {"steps": 11}, {"rewards": ["exact"]}, {"beta": 0}, {"verify_every": 1}]
    keys = [first, key_of(root, backend="trl"), key_of(root, adapter={"rank": 4})]
    keys += [key_of(root, change) for change in others]
    assert len(set(keys)) == len(keys)


def test_an_unknown_run_is_named():
    config = parse_config(CONFIG)
    with pytest.raises(FlexrollError, match=r"did you mean 'torch2\.11-flex-default-seed0'"):
        find_grpo_target(config, "torch2.11-flex-default-seed1")


def test_a_step_for_a_person():
    line = step_line(step(3, reward=0.25, kl=0.0003, refresh_s=0.25, faults=["memory ran out"]), 10)
    assert line == (
        "step 3/10: 2 s (rollout 1.2, loss 0.5, optimizer 0), 6 tok/s, reward 0.250, KL 0.0003; memory ran out"
    )


def test_failed_grpo_records_are_tried_again(tmp_path):
    folder = tmp_path / "r" / "grpo"
    folder.mkdir(parents=True)
    values = {"stack": "s", "backend": "flex", "option": "default", "option_values": {}, "seed": 0, "settings": {}}
    values |= {"model": "m", "dtype": "float32"}
    for status in ("ok", "failed", "skipped"):
        record = GrpoRecord(**values, status=status, reason="why")
        (folder / f"{status}.json").write_text(record.model_dump_json())
    (folder / "cut.json").write_text("{")
    assert [line.split(":")[0] for line in retry(tmp_path / "r")] == ["grpo/cut.json", "grpo/failed.json"]
    assert sorted(p.name for p in folder.iterdir()) == ["ok.json", "skipped.json"]


def test_words_are_written_only_beside_what_is_ours(tmp_path, tiny_gsm):
    words = write_words(tiny_gsm, tmp_path / "model")
    made = json.loads((words / "tokenizer.json").read_text())
    size = json.loads((tiny_gsm / "config.json").read_text())["vocab_size"]
    assert len(made["model"]["vocab"]) == size and made["model"]["vocab"]["t7"] == 7
    assert (words / "model.safetensors").resolve() == (tiny_gsm / "model.safetensors").resolve()
    assert not (words / "chat_template.jinja").exists()
    assert write_words(tiny_gsm, words) == words  # again
    (tmp_path / "other").mkdir()
    with pytest.raises(FlexrollError, match="remove it"):
        write_words(tiny_gsm, tmp_path / "other")
