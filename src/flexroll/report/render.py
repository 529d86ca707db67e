"""`flexroll report`: analysis.json and the samples of the raw records -> results/<run>/results.md and figures/*.svg.

Nothing else goes in, no clock and no machine: rendering twice gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexroll.analysis.model import Analysis, Result, VerdictRow
from flexroll.analysis.run import read_analysis
from flexroll.errors import FlexrollError
from flexroll.report import (
    drift,
    facts,
    grpo,
    grpo_sentences,
    lora,
    measured,
    memory,
    quality,
    samples,
    sentences,
    text,
)
from flexroll.report.figures import ALT, captions, draw_all
from flexroll.report.sections import SECTIONS
from flexroll.report.text import Table
from flexroll.schema.config import Config
from flexroll.schema.records import write_json

TEMPLATE = "results.md.j2"
SWEEPS = (*text.AGAINST_VLLM, "four_bit", "broke")


def render(config: Config, results_dir: Path, template_dir: Path) -> Path:
    """Write the results document and its figures; returns the document's path.

    Raises:
        FlexrollError: no analysis yet, an analysis of another run, or a template that is missing or broken.
    """
    results_dir = Path(results_dir)
    analysis = read_analysis(results_dir)
    if analysis.config["run"] != config.run:
        held = f"{results_dir}/analysis.json is of run '{analysis.config['run']}'"
        raise FlexrollError(f"{held}, not '{config.run}'; run `flexroll analyse` first")
    figures = draw_all(analysis, results_dir / "figures")
    document = _fill(Path(template_dir), context(analysis, results_dir, figures))
    path = results_dir / "results.md"
    write_json(path, document)
    return path


def _fill(template_dir: Path, values: dict[str, Any]) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(template_dir)
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        return environment.get_template(TEMPLATE).render(values)
    except jinja2.TemplateNotFound as error:
        raise FlexrollError(f"{template_dir / TEMPLATE}: no such template ({error})") from None
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise FlexrollError(f"{template_dir / TEMPLATE}{f':{line}' if line else ''}: {error}") from None


def context(analysis: Analysis, results_dir: Path, figures: dict[str, str]) -> dict[str, Any]:
    """Every value the template may use."""
    folders = ("raw", "drift", "quality", "grpo", "sbom")
    found = (path for folder in folders for path in results_dir.glob(f"{folder}/**/*.json"))
    existing = {path.relative_to(results_dir).as_posix() for path in found}
    topics: dict[str, list[VerdictRow]] = {}
    for verdict in analysis.verdicts:
        topics.setdefault(verdict.topic, []).append(verdict)
    broke = topics.pop("broke", [])
    claims = [(text.SECTIONS[topic], facts.claims_table(group, existing)) for topic, group in topics.items()]
    return {
        "analysis": analysis,
        "config": analysis.config,
        "figures": figures,
        "alt": ALT,
        "captions": captions(analysis, figures),
        "summary": facts.summary(analysis),
        "claims": claims,
        "verdicts": [(topic, *facts.split_claims(table)) for topic, table in claims],
        "verdict_counts": facts.verdict_counts(topics | {"broke": broke}),
        "environments": facts.environment_table(analysis, existing),
        "workload": facts.workload_table(analysis.config, analysis.results),
        "samplings": facts.sampling_lines(analysis.config),
        "prompt_hashes": sorted({c.prompts_sha256 for c in analysis.cells if c.prompts_sha256}),
        "best": measured.best_configs(analysis),
        "sweeps": {name: _tables(name, analysis, existing) for name in SWEEPS}
        | {lora.SECTION: _lora(analysis, existing)},
        "more": SECTIONS,
        "memory": [
            (name, analysis.config["experiments"][name]["title"], memory.table(own, existing), sentences.of_memory(own))
            for name in memory.experiments(analysis)
            if (own := [r for r in analysis.results if r.experiment == name])
        ],
        "remarks": facts.remarks(analysis.cells),
        "options": measured.options_table(analysis, existing),
        "tried": measured.options_table(analysis, existing, "tried"),
        "quality": quality.quality_table(analysis, existing),
        "quality_says": quality.says(analysis),
        "training": _training(analysis, results_dir, existing),
        "sentences": {
            "options": sentences.of_options(analysis),
            "tried": sentences.of_options(analysis, "tried"),
            "stacks": sentences.of_stacks(analysis),
        },
        "options_asked": any(r.section == "options" for r in analysis.results),
        "broken": facts.broken_table(analysis.cells, existing),
        "notes": [(c.file, text.cell(c.note)) for c in analysis.cells if c.note],
        "published_breaks": facts.claims_table(broke, existing),
        "torch_versions": measured.torch_versions_table(analysis, existing),
        "drift": drift.verification_table(analysis.drift, existing),
        "drift_cycles": drift.cycles_table(analysis.drift),
        "samples": {p: samples.grouped(items) for p, items in samples.completions(analysis, results_dir).items()},
        "rounds": facts.rounds_table(analysis.cells, existing),
        "ok": sum(c.status == "ok" for c in analysis.cells),
        "listed": text.listed,
        "plural": text.plural,
        "significant": text.significant,
    }


def _tables(section: str, analysis: Analysis, existing: set[str]) -> list[tuple[str, str, Table, list[str]]]:
    """(experiment, title, table, what it says or why it says nothing) of each experiment of a section."""
    tables = []
    for name, experiment in analysis.config["experiments"].items():
        own = [r for r in analysis.results if r.experiment == name and r.section == section]
        if own:
            says = sentences.of_sweep(own, analysis) if any(r.status == "ok" for r in own) else [_why(own)]
            tables.append((name, experiment["title"], measured.sweep_table(own, analysis, existing), says))
    return tables


def _lora(analysis: Analysis, existing: set[str]) -> list[tuple[str, str, Table, list[str]]]:
    """As _tables, of the section that sets forms of an adapter beside each other."""
    tables = []
    for name, experiment in analysis.config["experiments"].items():
        own = [r for r in analysis.results if r.experiment == name and r.section == lora.SECTION]
        if own:
            tables.append((name, experiment["title"], lora.table(own, analysis, existing), lora.says(own)))
    return tables


def _training(analysis: Analysis, results_dir: Path, existing: set[str]) -> dict[str, Any] | None:
    """The section about GRPO; None where nothing is to be trained."""
    if not analysis.grpo:
        return None
    completions = grpo.completions(analysis, results_dir)
    return {
        "title": grpo.TITLE,
        "costs": grpo.cost_table(analysis, existing),
        "learning": grpo.learning_table(analysis),
        "published": grpo.published_table(analysis),
        "says": grpo_sentences.says(analysis),
        "remarks": grpo_sentences.remarks(analysis),
        "samples": {prompt: samples.grouped(items) for prompt, items in completions.items()},
    }


def _why(results: list[Result]) -> str:
    """The reasons of results none of which is ok, each once."""
    reasons = ("no record" if r.status == "missing" else f"{r.status}: {r.reason}" for r in results)
    return f"No measurement: {'; '.join(dict.fromkeys(reasons))}."
