"""The process that runs one engine: start it, run every cell on it, tell the supervisor by one JSON line an event.

Started as `python -m flexroll.bench.worker TASK_FILE EVENT_FD`. It writes no record: a process that hangs or is killed
could not. Its exit codes: 0 all cells were tried, 3 the engine did not start, 4 a cell failed in a way that may have
broken the engine (the supervisor starts a fresh process for the cells that are left).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from flexroll.backends.base import Backend, EngineSpec, Generation, unavailable
from flexroll.bench.coherence import before_end, judge
from flexroll.bench.memory import MemoryWatch, device_in_use
from flexroll.bench.task import Task, read_prompts
from flexroll.errors import FlexrollError, one_line
from flexroll.schema.architecture import eos_ids
from flexroll.schema.cells import Cell
from flexroll.schema.records import Round, Sample

Read = TypeVar("Read", bound=BaseModel)
SAMPLES = 3
PATHS = ("model", "adapter", "merged", "shard", "replay")  # of a spec
WARMUP_TOKENS = 16  # enough for every kernel of a decode step to have run


def main(arguments: list[str]) -> int:
    return serve(arguments, Task, run)


def serve(arguments: list[str], kind: type[Read], run: Callable[[Read, Events], int]) -> int:
    """A worker process from its arguments, TASK_FILE and EVENT_FD, to its exit code; it ends with its supervisor."""
    die_with_parent()
    task = kind.model_validate_json(Path(arguments[0]).read_text())
    events = Events(int(arguments[1]))
    try:
        return run(task, events)
    except BrokenPipeError:  # the supervisor is gone: nobody is left to work for
        return 5


class Events:
    """One JSON object a line, on a pipe no child process inherits."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd

    def send(self, event: str, **values: Any) -> None:
        data = (json.dumps({"event": event, **values}) + "\n").encode()
        while data:
            data = data[os.write(self.fd, data) :]


def run(task: Task, events: Events) -> int:
    spec = spec_of(task.spec)
    prompts = [p["ids"] for p in read_prompts(task.prompts)["prompts"]]
    before = device_in_use(spec.device)
    begun = time.perf_counter()
    try:
        backend_class = load_backend(task.backend)
        reason = unavailable(backend_class, spec)
        if reason is not None:
            events.send("unavailable", reason=reason)
            return 0
        backend = backend_class(spec)
    except Exception as error:
        traceback.print_exc()
        events.send("start_failed", reason=one_line(error))
        return 3
    events.send("started", start_s=time.perf_counter() - begun)
    try:
        for index, cell in enumerate(task.cells):
            events.send("cell", index=index)
            if not run_cell(task.mode, backend, spec, cell, prompts, events, before):
                return 4
        events.send("finished")
        return 0
    finally:
        backend.close()


def spec_of(values: dict[str, Any]) -> EngineSpec:
    """The EngineSpec whose fields a task holds."""
    return EngineSpec(**{**values, **{name: None if values[name] is None else Path(values[name]) for name in PATHS}})


def run_cell(
    mode: str,
    backend: Backend,
    spec: EngineSpec,
    cell: Cell,
    prompts: list[list[int]],
    events: Events,
    before: int | None,
) -> bool:
    """Run one cell; False where the engine cannot be trusted with another.

    before: bytes in use on the device before the engine started.
    """
    gc.collect()
    batch = prompts[: cell.prompts]
    watch = MemoryWatch(spec.device, backend.child_pids, before)
    tokens: list[list[int]] = []
    try:
        with watch:
            backend.prepare(cell.running)
            if mode == "warmup":
                _round(backend, cell, prompts[: cell.warmup_prompts], 0, True, WARMUP_TOKENS)
                _round(backend, cell, batch, 1, True, WARMUP_TOKENS)
            else:
                for index in range(cell.warmup_rounds + cell.rounds):
                    warm = index < cell.warmup_rounds
                    batch = prompts_of_round(cell, prompts, index - cell.warmup_rounds)
                    chosen = prompts[: cell.warmup_prompts] if warm else batch
                    done, tokens, (begin, end) = _round(backend, cell, chosen, index, warm)
                    events.send("round", round=done.model_dump(), begin=begin, end=end)
        samples = _samples(spec.model, batch, tokens[:: cell.samples]) if mode == "bench" else []
        events.send(
            "cell_done",
            memory=watch.result(backend.memory()).model_dump(),
            samples=[s.model_dump() for s in samples],
            start_parts=backend.start_parts(),
            prompt_tokens=sum(map(len, batch)),
        )
        return True
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        events.send("cell_failed", reason=one_line(error), prompt_tokens=sum(map(len, batch)))
        return isinstance(error, FlexrollError)  # said in plain words: nothing in the engine is broken


def prompts_of_round(cell: Cell, prompts: list[list[int]], index: int) -> list[list[int]]:
    """The first prompts of the list, or with vary_prompts those after the round before's, round and round."""
    first = cell.prompts * index if cell.vary_prompts and index > 0 else 0
    return [prompts[(first + i) % len(prompts)] for i in range(cell.prompts)]


def _round(
    backend: Backend, cell: Cell, prompts: list[list[int]], index: int, warmup: bool, most: int | None = None
) -> tuple[Round, list[list[int]], tuple[float, float]]:
    """One timed rollout, repeated until a measured round is as long as the cell asks.

    More prompts than the cell's (a large warm-up) go in slices of them. most: cuts lengths.

    Returns: the round; the token ids of the first run of its batch, a list a completion; begin of the first and end of
    the last call on time.monotonic(), a clock that the supervisor shares.
    """
    lengths = [min(length, most or length) for length in cell.lengths(len(prompts))]
    parts = [slice(first, first + cell.prompts) for first in range(0, len(prompts), cell.prompts)]
    results: list[Generation] = []
    wall, calls = 0.0, 0
    started, begin = time.time(), time.monotonic()
    end = begin
    while not calls or (not warmup and wall < cell.min_round_s):
        backend.forget()
        for part in parts:
            new = lengths[part]
            begun = time.perf_counter()
            result = backend.generate(
                prompts[part], cell.sampling_values, new, cell.ignore_eos, cell.seed, cell.samples
            )
            wall += time.perf_counter() - begun
            end = time.monotonic()
            check_counts(result.tokens, new, cell.samples, cell.ignore_eos)
            results.append(result)
        calls += 1
    tokens = [ids for result in results[: len(parts)] for ids in result.tokens]
    done = Round(
        index=index,
        tokens=sum(len(ids) for result in results for ids in result.tokens),
        wall_s=wall,
        prefill_s=_total([result.prefill_s for result in results]),
        decode_s=_total([result.decode_s for result in results]),
        decode_tokens=_total([_decoded(result) for result in results]),
        steps=_total([result.steps for result in results]),
        first_token_s=results[0].first_token_s,
        notes=_notes(results),
        calls=calls,
        warmup=warmup,
        tokens_sha256=hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        started=started,
    )
    return done, tokens, (begin, end)


def _decoded(result: Generation) -> int | None:
    """Tokens of decode steps; None where the backend tells no decode time to set against them."""
    if result.decode_s is None:
        return None
    later = sum(map(len, result.tokens)) - len(result.tokens)
    return later if result.decode_tokens is None else result.decode_tokens


def _total(values: list[Any]) -> Any:
    """The sum; None unless every value is told."""
    return None if None in values else sum(values)


def _notes(results: list[Generation]) -> dict[str, float]:
    """Sums by name of what the backend noted."""
    names = dict.fromkeys(name for result in results for name in result.notes)
    return {name: sum(result.notes.get(name, 0) for result in results) for name in names}


def check_counts(tokens: list[list[int]], new_tokens: list[int], samples: int, exact: bool) -> None:
    """Raises FlexrollError unless every sample of every prompt has its completion, of the prompt's length."""
    if len(tokens) != len(new_tokens) * samples:
        each = f" of {samples} samples" if samples > 1 else ""
        raise FlexrollError(f"wrong count: {len(tokens)} completions for {len(new_tokens)} prompts{each}")
    for index, ids in enumerate(tokens):
        new = new_tokens[index // samples]
        if len(ids) > new or (exact and len(ids) != new) or not ids:
            asked = f"{new}" if exact else f"1 to {new}"
            raise FlexrollError(f"wrong count: prompt {index // samples} got {len(ids)} tokens, asked for {asked}")


def load_backend(reference: str) -> type[Backend]:
    """The class behind a name of the catalogue, `module:Class` or `file.py:Class`."""
    if ":" not in reference:
        return importlib.import_module("flexroll.backends").load(reference)
    where, _, name = reference.rpartition(":")
    if where.endswith(".py"):
        module_spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, name)


def _samples(model: Path, prompts: list[list[int]], tokens: list[list[int]]) -> list[Sample]:
    """The first completions as text, up to the first end token (what follows was forced); [] without a tokenizer."""
    if not (model / "tokenizer.json").exists():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ends = eos_ids(model)
    samples = []
    for prompt, ids in list(zip(prompts, tokens, strict=False))[:SAMPLES]:
        told = before_end(ids, ends)
        text = tokenizer.decode(told, skip_special_tokens=False)
        verdict = judge(told, text)
        if len(told) < len(ids) - 1:
            verdict.notes.append(f"end token after {len(told)} tokens; what was generated past it is not shown")
        shown = tokenizer.decode(prompt, skip_special_tokens=False)
        samples.append(Sample(prompt=shown, text=text, tokens=len(ids), coherence=verdict))
    return samples


def die_with_parent() -> None:
    """Linux: be terminated when the supervisor is, even by kill -9."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
