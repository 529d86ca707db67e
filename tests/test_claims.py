"""Every kind of claim gets every verdict it can have; the published claims file is sound and fits the matrix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import synthetic
from flexroll.analysis import collect
from flexroll.analysis.claims import Run, judge
from flexroll.analysis.drift import read_drift
from flexroll.analysis.model import VerdictRow
from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell, expand
from flexroll.schema.claims import ClaimsFile, Selector, load_claims
from flexroll.schema.config import Config
from flexroll.schema.load import load_config
from flexroll.schema.records import Record

ROOT = Path(__file__).parent.parent
BASE = {"source": 1, "section": "s", "topic": "batch_sweep", "quote": "q"}
FLEX = {"experiment": "sweep", "backend": "flex", "batch": 8}
VLLM = {"experiment": "sweep", "backend": "vllm", "batch": 8}
ABSOLUTE = {"id": "a", "kind": "absolute", "metric": "tps", "cells": FLEX, "value": 120, "unit": "tok/s"}
RATIO = {"id": "r", "kind": "ratio", "over": FLEX, "under": VLLM, "value": 0.5, "unit": "%"}
ARITHMETIC = {
    "operation": "ratio",
    "numbers": [{"label": "a", "value": 156}, {"label": "b", "value": 15.8}],
    "value": 7,
}
QWEN = {"name": "Qwen3_4B_Base", "source": "local", "path": "m"}


def qwen() -> Config:
    return synthetic.config(model=QWEN)


def claims(claim: dict[str, Any]) -> ClaimsFile:
    sources = {1: {"title": "t", "about": "a"}, 2: {"title": "t", "about": "a"}}
    return ClaimsFile.model_validate({"gpu": "B200", "model": "Qwen3-4B", "sources": sources, "claims": [BASE | claim]})


def verdict(
    tmp_path: Path,
    claim: dict[str, Any],
    flex: tuple[float, ...] = (100, 120, 110),
    vllm: tuple[float, ...] = (200, 240, 220),
    gpu: str | None = "NVIDIA B200",
    config: Config | None = None,
    **changes: Any,
) -> VerdictRow:
    config = config or qwen()

    def make(cell: Cell) -> Record:
        return synthetic.record(cell, vllm if cell.backend == "vllm" else flex, gpu=gpu, **changes)

    synthetic.write_run(tmp_path, config, make)
    rows, _ = collect.collect(config, tmp_path)
    drift = read_drift(config, tmp_path, config.stacks)
    run = Run(config.model.name, config.model.source, collect.combine(rows, config), drift, [])
    file = claims(claim)
    row = judge(file.claims[0], file, run)
    for name in row.files:
        assert (tmp_path / name).is_file()
    return row


def test_absolute_reproduced_links_to_its_cells(tmp_path: Path) -> None:
    row = verdict(tmp_path, ABSOLUTE)
    assert row.verdict == "reproduced" and row.measured == pytest.approx(120) and row.device == "NVIDIA B200"
    assert row.files == ["raw/torch2.11-flex-none-default-s1/sweep-greedy-b8.json"]


@pytest.mark.parametrize(("value", "expected"), [(103, "within noise"), (300, "not reproduced"), (118, "reproduced")])
def test_absolute_against_the_rounds(tmp_path: Path, value: float, expected: str) -> None:
    assert verdict(tmp_path, ABSOLUTE | {"value": value}).verdict == expected


@pytest.mark.parametrize(("statistic", "measured"), [("best", 120), ("median", 110)])
def test_statistic_is_the_one_asked_for(tmp_path: Path, statistic: str, measured: float) -> None:
    assert verdict(tmp_path, ABSOLUTE | {"statistic": statistic}).measured == pytest.approx(measured)


@pytest.mark.parametrize(("gpu", "why"), [("NVIDIA H200", "measured on NVIDIA H200"), (None, "CPU")])
def test_absolute_of_another_machine_is_not_run(tmp_path: Path, gpu: str | None, why: str) -> None:
    row = verdict(tmp_path, ABSOLUTE, gpu=gpu)
    assert row.verdict == "not run" and why in row.reason


@pytest.mark.parametrize("claim", [ABSOLUTE, RATIO])
def test_another_model_is_not_run(tmp_path: Path, claim: dict[str, Any]) -> None:
    row = verdict(tmp_path, claim, config=synthetic.config())
    assert row.verdict == "not run" and "tiny_gsm" in row.reason


def test_ratio_is_judged_on_any_gpu_and_names_it(tmp_path: Path) -> None:
    row = verdict(tmp_path, RATIO, gpu="NVIDIA H200")
    assert row.verdict == "reproduced" and row.device == "NVIDIA H200" and row.measured == pytest.approx(0.5)
    assert (row.low, row.high) == (pytest.approx(100 / 240), pytest.approx(120 / 200)) and len(row.files) == 2


def test_ratio_on_a_cpu_is_not_run(tmp_path: Path) -> None:
    assert verdict(tmp_path, RATIO, gpu=None).verdict == "not run"


@pytest.mark.parametrize(
    ("flex", "value", "direction", "expected"),
    [
        ((100, 100), 0.3, "about", "not reproduced"),
        ((100, 100), 0.3, "at_least", "reproduced"),
        ((100, 100), 0.3, "at_most", "not reproduced"),
        ((198, 206), 1.02, "about", "within noise"),  # a gain of 2 % where the rounds of both sides overlap
        ((198, 206), 1.0, "about", "reproduced"),
    ],
)
def test_ratio_verdicts(tmp_path: Path, flex: tuple[float, ...], value: float, direction: str, expected: str) -> None:
    row = verdict(tmp_path, RATIO | {"value": value, "direction": direction}, flex=flex, vllm=(200, 204))
    assert row.verdict == expected


def test_ratio_of_different_cards_or_prompts_is_not_run(tmp_path: Path) -> None:
    config = qwen()

    def make(cell: Cell) -> Record:
        return synthetic.record(cell, gpu="NVIDIA H200", uuid=f"GPU-{cell.backend}")

    synthetic.write_run(tmp_path, config, make)
    results = collect.combine(collect.collect(config, tmp_path)[0], config)
    file = claims(RATIO)
    row = judge(file.claims[0], file, Run(config.model.name, "local", results, [], []))
    assert row.verdict == "not run" and "different devices" in row.reason
    same = [r.model_copy(update={"device_uuids": ["GPU-1"], "prompts_sha256": r.backend}) for r in results]
    row = judge(file.claims[0], file, Run(config.model.name, "local", same, [], []))
    assert row.verdict == "not run" and "different prompts" in row.reason


def test_failed_missing_and_absent_cells_say_why(tmp_path: Path) -> None:
    row = verdict(tmp_path, ABSOLUTE, status="failed", reason="out of memory")
    assert row.verdict == "not run" and row.reason == "failed: out of memory"
    row = verdict(tmp_path, ABSOLUTE | {"cells": FLEX | {"batch": 999}})
    assert row.verdict == "not run" and "batch 999" in row.reason
    row = verdict(tmp_path, ABSOLUTE | {"cells": {"backend": "flex"}})
    assert row.verdict == "not run" and "results match" in row.reason


def test_memory_ratio(tmp_path: Path) -> None:
    row = verdict(tmp_path, RATIO | {"metric": "memory_gb", "value": 1.0, "unit": "x"}, memory_gb=44)
    assert row.verdict == "reproduced" and row.measured == 1


@pytest.mark.parametrize("metric", ["base_identical", "inference_identical", "merged_exact", "peft_drifts"])
def test_drift_is_judged_anywhere(tmp_path: Path, metric: str) -> None:
    synthetic.write_drift(tmp_path, "torch2.11")
    claim = {"id": "d", "kind": "boolean", "metric": metric}
    row = verdict(tmp_path, claim, gpu=None, config=synthetic.config())
    assert row.verdict == "reproduced" and row.files == ["drift/torch2.11.json"] and "tiny_gsm" in row.device
    bad: dict[str, Any] = {metric: False}
    if metric == "peft_drifts":
        bad = {"peft": {"cycles": [{"cycle": 1, "max_abs_diff": 0.0, "share_changed": 0.0}]}}
    synthetic.write_drift(tmp_path, "torch2.9.1", **bad)
    assert verdict(tmp_path, claim, gpu=None, config=synthetic.config()).verdict == "not reproduced"


def test_drift_without_a_record_is_not_run(tmp_path: Path) -> None:
    row = verdict(tmp_path, {"id": "d", "kind": "boolean", "metric": "base_identical"})
    assert row.verdict == "not run" and "missing" in row.reason


def test_refresh_time_needs_the_gpu(tmp_path: Path) -> None:
    claim = {"id": "d", "kind": "absolute", "metric": "refresh_ms", "value": 12, "unit": "ms"}
    synthetic.write_drift(tmp_path, "torch2.11", device="cpu")
    assert verdict(tmp_path, claim).verdict == "not run"
    synthetic.write_drift(tmp_path, "torch2.11", device="NVIDIA B200")
    assert verdict(tmp_path, claim).verdict == "reproduced"


def test_coherence_and_failure_facts(tmp_path: Path) -> None:
    coherent = {"id": "c", "kind": "boolean", "metric": "coherent", "cells": FLEX}
    assert verdict(tmp_path, coherent).verdict == "reproduced"
    assert verdict(tmp_path, coherent, samples=[synthetic.sample(ok=False)]).verdict == "not reproduced"
    assert verdict(tmp_path, coherent, samples=[]).verdict == "not run"
    noise = synthetic.config(model=QWEN | {"source": "random"})
    assert verdict(tmp_path, coherent, config=noise).verdict == "not run"
    fails = {"id": "f", "kind": "boolean", "metric": "fails", "cells": FLEX}
    assert verdict(tmp_path, fails).verdict == "not reproduced"
    assert verdict(tmp_path, fails, status="failed", reason="NameError").verdict == "reproduced"
    assert verdict(tmp_path, fails, status="skipped", reason="no GPU").verdict == "not run"


def test_arithmetic(tmp_path: Path) -> None:
    row = verdict(tmp_path, {"id": "m", "kind": "arithmetic", "own_source": ARITHMETIC})
    assert row.verdict == "contradicted by its own source" and row.computed == pytest.approx(156 / 15.8)
    right = ARITHMETIC | {"value": 9.9}
    assert verdict(tmp_path, {"id": "m", "kind": "arithmetic", "own_source": right}).verdict == "reproduced"


def test_own_source_overrides_the_measurement(tmp_path: Path) -> None:
    row = verdict(tmp_path, ABSOLUTE | {"own_source": ARITHMETIC})
    assert row.verdict == "contradicted by its own source" and row.measured == pytest.approx(120) and row.files


@pytest.mark.parametrize(
    ("operation", "values", "value", "holds"),
    [
        ("change", (4703, 4425), 0.063, True),
        ("change", (4703, 4425), 0.10, False),
        ("equal", (5474, 5898), 0, False),
        ("equal", (5474, 5480), 0, True),
        ("differ", (4581, 4581), 0, False),
        ("differ", (4581, 4000), 0, True),
    ],
)
def test_operations(operation: str, values: tuple[float, ...], value: float, holds: bool) -> None:
    numbers = [{"label": "n", "value": v} for v in values]
    own = {"operation": operation, "numbers": numbers, "value": value, "tolerance": 0.03}
    assert claims({"id": "o", "kind": "arithmetic", "own_source": own}).claims[0].own_source.holds is holds


# ---------------------------------------------------------------- the published file


def published() -> ClaimsFile:
    return load_claims(ROOT / "report" / "claims.yaml")


def test_the_file_covers_both_sources_and_every_kind() -> None:
    file = published()
    assert {c.source for c in file.claims} == {1, 2}
    assert {c.kind for c in file.claims} == {"absolute", "ratio", "boolean", "arithmetic"}


@pytest.mark.parametrize(
    "claim",
    [
        "sweep-flex-64",
        "grpo-flex",
        "option-contiguous",
        "option-best-config",
        "option-baseline",
        "second-vllm",
        "second-memory",
        "second-grpo-share",
        "second-round-one",
    ],
)
def test_known_contradictions_are_found(claim: str) -> None:
    found = next(c for c in published().claims if c.id == claim)
    assert found.own_source is not None and not found.own_source.holds


def test_published_rates_agree_with_the_claims() -> None:
    """A number that is both a claim and a published table entry is the same number."""
    file = published()
    cells = expand(load_config(ROOT / "config.yaml"))
    compared = 0
    for claim in file.claims:
        if claim.kind == "absolute" and claim.metric == "tps":
            for cell in (c for c in cells if claim.cells.matches(c)):
                entry = next(p for p in file.published if p.cells.matches(cell))
                assert math.isclose(entry.tps, claim.value), claim.id
                compared += 1
    assert compared


def selectors(file: ClaimsFile) -> list[tuple[str, Selector]]:
    found = [(f"published {i}", p.cells) for i, p in enumerate(file.published)]
    for claim in file.claims:
        found += [(claim.id, s) for name in ("cells", "over", "under") if (s := getattr(claim, name, None))]
    return found


def test_selectors_fit_the_default_matrix() -> None:
    """A selector that names an experiment of config.yaml means exactly one configuration; none names an unknown one."""
    config = load_config(ROOT / "config.yaml")
    cells = expand(config)
    for name, selector in selectors(published()):
        if selector.experiment is None:
            continue
        names = selector.experiment if isinstance(selector.experiment, list) else [selector.experiment]
        for experiment in names:
            assert experiment in config.experiments, (name, experiment)
            one = selector.model_copy(update={"experiment": experiment})
            found = {(c.engine, c.file) for c in cells if one.matches(c)}
            assert len(found) == 1, (name, experiment, found)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"colour": 1}, "sweep-vllm-64.absolute.colour"),
        ({"unit": "furlong"}, "sweep-vllm-64.absolute.unit"),
        ({"id": "sweep-flex-64"}, "used twice"),
    ],
)
def test_a_bad_claim_is_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    data = yaml.safe_load((ROOT / "report" / "claims.yaml").read_text())
    next(c for c in data["claims"] if c["id"] == "sweep-vllm-64").update(edit)
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(FlexrollError, match=message) as caught:
        load_claims(tmp_path / "claims.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "a: [", "- 1", ""])
def test_a_bad_file_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "claims.yaml").write_text(content)
    with pytest.raises(FlexrollError) as caught:
        load_claims(tmp_path / "claims.yaml")
    assert "claims.yaml" in str(caught.value) and "\n" not in str(caught.value)
