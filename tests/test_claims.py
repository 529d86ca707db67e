"""Every kind of claim gets every verdict it can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

import synthetic
from flexroll.analysis import collect
from flexroll.analysis.claims import Run, judge
from flexroll.analysis.drift import read_drift
from flexroll.analysis.model import VerdictRow
from flexroll.analysis.pairs import sessions_by_key
from flexroll.schema.cells import Cell
from flexroll.schema.claims import ClaimsFile
from flexroll.schema.config import Config
from flexroll.schema.records import Record

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


def test_ratio_of_different_cards_prompts_or_lengths_is_not_run(tmp_path: Path) -> None:
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
    same = [r.model_copy(update={"device_uuids": ["GPU-1"]}) for r in results]
    longer = [r.model_copy(update={"new_tokens": 99}) if r.backend == "vllm" else r for r in same]
    why = f"the two sides did different work: new_tokens {results[0].new_tokens} against 99"
    for claim, judged in ((RATIO, False), (RATIO | {"metric": "memory_gb"}, True)):
        file = claims(claim)
        row = judge(file.claims[0], file, Run(config.model.name, "local", longer, [], []))
        assert (row.verdict != "not run") is judged and (row.reason == why) is not judged


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
