"""The few numbers that open the page, each with what it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from flexroll.analysis.model import Analysis, Comparison, Pair, Result
from flexroll.analysis.pairs import key_of
from flexroll.report import grpo, text
from flexroll.report.roofline import rooflines
from flexroll.schema.claims import OWN_SOURCE, VERDICTS

TONES = {"faster": "good", "slower": "bad"}


@dataclass(frozen=True)
class Card:
    """tone: good, bad, or '' where nothing is judged."""

    value: str
    label: str
    detail: str
    tone: str = ""


def cards(analysis: Analysis) -> list[Card]:
    """Every card that has data: flex over vLLM by section, the floor, memory, drift, claims, cells."""
    results = {key_of(r): r for r in analysis.results}
    pairs = [pair for section in text.AGAINST_VLLM if (pair := _largest(analysis, results, section))]
    found = [_ratio(pair, results) for pair in pairs]
    found += [*([] if found else _fastest(analysis)), *_floor(analysis)]
    found += [card for pair in pairs[:1] if (card := _memory(results[key_of(pair.over)], results[key_of(pair.under)]))]
    return [*found, *_training(analysis), *_drift(analysis), *_claims(analysis), *_cells(analysis)]


def _largest(analysis: Analysis, results: dict[tuple[object, ...], Result], section: str) -> Pair | None:
    """flex against vLLM at the largest batch of a section; with LoRA, against LoRARequest."""
    own = [
        pair
        for pair in analysis.pairs
        if pair.kind == "vllm"
        and pair.over.backend == "flex"
        and pair.over.section == section
        and pair.comparison.ratio is not None
    ]
    return max(own, key=lambda p: (p.over.batch, results[key_of(p.over)].tps or 0), default=None)


def _ratio(pair: Pair, results: dict[tuple[object, ...], Result]) -> Card:
    over, under, c = results[key_of(pair.over)], results[key_of(pair.under)], pair.comparison
    ours, theirs = (text.series_label(r.backend, r.adapter) for r in (over, under))
    unlike = f" ({over.sampling} against {under.sampling})" if pair.across else f", {over.sampling}"
    detail = f"{ours} {text.rate(over.tps)} tok/s, {theirs} {text.rate(under.tps)}{unlike}; {_certainty(c)}"
    label = f"{theirs}'s tok/s: {text.SECTIONS[over.section]}, batch {over.batch}"
    return Card(f"{text.significant(c.ratio)}×", label, detail, TONES.get(c.verdict, ""))


def _certainty(c: Comparison) -> str:
    if c.low is None or c.high is None:
        return f"{text.plural(c.n, 'session')}, too few for an interval"
    return f"95 % interval {text.significant(c.low)} to {text.significant(c.high)}, n = {c.n}: {c.verdict}"


def _fastest(analysis: Analysis) -> Iterator[Card]:
    flex = [r for r in analysis.results if r.backend == "flex" and r.status == "ok" and r.tps]
    if flex:
        r = max(flex, key=lambda r: r.tps or 0)
        detail = f"{text.series_label(r.backend, r.adapter)}, {text.SECTIONS[r.section]}, batch {r.batch}, {r.sampling}"
        yield Card(f"{text.rate(r.tps)} tok/s", "the fastest result of flex", detail)


def _floor(analysis: Analysis) -> Iterator[Card]:
    flex = [one for one in rooflines(analysis) if one.result.backend == "flex"]
    if flex:
        best = max(flex, key=lambda one: one.share)
        detail = (
            f"flex at batch {best.result.batch} on {best.device}: {_ms(best.step_s)} a step, {_ms(best.floor_s)} least"
        )
        yield Card(text.percent(best.share), "of the memory-bandwidth floor, decoding", detail)


def _ms(seconds: float) -> str:
    return f"{text.significant(1000 * seconds)} ms"


def _memory(ours: Result, theirs: Result) -> Card | None:
    if not (ours.on_gpu and ours.memory.device_total and theirs.memory.device_total):
        return None
    reserved = theirs.memory.kv_reserved
    kv = f", of which {text.gigabytes(reserved)} a reserved KV cache" if reserved else ""
    label = f"in use on the device: flex, batch {ours.batch}"
    return Card(
        f"{text.gigabytes(ours.memory.device_total)} GB",
        label,
        f"vLLM {text.gigabytes(theirs.memory.device_total)} GB{kv}",
    )


def _training(analysis: Analysis) -> Iterator[Card]:
    """How fast flex trains against vLLM, and how many forms pass the gate."""
    flex = [row for row in analysis.grpo if row.backend == "flex" and row.speed is not None]
    if flex:
        row = flex[0]
        detail = f"{grpo.label(row)} {text.significant(row.step_s)} s a step; {grpo.share(row.speed)}"
        yield Card(f"{text.significant(row.speed.ratio)}×", "vLLM's speed of training (GRPO steps)", detail)
    ran = [row for row in analysis.grpo if row.ok]
    if ran:
        failed = [grpo.label(row) for row in ran if row.gate is False]
        detail = f"fails on {text.listed(failed)}" if failed else f"{sum(len(row.ok) for row in ran)} runs"
        passed = sum(row.gate is True for row in ran)
        tone = "bad" if failed else "good" if passed == len(ran) else ""
        yield Card(f"{passed} of {len(ran)}", "rollout backends pass GRPO's coherence gate", detail, tone)


def _drift(analysis: Analysis) -> Iterator[Card]:
    told = [d for d in analysis.drift if d.status == "ok" and d.base_identical is not None]
    if not told:
        return
    whole = all(d.base_identical for d in told)
    cycles = text.plural(max(d.cycles or 0 for d in told), "refresh cycle")
    stacks = text.listed(d.stack for d in told)
    peft = [d.peft[-1].share_changed for d in told if d.peft]
    beside = f"; PEFT's merge and unmerge changed {text.percent(max(peft), 1)}" if peft else ""
    value, tone = ("0", "good") if whole else ("some", "bad")
    yield Card(value, "base weights changed by refreshing", f"after {cycles} on {stacks}{beside}", tone)


def _claims(analysis: Analysis) -> Iterator[Card]:
    """What became of the published claims; findings of our own are not a reproduction."""
    count = Counter(v.verdict for v in analysis.verdicts if v.source != OWN_SOURCE)
    judged = sum(count.values()) - count["not run"]
    names = {name: name for name in VERDICTS[1:]} | {
        "contradicted by its own source": "contradicted by their own source"
    }
    others = ", ".join(f"{count[name]} {told}" for name, told in names.items() if count[name])
    if count:
        yield Card(f"{count['reproduced']} of {judged}", "judged published claims are reproduced", others)


def _cells(analysis: Analysis) -> Iterator[Card]:
    if not analysis.cells:
        return
    count = Counter(c.status for c in analysis.cells)
    others = [f"{count[s]} {s}" for s in ("failed", "skipped", "missing", "unreadable") if count[s]]
    flagged = sum(c.rounds_flagged for c in analysis.cells)
    rounds = text.plural(sum(c.n for c in analysis.cells), "measured round")
    detail = ", ".join([*others, rounds, *([f"{flagged} of them flagged"] if flagged else [])])
    yield Card(f"{count['ok']} of {len(analysis.cells)}", "cells have a result", detail)
