"""What each table says, in sentences made from the same data, so that no sentence can contradict its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexroll.analysis.model import Analysis, Comparison, Pair, Result
from flexroll.analysis.quality import is_inadmissible
from flexroll.analysis.statistics import MIN_SESSIONS
from flexroll.report import text
from flexroll.report.measured import gain, pairs_of, varied

Series = tuple[str, str, str, str, str]


def of_sweep(results: Sequence[Result], analysis: Analysis) -> list[str]:
    """Each series against each of vLLM's, or, where nothing pairs, the fastest and the slowest; flagged rounds."""
    ok = [r for r in results if r.status == "ok"]
    found: dict[tuple[Series, Series], list[Pair]] = {}
    for result in ok:
        for pair in pairs_of(result, analysis, "vllm"):
            if pair.comparison.ratio is not None:
                found.setdefault((_series(pair.over), _series(pair.under)), []).append(pair)
    sentences = [_against(pairs, results) for pairs in found.values()]
    if not sentences and len(ok) > 1:
        sentences = [_extremes(ok, results)]
    return [*sentences, *flagged(ok)]


def of_memory(results: Sequence[Result]) -> list[str]:
    """What flex has in use over what each form of vLLM has."""
    ok = [r for r in results if r.status == "ok" and r.memory.device_total]
    sentences = []
    for ours in (r for r in ok if r.backend == "flex"):
        shares = [
            f"{text.significant(ours.memory.device_total / r.memory.device_total)} of {_name(r, results)}"  # type: ignore[operator]
            for r in ok
            if r.backend == "vllm" and r.batch == ours.batch and r.stack == ours.stack
        ]
        if shares:
            used = text.gigabytes(ours.memory.device_total)
            sentences.append(f"{_name(ours, results)} has {used} GB in use at its most: {text.listed(shares)}.")
    return sentences


def of_options(analysis: Analysis, section: str = "options") -> list[str]:
    """How many options gained, lost, or cannot be told from their base; those that are not admissible apart."""
    pairs = [
        pair for group in varied(analysis, section).values() for r in group for pair in pairs_of(r, analysis, "option")
    ]
    named = [(f"`{pair.over.option}`", pair.comparison, is_inadmissible(pair.over, analysis)) for pair in pairs]
    wrong = _named([(name, comparison) for name, comparison, apart in named if apart])
    counted = _counted("option", [(name, comparison) for name, comparison, apart in named if not apart])
    return [*counted, *([f"Not counted, for it is not admissible: {each}." for each in wrong])]


def of_stacks(analysis: Analysis) -> list[str]:
    """The same of configurations on a later stack."""
    pairs = [pair for pair in analysis.pairs if pair.kind == "stack"]
    names = [f"{text.series_label(p.over.backend, p.over.adapter)} (`{p.over.experiment}`)" for p in pairs]
    return _counted("configuration", list(zip(names, (p.comparison for p in pairs), strict=True)))


def flagged(results: Iterable[Result]) -> list[str]:
    """How many measured rounds were throttled or disturbed, and by what; they count all the same."""
    listed = [r for r in results if r.rounds_flagged]
    if not listed:
        return []
    count, of = sum(r.rounds_flagged for r in listed), sum(r.n for r in results)
    reasons = sorted({flag for r in listed for flag in r.flags})
    shown = [*reasons[:4], *([f"{len(reasons) - 4} more"] if len(reasons) > 4 else [])]
    return [f"{text.plural(count, 'measured round')} of {of} {_is(count)} flagged, and counted: {'; '.join(shown)}."]


def _series(c: Result | Pair | object) -> Series:
    return tuple(getattr(c, name) for name in ("backend", "adapter", "option", "sampling", "stack"))  # type: ignore[return-value]


def _name(c: object, among: Sequence[Result]) -> str:
    """A series by what tells it from the others of its table."""
    parts = []
    for name in ("option", "sampling", "stack"):
        if len({getattr(r, name) for r in among if r.backend == c.backend}) > 1:  # type: ignore[attr-defined]
            parts.append(f"`{getattr(c, name)}`")
    label = text.series_label(c.backend, c.adapter)  # type: ignore[attr-defined]
    return f"{label} ({', '.join(parts)})" if parts else label


def _against(pairs: list[Pair], among: Sequence[Result]) -> str:
    pairs = sorted(pairs, key=lambda p: p.over.batch)
    ratios = [p.comparison.ratio or 0.0 for p in pairs]
    low, high = (text.significant(end(ratios), 4 if 0.95 < end(ratios) < 1.05 else 3) for end in (min, max))
    times = low if low == high else f"{low} to {high}"
    batches = [p.over.batch for p in pairs]
    where = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
    over, under = _name(pairs[0].over, among), _name(pairs[0].under, among)
    unlike = f", {pairs[0].over.sampling} against {pairs[0].under.sampling}" if pairs[0].across else ""
    verdicts: dict[str, list[int]] = {}
    for pair in pairs:
        verdicts.setdefault(pair.comparison.verdict, []).append(pair.over.batch)
    return f"{over} reaches {times} times the tok/s of {under} at {where}{unlike}: {_verdicts(verdicts)}."


def _verdicts(verdicts: dict[str, list[int]]) -> str:
    told = {"insufficient n": f"too few sessions for an interval ({MIN_SESSIONS} are needed)"}
    if len(verdicts) == 1:
        (verdict,) = verdicts
        return told.get(verdict, verdict)
    return ", ".join(f"{told.get(v, v)} at {text.listed(batches)}" for v, batches in verdicts.items())


def _extremes(ok: list[Result], among: Sequence[Result]) -> str:
    batch = max(r.batch for r in ok)
    ranked = sorted((r for r in ok if r.batch == batch), key=lambda r: -(r.tps or 0))
    first, last = ranked[0], ranked[-1]
    if len(ranked) == 1:
        return f"At batch {batch} {_name(first, among)} generates {text.rate(first.tps)} tok/s."
    return (
        f"At batch {batch}, of {len(ranked)} configurations, {_name(first, among)} is fastest at the median "
        f"({text.rate(first.tps)} tok/s) and {_name(last, among)} slowest ({text.rate(last.tps)})."
    )


def _counted(what: str, compared: list[tuple[str, Comparison]]) -> list[str]:
    if not compared:
        return []
    parts = []
    for verdict in ("faster", "slower", "no difference shown", "insufficient n", "not comparable"):
        own = [(name, c) for name, c in compared if c.verdict == verdict]
        if own:
            names = f" ({', '.join(_named(own))})" if verdict in ("faster", "slower") else ""
            parts.append(f"{len(own)} {verdict}{names}")
    return [f"Of {text.plural(len(compared), what)} compared: {'; '.join(parts)}."]


def _named(compared: list[tuple[str, Comparison]]) -> list[str]:
    """`x` +3.1 % (+2.0 % to +4.2 %) of a name that stands once; `x` +2.9 % to +3.4 % in 4 settings of others."""
    grouped: dict[str, list[Comparison]] = {}
    for name, comparison in compared:
        grouped.setdefault(name, []).append(comparison)
    found = []
    for name, group in grouped.items():
        ratios = [c.ratio or 0.0 for c in group]
        low, high = (text.percent(end(ratios) - 1, 1, sign=True) for end in (min, max))
        found.append(f"{name} {gain(group[0]) if len(group) == 1 else f'{low} to {high} in {len(group)} settings'}")
    return found


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
