"""A person's own training run, from the command line: the config it amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexroll.bench.model import prepare_model
from flexroll.bench.prompts import read_rows
from flexroll.errors import FlexrollError
from flexroll.provenance import device_class
from flexroll.rl.data import prepare_questions
from flexroll.rl.rewards import REWARDS, load_reward
from flexroll.rl.rollouts import CLASSES
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import FOLDER
from flexroll.schema.load import parse_config

QUESTION_KEYS = ("prompt", "question", "problem", "q")
ANSWER_KEYS = ("answer", "solution", "ground_truth", "a")
ROOM = 1024  # tokens a question may have, where no more is asked


def own_config(
    stack: str,
    backend: str,
    model: Path,
    questions: Path,
    field: str | None,
    answer: str | None,
    rewards: list[str] | None,
    grpo: dict[str, Any],
    temperature: float,
    rank: int,
    dtype: str | None,
) -> Config:
    """The config of one run.

    Args:
        field, answer: keys of the questions file; None takes the first usual one that its first row has.
        grpo: keys of `grpo:`. dtype: None is float32 on a CPU, else bfloat16.
    Raises:
        FlexrollError: a value that the config refuses, an unknown backend or reward, a file without such keys.
    """
    if backend not in CLASSES:
        raise FlexrollError(f"unknown rollout backend '{backend}'; choose from {', '.join(CLASSES)}")
    if not questions.is_file():
        raise FlexrollError(f"{questions}: no such file with questions")
    for name in rewards or []:
        load_reward(name)
    keys = _keys(questions)
    field = field or next((key for key in QUESTION_KEYS if key in keys), None)
    if field is None:
        raise FlexrollError(f"{questions}: which of {', '.join(keys)} is the question? Say with --field")
    answer = answer or next((key for key in ANSWER_KEYS if key in keys), None)
    if answer is None and (rewards is None or "exact" in rewards):
        raise FlexrollError(f"{questions}: which of {', '.join(keys)} is the answer? Say with --answer")
    named = [name for name in rewards or ["exact", "format"] if name in REWARDS]
    prompts = {"source": "file", "path": str(questions.absolute()), "field": field, "answer": answer}
    values = {
        "run": "own",
        "model": {
            "name": "own",
            "path": str(model.absolute()),
            "dtype": dtype or ("float32" if device_class() == "cpu" else "bfloat16"),
        },
        "prompts": prompts | {"max_tokens": ROOM, "count": 1},
        "max_model_len": ROOM + grpo["max_completion_length"],
        "adapter": {"rank": rank, "alpha": 2 * rank},
        "samplings": {"own": {"temperature": temperature}},
        "drift": {"stacks": []},
        "grpo": {
            **grpo,
            "sampling": "own",
            "skip_steps": min(3, grpo["steps"] - 1),
            "rewards": named or ["distinct"],  # of one's own alone: named when the run begins
            "run_s": 1e9,  # whoever started it can stop it
            "backends": [{"backend": backend, "stack": stack}],
        },
    }
    return parse_config(values, "grpo")


def prepare_own(config: Config, work: Path, root: Path) -> Config:
    """Check the checkpoint, and write the questions under `work`: as many as the file has. Returns the config with
    their number in it.

    Raises:
        FlexrollError: the checkpoint is damaged or the questions are unfit, see prepare_questions.
    """
    prepare_model(config, work / "model.json", root)
    found = prepare_questions(config, work / "model.json", work / FOLDER / "questions.json", root, every=True)
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"count": found})})


def _keys(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    first = next(read_rows(path, []), None)
    if not isinstance(first, dict):
        raise FlexrollError(f"{path}: expected rows with a question and an answer each")
    return [str(key) for key in first]
