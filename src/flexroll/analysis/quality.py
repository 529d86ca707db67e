"""Which engine configurations are admissible: as near to fp32 as the baseline, and apart from it at near-ties only.

An option changes how numbers are rounded, and greedy text then parts at near-ties without being wrong. What is wrong
shows in the whole distribution, and in a token that the fp32 model would not have been near to choosing. KL is judged
by the interval of its multiple of the baseline's (`kl_ratio`): what a handful of prompts leaves open is not told.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flexroll.analysis.kl_ratio import RESOLUTION, Times, kl_times
from flexroll.analysis.model import Analysis, Configuration, QualityRow
from flexroll.analysis.pairs import BASE_OPTION
from flexroll.analysis.reading import read_or_why
from flexroll.schema.config import Config, Quality
from flexroll.schema.quality import QualityRecord, Target, read_quality, targets


def read_qualities(config: Config, results: Path, stacks: Iterable[str] | None = None) -> list[QualityRow]:
    """One row a configuration that the config scores, whatever became of it, with its verdict."""
    if config.quality is None:
        return []
    wanted = targets(config, stacks)
    records = {target.name: read_or_why(results, target, read_quality, "another configuration") for target in wanted}
    rows = []
    for target in wanted:
        same = {t.option: records[t.name] for t in wanted if _form(t) == _form(target)}
        name = config.quality.baseline if config.quality.baseline in same else BASE_OPTION
        rows.append(_row(target, records[target.name], name, same.get(name), config.quality))
    return rows


def row_of(configuration: Configuration, analysis: Analysis) -> QualityRow | None:
    """The row about the engine that ran a result; None where nothing was scored."""
    names = ("stack", "backend", "adapter", "option")
    return next((q for q in analysis.quality if all(getattr(q, n) == getattr(configuration, n) for n in names)), None)


def not_finite(row: Any) -> bool:
    """Whether something ran and failed at numbers that are not finite. row: with `status` and `reason`."""
    return row.status == "failed" and "not finite" in row.reason


def is_inadmissible(configuration: Configuration, analysis: Analysis) -> bool:
    """Whether it is known to be; what cannot be told is not."""
    row = row_of(configuration, analysis)
    return row is not None and row.admissible is False


def _form(target: Target) -> tuple[str, str, str]:
    """What options are held against each other within."""
    return target.stack, target.backend, target.adapter


def _row(
    target: Target,
    found: QualityRecord | tuple[str, str],
    name: str,
    baseline: QualityRecord | tuple[str, str] | None,
    asked: Quality,
) -> QualityRow:
    """name: of the baseline option, the config's or, where the backend has no such option here, `default`."""
    identity = {name: getattr(target, name) for name in ("stack", "backend", "adapter", "option")}
    identity |= {"file": target.file, "baseline": target.option == name}
    if isinstance(found, QualityRecord):
        identity["model"] = found.model
    if isinstance(found, tuple):
        status, reason = found
        return QualityRow(**identity, status=status, reason=reason, why=f"not scored: {reason}")
    if found.status != "ok":
        reason = " ".join(found.reason.split())
        why = f"not scored: {found.status}: {reason}"
        row = QualityRow(**identity, status=found.status, reason=reason, device=found.device, why=why)
        return row.model_copy(update={"admissible": False, "why": reason}) if not_finite(row) else row
    told = baseline if isinstance(baseline, QualityRecord) and baseline.status == "ok" else None
    admissible, why = judge(found, name, told, asked)
    times = kl_times(found, told) if told is not None else None
    names = ("device", "prompts", "tokens", "kl", "logprob_rms", "top1_agreement", "diverged", "coherent", "unscored")
    return QualityRow(
        **identity,
        **{name: getattr(found, name) for name in names},
        status="ok",
        **({} if times is None else {"times": times.value, "times_low": times.low, "times_high": times.high}),
        near_ties=sum(d.gap <= asked.near_tie for d in found.divergences),
        admissible=admissible,
        why=why,
    )


def judge(record: QualityRecord, name: str, baseline: QualityRecord | None, asked: Quality) -> tuple[bool | None, str]:
    """(admissible, why) of a record that is ok; None where it cannot be told.

    NF4 weights are other weights: they are measured against fp32 and judged by nobody's rounding. name: of the
    baseline option. baseline: the ok record of that option with the same backend, adapter and stack, the record itself
    where it is the baseline; None where there is none.
    """
    if record.option_values.get("four_bit"):
        return None, f"NF4 weights are another model: {len(record.divergences)} of {record.prompts} sequences differ"
    apart = [d for d in record.divergences if d.gap > asked.near_tie]
    if apart:
        worst = max(apart, key=lambda d: d.gap)
        count = f"{len(apart)} of {record.prompts} sequences leave the fp32 model where it is no near-tie"
        return False, f"{count}: prompt {worst.prompt} at token {worst.place} by {worst.gap:.3g} nats"
    ties = "no sequence leaves the fp32 model"
    if record.divergences:
        ties = (
            f"every sequence that leaves the fp32 model ({len(record.divergences)} of {record.prompts}) is a near-tie"
        )
    if record.kl is None:
        return None, f"{ties}; {record.unscored or 'its backend tells no whole distribution'}, so KL cannot be told"
    if record.option == name:
        return True, f"the baseline; {ties}"
    if baseline is None or baseline.kl is None:
        return None, f"{ties}; the baseline `{name}` has no KL to hold it against"
    if record.kl <= RESOLUTION:
        return True, f"its KL is no more than rounding in fp32; {ties}"
    times = kl_times(record, baseline)
    if times is None:
        return None, f"{ties}; the baseline `{name}` was scored on other continuations, run both again"
    admissible = within(times, asked.limit)
    if admissible is None:
        return None, f"cannot be told: its KL is {times.told()}; score more prompts (quality.count)"
    if not admissible:
        return False, f"its KL is {times.told()}, more than {asked.limit:g}"
    return True, f"its KL is {times.told()}; {ties}"


def within(times: Times, limit: float) -> bool | None:
    """Whether a multiple of the baseline's KL is at most the limit.

    False where the whole interval lies above it, None where the value alone does. A value at most the limit counts,
    whatever its interval: that is told beside it.
    """
    if times.value <= limit:
        return True
    return None if times.low is None or times.low <= limit else False
