"""`flexroll prompts`: one prepared list of token ids, so that every backend is given the very same work."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexroll.bench.checkpoint import read_config
from flexroll.bench.console import say
from flexroll.bench.hub import check_sha256, fetch_dataset_file
from flexroll.bench.task import read_input
from flexroll.chat import Messages
from flexroll.errors import FlexrollError
from flexroll.provenance import hash_json
from flexroll.schema.config import Config
from flexroll.schema.lengths import longest
from flexroll.schema.records import write_json
from flexroll.schema.sources import Prompts
from flexroll.tokenizer import Tokenizer


def prepare_prompts(config: Config, model_json: Path, out: Path, root: Path) -> None:
    """Write {sha256, left_out, duplicates, source, prompts: [{text, ids}]} with exactly the prompts the run needs.

    A prompt longer than prompts.max_tokens, or than max_model_len leaves room for, is left out and counted; a repeated
    one is taken once.

    Raises:
        FlexrollError: an empty prompt (with its index), too few prompts, no tokenizer, no chat template, a bad file.
    """
    model = read_input(model_json, "model", ("path", "files"))
    folder = root / model["path"]
    needed = needed_prompts(config)
    limit = longest_prompt(config)
    if config.prompts.source == "random":
        prompts, left_out, duplicates = _random(config, folder, needed, limit), 0, 0
        source = f"random tokens, seed {config.prompts.seed}"
    else:
        path, source = prompts_file(config.prompts, root)
        prompts, left_out, duplicates = _from_file(config, path, folder, needed, limit)
    data = {
        "sha256": hash_json([p["ids"] for p in prompts]),
        "left_out": left_out,
        "duplicates": duplicates,
        "source": source,
        "prompts": prompts,
    }
    write_json(out, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    say(f"{len(prompts)} prompts, {left_out} left out as longer than {limit} tokens, {duplicates} repeated")


def needed_prompts(config: Config) -> int:
    """prompts.count, or more where a batch or a warm-up asks for more."""
    needed = config.prompts.count
    for experiment in config.experiments.values():
        batches = [*experiment.batches, *(b for use in experiment.backends for b in use.batches or [])]
        needed = max(needed, max(batches) // experiment.samples, experiment.warmup_prompts or 1)
    return needed


def longest_prompt(config: Config) -> int:
    """Tokens a prompt may have so that every experiment's new tokens still fit max_model_len."""
    if not config.experiments:
        return min(config.prompts.max_tokens, config.max_model_len)
    room = {name: config.length_of(e) - longest(e.new_tokens) for name, e in config.experiments.items()}
    name = min(room, key=lambda name: room[name])
    if room[name] < 1:
        held = config.length_of(config.experiments[name])
        raise FlexrollError(
            f"experiments.{name}: max_model_len {held} leaves no room for a prompt beside new_tokens; raise it"
        )
    return min(config.prompts.max_tokens, room[name])


def _from_file(
    config: Config, path: Path, folder: Path, needed: int, limit: int
) -> tuple[list[dict[str, Any]], int, int]:
    rows = UsableRows(config.prompts, path, folder, limit)
    prompts: list[dict[str, Any]] = []
    for usable in rows:
        prompts.append({"text": usable.text, "ids": usable.ids})
        if len(prompts) == needed:
            return prompts, rows.left_out, rows.duplicates
    raise FlexrollError(
        f"{path}: {len(prompts)} usable prompts ({rows.left_out} longer than {limit} tokens, "
        f"{rows.duplicates} repeated), the run needs {needed}; "
        "lower prompts.count and batches, or raise prompts.max_tokens"
    )


class Usable(NamedTuple):
    """A row as its file has it, its chat messages, and the prompt they make as text and token ids."""

    index: int
    row: Any
    messages: Messages
    text: str
    ids: list[int]


class UsableRows:
    """The rows of a file of prompts, each prompt once and none of more than `limit` tokens; left_out and duplicates
    count the others so far. columns: more of a parquet file's than the prompts'.

    Raises:
        FlexrollError: no tokenizer or chat template; on the way, an empty prompt (with its index), a bad file.
    """

    def __init__(self, prompts: Prompts, path: Path, folder: Path, limit: int, columns: Sequence[str] = ()) -> None:
        if not (folder / "tokenizer.json").exists():
            raise FlexrollError(f"{folder / 'tokenizer.json'}: missing; without one only prompts.source: random works")
        self.tokenizer = Tokenizer(folder)
        self.template = self.tokenizer.template if prompts.format == "chat" else None
        self.prompts, self.path, self.limit = prompts, path, limit
        self.columns = list(dict.fromkeys([prompts.field, *columns]))
        self.left_out = self.duplicates = 0

    def __iter__(self) -> Iterator[Usable]:
        seen: set[str] = set()
        for index, row in enumerate(read_rows(self.path, self.columns)):
            messages = chat_messages(row, self.prompts.field, self.path, index)
            text = self.template.render(messages) if self.template else "\n\n".join(m["content"] for m in messages)
            if text in seen:
                self.duplicates += 1
                continue
            seen.add(text)
            # A template writes its own special tokens; plain text gets those the tokenizer adds (a BOS, for Llama).
            ids = self.tokenizer.encode(text, special=self.template is None)
            if not ids:
                raise FlexrollError(f"{self.path}: prompt {index} is empty; every prompt needs text")
            if len(ids) > self.limit:
                self.left_out += 1
                continue
            yield Usable(index, row, messages, text, ids)


def chat_messages(row: Any, field: str, path: Path, index: int) -> Messages:
    """The chat messages of a row: its field is a string (one user message) or a list of {role, content}."""
    value = row
    if isinstance(row, dict):
        if field not in row:
            raise FlexrollError(
                f"{path}: row {index} has no '{field}' but {', '.join(map(str, row))}; set prompts.field"
            )
        value = row[field]
    if value is None:
        value = ""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and isinstance(m.get("role", "user"), str)
        for m in messages
    )
    if not good:
        raise FlexrollError(f"{path}: prompt {index} is neither text nor a list of messages with role and content")
    if not any(m["content"].strip() for m in messages):
        raise FlexrollError(f"{path}: prompt {index} is empty; every prompt needs text")
    return [{"role": m.get("role", "user"), "content": m["content"]} for m in messages]


def prompts_file(prompts: Prompts, root: Path) -> tuple[Path, str]:
    """The file with the prompts, fetched where it is on the hub, and where it is from, in words."""
    if prompts.source == "file":
        assert prompts.path
        path = root / prompts.path
        if not path.is_file():
            raise FlexrollError(f"{path}: no such prompts file; set prompts.path")
        check_sha256(path, prompts.sha256)
        return path, f"{prompts.path}, field {prompts.field}"
    assert prompts.repo and prompts.revision and prompts.file
    folder = root / ".cache" / "datasets" / prompts.repo.replace("/", "--")
    path = fetch_dataset_file(prompts.repo, prompts.revision, prompts.file, folder, prompts.sha256, say)
    return path, f"{prompts.repo} at {prompts.revision[:8]}, {prompts.file}, field {prompts.field}"


def read_rows(path: Path, columns: list[str]) -> Iterator[Any]:
    """Rows of a .json list, a .jsonl or a .parquet file (these columns of it), read as far as they are asked for."""
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
        return
    if path.suffix not in (".json", ".jsonl"):
        raise FlexrollError(f"{path}: prompts come from .json, .jsonl or .parquet")
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text())
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (ValueError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{path}: not valid JSON ({error}); is it cut short?") from None
    if not isinstance(rows, list):
        raise FlexrollError(f"{path}: expected a JSON list of rows")
    yield from rows


def _parquet(path: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        for name in columns:
            if name not in names:
                raise FlexrollError(f"{path}: no column '{name}'; it has {', '.join(names)}; set prompts.field")
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise FlexrollError(f"{path}: not a readable parquet file ({' '.join(str(error).split())[:120]})") from None


def _random(config: Config, folder: Path, needed: int, limit: int) -> list[dict[str, Any]]:
    low, high = config.prompts.lengths
    if high > limit:
        raise FlexrollError(f"prompts.lengths: {high} is too long, {limit} tokens fit beside the new ones; lower it")
    vocab = read_config(folder).get("vocab_size")
    if not isinstance(vocab, int):
        raise FlexrollError(f"{folder / 'config.json'}: no vocab_size in it, needed for random prompts")
    rng = random.Random(config.prompts.seed)
    # The lowest and highest ids are mostly special tokens, and some engines treat those as more than an embedding.
    first, last = vocab // 16, vocab - vocab // 16 - 1
    return [
        {"text": "", "ids": [rng.randint(first, last) for _ in range(rng.randint(low, high))]} for _ in range(needed)
    ]
