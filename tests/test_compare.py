"""`flexroll compare`: planted differences are found, nulls are not, and what does not compare is not compared."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
stats = pytest.importorskip("scipy.stats")

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import synthetic
from flexroll import cli
from flexroll import compare as runs
from flexroll.analysis.run import analyse
from flexroll.compare import RunComparison, compare, welch
from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell
from flexroll.schema.claims import load_claims
from flexroll.schema.config import Config
from flexroll.schema.records import Memory, Record
from synthetic import Truth, config, grid

ROOT = Path(__file__).resolve().parents[1]
READ_ONCE = cache(load_claims)
Values = st.lists(st.floats(-3, 3), min_size=3, max_size=12)


@pytest.fixture(autouse=True)
def claims_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of the time that an analysis takes, and no comparison is about them."""
    monkeypatch.setattr("flexroll.analysis.run.load_claims", READ_ONCE)


def made(results: Path, config: Config, make: Callable[[Cell], Record | None]) -> Path:
    synthetic.write_run(results, config, make)
    analyse(config, results, ROOT / "report" / "claims.yaml")
    return results


def run(results: Path, configurations: int = 1, sessions: int = 4, **truth: Any) -> Path:
    return made(results, grid(configurations, sessions), Truth(**({"between": 0.004} | truth)).record)


def one(comparison: RunComparison) -> runs.Row:
    (row,) = comparison.rows
    return row


def test_a_run_against_itself(tmp_path: Path) -> None:
    a = run(tmp_path / "a", configurations=3)
    for metric in ("tps", "decode_tps", "memory"):
        found = compare(a, a, metric)
        assert [row.verdict for row in found.rows] == ["no difference shown"] * 3
        assert found.geometric_mean == pytest.approx(1) and found.comparable == 3
        assert found.exit_code() == found.exit_code(strict=True) == 0


def test_a_slowdown_of_5_percent_is_found(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 2, sessions=3)
    b = run(tmp_path / "b", 2, sessions=3, seed=1, ratio=lambda cell: 0.95 if cell.option == "o001" else 1.0)
    found = compare(a, b)
    assert [(row.option, row.verdict, row.regression) for row in found.rows] == [
        ("default", "no difference shown", False),
        ("o001", "slower", True),
    ]
    slow = found.rows[1]
    assert slow.low is not None and slow.high is not None and slow.low < 0.95 < slow.high < 0.98
    assert slow.ratio == pytest.approx(slow.b / slow.a) and (slow.n_a, slow.n_b) == (3, 3)  # type: ignore[operator]
    assert found.regressions == 1 and found.exit_code() == 1
    back = compare(b, a)
    assert back.rows[1].verdict == "faster" and back.exit_code() == 0
    assert back.rows[1].ratio == pytest.approx(1 / slow.ratio)  # type: ignore[operator]
    assert back.rows[1].low == pytest.approx(1 / slow.high)


def test_no_slowdown_is_not_found(tmp_path: Path) -> None:
    """30 configurations: at 95 % one or two look different, none by more than the threshold."""
    a, b = run(tmp_path / "a", 30, between=0.01), run(tmp_path / "b", 30, between=0.01, seed=1)
    found = compare(a, b)
    assert sum(row.verdict != "no difference shown" for row in found.rows) <= 4
    assert found.regressions == 0 and found.exit_code() == 0 and found.comparable == 30
    assert found.geometric_mean == pytest.approx(1, abs=0.005)


def test_a_small_slowdown_is_shown_and_is_no_regression(tmp_path: Path) -> None:
    a = run(tmp_path / "a", sessions=6, between=0.001)
    b = run(tmp_path / "b", sessions=6, between=0.001, seed=1, rate=990)
    row = one(compare(a, b))
    assert row.verdict == "slower" and not row.regression
    assert one(compare(a, b, threshold=0.005)).regression and compare(a, b, threshold=0.005).exit_code() == 1


def test_more_memory_is_the_regression(tmp_path: Path) -> None:
    def holding(gb: float) -> Callable[[Cell], Record]:
        memory = Memory(weights=10**9, peak_allocated=int(gb * 1e9))
        return lambda cell: Truth().record(cell, memory=memory)

    a, b = made(tmp_path / "a", grid(1, 3), holding(2)), made(tmp_path / "b", grid(1, 3), holding(2.1))
    row = one(compare(a, b, "memory"))
    assert (row.verdict, row.regression, row.low, row.high) == ("more", True, pytest.approx(1.05), pytest.approx(1.05))
    assert compare(a, b, "memory").exit_code() == 1 and compare(a, b).exit_code() == 0
    assert one(compare(b, a, "memory")).verdict == "less" and compare(b, a, "memory").exit_code() == 0
    assert compare(a, b, "memory", threshold=0.06).exit_code() == 0


def test_too_few_sessions_have_a_ratio_and_no_verdict(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", sessions=4), run(tmp_path / "b", sessions=2, rate=500)
    found = compare(a, b)
    row = one(found)
    assert row.verdict == "insufficient n" and row.ratio == pytest.approx(0.5, rel=0.02)
    assert row.low is None and not row.regression and "3 sessions a side" in row.reason
    assert found.exit_code() == 0 and found.comparable == 1


def test_other_devices_do_not_compare_unless_told(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", rate=900, uuid=lambda cell: "GPU-2")
    found = compare(a, b)
    assert one(found).verdict == "not comparable" and "different devices" in one(found).reason
    assert found.geometric_mean is None and found.exit_code() == 0 and found.exit_code(strict=True) == 1
    assert "nothing could be compared" in runs.markdown(found)
    across = compare(a, b, across_devices=True)
    assert one(across).verdict == "slower" and across.exit_code() == 1
    assert "may be those of the cards" in runs.markdown(across)
    cpu = compare(run(tmp_path / "c", gpu=None), run(tmp_path / "d", gpu=None))
    assert one(cpu).verdict == "no difference shown"


def test_only_sessions_of_one_device_compare(tmp_path: Path) -> None:
    """A's fifth session was on another card, a fast one."""
    a = run(
        tmp_path / "a",
        sessions=5,
        uuid=lambda cell: "GPU-2" if cell.session == 5 else "GPU-1",
        ratio=lambda cell: 2.0 if cell.session == 5 else 1.0,
    )
    row = one(compare(a, run(tmp_path / "b", seed=1)))
    assert (row.n_a, row.n_b, row.verdict) == (4, 4, "no difference shown") and "1 sessions left out" in row.reason


def test_other_work_does_not_compare(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    options = grid(1, 4).model_dump(mode="json")["experiments"]["options"]

    def changed(name: str, **changes: Any) -> str:
        b = made(tmp_path / name, grid(1, 4, **changes), Truth().record)
        row = one(compare(a, b))
        assert row.verdict == "not comparable" and row.ratio is None, name
        return row.reason

    assert "new_tokens 64 against 32" in changed("tokens", experiments={"options": options | {"new_tokens": 32}})
    assert "max_model_len 512 against 1024" in changed("length", max_model_len=1024)
    model = {"name": "tiny_gsm", "path": "models/tiny-gsm"}
    assert "model dtype bfloat16 against float32" in changed("dtype", model=model | {"dtype": "float32"})
    elsewhere = made(tmp_path / "elsewhere", grid(1, 4, model=model | {"path": "/models/tiny"}), Truth().record)
    assert one(compare(a, elsewhere)).verdict == "no difference shown"
    b = made(tmp_path / "prompts", grid(1, 4), lambda cell: Truth().record(cell, prompts_sha256="9" * 64))
    assert "different prompts" in one(compare(a, b)).reason


def test_another_adapter_does_not_compare(tmp_path: Path) -> None:
    a, b = (
        made(tmp_path / f"rank{rank}", config(adapter={"rank": rank}), lambda cell: synthetic.record(cell))
        for rank in (16, 32)
    )
    verdicts = {row.adapter: (row.verdict, row.reason) for row in compare(a, b).rows}
    assert verdicts["none"][0] == "insufficient n" and verdicts["merged"][0] == "not comparable"
    assert "'rank': 16" in verdicts["merged"][1]


def test_what_one_run_lacks(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", 2), run(tmp_path / "b", 1)
    found = compare(a, b)
    assert [row.verdict for row in found.rows] == ["no difference shown", "only in A"]
    assert found.missing == 1 and found.exit_code() == 0 and found.exit_code(strict=True) == 1
    back = compare(b, a)
    assert [row.verdict for row in back.rows] == ["no difference shown", "only in B"]
    assert back.missing == 0 and back.exit_code(strict=True) == 0


def good(cell: Cell) -> Record:
    return Truth().record(cell)


def failing(option: str, sessions: int = 9) -> Callable[[Cell], Record]:
    """The first `sessions` sessions of an option fail."""

    def make(cell: Cell) -> Record:
        if cell.option == option and cell.session <= sessions:
            return synthetic.record(cell, status="failed", reason="out of memory", rounds=[])
        return good(cell)

    return make


def test_what_one_run_failed_at(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 2)
    b = made(tmp_path / "b", grid(2, 4), failing("o001"))
    found = compare(a, b)
    assert found.rows[1].verdict == "only in A" and found.rows[1].reason == "B: failed: out of memory"
    assert found.missing == 4 and (found.exit_code(), found.exit_code(strict=True)) == (0, 1)
    assert compare(b, a).rows[1].verdict == "only in B" and compare(b, a).exit_code(strict=True) == 0
    both = compare(b, b)
    assert both.rows[1].verdict == "not comparable" and both.missing == 0 and both.exit_code(strict=True) == 0
    partly = compare(a, made(tmp_path / "c", grid(2, 4), failing("o001", sessions=1)))
    assert partly.rows[1].n_b == 3 and "1 of 4 sessions of B failed: out of memory" in partly.rows[1].reason
    assert partly.missing == 1 and (partly.exit_code(), partly.exit_code(strict=True)) == (0, 1)
    b = made(
        tmp_path / "d", grid(2, 4), lambda cell: good(cell) if cell.option == "default" else synthetic.skipped(cell)
    )
    assert compare(a, b).missing == 1


def test_a_metric_that_a_backend_does_not_tell(tmp_path: Path) -> None:
    a = made(tmp_path / "a", grid(1, 3), lambda cell: synthetic.record(cell, gpu="NVIDIA H200"))
    row = one(compare(a, a, "decode_tps"))
    assert row.verdict == "not comparable" and "not told" in row.reason


@given(Values, Values)
def test_welch_is_scipys(a: list[float], b: list[float]) -> None:
    low, high = welch(a, b)
    assert low <= high and welch(b, a) == (pytest.approx(-high, abs=1e-9), pytest.approx(-low, abs=1e-9))
    if np.var(a) > 1e-6 and np.var(b) > 1e-6:  # below, scipy says itself that it loses precision
        theirs = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        assert (low, high) == (pytest.approx(theirs.low, abs=1e-6), pytest.approx(theirs.high, abs=1e-6))


def test_welch_by_hand() -> None:
    # Means 0 and 1, variances 1 and 4, n = 3: se^2 = 5/3, df = (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 50/17.
    low, high = welch([-1, 0, 1], [-1, 1, 3])
    half = stats.t.ppf(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert (low, high) == (pytest.approx(1 - half), pytest.approx(1 + half))
    assert welch([1, 1, 1], [3, 3, 3]) == (2, 2)


@pytest.mark.parametrize(("n", "spread"), [((3, 3), 1.0), ((3, 6), 3.0), ((5, 5), 3.0)])
def test_coverage_of_the_interval(n: tuple[int, int], spread: float) -> None:
    """Of the true ratio, over seeded sessions; Welch's t is a little wide where the sides are alike and few."""
    rng = np.random.default_rng(20131)
    held = 0
    for _ in range(2000):
        low, high = welch(rng.normal(0, 0.01, n[0]).tolist(), rng.normal(0.05, 0.01 * spread, n[1]).tolist())
        held += low <= 0.05 <= high
    assert 0.93 <= held / 2000 <= 0.98


def test_tables(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 2, sessions=3)
    b = run(tmp_path / "b", 2, sessions=3, seed=1, ratio=lambda cell: 0.9 if cell.option == "o001" else 1.0)
    found = compare(a, b)
    lines = runs.markdown(found).splitlines()
    assert lines[0] == f"## {b} against {a}: tok/s"
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert sum("slower, a regression" in line for line in lines) == 1
    assert "- verdicts: 1 no difference shown, 1 slower" in lines
    console = Console(width=200, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    runs.show(found, console)
    text = console.export_text()
    assert "slower, a regression" in text and "regressions past 0.02: 1" in text


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, ...]:
    monkeypatch.delenv("FLEXROLL_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["flexroll", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path / "a", 2), run(tmp_path / "b", 2, rate=900)
    files = tmp_path / "out" / "c.json", tmp_path / "out" / "c.md"
    code, out, errors = command(monkeypatch, capsys, a, b, "--json", files[0], "--markdown", files[1])
    assert code == 1 and errors == "" and out == files[1].read_text() and "| slower, a regression |" in out
    told = RunComparison.model_validate_json(files[0].read_text())
    assert told.regressions == 2 and told == compare(a, b)
    assert command(monkeypatch, capsys, a, a)[0] == command(monkeypatch, capsys, a, a, "--strict")[0] == 0
    assert command(monkeypatch, capsys, a, b, "--threshold", "0.2")[0] == 0
    lacking = run(tmp_path / "c", 1)
    assert command(monkeypatch, capsys, a, lacking)[0] == 0
    assert command(monkeypatch, capsys, a, lacking, "--strict")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none", "a"], "none: no such folder of results"),
        (["a", "empty"], "empty/analysis.json: missing; run `flexroll analyse` first"),
        (["a", "half"], "half/analysis.json: not an analysis of this version"),
        (["a", "a", "--metric", "speed"], "unknown metric 'speed'; known: tps, decode_tps, memory"),
        (["a", "a", "--threshold", "2"], "2 is no fraction"),
        (["a", "a", "--threshold", "nan"], "nan is no fraction"),
        (["a", "a", "--threshold", "much"], "Invalid value"),
        (["a", "other"], "a and other have no configuration in common"),
        (["a", "odd"], "odd/analysis.json: its config has no experiment 'another'"),
        (["a", "a", "--json", "empty"], "empty: cannot be written"),
        (["a"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    half = Path(shutil.copytree(tmp_path / "a", tmp_path / "half")) / "analysis.json"
    half.write_bytes(half.read_bytes()[:1000])
    other = json.loads((tmp_path / "a" / "analysis.json").read_text())
    other["cells"] = [cell | {"experiment": "another"} for cell in other["cells"]]
    for name, experiments in {"odd": ["options"], "other": ["options", "another"]}.items():
        other["config"]["experiments"] = dict.fromkeys(experiments, other["config"]["experiments"]["options"])
        (tmp_path / name).mkdir()
        (tmp_path / name / "analysis.json").write_text(json.dumps(other))
    code, _, errors = command(monkeypatch, capsys, *arguments)
    assert code == 2 and errors.count("\n") == 1 and words in errors, errors


def test_an_analysis_with_a_bad_config(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    data = json.loads((a / "analysis.json").read_text())
    data["config"]["nonsense"] = 1
    (a / "analysis.json").write_text(json.dumps(data))
    with pytest.raises(FlexrollError, match="unknown key 'nonsense'"):
        compare(a, a)
