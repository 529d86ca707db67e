"""Every kind of claim gets every verdict it can have; claims.yaml covers both texts by number and fits the matrices.

The texts are not part of the tree: their numbers are, by section and table row, in TEXT below.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

pytest.importorskip("scipy")

import synthetic
from flexroll.analysis import claims as analysis
from flexroll.analysis import collect
from flexroll.analysis.claims import Run, judge
from flexroll.analysis.drift import read_drift
from flexroll.analysis.model import VerdictRow
from flexroll.analysis.pairs import sessions_by_key
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.schema.cells import Cell, expand
from flexroll.schema.claims import Claim, ClaimsFile, Selector, Topic, load_claims
from flexroll.schema.config import Config
from flexroll.schema.load import load_config
from flexroll.schema.records import Record

ROOT = Path(__file__).parent.parent
BASE = {"source": 1, "section": "s", "topic": "batch_sweep", "quote": "q"}
FLEX = {"experiment": "sweep", "backend": "flex", "batch": 8}
VLLM = {"experiment": "sweep", "backend": "vllm", "batch": 8}
ABSOLUTE = {"id": "a", "kind": "absolute", "metric": "tps", "cells": FLEX, "value": 120, "unit": "tok/s"}
RATIO = {"id": "r", "kind": "ratio", "over": FLEX, "under": VLLM, "value": 0.5, "unit": "%"}
ARITHMETIC = {"operation": "ratio", "numbers": {"a": 156, "b": 15.8}, "value": 7}
QWEN = {"name": "Qwen3_4B_Base", "source": "local", "path": "m"}


def qwen() -> Config:
    return synthetic.config(model=QWEN)


def claims(claim: dict[str, Any]) -> ClaimsFile:
    sources = {1: {"title": "t", "about": "a", "sections": ["s"]}}
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
    results = collect.combine(rows, config)
    run = Run(config.model.name, config.model.source, results, drift, [], sessions_by_key(rows))
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


@pytest.mark.parametrize(
    ("ratio", "value", "direction", "expected"),
    [
        (0.5, 0.5, "about", "reproduced"),
        (0.5, 0.7, "about", "not reproduced"),
        (1.04, 1.0, "more", "reproduced"),
        (1.0, 1.0, "more", "within noise"),
        (1.0, 1.04, "about", "within noise"),  # inside the tolerance, but no difference was seen
        (0.96, 1.0, "more", "not reproduced"),
    ],
)
def test_ratio_over_sessions_has_an_interval(
    tmp_path: Path, ratio: float, value: float, direction: str, expected: str
) -> None:
    """Sessions that differ by a tenth hide nothing: the two sides pair session by session."""
    truth = synthetic.Truth(ratio=lambda cell: ratio if cell.backend == "flex" else 1.0, between=0.005, block=0.1)
    config = synthetic.config(model=QWEN, repeats={"sessions": 5, "rounds": 5})
    synthetic.write_run(tmp_path, config, truth.record)
    rows, _ = collect.collect(config, tmp_path)
    results = collect.combine(rows, config)
    run = Run(config.model.name, config.model.source, results, [], [], sessions_by_key(rows))
    file = claims(RATIO | {"value": value, "direction": direction, "tolerance": 0.05})
    row = judge(file.claims[0], file, run)
    assert row.verdict == expected and row.interval and row.low < row.measured < row.high
    assert row.high / row.low < 1.05 and len(row.files) == 10
    if expected == "within noise":
        assert "interval" in row.reason


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
        ((300, 310), 1.0, "more", "reproduced"),
        ((198, 206), 1.0, "more", "within noise"),
        ((100, 110), 1.0, "more", "not reproduced"),
        ((100, 110), 1.0, "less", "reproduced"),
        ((198, 206), 1.0, "less", "within noise"),
        ((300, 310), 1.0, "less", "not reproduced"),
        ((206, 207), 1.0, "same", "reproduced"),  # apart, inside the tolerance
        ((180, 201), 1.0, "same", "reproduced"),  # outside of it at the best, and the rounds overlap
        ((300, 310), 1.0, "same", "not reproduced"),
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


def test_of_a_list_the_first_with_a_result_is_meant(tmp_path: Path) -> None:
    listed = FLEX | {"experiment": ["absent", "options", "sweep"], "option": ["page32", "default"]}
    row = verdict(tmp_path, ABSOLUTE | {"cells": listed})
    assert row.files == ["raw/torch2.11-flex-none-page32-s1/options-greedy-b8.json"]
    row = verdict(tmp_path, ABSOLUTE | {"cells": listed | {"experiment": ["sweep", "options"]}})
    assert row.files == ["raw/torch2.11-flex-none-default-s1/sweep-greedy-b8.json"]


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
        ("gap", (2683, 5785), 0.54, True),
        ("gap", (5812, 21170), 0.48, False),
        ("difference", (52, 44), 8, True),
        ("difference", (52, 44), 9, False),
        ("sum", (3, 30, 2), 35, True),
        ("sum", (3, 30), 40, False),
    ],
)
def test_operations(operation: str, values: tuple[float, ...], value: float, holds: bool) -> None:
    numbers = {f"n{i}": v for i, v in enumerate(values)}
    own = {"operation": operation, "numbers": numbers, "value": value, "tolerance": 0.03}
    assert claims({"id": "o", "kind": "arithmetic", "own_source": own}).claims[0].own_source.holds is holds


@pytest.mark.parametrize("direction", ["at_least", "at_most"])
def test_arithmetic_of_one_side(direction: str) -> None:
    own = {"operation": "ratio", "numbers": {"a": 35, "b": 5000}, "value": 0.01, "tolerance": 0, "direction": direction}
    found = claims({"id": "o", "kind": "arithmetic", "own_source": own}).claims[0].own_source
    assert found.holds is (direction == "at_most")


def test_an_order_prints_no_number(tmp_path: Path) -> None:
    row = verdict(tmp_path, RATIO | {"direction": "less", "value": 1.0})
    assert (row.verdict, row.published, row.direction, row.gpu) == ("reproduced", None, "less", "any")
    assert verdict(tmp_path, RATIO | {"direction": "less", "value": 0.9}).published == 0.9


@pytest.mark.parametrize(
    ("statistic", "under", "measured"),
    [("median", None, 110 / 220), ("slowest", "best", 100 / 240), ("best", "slowest", 120 / 200)],
)
def test_each_side_has_its_statistic(tmp_path: Path, statistic: str, under: str | None, measured: float) -> None:
    row = verdict(tmp_path, RATIO | {"statistic": statistic, "under_statistic": under})
    assert row.measured == pytest.approx(measured)


def test_two_statistics_of_the_same_rounds(tmp_path: Path) -> None:
    claim = RATIO | {"under": FLEX, "statistic": "median", "under_statistic": "best", "value": 0.75}
    row = verdict(tmp_path, claim)
    assert row.measured == row.low == row.high == pytest.approx(110 / 120) and len(row.files) == 1
    assert row.verdict == "not reproduced"
    assert verdict(tmp_path, claim | {"value": 0.92}).verdict == "reproduced"


@pytest.mark.parametrize(
    ("metric", "unit", "value"), [("round_s", "s", 8 * 64 / 120), ("start_s", "s", 81), ("memory_gb", "GB", 44)]
)
def test_seconds_and_memory(tmp_path: Path, metric: str, unit: str, value: float) -> None:
    claim = ABSOLUTE | {"metric": metric, "unit": unit, "value": value}
    row = verdict(tmp_path, claim, start_s=81.0)
    assert row.verdict == "reproduced" and row.measured == pytest.approx(value)
    assert metric != "round_s" or (row.low, row.high) == (pytest.approx(value), pytest.approx(8 * 64 / 100))
    row = verdict(tmp_path, ABSOLUTE | {"metric": "start_s", "unit": "s", "value": 81})
    assert row.verdict == "not run" and "seconds to start" in row.reason


def test_difference(tmp_path: Path) -> None:
    claim = {"id": "d", "kind": "difference", "metric": "tps", "over": VLLM, "under": FLEX, "value": 120}
    row = verdict(tmp_path, claim | {"unit": "tok/s"})
    assert row.verdict == "reproduced" and row.measured == pytest.approx(120)
    assert (row.low, row.high) == (pytest.approx(200 - 120), pytest.approx(240 - 100))
    memory = claim | {"metric": "memory_gb", "unit": "GB", "value": 8}
    row = verdict(tmp_path, memory)
    assert row.verdict == "not reproduced" and row.measured == 0
    assert verdict(tmp_path, claim | {"unit": "tok/s"}, gpu=None).verdict == "not run"


def test_share_of_a_refresh(tmp_path: Path) -> None:
    claim = ABSOLUTE | {"metric": "refresh_share", "unit": "%", "value": 0.01, "direction": "at_most", "gpu": "any"}
    assert "no drift record" in verdict(tmp_path, claim).reason
    synthetic.write_drift(tmp_path, "torch2.11", device="NVIDIA H200", refresh_ms_median=35.0)
    row = verdict(tmp_path, claim, gpu="NVIDIA H200")
    assert row.verdict == "reproduced" and row.measured == pytest.approx(0.035 / (8 * 64 / 120))
    assert row.files[0] == "drift/torch2.11.json" and len(row.files) == 2
    row = verdict(tmp_path, claim, gpu="NVIDIA B200")
    assert row.verdict == "not run" and "refreshed on NVIDIA H200" in row.reason


def test_growth_of_drift(tmp_path: Path) -> None:
    claim = {"id": "g", "kind": "absolute", "metric": "peft_growth", "direction": "more", "unit": "x", "gpu": "none"}
    synthetic.write_drift(tmp_path, "torch2.11")
    assert verdict(tmp_path, claim, config=synthetic.config()).verdict == "not run"  # of another model
    row = verdict(tmp_path, claim | {"any_model": True}, config=synthetic.config())
    assert row.verdict == "reproduced" and row.measured == pytest.approx(3)
    same = [{"cycle": i, "max_abs_diff": 6e-5, "share_changed": 0.1} for i in (1, 2)]
    synthetic.write_drift(tmp_path, "torch2.11", peft={"cycles": same})
    row = verdict(tmp_path, claim | {"any_model": True}, config=synthetic.config())
    assert row.verdict == "within noise" and row.measured == 1


def test_a_failure_for_another_reason_is_not_the_published_one(tmp_path: Path) -> None:
    claim = {"id": "f", "kind": "boolean", "metric": "fails", "cells": FLEX, "reason": "NameError"}
    reason = "NameError('TRITON_DECODE is not defined')"
    assert verdict(tmp_path, claim, status="failed", reason=reason).verdict == "reproduced"
    row = verdict(tmp_path, claim, status="failed", reason="out of memory")
    assert row.verdict == "not reproduced" and "out of memory" in row.reason
    assert verdict(tmp_path, claim).verdict == "not reproduced"


@pytest.mark.parametrize(
    "claim",
    [
        {"id": "t", "kind": "absolute", "metric": "train_s", "cells": FLEX, "value": 74, "unit": "s"},
        RATIO | {"metric": "step_s"},
        {"id": "t", "kind": "boolean", "metric": "losses_finite", "cells": FLEX},
    ],
)
def test_training_is_not_in_a_run(tmp_path: Path, claim: dict[str, Any]) -> None:
    row = verdict(tmp_path, claim)
    assert (row.verdict, row.reason) == ("not run", "GRPO is not in this run")
    assert not isinstance(row.published, bool)  # the document has no words for it


def test_tested_needs_the_test(tmp_path: Path) -> None:
    here = "tests/test_claims.py::test_tested_needs_the_test"
    row = verdict(tmp_path, {"id": "t", "kind": "tested", "tests": [here]}, gpu=None, config=synthetic.config())
    assert row.verdict == "reproduced" and here in row.reason
    for gone in ("tests/test_claims.py::test_no_such", "tests/test_nowhere.py::test_x"):
        row = verdict(tmp_path, {"id": "t", "kind": "tested", "tests": [here, gone]})
        assert row.verdict == "not run" and gone in row.reason and here not in row.reason


def test_tested_outside_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXROLL_ROOT", str(tmp_path))
    claim = {"id": "t", "kind": "tested", "tests": ["tests/test_claims.py::test_tested_outside_of_the_tree"]}
    assert verdict(tmp_path, claim).verdict == "not run"


def test_a_statement_says_why_nothing_judges_it(tmp_path: Path) -> None:
    claim = {"id": "s", "kind": "statement", "why": "needs a B200"}
    row = verdict(tmp_path, claim)
    assert (row.verdict, row.reason) == ("not run", "needs a B200")
    row = verdict(tmp_path, claim | {"own_source": ARITHMETIC})
    assert row.verdict == "contradicted by its own source"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (ABSOLUTE | {"section": "t"}, "source 1 has no section 't'"),
        (ABSOLUTE | {"source": 2}, "no source 2"),
        (ABSOLUTE | {"cells": {"backend": "vlm"}}, "backend"),
        (ABSOLUTE | {"cells": {"adapter": "melted"}}, "adapter"),
        (ABSOLUTE | {"quote": ""}, "quote"),
        ({k: v for k, v in RATIO.items() if k != "value"}, "direction 'about' needs a value"),
        (RATIO | {"direction": "same"}, "direction 'same' has the value 1"),
        (RATIO | {"metric": "refresh_ms"}, "metric"),
        ({"id": "f", "kind": "boolean", "metric": "coherent", "reason": "NameError"}, "goes with metric 'fails'"),
        ({"id": "t", "kind": "tested", "tests": []}, "tests"),
        ({"id": "t", "kind": "tested", "tests": ["test_x.py"]}, "tests"),
        ({"id": "m", "kind": "arithmetic", "own_source": ARITHMETIC | {"numbers": {"a": 1}}}, "numbers"),
        ({"id": "m", "kind": "arithmetic", "own_source": ARITHMETIC | {"numbers": {"a": 1, "b": 2, "c": 3}}}, "two"),
    ],
)
def test_what_a_claim_may_not_be(claim: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        claims(claim)


# ---------------------------------------------------------------- the published file


@cache
def published() -> ClaimsFile:
    return load_claims(ROOT / "report" / "claims.yaml")


def test_the_file_covers_every_source_kind_and_topic() -> None:
    file = published()
    assert {c.source for c in file.claims} == {1, 2, 3}
    kinds = {"absolute", "ratio", "difference", "boolean", "arithmetic", "tested", "statement"}
    assert {c.kind for c in file.claims} == kinds == set(analysis.JUDGES)
    assert {c.topic for c in file.claims} == set(get_args(Topic)) <= set(text.SECTIONS)


# The numbers of both texts: of prose, and of each table's row, under words that its claims quote.
TEXT: dict[tuple[int, str], tuple[str, dict[str, str]]] = {
    (1, "Introduction"): ("30 10", {}),
    (1, "Setup"): ("512 16 0.1 0.97 0.5 5 32", {}),
    (1, "Best config"): ("8 3", {}),
    (1, "Batch-size sweep"): (
        "512",
        {
            " 8 ": "680 1900 35.8 44 156",
            " 16 ": "1626 3698 44.0 44 156",
            " 32 ": "3134 6318 49.6 44 156",
            " 64 ": "5474 10459 52.3 44 156",
            " 128 ": "5565 14996 37.1 81 157",
            " 256 ": "5812 21170 27.5 154 157",
        },
    ),
    (1, "Canonical GRPO workload"): (
        "64 32 100 3 9 50 36",
        {"vLLM (LoRARequest)": "7775 156", "flex": "5785 52 74", "unmerged": "2683 45 35"},
    ),
    (1, "What the default path does now: double-copy rollout"): ("6e-5 8 44 52 3 30 35 1 5 7 2 4", {}),
    (1, "Drift verification"): ("10 32 6 1", {}),
    (1, "Same workload at load_in_4bit=True"): (
        "4 4515 7775 58 1738 5744 30 0.8",
        {"fast_inference": "4515 159", "this PR": "1738 40.6", "transformers CB": "504 124"},
    ),
    (1, "What each option did"): (
        "64 8 4 10",
        {
            "eager": "420",
            "CUDA graphs": "4279",
            "PRESCALE_QK": "4367 2",
            "USE_TMA": "4425 3",
            "BLOCKS_ARE_CONTIGUOUS": "4703 10",
            "num_warps=8 ...": "5474 28",
            "num_stages=3": "5898 38",
        },
    ),
    (1, "What broke correctness and had to be dropped"): ("0", {}),
    (1, "What I tried that did NOT move the needle"): (
        "4 2.11 4617 64 5744 256 128 3 4827 8 36 4425 16 4486 4748 5009",
        {},
    ),
    (1, "Torch version + run-to-run noise"): ("2.9.1 2.11 5616 5660 64 10 4192 60 75", {}),
    (1, "Architecture notes"): ("3 1 2 4 8 16 32", {}),
    (1, "Output coherence"): ("17", {}),
    (1, "What's left on the table"): ("144 8 5 20 28 48", {}),
    (1, "Raw stats"): ("8 16 32 64 128 5 2.9.1 2.11 256 3", {}),
    (2, "Introduction"): ("2024", {}),
    (2, "Numbers"): (
        "32 512 30 1 48 2191 4581 100 2",
        {
            "vLLM (fast_inference)": "4581",
            "CUDA graphs": "1618 2192 35 48",
            "eager": "372 532 8 12",
            "unsloth_fi_false": "641 14",
            "paged+FA4": "422 9.2",
            "sdpa_paged": "434 9.5",
        },
    ),
    (2, "Why this works"): ("1 2 3 4 8 16 32 0", {}),
    (2, "Files"): ("3", {}),
    (2, "CB sync driver side-note"): ("382 400 422 4 10", {}),
    (2, "Next steps"): ("32 64", {}),
    (2, "Phase 2 results"): (
        "2 100 0 0.015 15",
        {
            "vLLM:": "74.4 4.14 158",
            "unsloth_fi_false:": "355 23.95 10.7 17",
            "cb_paged": "466 36 55.6 11.5",
        },
    ),
    (2, "Phase 2 fixes"): ("1 8 64 512", {}),
    (2, "Phase 1 results"): (
        "1 100 1.5 7 2",
        {
            "vLLM+LoRA": "4581 156",
            "unsloth_fi_false+LoRA": "641 15.8 14 7",
            "paged+FA4": "422 9.2",
            "sdpa_paged": "434 9.5",
        },
    ),
    (2, "Phase 1 changes"): ("32", {}),
    (2, "Phase 3"): ("3 2", {}),
    (2, "Phase 4"): ("4 3", {}),
    (2, "Phase 0"): ("0 10 5.80 158.9", {}),
}

# Numbers that claim nothing, by why.
EXEMPT: dict[str, dict[tuple[int, str], str]] = {
    "part of a licence's name": {(1, "Architecture notes"): "3", (2, "Files"): "3"},
    "the workload: batch, prompts, new tokens, LoRA rank, warm-up": {
        (1, "Setup"): "512 16 32",
        (1, "Batch-size sweep"): "512",
        (1, "Canonical GRPO workload"): "64 32",
        (1, "Drift verification"): "32",
        (1, "What each option did"): "64",
        (2, "Numbers"): "32 512",
        (2, "Phase 1 changes"): "32",
        (2, "Phase 0"): "10",
    },
    "sampling parameters": {(1, "Setup"): "0.1 0.97 0.5 5"},
    "the reference itself, 100 %": {
        (1, "Canonical GRPO workload"): "100",
        (2, "Numbers"): "100",
        (2, "Phase 2 results"): "100",
        (2, "Phase 1 results"): "100",
    },
    "a step of a list, or a phase's number": {
        (1, "What the default path does now: double-copy rollout"): "2 4",
        (2, "Why this works"): "3",
        (2, "Phase 2 results"): "2",
        (2, "Phase 1 results"): "2",
        (2, "Phase 3"): "3",
        (2, "Phase 4"): "4",
        (2, "Phase 0"): "0",
    },
    "sizes that graphs are captured for": {
        (1, "Architecture notes"): "1 2 4 8 16 32",
        (2, "Why this works"): "1 2 4 8 16 32",
    },
    "flags of a command, reserved slots, which GPU": {
        (1, "Drift verification"): "6 1",
        (1, "What broke correctness and had to be dropped"): "0",
        (2, "Phase 2 fixes"): "1",
    },
    "how much is run or skipped before measuring": {(2, "Phase 3"): "2", (2, "Phase 4"): "3"},
    "names of raw files and what they were run with": {(1, "Raw stats"): "8 16 32 64 128 5 2.9.1 2.11 256 3"},
    "plans": {(2, "Next steps"): "32 64"},
    "a year": {(2, "Introduction"): "2024"},
}
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(?!\d+B\b)\d+(?:\.\d+)*(?:e-?\d+)?")


def quoted(claim: Claim) -> set[float]:
    return {float(n) for n in NUMBER.findall(claim.quote) if n.count(".") < 2}


def stated(claim: Claim) -> set[float]:
    """The claim's own number, as a text may print it: plain, in percent, or as a gain in percent."""
    value = None
    if "value" in claim.model_fields_set and not isinstance(claim.value, bool):
        value = claim.value
    elif claim.kind == "arithmetic" and not claim.own_source.compares:
        value = claim.own_source.value
    if value is None:
        return set()
    if claim.kind == "ratio" and claim.unit == "x":
        return {value, round((value - 1) * 100, 9)}
    return {value, round(value * 100, 9)} if claim.unit == "%" else {value}


def held(claim: Claim) -> set[float]:
    """Every number of a claim: quoted, stated, or one that its text is checked by."""
    return quoted(claim) | stated(claim) | set(claim.own_source.numbers.values() if claim.own_source else [])


def exempt(place: tuple[int, str]) -> list[str]:
    return [number for own in EXEMPT.values() for number in own.get(place, "").split()]


def test_the_texts_sections_are_those_of_the_file() -> None:
    for number in (1, 2):
        assert published().sources[number].sections == [section for source, section in TEXT if source == number]
    assert {place for own in EXEMPT.values() for place in own} <= set(TEXT)


@pytest.mark.parametrize("place", TEXT, ids=lambda place: f"{place[0]} {place[1]}")
def test_every_number_of_the_texts_is_claimed_or_exempt(place: tuple[int, str]) -> None:
    prose, rows = TEXT[place]
    own = [c for c in published().claims if (c.source, c.section) == place]
    found = set().union(*(held(c) for c in own)) if own else set()
    words = " ".join(c.quote for c in own)
    unclaimed = {n for n in prose.split() if not (n in words if n.count(".") > 1 else float(n) in found)}
    assert unclaimed == set(exempt(place))
    for label, numbers in rows.items():
        of_row = Counter(n for c in own if label in f"{c.quote} " for n in stated(c))
        assert not Counter(map(float, numbers.split())) - of_row, label  # a claim for each, equal ones too


def test_a_number_left_out_would_be_seen() -> None:
    """The check above can fail: without a claim, its number is not found."""
    own = [c for c in published().claims if (c.source, c.section) == (1, "What each option did")]
    assert any(28 in stated(c) for c in own if "num_warps=8 ..." in c.quote)
    assert not any(28 in held(c) for c in own if c.id != "option-warps")


PHRASES = {
    1: [
        "asymmetric at bf16",
        "bit-identical",
        "deterministic",
        "no re-capture needed",
        "same tensor storage",
        "well under 1 %",
        "can't merge into 4-bit",
        "gibberish",
        "garbage tokens",
        "on every backend",
        "barely moves",
        "safe in our setup",
        "biggest win",
        "!!!!!!",
        "NameError",
        "misaligned address",
        "during capturing stage",
        "negligible throughput delta",
        "indexes by kv_idx",
        "output is coherent",
        "worse than the hand-tuned",
        "same as eager walker",
        "neither beats 8",
        "picks 128 for our shape",
        "within noise",
        "clock throttling",
        "coherent math solutions",
        "main remaining penalty",
        "gap",
    ],
    2: [
        "target is met",
        "pure graph replay",
        "closes the gap",
        "valid logical positions",
        "cudaErrorIllegalAddress",
        "close to threaded CB",
        "timed out",
        "losses finite",
        "expected early-GRPO range",
        "KL trajectories",
        "less memory than vLLM",
        "divisibility check",
        "falls back to plain SDPA",
        "512 correct tokens",
        "hangs during first-step capture",
        "faster than CB",
        "1/7th the peak memory",
        "Greedy sampling only",
        "zero-init",
    ],
}


@pytest.mark.parametrize(("source", "phrase"), [(source, p) for source, own in PHRASES.items() for p in own])
def test_statements_without_a_number_are_claimed(source: int, phrase: str) -> None:
    assert any(phrase in claim.quote for claim in published().claims if claim.source == source)


def test_the_number_judged_is_the_one_quoted() -> None:
    file = published()
    left = {c.id for c in file.claims if c.source != 3 and stated(c) and not stated(c) & quoted(c)}
    # A ratio that the text leaves to its reader, two statements in words, the middle of a range.
    assert left == {"option-graphs", "option-tma-step", "four-bit-worse-for-flex", "grpo-rollout"}


@pytest.mark.parametrize(
    "claim",
    [
        "sweep-flex-64",
        "grpo-flex",
        "option-contiguous",
        "option-best-config",
        "option-baseline",
        "left-gap",
        "second-vllm",
        "second-unsloth",
        "second-cb",
        "second-cb-fa4",
        "second-memory",
        "second-grpo-share",
        "second-grpo-share-cb",
        "second-round-one",
    ],
)
def test_known_contradictions_are_found(claim: str) -> None:
    found = next(c for c in published().claims if c.id == claim)
    assert found.own_source is not None and not found.own_source.holds


def test_the_contradictions_are_the_known_ones_and_findings_hold() -> None:
    wrong = [c for c in published().claims if c.own_source and not c.own_source.holds]
    assert len(wrong) == 14 and {c.source for c in wrong} == {1, 2}


def test_published_rates_agree_with_the_claims() -> None:
    """A number that is both a claim and a published table entry is the same number, and every table row is an entry."""
    file = published()
    cells = expand(load_config(ROOT / "config.yaml"))
    for metric in ("tps", "memory_gb"):
        compared = 0
        for claim in file.claims:
            if claim.kind != "absolute" or claim.metric != metric or claim.statistic != "best":
                continue
            for cell in (c for c in cells if claim.cells.matches(c)):
                entry = next(p for p in file.published if p.cells.matches(cell))
                assert math.isclose(getattr(entry, metric), claim.value), claim.id
                compared += 1
            if TEXT[claim.source, claim.section][1]:
                assert any(p.source == claim.source and getattr(p, metric) == claim.value for p in file.published)
        assert compared > 10


def selectors(file: ClaimsFile) -> list[tuple[str, Selector]]:
    found = [(f"published {i}", p.cells) for i, p in enumerate(file.published)]
    for claim in file.claims:
        found += [(claim.id, s) for name in ("cells", "over", "under") if (s := getattr(claim, name, None))]
    return found


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def test_selectors_fit_the_matrices() -> None:
    """A selector that names an experiment means exactly one configuration an option, of config.yaml where the
    experiment is there and of a preset otherwise; none names an unknown experiment, option, sampling or stack."""
    presets = sorted((ROOT / "workflow" / "presets").glob("*.yaml"))
    default, *others = [load_config(path) for path in (ROOT / "config.yaml", *presets)]
    file = published()
    options = {"default", *(name for config in (default, *others) for name in config.options)}
    for name, selector in selectors(file):
        assert set(listed(selector.option)) <= options, name
        assert set(listed(selector.sampling)) <= set(default.samplings), name
        assert set(listed(selector.stack)) <= set(default.stacks), name
        for experiment in listed(selector.experiment):
            configs = [default] if experiment in default.experiments else others
            sizes = Counter()
            for config, option in product(configs, listed(selector.option) or [None]):
                one = selector.model_copy(update={"experiment": experiment, "option": option})
                sizes[len({(c.engine, c.file) for c in expand(config) if one.matches(c)})] += 1
            assert sizes.keys() - {0} == {1}, (name, experiment, sizes)


def test_every_named_test_is_in_the_tree() -> None:
    named = [test for claim in published().claims if claim.kind == "tested" for test in claim.tests]
    assert len(named) > 10
    for test in named:
        file, function = test.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), test


def test_ids_are_unique_and_quotes_short() -> None:
    file = published()
    assert len({c.id for c in file.claims}) == len(file.claims)
    for claim in file.claims:
        assert claim.quote.strip() == claim.quote and 2 < len(claim.quote) < 230, claim.id
        assert not {"None", "nan"} & set(claim.quote.split()), claim.id


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
