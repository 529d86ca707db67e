"""What the tables of GRPO say, in sentences made from the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from flexroll.analysis.model import Analysis, GrpoRow
from flexroll.report import text
from flexroll.report.grpo import label, share
from flexroll.report.text import cell


def opening(analysis: Analysis) -> list[str]:
    """What a step costs with the flex engine, and that against vLLM where both ran; a sentence a form of it."""
    found = []
    for row in analysis.grpo:
        if row.backend == "flex" and row.ok:
            sentence = f"A GRPO step with {label(row, analysis.grpo)} takes {text.significant(row.step_s)} s"
            if row.speed is not None:
                sentence += f", {share(row.speed)} times the speed of vLLM's"
            if row.memory is not None:
                sentence += f", with {share(row.memory)} of its memory"
            found.append(sentence + ".")
    return found


def says(analysis: Analysis) -> list[str]:
    """What the tables say: the gate, time, memory, the noise between seeds, the base, and what was survived."""
    rows = analysis.grpo
    ok = [row for row in rows if row.ok]
    if not ok:
        return [f"No training run has a result: {'; '.join(dict.fromkeys(row.why for row in rows))}."] if rows else []
    return [*_gate(rows), *_time(ok), *_memory(ok), *_noise(analysis), *_base(ok), *_faults(ok)]


def remarks(analysis: Analysis) -> list[str]:
    """What was adjusted, and what went wrong and was survived: each once, with the forms it is about."""
    found: dict[str, list[str]] = {}
    for row in analysis.grpo:
        for run in row.runs:
            told = [*run.notes, *(f"survived in {fault}" for fault in run.faults)]
            told += [f"resumed {text.plural(run.resumed, 'time')} (seed {run.seed})"] if run.resumed else []
            for note in told:
                found.setdefault(note, []).append(label(row, analysis.grpo))
    return [f"{text.listed(dict.fromkeys(names))}: {cell(note)}" for note, names in found.items()]


def _gate(rows: Sequence[GrpoRow]) -> list[str]:
    passed = [label(row, rows) for row in rows if row.gate]
    told = f" ({text.listed(passed)})" if passed else ""
    verb = "passes" if len(passed) == 1 else "pass"
    sentences = [f"Of {text.plural(len(rows), 'form')} of rollout, {len(passed)} {verb} the coherence gate{told}."]
    others: dict[tuple[bool, str], list[str]] = {}
    for row in rows:
        if not row.gate:
            others.setdefault((row.gate is False, row.why), []).append(label(row, rows))
    for (fails, why), names in others.items():
        verb = ("does not" if len(names) == 1 else "do not") if fails else "cannot be judged"
        sentences.append(f"{text.listed(names)} {verb}: {why}.")
    return sentences


def _time(ok: Sequence[GrpoRow]) -> list[str]:
    ranked = sorted(ok, key=lambda row: row.step_s or 0.0)
    first, last = ranked[0], ranked[-1]
    told = f"A step takes {text.significant(first.step_s)} s on {label(first, ok)}"
    told += (
        f", the least, to {text.significant(last.step_s)} s on {label(last, ok)}, the most" if first is not last else ""
    )
    sentences = [f"{told} (medians)."]
    for row in ok:
        if row.backend == "flex" and row.speed is not None:
            ratio, least = row.speed.ratio, (row.speed.low, row.speed.high)
            ends = " to ".join(text.significant(end) for end in least)
            sure = "" if None in least else f" (95 % interval {ends}, over {row.speed.over})"
            sentences.append(f"{label(row, ok)} trains {text.significant(ratio)} times as fast as vLLM{sure}.")
        if row.backend == "flex" and sum(row.seconds.values()):
            waited = (row.seconds["rollout"] + row.seconds["refresh"]) / sum(row.seconds.values())
            sentences.append(f"Its rollout and refresh take {text.percent(waited)} of a step.")
    return sentences


def _memory(ok: Sequence[GrpoRow]) -> list[str]:
    told = [row for row in ok if row.backend == "flex" and row.memory is not None and row.on_gpu]
    return [
        f"{label(row, ok)} has {text.gigabytes(row.device_bytes)} GB in use at its most, {share(row.memory)} of vLLM's."
        for row in told
    ]


def _noise(analysis: Analysis) -> list[str]:
    asked = analysis.config["grpo"]
    for row in analysis.grpo:
        if row.reference and len(row.ok) > 1:
            sizes = [("reward", row.reward_spread, asked["reward_band"]), ("KL", row.kl_spread, asked["kl_band"])]
            parts = [
                f"{text.significant(sd, 2)} in {name} (band ±{band:g})" for name, sd, band in sizes if sd is not None
            ]
            return [
                f"Between its own {len(row.ok)} seeds the reference ({label(row)}) varies by a standard deviation of "
                f"{text.listed(parts)}."
            ]
    return []


def _base(ok: Sequence[GrpoRow]) -> list[str]:
    told = [(row, run) for row in ok for run in row.ok if run.base_identical is not None]
    changed = dict.fromkeys(label(row, ok) for row, run in told if not run.base_identical)
    if changed:
        return [f"The frozen base CHANGED while training on {text.listed(changed)}."]
    return (
        [f"The frozen base is bit-identical after every verified step of {text.plural(len(told), 'run')}."]
        if told
        else []
    )


def _faults(ok: Sequence[GrpoRow]) -> list[str]:
    count = sum(len(run.faults) for row in ok for run in row.ok)
    return [f"{text.plural(count, 'fault')} {'was' if count == 1 else 'were'} met and survived."] if count else []
