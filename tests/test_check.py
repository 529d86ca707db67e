"""`flexroll check`: a whole run passes every check, and each check finds the fault that was planted for it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import grpo_runs
import synthetic
from flexroll import cli
from flexroll.analysis.run import analyse
from flexroll.bench.job import write_manifest
from flexroll.bench.retry import retry
from flexroll.check import runner
from flexroll.check.registry import CELLS, CHECKS, GROUPS, check, error
from flexroll.check.submission import Held, load
from flexroll.errors import FlexrollError
from flexroll.schema import architecture
from flexroll.schema.cells import Cell, jobs
from flexroll.schema.claims import load_claims
from flexroll.schema.config import Config
from flexroll.schema.load import load_config
from flexroll.schema.records import Memory, Record, Telemetry, read_record, write_record

ROOT = Path(__file__).resolve().parents[1]
MODEL = json.loads((ROOT / "models" / "qwen3-4b-shape" / "config.json").read_text())
WEIGHTS = 2 * architecture.parameters(MODEL)
SMALL = {"section": "batch_sweep", "batches": [8], "new_tokens": 64, "stacks": ["torch2.11"]}
CONFIG: dict[str, Any] = {
    "model": {"name": "Qwen3_4B", "source": "random", "path": "models/qwen3-4b-shape"},
    "prompts": {"source": "random", "count": 16},
    "repeats": {"sessions": 3, "rounds": 8},
    "drift": {"cycles": 3, "stacks": ["torch2.11"]},
    "quality": {"count": 4, "new_tokens": 8},
    "grpo": {
        "rewards": ["distinct"],
        "steps": 6,
        "sampling": "equivalence",
        "reference": "flex",
        "backends": [{"backend": "flex", "seeds": [0, 1, 2]}, {"backend": "vllm"}],
    },
    "experiments": {
        "sweep": SMALL | {"title": "Sweep", "batches": [4, 8], "backends": [{"backend": "flex"}, {"backend": "vllm"}]},
        "lora": SMALL
        | {
            "title": "LoRA",
            "backends": [
                {"backend": "flex", "adapters": ["merged"]},
                {"backend": "vllm", "adapters": ["request"]},
                {"backend": "unsloth", "adapters": ["unmerged"]},
            ],
        },
        "uneven": SMALL
        | {"title": "Uneven", "new_tokens": {"min": 16, "max": 96}, "slots": 4, "backends": [{"backend": "flex"}]},
        "ends": SMALL | {"title": "To the end", "ignore_eos": False, "backends": [{"backend": "flex"}]},
        "versions": SMALL
        | {"title": "Versions", "stacks": ["torch2.9.1", "torch2.11"], "backends": [{"backend": "flex"}]},
    },
}
# LoRA of rank 32 on every matrix of a layer, by hand: 36 layers; q, o 2560 x 4096, k, v 2560 x 1024, the rest 2560 x
# 9728; two bytes each.
ADAPTER = 36 * 2 * 32 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
MERGED = 36 * 2 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)

TRUTH = synthetic.Truth(rate=500, rounds=8)

Edit = Callable[[Cell, Record], Record]


def weights(cell: Cell) -> int:
    return WEIGHTS + {"none": 0, "request": ADAPTER, "merged": ADAPTER + MERGED}.get(cell.adapter, 0)


def whole(truth: synthetic.Truth) -> Callable[[Cell], Record]:
    """Records as the pipeline writes them on an H200; Unsloth is skipped."""

    def make(cell: Cell) -> Record:
        memory = Memory(weights=weights(cell), kv_reserved=10**9, peak_allocated=30 * 10**9, device_total=40 * 10**9)
        made = truth.record(cell, memory=memory, key=f"key of {cell.path}")
        assert made.environment is not None
        made.environment.device_memory_bytes = 150 * 10**9 if truth.gpu else None
        if cell.backend == "unsloth":
            return Record(cell=cell, status="skipped", reason="not installed", key=made.key)
        for r in made.rounds:
            r.telemetry = Telemetry(samples=3)
        return made

    return make


def build(
    results: Path,
    edit: Edit = lambda cell, record: record,
    truth: synthetic.Truth = TRUTH,
    stacks: list[str] | None = None,
    **changes: Any,
) -> Config:
    """A run with `edit` applied to every record before manifests and analysis are made from them."""
    config = synthetic.config(**(CONFIG | changes))
    cells = synthetic.write_run(results, config, lambda cell: edit(cell, whole(truth)(cell)))
    for job in jobs(cells):
        folder = results / "raw" / job.name
        write_manifest(folder, job, {c.file: read_record(folder / c.file).key for c in job.cells}, folder / "job.json")
    for stack in config.drift.stacks:
        synthetic.write_drift(results, stack)
    measured_on = synthetic.environment(gpu=truth.gpu)
    device = {"device": measured_on.device, "environment": measured_on}
    synthetic.write_quality(results, config, lambda target: synthetic.quality(target, config, **device))
    grpo_runs.write(results, config, lambda target: grpo_runs.record(target, config, gpu=truth.gpu))
    analyse(config, results, ROOT / "report" / "claims.yaml", stacks)
    return config


def judged(results: Path, config: Path | None = None, root: Path | None = ROOT) -> runner.Report:
    return runner.check(results, config, root)


def found(report: runner.Report, *severities: str) -> set[str]:
    return {f.check for f in report.findings if f.severity in (severities or ("error", "warning"))}


# Faults in records, in the cells that `where` picks: manifests and analysis agree with them.

FIRST = "torch2.11-flex-none-default-s1/sweep-greedy-b8.json"


def at(path: str, change: Callable[[Record], Any]) -> Edit:
    """`change` a copy of the record at `path`, or of all at ''."""

    def edit(cell: Cell, record: Record) -> Record:
        if (not path or cell.path == path) and record.status == "ok":
            record = record.model_copy(deep=True)
            change(record)
        return record

    return edit


def cell(**values: Any) -> Callable[[Record], None]:
    return lambda record: setattr(record, "cell", record.cell.model_copy(update=values))


def environment(**values: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.environment = record.environment.model_copy(update=values)  # type: ignore[union-attr]

    return change


def memory(**values: int) -> Callable[[Record], None]:
    return lambda record: setattr(record, "memory", record.memory.model_copy(update=values))


def last(**values: Any) -> Callable[[Record], None]:
    """The last round with other values."""
    return lambda record: record.rounds.append(record.rounds.pop().model_copy(update=values))


def faster(record: Record) -> None:
    """All of it ten times as fast."""
    for r in record.rounds:
        r.wall_s, r.decode_s = r.wall_s / 10, r.decode_s and r.decode_s / 10


def fewer(record: Record) -> None:
    record.rounds[1].tokens -= 1


def unmarked(record: Record) -> None:
    record.rounds[0].warmup = False


def renumbered(record: Record) -> None:
    record.rounds[3].index = 7


def flagged(record: Record) -> None:
    record.rounds[2].flags = ["throttled: power cap"]


IN_RECORDS: list[tuple[str, str, Edit]] = [
    ("settings-as-configured", "error", at("", cell(seed=7))),
    ("environment-complete", "error", at(FIRST, environment(device=""))),
    ("environment-complete", "error", at("", environment(driver=None))),
    ("environment-complete", "error", at("", environment(source_sha256="unknown"))),
    ("environment-complete", "error", at("", environment(packages={}))),
    ("clean-tree", "warning", at(FIRST, environment(dirty=True))),
    ("clean-tree", "warning", at(FIRST, environment(dirty=None))),
    ("one-lock", "error", at(FIRST, environment(lock_sha256="9" * 64))),
    ("one-source", "error", at(FIRST, environment(source_sha256="9" * 64))),
    ("one-environment", "error", at(FIRST, environment(packages={"torch": "2.10.0", "transformers": "5.17.0"}))),
    ("one-environment", "warning", at(FIRST, environment(driver="570"))),
    ("image-named", "error", at(FIRST, environment(image="sha256:" + "9" * 64))),
    ("image-named", "error", at("", environment(image="unrecorded image of torch2.11"))),
    ("tokens-as-asked", "error", at(FIRST, last(tokens=8 * 64 - 1))),
    ("tokens-as-asked", "error", at(FIRST.replace("sweep", "ends"), last(tokens=8 * 64 + 1))),
    ("tokens-as-asked", "error", at("torch2.11-flex-none-default-s1/uneven-greedy-b8.json", fewer)),
    ("tokens-as-asked", "error", at(FIRST, last(calls=2))),
    ("rounds-as-configured", "error", at(FIRST, lambda record: record.rounds.pop())),
    ("rounds-as-configured", "error", at(FIRST, renumbered)),
    ("same-prompts", "error", at(FIRST, lambda record: setattr(record, "prompts_sha256", "9" * 64))),
    ("same-prompts", "error", at(FIRST, lambda record: setattr(record, "prompt_tokens", 99))),
    ("one-device-a-session", "error", at(FIRST, environment(device_uuid="GPU-2"))),
    ("time-parts", "error", at(FIRST, last(prefill_s=99.0))),
    ("time-parts", "error", at(FIRST, last(decode_tokens=8 * 64 + 1))),
    ("time-parts", "error", at(FIRST, last(prefill_s=-1.0))),
    ("round-spread", "warning", at(FIRST, last(wall_s=1.3))),
    ("memory-bandwidth", "error", at(FIRST, faster)),
    ("memory-bandwidth", "error", at(FIRST.replace("flex", "vllm"), faster)),
    ("memory-parts", "error", at(FIRST, memory(kv_reserved=33 * 10**9))),
    ("memory-parts", "error", at(FIRST, memory(peak_allocated=151 * 10**9))),
    ("weights-size", "error", at(FIRST, memory(weights=int(WEIGHTS * 1.05)))),
    ("weights-size", "error", at("torch2.11-flex-merged-default-s1/lora-greedy-b8.json", memory(weights=WEIGHTS))),
    ("flagged-rounds", "warning", at(FIRST, flagged)),
]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edited(file: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def swap(results: Path) -> None:
    raw = results / "raw" / FIRST
    shutil.copy(raw.with_name("sweep-greedy-b4.json"), raw)


MANIFEST = Path("raw", FIRST).parent / "job.json"
SCORED = "quality/torch2.11-flex-none-default.json"


def fewer(data: dict[str, Any]) -> None:
    """One prompt less in a quality record, of which all else still adds up."""
    data["tokens"] -= data["sequence_tokens"].pop()
    data["kl_sequences"].pop()
    data["prompts"] -= 1


# Faults in a run's folder afterwards, and all checks that must find them.
IN_FILES: list[tuple[set[str], Callable[[Path], Any]]] = [
    ({"record-schema", "job-manifest", "analysis-current"}, lambda r: cut(r / "raw" / FIRST)),
    (
        {"record-schema", "job-manifest", "analysis-current"},
        lambda r: edited(r / "raw" / FIRST, lambda data: data.update(extra=1)),
    ),
    ({"manifest-schema"}, lambda r: cut(r / MANIFEST)),
    ({"manifest-schema"}, lambda r: edited(r / MANIFEST, lambda data: data.update(extra=1))),
    ({"drift-schema"}, lambda r: cut(r / "drift" / "torch2.11.json")),
    ({"cell-recorded", "job-manifest", "analysis-current"}, lambda r: (r / "raw" / FIRST).unlink()),
    ({"cell-recorded", "job-manifest", "analysis-current"}, swap),
    ({"job-manifest"}, lambda r: (r / MANIFEST).unlink()),
    ({"job-manifest"}, lambda r: (r / "raw" / FIRST).write_text((r / "raw" / FIRST).read_text() + "\n")),
    ({"job-manifest"}, lambda r: edited(r / MANIFEST, lambda data: data["cells"].pop("sweep-greedy-b8.json"))),
    (
        {"job-manifest"},
        lambda r: edited(r / MANIFEST, lambda data: data["cells"]["sweep-greedy-b8.json"].update(status="failed")),
    ),
    ({"job-manifest"}, lambda r: edited(r / MANIFEST, lambda data: data.update(job="another"))),
    ({"nothing-unlisted"}, lambda r: shutil.copy(r / "raw" / FIRST, r / "raw" / FIRST.replace("b8", "b16"))),
    ({"nothing-unlisted"}, lambda r: (r / "raw" / "notes.txt").write_text("best of three")),
    ({"nothing-unlisted"}, lambda r: shutil.copy(r / SCORED, r / "quality/another.json")),
    ({"quality-schema", "quality-analysed"}, lambda r: cut(r / SCORED)),
    ({"quality-recorded", "quality-analysed"}, lambda r: (r / SCORED).unlink()),
    ({"quality-recorded", "quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(option="page32"))),
    ({"quality-recorded", "quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(status="failed"))),
    ({"quality-as-configured"}, lambda r: edited(r / SCORED, lambda d: d["option_values"].update(page_size=32))),
    ({"quality-as-configured", "quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(model="another"))),
    ({"quality-as-configured", "quality-analysed"}, lambda r: edited(r / SCORED, fewer)),
    ({"quality-schema", "quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(kl_sequences=[]))),
    (
        {"quality-adds-up"},
        lambda r: edited(r / SCORED, lambda d: d["kl_sequences"].append(d["kl_sequences"].pop() * 2)),
    ),
    (
        {"quality-adds-up"},
        lambda r: edited(r / SCORED, lambda d: d["sequence_tokens"].append(d["sequence_tokens"].pop() - 1)),
    ),
    ({"quality-adds-up"}, lambda r: edited(r / SCORED, lambda d: d.update(near_ties=0))),
    ({"quality-adds-up"}, lambda r: edited(r / SCORED, lambda d: d["divergences"][0].update(prompt=99))),
    ({"quality-same-code"}, lambda r: edited(r / SCORED, lambda d: d["environment"].update(source_sha256="9" * 64))),
    ({"quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(top1_agreement=0.5))),
    ({"quality-adds-up", "quality-analysed"}, lambda r: edited(r / SCORED, lambda d: d.update(kl=1.5e-4))),
    ({"drift-recorded"}, lambda r: (r / "drift" / "torch2.11.json").unlink()),
    (
        {"analysis-current"},
        lambda r: edited(r / "analysis.json", lambda data: data["cells"][0].update(tps_median=1e4)),
    ),
    ({"analysis-current"}, lambda r: edited(r / "analysis.json", lambda data: data["cells"].pop())),
]
# Faults with a test of their own below.
ELSEWHERE = {
    *("analysis-schema", "reason-given", "no-stack-left-out", "same-work", "enough-sessions", "no-trend"),
    *(name for name in CHECKS if name.startswith("grpo-")),  # in test_grpo_report.py
}


READ_ONCE = cache(load_claims)


@pytest.fixture(autouse=True)
def claims_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of the time that an analysis takes, and no check is about them."""
    monkeypatch.setattr("flexroll.analysis.run.load_claims", READ_ONCE)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("clean") / "run"
    build(results)
    return results


@pytest.fixture
def run(clean: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(clean, tmp_path / "run"))


def test_every_check_has_a_planted_fault() -> None:
    planted = {name for name, _, _ in IN_RECORDS} | {name for names, _ in IN_FILES for name in names} | ELSEWHERE
    assert planted == set(CHECKS)


def test_every_check_states_its_rule() -> None:
    for name, each in CHECKS.items():
        assert each.group in GROUPS and each.rule.endswith(".") and "\n" not in each.rule, name


def test_a_whole_run_passes_every_check(clean: Path) -> None:
    report = judged(clean)
    assert report.findings == [] and report.exit_code == 0
    assert {row.outcome for row in report.checks} == {"pass"} and len(report.checks) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "severity", "edit"), IN_RECORDS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(IN_RECORDS)]
)
def test_a_fault_in_a_record_is_found(name: str, severity: str, edit: Edit, tmp_path: Path) -> None:
    build(tmp_path, edit)
    report = judged(tmp_path)
    assert found(report) == {name} and found(report, severity) == {name}, report.findings
    assert report.exit_code == (severity == "error")


@pytest.mark.parametrize(("names", "plant"), IN_FILES, ids=[f"{min(n)}-{i}" for i, (n, _) in enumerate(IN_FILES)])
def test_a_fault_in_the_folder_is_found(names: set[str], plant: Callable[[Path], Any], run: Path) -> None:
    plant(run)
    report = judged(run)
    assert found(report, "error") == names and report.exit_code == 1, report.findings
    assert all("\n" not in f.message for f in report.findings)


def test_an_analysis_cut_in_half_is_a_finding_where_the_config_is_given(run: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(json.loads((run / "analysis.json").read_text())["config"]))
    assert judged(run, config).findings == []
    cut(run / "analysis.json")
    report = judged(run, config)
    assert found(report, "error") == {"analysis-schema"}
    assert found(report, "not applicable") == {"analysis-current", "quality-analysed", "grpo-analysed"}
    (run / "analysis.json").unlink()
    report = judged(run, config)
    lacking = {"analysis-schema", "analysis-current", "quality-analysed", "grpo-analysed"}
    assert report.passed and found(report, "not applicable") == lacking


def test_another_config_overrides_that_of_the_analysis(run: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    data = json.loads((run / "analysis.json").read_text())["config"]
    data["repeats"]["sessions"] = 4
    config.write_text(json.dumps(data))
    report = judged(run, config)
    assert {"cell-recorded", "job-manifest"} <= found(report, "error")


def test_a_cell_without_a_reason(tmp_path: Path) -> None:
    build(tmp_path, lambda cell, record: record if record.status == "ok" else record.model_copy(update={"reason": " "}))
    assert found(judged(tmp_path), "error") == {"reason-given"}


def test_retry_clears_bad_quality_records(run: Path) -> None:
    other = run / "quality/torch2.11-vllm-none-default.json"
    edited(run / SCORED, lambda data: data.update(status="failed", reason="timeout"))
    cut(other)
    cleared = retry(run)
    assert len(cleared) == 2 and cleared[0] == f"{SCORED}: failed (timeout)" and "unreadable" in cleared[1]
    assert not (run / SCORED).exists() and not other.exists() and retry(run) == []


def test_a_stack_left_out(tmp_path: Path) -> None:
    build(tmp_path, stacks=["torch2.11"])
    report = judged(tmp_path)
    assert found(report) == {"no-stack-left-out"} and report.passed


def test_other_work_in_one_cell(tmp_path: Path) -> None:
    """A record tells what was done, so a cell that was measured under other settings breaks two rules."""
    build(tmp_path, at(FIRST, cell(max_model_len=1024)))
    assert found(judged(tmp_path)) == {"same-work", "settings-as-configured"}


def test_two_samplings_side_by_side(tmp_path: Path) -> None:
    both = CONFIG["experiments"]["sweep"] | {
        "backends": [{"backend": "flex"}, {"backend": "vllm", "sampling": "equivalence"}]
    }
    build(tmp_path, experiments={"sweep": both})
    report = judged(tmp_path)
    assert found(report) == {"same-work"} and report.passed


def test_too_few_sessions(tmp_path: Path) -> None:
    build(tmp_path, repeats={"sessions": 2, "rounds": 8})
    report = judged(tmp_path)
    assert found(report) == {"enough-sessions"} and report.passed
    assert "insufficient n: 2 of the 3 sessions" in report.findings[0].message


@pytest.mark.parametrize(("drift", "words"), [(0.1, "warm-up was too short"), (-0.1, "slowed under load")])
def test_rounds_that_go_one_way(drift: float, words: str, tmp_path: Path) -> None:
    build(tmp_path, truth=synthetic.Truth(rate=500, rounds=8, drift=drift))
    report = judged(tmp_path)
    assert found(report) == {"no-trend"} and report.passed and words in report.findings[0].message


def test_an_unmarked_warm_up_round(tmp_path: Path) -> None:
    build(tmp_path, at(FIRST, unmarked))
    assert "rounds-as-configured" in found(judged(tmp_path), "error")


def test_a_record_without_its_environment(tmp_path: Path) -> None:
    build(tmp_path, at("", lambda record: setattr(record, "environment", None)))
    report = judged(tmp_path)
    assert found(report) == {"environment-complete"}
    assert {"clean-tree", "one-lock", "one-device-a-session", "memory-bandwidth"} <= found(report, "not applicable")


def test_what_cannot_be_tried_has_not_passed(tmp_path: Path) -> None:
    """On a CPU, without the model's config.json, with few rounds that nobody watched."""

    def edit(cell: Cell, record: Record) -> Record:
        record.rounds = [r.model_copy(update={"telemetry": None}) for r in record.rounds]
        return record

    build(tmp_path, edit, synthetic.Truth(rate=500, gpu=None), repeats={"sessions": 3, "rounds": 5})
    report = judged(tmp_path, root=None)
    outcomes = {row.id: row.outcome for row in report.checks}
    unknown = {"memory-bandwidth", "memory-parts", "weights-size", "flagged-rounds", "no-trend"}
    assert {name for name, outcome in outcomes.items() if outcome == "not applicable"} == unknown
    assert {name for name, outcome in outcomes.items() if outcome == "pass"} == set(CHECKS) - unknown
    assert all(f.message for f in report.findings) and report.passed


def floor_s(tokens: int = 64, batch: int = 8, prompt_tokens: int = 100) -> float:
    """Seconds that an H200 needs for the decode steps of a round, by hand: the first token is prefill's."""
    steps = tokens - 1
    kv = 2 * 36 * 8 * 128 * 2  # bytes a token: K and V, layers, heads, head size, bf16
    read = batch * steps * (steps + 1) / 2 + steps * prompt_tokens
    return (steps * (WEIGHTS - 126 * 2**20) + read * kv) / 4.8e12


@pytest.mark.parametrize(("times", "clean"), [(0.97, False), (1.0, True)])
@pytest.mark.parametrize("told", [True, False])
def test_where_the_memory_bandwidth_ends(times: float, clean: bool, told: bool, tmp_path: Path) -> None:
    """Decode time where it is told, the whole round where it is not."""
    took = floor_s() * times

    def change(record: Record) -> None:
        for r in record.measured:
            r.wall_s, r.decode_s = (took * 2, took) if told else (took, None)

    build(tmp_path, at(FIRST, change))
    assert (found(judged(tmp_path), "error") == set()) is clean


def test_bandwidth_counts_every_call_and_the_steps_that_are_told(tmp_path: Path) -> None:
    def change(record: Record) -> None:
        for r in record.measured:
            r.tokens, r.calls, r.decode_s, r.wall_s = r.tokens * 2, 2, floor_s() * 1.5, 9.0

    build(tmp_path / "calls", at(FIRST, change))
    assert found(judged(tmp_path / "calls"), "error") == {"memory-bandwidth"}
    build(tmp_path / "steps", at(FIRST, lambda record: last(steps=4096)(record)))
    assert found(judged(tmp_path / "steps"), "error") == {"memory-bandwidth"}


def test_the_committed_run_has_no_error(tmp_path: Path) -> None:
    """Its analysis made anew: what is published are the raw records, and an analysis is of one version."""
    results = Path(shutil.copytree(ROOT / "results" / "h200_engine", tmp_path / "run"))
    config = load_config(ROOT / "workflow" / "presets" / "h200-engine.yaml")
    analyse(config, results, ROOT / "report" / "claims.yaml")
    report = judged(results)
    assert report.passed, [f for f in report.findings if f.severity == "error"]
    assert found(report) == {"enough-sessions", "flagged-rounds"}  # one session, and a power cap
    applied = {row.id for row in report.checks if row.passed}
    assert {"memory-bandwidth", "memory-parts", "weights-size", "tokens-as-asked", "job-manifest"} <= applied


def test_bandwidth_without_the_models_config(tmp_path: Path) -> None:
    """Half of the weights is the least that a step reads; K and V are unknown."""

    def change(record: Record) -> None:
        for r in record.measured:
            r.decode_s = 63 * (WEIGHTS / 2 - 126 * 2**20) / 4.8e12 * 0.97

    build(tmp_path, at(FIRST, change))
    report = judged(tmp_path, root=None)
    assert found(report, "error") == {"memory-bandwidth"} and "K and V" not in report.findings[0].message


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({})
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix] * bool(prefix) + [path for key, inner in items for path in paths(inner, (*prefix, key))]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_value_in_a_record_breaks_the_checker(clean: Path, data: st.DataObject) -> None:
    document = json.loads((clean / "raw" / FIRST).read_text())
    path = data.draw(st.sampled_from(paths(document)))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = data.draw(LEAVES)
    submission = load(clean, root=ROOT)
    file = f"raw/{FIRST}"
    try:
        record: Record | str = Record.model_validate(document)
    except ValueError:
        record = "not a record"
    submission.records[file] = record
    report = runner.judge(submission)
    assert all("\n" not in f.message for f in report.findings)
    if isinstance(record, str):
        assert "record-schema" in found(report, "error")


def test_registering_a_check(monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    monkeypatch.setattr("flexroll.check.registry.CHECKS", CHECKS.copy())
    monkeypatch.setattr(runner, "CHECKS", sys.modules["flexroll.check.registry"].CHECKS)

    @check("schema", CELLS)
    def nothing_is_good(run: Any, row: Any) -> Any:
        """Nothing passes."""
        yield error("no")

    def without_a_rule(run: Any, held: Held) -> Any:
        yield error("no")

    report = judged(clean)
    assert found(report) == {"nothing-is-good"} and report.exit_code == 1
    with pytest.raises(ValueError, match="docstring"):
        check("schema", CELLS)(without_a_rule)
    with pytest.raises(ValueError, match="already there"):
        check("schema", CELLS)(nothing_is_good)
    without_a_rule.__doc__ = "A rule."
    with pytest.raises(ValueError, match="no group 'others'"):
        check("others", CELLS)(without_a_rule)


def printed(report: runner.Report) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    runner.show(report, console)
    return console.export_text()


def test_what_is_printed(tmp_path: Path) -> None:
    build(tmp_path, at(FIRST, last(tokens=1)), repeats={"sessions": 2, "rounds": 8})
    text = printed(judged(tmp_path))
    lines = text.splitlines()
    assert f"error    tokens-as-asked  raw/{FIRST}: round 8: 1 tokens, asked for 512" in lines
    assert sum("insufficient n" in line for line in lines) == 1 and "and 9 more: insufficient n" in text
    assert any("tokens-as-asked" in line and "error" in line and "│" in line for line in lines)


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, ...]:
    monkeypatch.delenv("FLEXROLL_DEBUG", raising=False)
    monkeypatch.setenv("FLEXROLL_ROOT", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["flexroll", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_the_command(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "check.json"
    code, out, errors = command(monkeypatch, capsys, "check", clean, "--json", file)
    assert code == 0 and errors == "" and f"{len(CHECKS)} checks: {len(CHECKS)} pass" in out
    assert runner.Report.model_validate_json(file.read_text()).passed
    broken = Path(shutil.copytree(clean, tmp_path / "broken"))
    cut(broken / "raw" / FIRST)
    code, out, errors = command(monkeypatch, capsys, "check", broken, "--json", file)
    assert code == 1 and errors == "" and f"error    record-schema  raw/{FIRST}: not complete JSON" in out
    assert not runner.Report.model_validate_json(file.read_text()).passed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "none: no such folder of results; there are: run"),
        (["empty"], "analysis.json: missing; run `flexroll analyse` first, or give --config"),
        (["half"], "not an analysis of this version"),
        (["run", "--config", "none.yaml"], "none.yaml: no such config file"),
        (["run", "--config", "bad.yaml"], "unknown key 'nonsense'"),
        (["run", "--json", "empty"], "empty: cannot be written"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    shutil.copy(run / "analysis.json", tmp_path / "half")
    cut(tmp_path / "half" / "analysis.json")
    (tmp_path / "bad.yaml").write_text("nonsense: 1\n")
    code, _, errors = command(monkeypatch, capsys, "check", *arguments)
    assert code == 2 and errors.count("\n") == 1 and words in errors, errors


def test_an_unreadable_config_in_an_analysis(run: Path) -> None:
    edited(run / "analysis.json", lambda data: data["config"].update(nonsense=1))
    with pytest.raises(FlexrollError, match="unknown key 'nonsense'"):
        judged(run)


def test_a_record_is_read_as_it_was_written(run: Path) -> None:
    """The key and status of a manifest are those of its records."""
    record = read_record(run / "raw" / FIRST)
    write_record(run / "raw" / FIRST, record.model_copy(update={"key": "another"}))
    report = judged(run)
    assert found(report) == {"job-manifest"} and "changed after the job ended" in report.findings[0].message
