"""`flexroll generate`: prompts from the command line, a file or stdin to completions, one JSON object a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError
from flexroll.schema.records import write_json
from flexroll.tokenizer import Tokenizer

Prompt = str | list[dict[str, str]]
MAX_BATCH = 64  # sequences at once where --max-batch does not say


@dataclass(frozen=True)
class Request:
    """What is asked of `generate`. engine: further arguments of Engine.from_pretrained; sampling: of SamplingParams."""

    model: Path
    prompts: Sequence[Prompt]
    raw: bool
    engine: dict[str, Any]
    sampling: dict[str, Any]
    max_batch: int | None = None
    max_model_len: int | None = None


def read_prompts(given: Sequence[str], file: Path | None) -> list[Prompt]:
    """Prompts of the command line, then those of the file; `-` is all of stdin as one prompt.

    Raises:
        FlexrollError: none at all, an empty one (with its place), or a file that cannot be read.
    """
    prompts: list[Prompt] = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in given]
    for number, prompt in enumerate(prompts, 1):
        if not str(prompt).strip():
            raise FlexrollError(f"prompt {number} is empty; every prompt needs text")
    if file is not None:
        prompts += read_file(file)
    if not prompts:
        raise FlexrollError("no prompt; give one or more, --file FILE, or - for stdin")
    return prompts


def read_file(path: Path) -> list[Prompt]:
    """Prompts of a .jsonl (a line is text, a list of messages, or an object with `prompt` or `messages`), or of any
    other file, one a line.

    Raises:
        FlexrollError: no such file, not text, no prompt in it, or a bad line, with its number.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise FlexrollError(f"{path}: no such prompts file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{path}: cannot be read as text ({error})") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if path.suffix == ".jsonl":
            if line.strip():
                prompts.append(_parsed(line, where))
        elif line.strip():
            prompts.append(line)
        else:
            raise FlexrollError(f"{where}: an empty prompt; every line is one")
    if not prompts:
        raise FlexrollError(f"{path}: no prompt in it")
    return prompts


def _parsed(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise FlexrollError(f"{where}: not valid JSON ({error})") from None
    if isinstance(value, dict):
        name = next((name for name in ("prompt", "messages") if name in value), None)
        if name is None:
            raise FlexrollError(f"{where}: neither 'prompt' nor 'messages' in it but {', '.join(value) or 'nothing'}")
        value = value[name]
    if isinstance(value, str):
        texts = [value]
    elif isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        texts = [m["content"] for m in value]
    else:
        raise FlexrollError(f"{where}: neither text nor a list of messages with role and content")
    if not any(text.strip() for text in texts):
        raise FlexrollError(f"{where}: an empty prompt")
    return value


def check_out(out: Path | None, force: bool) -> None:
    """Raises FlexrollError where `out` may not be written; asked before the model is loaded."""
    if out is None:
        return
    if out.is_dir():
        raise FlexrollError(f"{out}: a folder; name a file")
    if out.exists() and not force:
        raise FlexrollError(f"{out}: exists already; --force overwrites it")


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, raw: bool) -> list[list[int]]:
    """Token ids of the prompts: chat prompts, or with `raw` the text as it is.

    Raises:
        FlexrollError: messages with `raw`, or a prompt without tokens.
    """
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if raw and not isinstance(prompt, str):
            raise FlexrollError(f"prompt {number} is a list of messages, which --raw cannot render; leave --raw out")
        ids = tokenizer.encode(prompt) if raw and isinstance(prompt, str) else tokenizer.chat(prompt)
        if not ids:
            raise FlexrollError(f"prompt {number} is empty; every prompt needs text")
        encoded.append(ids)
    return encoded


def generate(request: Request, out: Path | None) -> None:
    """Load the model, continue every prompt, and write one JSON object a completion to `out`, or to stdout.

    The objects come in prompt order, samples of a prompt together: {index, sample, prompt, text, token_ids,
    finish_reason}, and with logprobs also {logprobs, raw_logprobs}.

    Raises:
        FlexrollError: the model or adapter is unfit, a prompt is empty or too long, or a value is out of range.
    """
    if not (request.model / "config.json").is_file():
        raise FlexrollError(f"{request.model}: not a checkpoint folder (no config.json)")
    from flexroll.engine import Engine, SamplingParams

    params = SamplingParams(**request.sampling)
    if params.n > 1 and params.temperature == 0:
        raise FlexrollError(f"--n {params.n}: greedy samples are all alike; give --temperature as well")
    tokenizer = Tokenizer(request.model)
    prompts = encode(request.prompts, tokenizer, request.raw)
    total = len(prompts) * params.n
    longest = max(map(len, prompts)) + params.max_new_tokens
    engine = Engine.from_pretrained(
        request.model,
        max_batch=request.max_batch or min(total, MAX_BATCH),
        max_model_len=request.max_model_len or longest,
        **request.engine,
    )
    begun = time.perf_counter()
    with _progress(total) as advance:
        completions = engine.generate(prompts, params, progress=advance)
    seconds = time.perf_counter() - begun
    lines = [_line(c, request.prompts[c.index], tokenizer, params.logprobs) for c in completions]
    if out is None:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
    else:
        write_json(out, "".join(lines))
    tokens = sum(len(c.token_ids) for c in completions)
    if sys.stderr.isatty():
        print(f"{total} completions, {tokens} tokens, {tokens / seconds:.0f} tok/s", file=sys.stderr)


def _line(completion: Any, prompt: Prompt, tokenizer: Tokenizer, logprobs: bool) -> str:
    data = {
        "index": completion.index,
        "sample": completion.sample,
        "prompt": prompt,
        "text": tokenizer.decode(completion.token_ids),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if logprobs:
        data |= {"logprobs": completion.logprobs, "raw_logprobs": completion.raw_logprobs}
    return json.dumps(data, ensure_ascii=False) + "\n"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Any], None] | None]:
    """What the engine calls with each completion: a bar on stderr where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[tokens]} tokens"), console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total, tokens=0)
        tokens = 0

        def advance(completion: Any) -> None:
            nonlocal tokens
            tokens += len(completion.token_ids)
            bar.update(task, advance=1, tokens=tokens)

        yield advance
