"""The process that scores one engine configuration: free greedy tokens, then teacher forcing, against the reference.

Started as `python -m flexroll.bench.quality_worker TASK_FILE EVENT_FD`; tells what it found by one JSON line an event.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flexroll.backends.base import Backend, EngineSpec, Scores, unavailable
from flexroll.bench.coherence import before_end, judge
from flexroll.bench.quality_reference import Reference, read_reference
from flexroll.bench.worker import Events, check_counts, load_backend, serve, spec_of
from flexroll.errors import one_line
from flexroll.schema.architecture import eos_ids
from flexroll.schema.config import Sampling
from flexroll.schema.quality import Divergence
from flexroll.schema.records import Coherence


class ScoringTask(BaseModel):
    """backend: as in bench.task.Task. spec: the fields of EngineSpec. reference: of `flexroll quality-reference`."""

    model_config = ConfigDict(extra="forbid")

    backend: str
    spec: dict[str, Any]
    reference: Path


def main(arguments: list[str]) -> int:
    return serve(arguments, ScoringTask, run)


def run(task: ScoringTask, events: Events) -> int:
    spec = spec_of(task.spec)
    try:
        backend_class = load_backend(task.backend)
        reason = unavailable(backend_class, spec)
        if reason is not None:
            events.send("skipped", reason=reason)
            return 0
        reference = read_reference(task.reference)
        backend = backend_class(spec)
    except Exception as error:
        traceback.print_exc()
        events.send("failed", reason=f"engine did not start: {one_line(error)}")
        return 0
    events.send("started")
    try:
        found = score(backend, spec, reference)
        events.send("done", **found)
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        events.send("failed", reason=one_line(error))
    finally:
        backend.close()
    return 0


def score(backend: Backend, spec: EngineSpec, reference: Reference) -> dict[str, Any]:
    """Fields of a QualityRecord that come from the engine.

    Raises whatever the engine raises; NotImplementedError of `score` alone is a finding (`unscored`).
    """
    prompts, expected = reference.prompts, reference.tokens
    lengths = [len(tokens) for tokens in expected]
    backend.prepare(min(len(prompts), spec.max_batch))
    backend.forget()
    tokens = backend.generate(prompts, Sampling(), lengths, True, spec.seed).tokens
    check_counts(tokens, lengths, 1, True)
    apart = divergences(reference, tokens)
    found: dict[str, Any] = {
        "reference_sha256": reference.sha256,
        "prompts": len(prompts),
        "tokens": sum(lengths),
        "diverged": len(apart),
        "divergences": [d.model_dump() for d in apart],
        **_coherence(spec.model, tokens),
    }
    backend.forget()
    try:
        scores = backend.score(prompts, expected)
    except NotImplementedError as error:
        return found | {"unscored": f"cannot be scored: {error}"}
    return found | compare(reference, scores)


def divergences(reference: Reference, tokens: Sequence[Sequence[int]]) -> list[Divergence]:
    """The first place of each sequence at which greedy tokens are not the reference's."""
    found, begin = [], 0
    for prompt, (expected, got) in enumerate(zip(reference.tokens, tokens, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
        if place is not None:
            row = reference.full[begin + place]
            gap = float(row[expected[place]] - row[got[place]])
            found.append(
                Divergence(prompt=prompt, place=place, expected=expected[place], got=got[place], gap=round(gap, 6))
            )
        begin += len(expected)
    return found


def compare(reference: Reference, scores: Sequence[Scores]) -> dict[str, Any]:
    """kl, logprob_rms and top1_agreement of all given tokens, and kl of each prompt's.

    Raises:
        ValueError: a log probability that is not finite.
    """
    import torch

    squares, agreed, begin = 0.0, 0, 0
    whole = all(s.full is not None for s in scores)
    lengths, sums = [len(tokens) for tokens in reference.tokens], []
    for expected, own in zip(reference.tokens, scores, strict=True):
        exact = reference.full[begin : begin + len(expected)].double()
        given = exact[range(len(expected)), expected]
        squares += float((given - torch.tensor(own.logprobs, dtype=torch.float64)).square().sum())
        agreed += int((exact.argmax(-1) == torch.tensor(own.argmax)).sum())
        if whole:
            sums.append(float((exact.exp() * (exact - own.full.double())).sum()))
        begin += len(expected)
    if not all(map(math.isfinite, (squares, *sums))):
        raise ValueError("log probabilities that are not finite")
    found = {"kl": None, "logprob_rms": math.sqrt(squares / begin), "top1_agreement": agreed / begin}
    if not whole:
        return found
    each = [total / length for total, length in zip(sums, lengths, strict=True)]
    return found | {"kl": math.fsum(sums) / begin, "kl_sequences": each, "sequence_tokens": lengths}


def _coherence(model: Path, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Whether the text is coherent up to its end tokens, and the verdicts where it is not; nothing without a
    tokenizer."""
    if not (model / "tokenizer.json").exists():
        return {}
    from tokenizers import Tokenizer

    tokenizer, ends = Tokenizer.from_file(str(model / "tokenizer.json")), eos_ids(model)
    verdicts: list[Coherence] = []
    for ids in tokens:
        told = before_end(ids, ends)
        verdicts.append(judge(told, tokenizer.decode(told, skip_special_tokens=False)))
    broken = [v.model_dump() for v in verdicts if not v.ok]
    return {"coherent": not broken, "coherence": broken}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
