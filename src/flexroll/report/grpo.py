"""Training on each rollout backend: what a step costs, whether the backends learn alike, and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from flexroll.analysis.grpo_runs import PARTS, over
from flexroll.analysis.model import Analysis, Equivalence, GrpoRow, GrpoRun, Share
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.report.drift import YES
from flexroll.report.samples import PROMPT_LIMIT, TEXT_LIMIT, Completion
from flexroll.report.text import NONE, Table, cell
from flexroll.schema.grpo import LABELS
from flexroll.schema.grpo_records import read_grpo

TITLE = "GRPO: training on each rollout backend"
GATE = {True: "passes", False: "**fails**", None: "cannot be told"}
PUBLISHED = {"train_s": "Train, s", "step_s": "Median step, s", "train_memory_gb": "Peak memory, GB"}


def label(row: GrpoRow, among: Sequence[GrpoRow] = ()) -> str:
    """`flex`, `flex, pool released`: the backend and what is not plain; with `among`, the stack where they differ."""
    parts = [LABELS[row.backend]]  # type: ignore[index]
    parts += [f"`{row.option}`"] * (row.option != "default") + [f"compiled ({row.compile_mode})"] * bool(
        row.compile_mode
    )
    parts += [f"pool {row.pool}"] * (row.pool != "kept")
    parts += [row.stack] * (len({other.stack for other in among}) > 1)
    return ", ".join(parts)


def cost_table(analysis: Analysis, existing: set[str]) -> Table:
    """One row a form that was to train: time and memory; its status and reason where it has no run."""
    rows = []
    for row in analysis.grpo:
        state = "" if row.status == "ok" else row.status
        rows.append(
            {
                "Rollout backend": cell(label(row, analysis.grpo)),
                "Seeds": f"{len(row.ok)} of {len(row.runs)}",
                "Steps": ", ".join(sorted({str(len(run.wall_s)) for run in row.ok})) or NONE,
                "Train, s": text.significant(row.train_s) if row.ok else f"**{state}**",
                "Median step, s": text.significant(row.step_s),
                **{f"{part.capitalize()}, s": text.significant(row.seconds.get(part)) for part in PARTS},
                "Rollout tok/s": text.rate(row.tps),
                "Device memory, GB": text.gigabytes(row.device_bytes),
                "Trainer's peak, GB": text.gigabytes(row.peak_bytes),
                "Speed over vLLM's": "1" if row.baseline and row.ok else share(row.speed),
                "Memory over vLLM's": "1" if row.baseline and row.ok else share(row.memory),
                "Why not": cell(row.reason) or NONE,
                "Raw": text.links([run.file for run in row.runs], existing),
            }
        )
    return Table(rows, frozenset({"Rollout backend", "Seeds", "Why not", "Raw"})).without_empty()


def learning_table(analysis: Analysis) -> Table:
    """One row a form with a run: rewards, KL, how far its rollouts are from the trainer, and the gate."""
    rows = [
        {
            "Rollout backend": cell(label(row, analysis.grpo)),
            "Mean reward": spread(row.reward, row.reward_spread),
            "Its difference": test(row.reward_test, row.reference),
            "Mean KL": spread(row.kl, row.kl_spread),
            "KL's difference": test(row.kl_test, row.reference),
            "Log-probability mismatch": text.significant(row.logprob_difference),
            "Importance weight": text.significant(over(fmean, (run.importance_ratio for run in row.ok))),
            "Base identical": YES[over(all, (run.base_identical for run in row.ok))],
            "Graphs, breaks, recompiles": _compiled(row.ok),
            "Gate": GATE[row.gate],
            "Why": cell(row.why),
        }
        for row in analysis.grpo
        if row.ok
    ]
    words = {"Rollout backend", "Its difference", "KL's difference", "Base identical", "Gate", "Why"}
    return Table(rows, frozenset(words)).without_empty()


def published_table(analysis: Analysis) -> Table:
    """Published numbers beside ours, whatever it was measured on; verdicts stand with the claims."""
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    for one in analysis.published_training:
        if one.metric not in PUBLISHED:
            continue
        own = next((row for name in one.backends for row in analysis.grpo if row.backend == name and row.ok), None)
        if own is None:
            continue
        ours = {"train_s": own.train_s, "step_s": own.step_s}
        ours["train_memory_gb"] = None if own.device_bytes is None else own.device_bytes / 1e9
        key = (one.source, one.section, label(own, analysis.grpo))
        line = found.setdefault(key, {"Text, section": f"{one.source}, {cell(one.section)}", "Ours": cell(key[2])})
        line["On"] = cell(", ".join(own.devices) or NONE)
        line[f"{PUBLISHED[one.metric]}: published"] = text.plain(one.value)
        line[f"{PUBLISHED[one.metric]}: ours"] = text.significant(ours[one.metric])
    headers = ["Text, section", "Ours", "On"]
    headers += [f"{name}: {side}" for name in PUBLISHED.values() for side in ("published", "ours")]
    rows = [{header: line.get(header, NONE) for header in headers} for line in found.values()]
    return Table(rows, frozenset(headers[:3]))


def completions(analysis: Analysis, results: Path) -> dict[str, list[Completion]]:
    """Prompt as a code block -> the first completion of the last step of each form's first run."""
    found: dict[str, list[Completion]] = {}
    for row in analysis.grpo:
        for run in row.ok[:1]:
            try:
                samples = read_grpo(results / run.file).samples
            except (FlexrollError, OSError):
                continue
            for sample in samples[:1]:
                notes = f" ({'; '.join(sample.coherence.notes)})" if sample.coherence.notes else ""
                verdict = (
                    "not judged, for weights are random"
                    if run.coherent is None
                    else ("broken", "coherent")[run.coherent]
                )
                block = text.fence(text.clip(sample.text, TEXT_LIMIT))
                name = f"{label(row, analysis.grpo)}, after step {len(run.wall_s)}, seed {run.seed}"
                prompt = text.fence(text.clip(sample.prompt, PROMPT_LIMIT))
                found.setdefault(prompt, []).append(Completion(name, verdict + notes, block, run.file))
    return found


def share(found: Share | None) -> str:
    """`1.31 (1.28–1.35)`, of steps marked; a dash where there is none."""
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return text.significant(found.ratio)
    steps = ", steps" if found.over == "steps" else ""
    return f"{text.significant(found.ratio)} ({text.significant(found.low)}–{text.significant(found.high)}{steps})"


def spread(value: float | None, sd: float | None) -> str:
    return (
        text.significant(value)
        if value is None or sd is None
        else f"{text.significant(value)} ± {text.significant(sd, 2)}"
    )


def test(found: Equivalence | None, reference: bool = False) -> str:
    """`+0.0012 (-0.0003 to +0.0027): equivalent`."""
    if found is None or found.difference is None:
        return "the reference" if reference else NONE if found is None else f"{NONE}: {found.verdict}"
    ends = "" if found.low is None or found.high is None else f" ({_signed(found.low)} to {_signed(found.high)})"
    return f"{_signed(found.difference)}{ends}: {found.verdict}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{text.significant(value, 2)}"


def _compiled(runs: Sequence[GrpoRun]) -> str:
    counted = [run for run in runs if run.graphs is not None]
    numbers = (
        (max((getattr(run, name) or 0) for run in counted) for name in ("graphs", "graph_breaks", "recompiles"))
        if counted
        else ()
    )
    return ", ".join(map(str, numbers)) or NONE
