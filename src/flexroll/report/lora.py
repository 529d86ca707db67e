"""Forms of an adapter side by side: what each costs in speed, memory and exactness, and what a refresh takes."""

from __future__ import annotations

from collections.abc import Sequence

from flexroll.analysis.model import Analysis, Result
from flexroll.analysis.quality import row_of
from flexroll.report import text
from flexroll.report.measured import batch
from flexroll.report.text import Table, cell

SECTION = "lora"


def table(results: Sequence[Result], analysis: Analysis, existing: set[str]) -> Table:
    """One row a form. Shares and bytes are against the same backend without an adapter, where that was measured."""
    rows = []
    for r in results:
        plain = _plain(r, results)
        exact = row_of(r, analysis)
        rows.append(
            {
                "Backend": text.series_label(r.backend, r.adapter),
                "Option": f"`{cell(r.option)}`",
                "Batch": batch(r),
                "tok/s, median": text.rate(r.tps) if r.status == "ok" else r.status,
                "Of no adapter's": text.percent(_share(r, plain)),
                "Weights, GB": text.gigabytes(r.memory.weights),
                "More than without, GB": text.gigabytes(_more(r, plain)),
                "Refresh, ms": text.significant(_refresh_ms(r, analysis)),
                "KL to fp32, nats a token": text.significant(exact.kl if exact else None),
                "RMS of log-probabilities, nats": text.significant(exact.logprob_rms if exact else None),
                "Stack": r.stack,
                "Raw": text.links([*r.files, *([exact.file] if exact else [])], existing),
            }
        )
    left = frozenset({"Backend", "Option", "Stack", "Raw"})
    return Table(rows, left).without_empty().without_constant("Option", "Batch", "Stack")


def says(results: Sequence[Result]) -> list[str]:
    """What each form keeps of the speed without an adapter."""
    parts = []
    for r in results:
        share = _share(r, _plain(r, results))
        if share is not None:
            parts.append(f"{text.series_label(r.backend, r.adapter)} {text.percent(share)}")
    return [f"Of the same backend's tok/s without an adapter: {text.listed(parts)}."] if parts else []


def _plain(result: Result, results: Sequence[Result]) -> Result | None:
    """The same backend without an adapter; None for itself."""
    same = ("backend", "option", "batch", "stack", "sampling")
    if result.adapter == "none":
        return None
    return next(
        (r for r in results if r.adapter == "none" and all(getattr(r, n) == getattr(result, n) for n in same)), None
    )


def _share(result: Result, plain: Result | None) -> float | None:
    return result.tps / plain.tps if plain is not None and result.tps and plain.tps else None


def _more(result: Result, plain: Result | None) -> int | None:
    if plain is None or None in (result.memory.weights, plain.memory.weights):
        return None
    return result.memory.weights - plain.memory.weights  # type: ignore[operator]


def _refresh_ms(result: Result, analysis: Analysis) -> float | None:
    """Median of the stack's drift verification: of the flex engine's merged copy alone, for no other form has one."""
    if (result.backend, result.adapter) != ("flex", "merged"):
        return None
    return next((d.refresh_ms_median for d in analysis.drift if d.stack == result.stack), None)
