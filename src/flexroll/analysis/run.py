"""`flexroll analyse`: raw records, drift records and claims -> results/<run>/{table.csv, analysis.json}."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from flexroll.analysis import claims as verdicts
from flexroll.analysis import collect
from flexroll.analysis.drift import read_drift
from flexroll.analysis.grpo import read_grpos
from flexroll.analysis.grpo import unlisted as unlisted_grpo
from flexroll.analysis.model import Analysis
from flexroll.analysis.pairs import make_pairs, sessions_by_key
from flexroll.analysis.quality import read_qualities
from flexroll.analysis.train_claims import published_training
from flexroll.errors import FlexrollError
from flexroll.schema.claims import load_claims
from flexroll.schema.config import Config
from flexroll.schema.records import write_json


def analyse(config: Config, results_dir: Path, claims_path: Path, stacks: Iterable[str] | None = None) -> Analysis:
    """Read everything the run has so far, judge the claims, write table.csv and analysis.json.

    Args:
        config: the validated matrix.
        results_dir: results/<run>.
        claims_path: report/claims.yaml.
        stacks: only these stacks of the matrix; None for all.

    Raises:
        FlexrollError: the claims file is bad, or a stack is not one of the config's. Bad records are rows, not errors.
    """
    results_dir = Path(results_dir)
    claims = load_claims(claims_path)
    chosen = config.stacks if stacks is None else list(dict.fromkeys(stacks))
    for stack in chosen:
        if stack not in config.stacks:
            raise FlexrollError(f"stack '{stack}' is not in this matrix; it has {', '.join(config.stacks)}")
    rows, environments = collect.collect(config, results_dir, chosen)
    results = collect.combine(rows, config)
    drift = read_drift(config, results_dir, chosen)
    grpo, of_grpo = read_grpos(config, results_dir, chosen)
    left_out = [stack for stack in config.stacks if stack not in chosen]
    quality = read_qualities(config, results_dir, chosen)
    sessions = sessions_by_key(rows)
    run = verdicts.Run(config.model.name, config.model.source, results, drift, left_out, sessions, quality, grpo)
    analysis = Analysis(
        config=config.model_dump(mode="json"),
        stacks=chosen,
        left_out=left_out,
        cells=rows,
        results=results,
        pairs=make_pairs(results, rows, {key: one.baseline for key, one in config.experiments.items()}),
        environments=collect.environments_by_stack(environments, chosen, of_grpo),
        drift=drift,
        quality=quality,
        grpo=grpo,
        published_training=published_training(claims) if grpo and claims.about_model(config.model.name) else [],
        verdicts=verdicts.judge_all(claims, run),
        published=claims.published,
        published_gpu=claims.gpu,
        published_model=claims.model,
        sources=claims.sources,
        unlisted=[*collect.unlisted(config, results_dir), *unlisted_grpo(config, results_dir)],
        unscored=collect.read_perplexities(results_dir, chosen)[1],
    )
    write_json(results_dir / "table.csv", collect.table(rows).to_csv(index=False, lineterminator="\n"))
    write_json(results_dir / "analysis.json", analysis.model_dump_json(indent=1) + "\n")
    return analysis


def read_analysis(results_dir: Path) -> Analysis:
    """Read analysis.json.

    Raises:
        FlexrollError: missing, cut short or of another version; the message says how to make it.
    """
    path = Path(results_dir) / "analysis.json"
    try:
        return Analysis.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; run `flexroll analyse` first") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError):
        raise FlexrollError(f"{path}: not an analysis of this version; run `flexroll analyse` again") from None
