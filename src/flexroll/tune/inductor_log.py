"""The log that TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE asks of Inductor's autotuning (torch 2.11; 2.9.1 has none).

torch._inductor.select_algorithm writes a JSON list with one {shape key: [candidate, ...]} for each tuned call,
candidates by time. A shape key is the text of (kind, batch, query heads, KV heads, query length, KV length, head_dim of
Q and K, head_dim of V); a candidate is {"type": "triton", "time": ms, num_warps, num_stages, BLOCK_M, BLOCK_N, USE_TMA,
...}. Only the flex_attention template is logged, never flex_decoding. The whole file is rewritten for every call,
without a temporary file, so that a process that dies leaves a cut one.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

# What a candidate tells and flex_attention takes as a kernel option, and its type.
TUNABLE = {
    "BLOCK_M": int,
    "BLOCK_N": int,
    "num_warps": int,
    "num_stages": int,
    "USE_TMA": bool,
    "kpack": int,
    "matrix_instr_nonkdim": int,
    "waves_per_eu": int,
}


@dataclass(frozen=True)
class Shape:
    """A tuned call. kind: forward or backward; lengths in tokens."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Candidate:
    """One kernel that was timed. ms: of one call; options: as kernel_options take them."""

    ms: float
    options: dict[str, Any]


def log_file(given: Path) -> Path:
    """Where torch writes when the variable holds `given`: it puts .json in place of any suffix."""
    return given.with_suffix(".json")


def read_log(path: Path) -> dict[Shape, list[Candidate]]:
    """Candidates of each shape in the file, fastest first.

    Raises:
        FlexrollError: no such file, or nothing in it that can be read.
    """
    try:
        return parse_log(path.read_text(errors="replace"))
    except FileNotFoundError:
        raise FlexrollError(f"{path.name}: torch wrote no log; nothing was tuned") from None


def parse_log(text: str) -> dict[Shape, list[Candidate]]:
    """The same from a log's text. What is no entry is left out; of a cut log all whole entries count.

    Raises:
        FlexrollError: not one forward candidate with a time is in it.
    """
    found: dict[Shape, dict[str, Candidate]] = {}
    for entry in _entries(text):
        for key, listed in entry.items() if isinstance(entry, dict) else ():
            shape = _shape(key)
            if shape is None or not isinstance(listed, list):
                continue
            for candidate in filter(None, map(_candidate, listed)):
                best = found.setdefault(shape, {})
                name = json.dumps(candidate.options, sort_keys=True)
                if name not in best or candidate.ms < best[name].ms:  # the same call tuned twice
                    best[name] = candidate
    if not any(shape.kind == "forward" for shape in found):
        raise FlexrollError("the autotuning log has no forward kernel of flex_attention with a time")
    return {shape: sorted(best.values(), key=lambda c: c.ms) for shape, best in found.items()}


def decode_candidates(found: dict[Shape, list[Candidate]], batch: int) -> tuple[Shape, list[Candidate]]:
    """The decode step of `batch` sequences: one query each. The longest KV where there are several.

    Raises:
        FlexrollError: no such shape; it names those there are.
    """
    shapes = [s for s in found if s.kind == "forward" and s.q_length == 1 and s.batch == batch]
    if not shapes:
        others = ", ".join(f"{s.batch} x {s.q_length}" for s in found)
        raise FlexrollError(f"the autotuning log has no decode step of batch {batch}, only {others} queries")
    shape = max(shapes, key=lambda s: s.kv_length)
    return shape, found[shape]


def _entries(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), text.find("[") + 1
    while at:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            entry, at = decoder.raw_decode(text, at)
        except ValueError:  # the closing bracket, or where the file is cut
            return
        yield entry


def _shape(key: str) -> Shape | None:
    try:
        kind, *numbers = ast.literal_eval(key)
    except (ValueError, SyntaxError, TypeError):  # a symbolic size, or a key of another version
        return None
    if kind not in ("forward", "backward") or len(numbers) != 7 or not all(type(n) is int for n in numbers):
        return None
    return Shape(kind, *numbers)


def _candidate(value: Any) -> Candidate | None:
    if not isinstance(value, dict) or value.get("type") != "triton":
        return None
    ms = value.get("time")
    if type(ms) not in (int, float) or not 0 < ms < math.inf:  # infinite: it did not compile or run
        return None
    return Candidate(float(ms), {name: value[name] for name, kind in TUNABLE.items() if type(value.get(name)) is kind})
