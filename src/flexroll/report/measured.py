"""Tables of measured results: sweeps, options, torch versions, and the best option of each setting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flexroll.analysis.model import Analysis, Comparison, Pair, Result
from flexroll.analysis.pairs import key_of, version
from flexroll.analysis.quality import is_inadmissible
from flexroll.report import quality, text
from flexroll.report.text import NONE, Table, cell
from flexroll.schema.claims import Published, same_model
from flexroll.schema.options import Option

SETTING = ("experiment", "backend", "adapter", "batch", "sampling", "stack")


def judged_text(result: Result, analysis: Analysis) -> str:
    """`coherent`, `broken`, or a dash where no sample was kept or the weights are random."""
    if result.coherent is None or analysis.config["model"]["source"] == "random":
        return NONE
    return "coherent" if result.coherent else "broken"


def sweep_table(results: list[Result], analysis: Analysis, existing: set[str]) -> Table:
    """One row a configuration, by batch; columns that hold nothing here are left out."""
    gpu = analysis.published_gpu
    on_cpu = not any(r.on_gpu for r in results)
    peak, total = ("Peak RSS, GB", "Machine in use, GB") if on_cpu else ("Peak, GB", "Device, GB")
    rows = []
    for r in sorted(results, key=lambda r: r.batch):
        against, known = next(iter(pairs_of(r, analysis, "vllm")), None), published(r, analysis)
        rows.append(
            {
                "Batch": batch(r),
                "Backend": text.series_label(r.backend, r.adapter),
                "Option": cell(r.option),
                "Sampling": r.sampling,
                "Stack": r.stack,
                "tok/s, median": text.rate(r.tps) if r.status == "ok" else r.status,
                "95 % interval": text.interval(r.tps_low, r.tps_high),
                "tok/s, best": text.rate(r.tps_best),
                "Decode tok/s, median": text.rate(r.decode_tps),
                "Rounds": rounds(r),
                "Flagged": str(r.rounds_flagged) if r.rounds_flagged else NONE,
                "% of vLLM": ratio(against.comparison) if against else NONE,
                "Weights, GB": text.gigabytes(r.memory.weights),
                "KV, GB": text.gigabytes(r.memory.kv_reserved),
                peak: text.gigabytes(r.memory.peak_allocated),
                total: text.gigabytes(r.memory.device_total),
                f"Published {gpu}: tok/s": text.plain(known.tps) if known else NONE,
                f"Published {gpu}: GB": text.plain(known.memory_gb) if known else NONE,
                "Raw": text.links(r.files, existing),
            }
        )
    table = Table(rows, frozenset({"Backend", "Option", "Sampling", "Stack", "Raw"}))
    return table.without_empty().without_constant("Option", "Sampling", "Stack")


def pairs_of(result: Result, analysis: Analysis, kind: str) -> list[Pair]:
    """What a result is set against, the best match first."""
    key = key_of(result)
    return [pair for pair in analysis.pairs if pair.kind == kind and key_of(pair.over) == key]


def ratio(found: Comparison) -> str:
    """`132 %`, with its interval where there is one; a dash where nothing pairs."""
    inside = f" ({text.span(found.low, found.high, '%')})" if found.low is not None and found.high is not None else ""
    return f"{text.percent(found.ratio)}{inside}"


def gain(found: Comparison) -> str:
    """`+3.1 %`, with its interval where there is one; a dash where nothing pairs."""
    if found.ratio is None:
        return NONE
    ends = [text.percent(end - 1, 1, sign=True) for end in (found.low, found.high) if end is not None]
    return f"{text.percent(found.ratio - 1, 1, sign=True)}{f' ({ends[0]} to {ends[1]})' if ends else ''}"


def batch(result: Result) -> str:
    """`64`, `64 (8 × 8)` with several samples a prompt, `200 (64 at once)` with fewer slots than sequences."""
    shape = f"{result.batch // result.samples} × {result.samples}" if result.samples > 1 else ""
    waiting = f"{result.slots} at once" if result.slots and result.slots < result.batch else ""
    inside = ", ".join(filter(None, (shape, waiting)))
    return f"{result.batch} ({inside})" if inside else str(result.batch)


def published(result: Result, analysis: Analysis) -> Published | None:
    """The published table entry of this configuration; none where the run is of another model."""
    model = analysis.config["model"]["name"]
    if not same_model(model, analysis.published_model):
        return None
    return next((p for p in analysis.published if p.cells.matches(result)), None)


def published_rate(result: Result, analysis: Analysis) -> str:
    known = published(result, analysis)
    return text.plain(known.tps) if known else NONE


def rounds(result: Result) -> str:
    """Measured rounds, with the sessions where there are several."""
    if result.status != "ok":
        return NONE
    return str(result.n) if result.sessions == 1 else f"{result.n} in {result.sessions} sessions"


@dataclass(frozen=True)
class Best:
    """The fastest option of one setting: heading, option, its values as JSON, sentences about it."""

    heading: str
    values: str
    sentences: list[str]


def varied(analysis: Analysis, section: str = "options") -> dict[tuple, list[Result]]:
    """Settings in which more than one option of a section was asked for, with their results."""
    grouped: dict[tuple, list[Result]] = {}
    for r in analysis.results:
        if r.section == section:
            grouped.setdefault(tuple(getattr(r, name) for name in SETTING), []).append(r)
    return {key: group for key, group in grouped.items() if len({r.option for r in group}) > 1}


def best_configs(analysis: Analysis) -> list[Best]:
    """The fastest option of each setting by median tok/s, broken text and what is not admissible excluded."""
    found = []
    for group in varied(analysis).values():
        ok = [r for r in group if r.status == "ok" and not _left_out(r, analysis)]
        if ok:
            found.append(_best(sorted(ok, key=lambda r: -(r.tps or 0)), group, analysis))
    return found


def _left_out(result: Result, analysis: Analysis) -> bool:
    return judged_text(result, analysis) == "broken" or is_inadmissible(result, analysis)


def _best(ok: list[Result], group: list[Result], analysis: Analysis) -> Best:
    first = ok[0]
    where = f"{text.series_label(first.backend, first.adapter)}, batch {first.batch}, {first.sampling}, {first.stack}"
    sessions = f" in {first.sessions} sessions" if first.sessions > 1 else ""
    of = f"{text.rate(first.tps)} tok/s at the median of {text.plural(first.n, 'round')}{sessions}"
    sentences = [f"fastest is `{first.option}`: {of}."]
    against = next(iter(pairs_of(first, analysis, "option")), None)
    if against:
        found = against.comparison
        sentences.append(f"Against `{against.under.option}`: {gain(found)}, {found.verdict}.")
    if len(ok) > 1:
        second = ok[1]
        behind = text.percent(1 - second.tps / first.tps, 1)  # type: ignore[operator]
        sentences.append(f"Next at the median is `{second.option}`, {behind} behind.")
    broken = [r.option for r in group if judged_text(r, analysis) == "broken"]
    if broken:
        sentences.append(f"Left out for broken text: {text.listed(f'`{name}`' for name in broken)}.")
    wrong = [r.option for r in group if r.status == "ok" and is_inadmissible(r, analysis)]
    if wrong:
        sentences.append(f"Left out as not admissible: {text.listed(f'`{name}`' for name in wrong)}.")
    failed = [r.option for r in group if r.status != "ok"]
    if failed:
        sentences.append(f"Without a result: {text.listed(f'`{name}`' for name in failed)}.")
    return Best(where, json.dumps(first.option_values, indent=2), sentences)


def options_table(analysis: Analysis, existing: set[str], section: str = "options") -> Table:
    """Every option of a section against the baseline of its setting."""
    rows, defaults = [], Option.model_validate(analysis.config.get("defaults", {}))
    for group in varied(analysis, section).values():
        for r in group:
            against = next(iter(pairs_of(r, analysis, "option")), None)
            # What has a result and no pair is what the others are held against.
            alone = "baseline" if r.status == "ok" else NONE
            rows.append(
                {
                    "Backend": text.series_label(r.backend, r.adapter),
                    "Batch": str(r.batch),
                    "Sampling": r.sampling,
                    "Stack": r.stack,
                    "Experiment": f"`{r.experiment}`",
                    "Option": f"`{cell(r.option)}`",
                    "Sets": _sets(r, defaults),
                    "tok/s, median": text.rate(r.tps) if r.status == "ok" else r.status,
                    "95 % interval": text.interval(r.tps_low, r.tps_high),
                    "tok/s, best": text.rate(r.tps_best),
                    "Gain": gain(against.comparison) if against else alone,
                    "Verdict": against.comparison.verdict if against else NONE,
                    "Admissible": quality.admissible(r, analysis),
                    "Text": judged_text(r, analysis),
                    f"Published {analysis.published_gpu}: tok/s": published_rate(r, analysis),
                    "Raw": text.links(r.files, existing),
                }
            )
    left = frozenset(
        {"Backend", "Sampling", "Stack", "Experiment", "Option", "Sets", "Verdict", "Admissible", "Text", "Raw"}
    )
    return Table(rows, left).without_empty().without_constant("Backend", "Batch", "Sampling", "Stack", "Experiment")


def _sets(result: Result, defaults: Option) -> str:
    """The option's values that differ from those of `default`."""
    before = _flat(defaults.for_backend(result.backend))
    changed = [
        f"{key}={json.dumps(value)}" for key, value in _flat(result.option_values).items() if before.get(key) != value
    ]
    return cell(", ".join(changed)) or NONE


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def torch_versions_table(analysis: Analysis, existing: set[str]) -> Table:
    """Configurations measured on more than one stack, one row each; the torch_versions section's first."""
    grouped: dict[tuple, dict[str, Result]] = {}
    keys = ("section", "experiment", "backend", "adapter", "batch", "option", "sampling")
    for r in sorted(analysis.results, key=lambda r: r.section != "torch_versions"):
        grouped.setdefault(tuple(getattr(r, k) for k in keys), {})[r.stack] = r
    stacks = sorted(analysis.stacks, key=version)
    rows = []
    for key, by_stack in grouped.items():
        if len(by_stack) < 2:
            continue
        values = dict(zip(keys, key, strict=True))
        row = {
            "Experiment": f"`{values['experiment']}`",
            "Backend": text.series_label(values["backend"], values["adapter"]),
            "Batch": str(values["batch"]),
            "Option": values["option"],
            "Sampling": values["sampling"],
        }
        row |= {f"{s}: tok/s, median": _rate_or_status(by_stack.get(s)) for s in stacks}
        for stack in stacks[1:]:
            pair = next(iter(pairs_of(by_stack[stack], analysis, "stack")), None) if stack in by_stack else None
            row |= {
                f"{stack} over {stacks[0]}": gain(pair.comparison) if pair else NONE,
                f"Verdict{'' if len(stacks) == 2 else f' ({stack})'}": pair.comparison.verdict if pair else NONE,
            }
        row["Raw"] = text.links([f for r in by_stack.values() for f in r.files], existing)
        rows.append(row)
    verdicts = {h for row in rows for h in row if h.startswith("Verdict")}
    table = Table(rows, frozenset({"Experiment", "Backend", "Option", "Sampling", "Raw", *verdicts}))
    return table.without_empty().without_constant("Option", "Sampling")


def _rate_or_status(result: Result | None) -> str:
    if result is None:
        return NONE
    return text.rate(result.tps) if result.status == "ok" else result.status
