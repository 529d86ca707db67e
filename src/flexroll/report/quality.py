"""How exact each engine configuration is, as a table and in sentences made from the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexroll.analysis.model import Analysis, Configuration, QualityRow
from flexroll.analysis.quality import row_of
from flexroll.report import text
from flexroll.report.text import NONE, Table, cell

ADMISSIBLE = {True: "admissible", False: "**not admissible**", None: "cannot be told"}
SHORT = {True: "yes", False: "**no**", None: "not told"}


def quality_table(analysis: Analysis, existing: set[str]) -> Table:
    """One row a configuration that was to be scored; empty where the config asks for none."""
    rows = [
        {
            "Backend": text.series_label(q.backend, q.adapter),
            "Option": f"`{cell(q.option)}`",
            "Stack": q.stack,
            "KL, nats a token": text.significant(q.kl) if q.status == "ok" else q.status,
            "Times the baseline's": NONE if q.baseline else text.significant(q.times),
            "95 % interval": NONE if q.baseline else text.interval(q.times_low, q.times_high),
            "RMS of log-probabilities, nats": text.significant(q.logprob_rms),
            "Top-1 agreement": text.percent(q.top1_agreement, 2),
            "Diverged": NONE if q.diverged is None else f"{q.diverged} of {q.prompts}",
            "Near-ties": NONE if not q.diverged else f"{q.near_ties} of {q.diverged}",
            "Text": {True: "coherent", False: "broken", None: NONE}[q.coherent],
            "Admissible": ADMISSIBLE[q.admissible],
            "Why": cell(q.why),
            "Raw": text.links([q.file], existing),
        }
        for q in analysis.quality
    ]
    left = frozenset({"Backend", "Option", "Stack", "Text", "Admissible", "Why", "Raw"})
    return Table(rows, left).without_empty().without_constant("Stack")


def says(analysis: Analysis) -> list[str]:
    """How many configurations are admissible, which are not and why, and of how many it cannot be told."""
    rows = analysis.quality
    if not rows:
        return []
    counts = {verdict: [q for q in rows if q.admissible is verdict] for verdict in (True, False, None)}
    parts = [f"{len(counts[True])} {_is(counts[True])} admissible"]
    parts += [f"{len(counts[False])} {_is(counts[False])} not"] if counts[False] else []
    parts += [f"of {len(counts[None])} it cannot be told"] if counts[None] else []
    sentences = [f"Of {text.plural(len(rows), 'engine configuration')} {text.listed(parts)}."]
    sentences += [f"{_name(q, rows)} is not: {q.why}." for q in counts[False]]
    exact = [q for q in rows if q.kl is not None]
    if exact:
        first, last = min(exact, key=lambda q: q.kl or 0.0), max(exact, key=lambda q: q.kl or 0.0)
        told = f"KL to fp32 is {text.significant(first.kl)} nats a token of {_name(first, rows)}"
        told += "" if first is last else f", the least, to {text.significant(last.kl)} of {_name(last, rows)}, the most"
        sentences.append(f"{told}.")
    return sentences


def admissible(configuration: Configuration, analysis: Analysis) -> str:
    """`yes`, `**no**`, `not told`, or a dash where nothing was to be scored."""
    row = row_of(configuration, analysis)
    return NONE if row is None else SHORT[row.admissible]


def _name(q: QualityRow, among: Sequence[QualityRow]) -> str:
    label = f"`{q.option}` of {text.series_label(q.backend, q.adapter)}"
    return f"{label} on {q.stack}" if len({other.stack for other in among}) > 1 else label


def _is(items: Iterable[QualityRow]) -> str:
    return "is" if len(list(items)) == 1 else "are"
