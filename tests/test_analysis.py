"""Statistics by hand-computed values; bad records stay rows; nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pandas = pytest.importorskip("pandas")

from hypothesis import given
from hypothesis import strategies as st

import synthetic
from flexroll.analysis import collect, statistics
from flexroll.analysis.run import analyse, read_analysis
from flexroll.errors import FlexrollError
from flexroll.schema.cells import expand
from flexroll.schema.records import Round, write_record

CLAIMS = Path(__file__).parent.parent / "report" / "claims.yaml"


def rounds(*pairs: tuple[int, float], warmup: int = 0) -> list[Round]:
    return [Round(index=i, tokens=t, wall_s=s, warmup=i < warmup) for i, (t, s) in enumerate(pairs)]


def test_rates_by_hand() -> None:
    # 100/1, 300/2, 120/1.5 -> 100, 150, 80 tok/s
    found = statistics.round_rates(rounds((100, 1.0), (300, 2.0), (120, 1.5)))
    assert (found.n, found.median, found.best, found.low) == (3, 100, 150, 80)
    assert found.spread == pytest.approx(0.7)


def test_best_is_of_one_round() -> None:
    """Not the last round's tokens over another round's shortest seconds, which would be 600 / 1 = 600 here."""
    assert statistics.round_rates(rounds((100, 1.0), (600, 4.0))).best == 150


def test_warmup_is_left_out() -> None:
    found = statistics.round_rates(rounds((9000, 1.0), (100, 1.0), (200, 1.0), warmup=1))
    assert (found.n, found.median, found.best) == (2, 150, 200)
    assert statistics.round_rates(rounds((9000, 1.0), warmup=1)) is None


def test_decode_rate_needs_every_round() -> None:
    told = [Round(index=i, tokens=10, wall_s=2, decode_s=1, decode_tokens=8) for i in range(2)]
    assert statistics.decode_rates(told).median == 8
    assert statistics.decode_rates([*told, Round(index=2, tokens=10, wall_s=2)]) is None


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 1e3)), min_size=1, max_size=20))
def test_best_bounds_every_round(pairs: list[tuple[int, float]]) -> None:
    found = statistics.round_rates(rounds(*pairs))
    values = [t / s for t, s in pairs]
    assert found.best == max(values) and found.low == min(values) and found.low <= found.median <= found.best


def test_headline_is_the_median_of_session_medians(tmp_path: Path) -> None:
    config = synthetic.config(repeats={"sessions": 3, "rounds": 3})
    medians = {1: (100, 101, 900), 2: (200, 201, 202), 3: (10, 150, 160)}
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, medians[cell.session]))
    rows, _ = collect.collect(config, tmp_path)
    result = collect.combine(rows, config)[0]
    assert result.tps == pytest.approx(150)  # medians 101, 201, 150
    assert (result.tps_best, result.tps_min) == (pytest.approx(900), pytest.approx(10))
    assert (result.sessions, result.n) == (3, 9)


def test_bad_records_are_rows(tmp_path: Path) -> None:
    config = synthetic.config()
    cells = synthetic.write_run(tmp_path, config, synthetic.record)
    cut, gone, wrong, noise = (tmp_path / "raw" / cell.path for cell in cells[:4])
    cut.write_text(cut.read_text()[: cut.stat().st_size // 2])
    gone.unlink()
    wrong.write_text(json.dumps({"status": "ok"}))
    noise.write_bytes(b"\xff\xfe\x00")
    analysis = analyse(config, tmp_path, CLAIMS)
    assert [row.status for row in analysis.cells[:4]] == ["unreadable", "missing", "unreadable", "unreadable"]
    assert all(row.reason and "\n" not in row.reason and str(tmp_path) not in row.reason for row in analysis.cells[:4])
    assert all(row.status == "ok" and row.tps_median == pytest.approx(110) for row in analysis.cells[4:])
    table = pandas.read_csv(tmp_path / "table.csv")
    assert len(table) == len(cells) and list(table["status"][:4]) == [
        "unreadable",
        "missing",
        "unreadable",
        "unreadable",
    ]
    assert table["memory_weights_bytes"].iloc[-1] == 10**9 and table["file"].iloc[-1] == f"raw/{cells[-1].path}"
    assert table["rounds"].iloc[-1] == 3 and table["tps_best"].iloc[-1] == pytest.approx(120)


def test_a_record_of_another_cell_is_not_used(tmp_path: Path) -> None:
    config = synthetic.config()
    cells = synthetic.write_run(tmp_path, config, synthetic.record)
    write_record(tmp_path / "raw" / cells[0].path, synthetic.record(cells[1]))
    row = collect.collect(config, tmp_path)[0][0]
    assert row.status == "unreadable" and "another cell" in row.reason and row.tps_median is None


def test_changed_settings_are_told(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell.model_copy(update={"rounds": 9})))
    row = collect.collect(config, tmp_path)[0][0]
    assert row.status == "ok" and row.note == "rounds 9 (config: 3)"


def test_failed_rounds_are_kept_but_not_counted(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, status="failed", reason="timeout: 3 s"))
    row = collect.collect(config, tmp_path)[0][0]
    assert len(row.rounds) == 4 and row.tps_median is None and row.n == 0 and row.reason == "timeout: 3 s"


def test_ok_without_a_round_is_not_ok(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, rounds=[]))
    assert collect.collect(config, tmp_path)[0][0].status == "failed"


def test_coherence_of_a_cell_is_that_of_all_its_samples(tmp_path: Path) -> None:
    config = synthetic.config()
    mixed = [synthetic.sample(), synthetic.sample(ok=False)]
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, samples=mixed if cell.batch == 2 else []))
    row, other = collect.collect(config, tmp_path)[0][:2]
    assert row.coherent is False and row.coherence_notes == ["one unit repeats"] and other.coherent is None


def test_stacks_restrict_the_rows(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, synthetic.record)
    analysis = analyse(config, tmp_path, CLAIMS, stacks=["torch2.9.1"])
    assert {row.stack for row in analysis.cells} == {"torch2.9.1"} and analysis.left_out == ["torch2.11"]
    assert analysis.unlisted == []
    with pytest.raises(FlexrollError, match="torch3"):
        analyse(config, tmp_path, CLAIMS, stacks=["torch3"])


def test_files_of_no_cell_are_listed(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, synthetic.record)
    (tmp_path / "raw" / expand(config)[0].job / "old-greedy-b1.json").write_text("{}")
    assert analyse(config, tmp_path, CLAIMS).unlisted == [f"raw/{expand(config)[0].job}/old-greedy-b1.json"]


def test_analysis_round_trips_and_repeats(tmp_path: Path) -> None:
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, synthetic.record)
    synthetic.write_drift(tmp_path, "torch2.11")
    analysis = analyse(config, tmp_path, CLAIMS)
    before = {name: (tmp_path / name).read_bytes() for name in ("analysis.json", "table.csv")}
    assert read_analysis(tmp_path) == analysis
    analyse(config, tmp_path, CLAIMS)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


@pytest.mark.parametrize("content", [None, "{", '{"cells": 3}'])
def test_no_analysis_says_what_to_do(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "analysis.json").write_text(content)
    with pytest.raises(FlexrollError, match="flexroll analyse"):
        read_analysis(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"peft": {"cycles": [{"cycle": "x"}]}}'])
def test_bad_drift_is_a_row(tmp_path: Path, content: str | None) -> None:
    config = synthetic.config()
    synthetic.write_drift(tmp_path, "torch2.9.1")
    if content is not None:
        (tmp_path / "drift" / "torch2.11.json").write_text(content)
    bad, good = analyse(config, tmp_path, CLAIMS).drift
    assert bad.status == ("missing" if content is None else "unreadable") and "torch2.11" in bad.reason
    assert good.status == "ok" and good.peft[2].max_abs_diff == pytest.approx(1.8e-4)
