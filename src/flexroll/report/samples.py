"""Sample completions, read from the raw records: the first sample of each backend form and stack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexroll.analysis.model import Analysis
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.schema.records import read_record

PROMPT_LIMIT = 600
TEXT_LIMIT = 600


@dataclass(frozen=True)
class Completion:
    """One completion, ready to print: who wrote it, its coherence verdict in words, its text as a code block."""

    label: str
    verdict: str
    block: str
    file: str


def completions(analysis: Analysis, results: Path) -> dict[str, list[Completion]]:
    """Prompt as a code block -> its completions, one a backend, adapter form, option, sampling and stack."""
    seen: set[tuple[str, ...]] = set()
    found: dict[str, list[Completion]] = {}
    for row in analysis.cells:
        key = (row.backend, row.adapter, row.option, row.sampling, row.stack)
        if row.status != "ok" or key in seen:
            continue
        try:
            samples = read_record(results / row.file).samples
        except (FlexrollError, OSError):
            continue
        if not samples:
            continue
        seen.add(key)
        sample = samples[0]
        option = "" if row.option == "default" else f", {row.option}"
        label = f"{text.series_label(row.backend, row.adapter)}{option}, {row.sampling}, batch {row.batch}, {row.stack}"
        notes = f" ({'; '.join(row.coherence_notes)})" if row.coherence_notes else ""
        found_likely = f", perplexity {text.significant(row.perplexity)}" if row.perplexity is not None else ""
        verdict = f"{'coherent' if row.coherent else 'broken'}{found_likely}{notes}"
        prompt = text.fence(text.clip(sample.prompt, PROMPT_LIMIT))
        block = text.fence(text.clip(sample.text, TEXT_LIMIT))
        found.setdefault(prompt, []).append(Completion(label, verdict, block, row.file))
    return found


def grouped(items: list[Completion]) -> list[tuple[list[Completion], str]]:
    """Completions with the same text together, so that equal greedy outputs are printed once."""
    by_text: dict[str, list[Completion]] = {}
    for item in items:
        by_text.setdefault(item.block, []).append(item)
    return [(group, block) for block, group in by_text.items()]
