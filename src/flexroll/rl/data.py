"""Questions with answers, as every rollout backend trains on them: `flexroll grpo-questions` and its reader."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from flexroll.bench.checkpoint import fingerprint, read_config
from flexroll.bench.console import say
from flexroll.bench.prompts import UsableRows, prompts_file
from flexroll.bench.task import read_input
from flexroll.errors import FlexrollError
from flexroll.provenance import hash_json
from flexroll.schema.architecture import eos_ids
from flexroll.schema.config import Config
from flexroll.schema.records import write_json
from flexroll.schema.sources import Prompts

Row = dict[str, Any]  # prompt: chat messages, or plain text; answer: str, "" where there is none
COMMAND = "grpo-questions"
WORDS = "flexroll-words.json"  # marks a folder as written here
# What a folder of written words has of its own.
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def prepare_questions(config: Config, model_json: Path, out: Path, root: Path, every: bool = False) -> int:
    """Write {sha256, model, model_sha256, source, left_out, duplicates, questions: [{prompt, answer}]}.

    model: the checkpoint folder to train, relative inside the tree. It is the run's own, or for random prompts, which
    are no text, a folder beside `out` of links to it with a tokenizer of one word a token. every: all usable questions
    of the file, instead of prompts.count. Returns their number.

    Raises:
        FlexrollError: no GRPO in the config, too few questions, a question without an answer, no tokenizer, a bad file.
    """
    if config.grpo is None:
        raise FlexrollError(f"run {config.run} trains nothing; add `grpo:` to its config")
    prompts = config.grpo.prompts or config.prompts
    model = read_input(model_json, "model", ("path", "files"))
    folder = root / model["path"]
    limit = min(prompts.max_tokens, config.max_model_len - config.grpo.max_completion_length)
    left_out = duplicates = 0
    if prompts.source == "random":
        questions, source = _random(prompts, folder, limit), f"random tokens, seed {prompts.seed}"
        folder = write_words(folder, out.parent / "model")
    else:
        path, source = prompts_file(prompts, root)
        questions, left_out, duplicates = _from_file(prompts, path, folder, limit, every)
    if len(questions) < config.grpo.prompts_per_step:
        raise FlexrollError(
            f"{len(questions)} questions, a step takes {config.grpo.prompts_per_step}; raise prompts.count"
        )
    data = {
        "sha256": hash_json(questions),
        "model": _relative(folder, root),
        "model_sha256": fingerprint(model["files"]),
        "source": source,
        "left_out": left_out,
        "duplicates": duplicates,
        "questions": questions,
    }
    write_json(out, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    say(f"{len(questions)} questions, {left_out} left out as longer than {limit} tokens, {duplicates} repeated")
    return len(questions)


def read_questions(path: Path) -> dict[str, Any]:
    """What `flexroll grpo-questions` wrote. Raises FlexrollError."""
    return read_input(path, COMMAND, ("sha256", "model", "model_sha256", "questions"))


def _from_file(prompts: Prompts, path: Path, folder: Path, limit: int, every: bool) -> tuple[list[Row], int, int]:
    columns = [] if prompts.answer is None else [prompts.answer.split(".")[0]]  # a dotted key's first part
    rows = UsableRows(prompts, path, folder, limit, columns)
    found: list[Row] = []
    for usable in rows:
        answer = "" if prompts.answer is None else _answer(usable.row, prompts.answer, path, usable.index)
        found.append({"prompt": usable.messages if prompts.format == "chat" else usable.text, "answer": answer})
        if len(found) == prompts.count and not every:
            return found, rows.left_out, rows.duplicates
    if every and found:
        return found, rows.left_out, rows.duplicates
    raise FlexrollError(
        f"{path}: {len(found)} usable questions ({rows.left_out} longer than {limit} tokens, "
        f"{rows.duplicates} repeated), prompts.count asks for {prompts.count}; lower it, or raise prompts.max_tokens"
    )


def _answer(row: Any, key: str, path: Path, index: int) -> str:
    """The right answer of a row, as text; a key may be dotted: reward_model.ground_truth."""
    value = row
    for part in [key] if isinstance(row, dict) and key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            held = ", ".join(map(str, value)) if isinstance(value, dict) else "plain values"
            raise FlexrollError(f"{path}: row {index} has no '{key}' but {held}; set prompts.answer")
        value = value[part]
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise FlexrollError(f"{path}: row {index}: its answer '{key}' is neither text nor a number, or empty")
    return str(value)


def _random(prompts: Prompts, folder: Path, limit: int) -> list[Row]:
    """Texts of one word a token, whose tokens are as in `flexroll prompts`: none of the lowest and highest ids."""
    low, high = prompts.lengths
    if high > limit:
        raise FlexrollError(f"prompts.lengths: {high} is too long, {limit} tokens fit beside the new ones; lower it")
    vocab, rng = _vocabulary(folder), random.Random(prompts.seed)
    first, last = vocab // 16, vocab - vocab // 16 - 1
    return [
        {"prompt": " ".join(_word(rng.randint(first, last)) for _ in range(rng.randint(low, high))), "answer": ""}
        for _ in range(prompts.count)
    ]


def write_words(checkpoint: Path, folder: Path) -> Path:
    """Write a folder of links to the checkpoint's files, with a tokenizer of one word a token: t0, t1, ...

    Every library that trains or generates then reads text of random tokens as the very tokens meant.

    Raises:
        FlexrollError: the folder exists and is not of here, or the checkpoint names no end token.
    """
    if folder.exists() and not (folder / WORDS).exists():
        raise FlexrollError(f"{folder}: not what `flexroll {COMMAND}` writes; remove it and run that again")
    ends = eos_ids(checkpoint)
    if not ends:
        raise FlexrollError(f"{checkpoint / 'config.json'}: no eos_token_id in it, which a trainer needs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / WORDS).write_text("{}\n")
    own = {path.name for pattern in TOKENIZER_FILES for path in checkpoint.glob(pattern)}
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name not in own:
            # Relative, so that the tree may be mounted elsewhere.
            (folder / path.name).symlink_to(os.path.relpath(path.resolve(), folder.resolve()))
    # A special token is found inside words, too, so that none may begin another word.
    names = {i: f"<{_word(i)}>" for i in ends}
    end = names[ends[0]]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i], **special} for i in sorted(ends)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {names.get(i, _word(i)): i for i in range(_vocabulary(checkpoint))},
            "unk_token": end,
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "unk_token": end}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return folder


def _vocabulary(folder: Path) -> int:
    vocab = read_config(folder).get("vocab_size")
    if not isinstance(vocab, int):
        raise FlexrollError(f"{folder / 'config.json'}: no vocab_size in it, needed for random prompts")
    return vocab


def _word(token: int) -> str:
    return f"t{token}"


def _relative(path: Path, root: Path) -> str:
    path, root = path.absolute(), root.absolute()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
