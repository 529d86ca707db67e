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
from flexroll.analysis.blocks import paired_ratio
from flexroll.analysis.model import CellRow, Result
from flexroll.analysis.pairs import key_of, sessions_by_key
from flexroll.analysis.run import analyse, read_analysis
from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell, expand
from flexroll.schema.records import Range, Record, Round, Telemetry, write_record

HEADER = (
    "experiment,section,backend,adapter,batch,option,sampling,stack,session,new_tokens,samples,slots,status,reason,note,"
    "remark,tps_median,tps_best,tps_min,decode_tps_median,decode_tps_best,decode_tps_min,spread,start_s,device,"
    "device_uuid,on_gpu,prompts_sha256,prompt_tokens,rounds,memory_weights_bytes,memory_kv_reserved_bytes,"
    "memory_peak_allocated_bytes,memory_device_total_bytes,coherence,coherence_notes,file"
)
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


def results(
    path: Path, truth: synthetic.Truth, configurations: int, sessions: int
) -> tuple[list[CellRow], list[Result]]:
    config = synthetic.grid(configurations, sessions)
    synthetic.write_run(path, config, truth.record)
    rows, _ = collect.collect(config, path)
    return rows, collect.combine(rows, config)


def sessions_of(result: Result, rows: list[CellRow]) -> list[CellRow]:
    return sessions_by_key(rows)[key_of(result)]


def test_interval_of_a_result(tmp_path: Path) -> None:
    rows, (result, *_) = results(tmp_path, synthetic.Truth(), 2, 5)
    medians = [row.tps_median for row in sessions_of(result, rows)]
    expected = statistics.estimate(medians)
    assert result.tps == expected.value and (result.tps_low, result.tps_high) == (
        expected.interval.low,
        expected.interval.high,
    )
    assert result.sufficient and result.interval_method == "t" and result.tps_low < 1000 < result.tps_high
    assert result.decode_sufficient and result.decode_interval_method == "t"
    assert result.decode_tps_low < result.decode_tps < result.decode_tps_high
    assert result.decode_tps == pytest.approx(1.25 * result.tps) and result.tps_best > result.tps
    assert 0.003 < result.cv_between < 0.03 and 0.0005 < result.cv_within < 0.005 and result.helps == "sessions"


def test_rounds_make_no_interval(tmp_path: Path) -> None:
    """Fifty rounds of one process, or a hundred of two, are one or two observations."""
    for sessions in (1, 2):
        _, (result, *_) = results(tmp_path / str(sessions), synthetic.Truth(rounds=50), 2, sessions)
        assert result.n == 50 * sessions and result.tps is not None
        assert not result.sufficient and result.interval_method == "" and result.tps_low is result.tps_high is None


def test_only_sessions_that_ended_ok_count(tmp_path: Path) -> None:
    config, truth = synthetic.grid(2, 4), synthetic.Truth()
    synthetic.write_run(tmp_path, config, lambda c: synthetic.skipped(c) if c.session > 2 else truth.record(c))
    rows, _ = collect.collect(config, tmp_path)
    result = collect.combine(rows, config)[0]
    assert result.status == "ok" and result.sessions == 2 and not result.sufficient


def flags(cell: Cell, index: int) -> list[str]:
    if cell.option == "default" or index > 2:
        return []
    return ["low SM clock", "throttled: power cap"] if index == 1 else ["low SM clock"]


def test_flags_are_counted_and_drop_nothing(tmp_path: Path) -> None:
    rows, (clean, flagged) = results(tmp_path, synthetic.Truth(flags=flags), 2, 3)
    assert (clean.rounds_flagged, clean.flags) == (0, [])
    assert (flagged.n, flagged.rounds_flagged) == (15, 6)
    assert flagged.flags == ["low SM clock", "throttled: power cap"]
    row = sessions_of(flagged, rows)[0]
    assert (row.n, row.rounds_flagged, row.flags) == (5, 2, flagged.flags)
    assert [r.flags for r in row.rounds][:4] == [[], ["low SM clock", "throttled: power cap"], ["low SM clock"], []]
    assert paired_ratio(sessions_of(flagged, rows), sessions_of(clean, rows)).flagged == 3
    assert list(collect.table(rows)["flags"][-1:]) == ["low SM clock; throttled: power cap"]


def test_flags_of_the_warm_up_are_not_counted(tmp_path: Path) -> None:
    config, truth = synthetic.grid(2, 3), synthetic.Truth()

    def make(cell: Cell) -> Record:
        made = truth.record(cell)
        made.rounds[0].flags = ["low SM clock"]
        return made

    synthetic.write_run(tmp_path, config, make)
    assert all(row.rounds_flagged == 0 and row.flags == [] for row in collect.collect(config, tmp_path)[0])


def test_telemetry_of_a_round_is_kept(tmp_path: Path) -> None:
    clock = Range(median=1755, min=1200, max=1980)
    told = Round(index=0, tokens=8, wall_s=1, started=12.5, telemetry=Telemetry(samples=9, sm_mhz=clock))
    plain = Round(index=1, tokens=8, wall_s=1)
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, rounds=[told, plain]))
    first, second = collect.collect(config, tmp_path)[0][0].rounds
    assert (first.started, first.sm_clock) == (12.5, 1755) and (second.started, second.sm_clock) == (None, None)


def test_a_short_warm_up_shows(tmp_path: Path) -> None:
    rows, (result, *_) = results(tmp_path, synthetic.Truth(rounds=10, drift=0.05), 2, 3)
    assert result.trends == 3 and all(row.trend == pytest.approx(0.05, abs=0.01) for row in rows)
    rows, (result, *_) = results(tmp_path / "still", synthetic.Truth(rounds=10), 2, 3)
    assert result.trends == 0 and all(row.trend is None for row in rows)


def test_the_workload_is_the_measured_one(tmp_path: Path) -> None:
    """A record of before the config changed still says what it measured."""
    config, truth = synthetic.grid(2, 3), synthetic.Truth()

    def make(cell: Cell) -> Record:
        asked = cell if cell.option == "default" else cell.model_copy(update={"new_tokens": 32})
        return truth.record(asked)

    synthetic.write_run(tmp_path, config, make)
    rows, _ = collect.collect(config, tmp_path)
    default, other = collect.combine(rows, config)
    found = paired_ratio(sessions_of(other, rows), sessions_of(default, rows))
    assert found.verdict == "not comparable" and "new_tokens 32 against 64" in found.reason


def test_a_card_a_session_pairs_and_a_card_a_side_does_not(tmp_path: Path) -> None:
    sides = {
        "session": synthetic.Truth(uuid=lambda cell: f"GPU-{cell.session}", block=0.05, ratio=faster),
        "side": synthetic.Truth(uuid=lambda cell: f"GPU-{cell.option}", ratio=faster),
    }
    found = {}
    for name, truth in sides.items():
        rows, (default, other) = results(tmp_path / name, truth, 2, 7)
        found[name] = paired_ratio(sessions_of(other, rows), sessions_of(default, rows))
    assert found["session"].verdict == "faster" and found["session"].low < 1.05 < found["session"].high
    assert found["side"].verdict == "not comparable" and "different devices" in found["side"].reason


def faster(cell: Cell) -> float:
    return 1.0 if cell.option == "default" else 1.05


def test_five_hundred_cells_with_known_truth(tmp_path: Path) -> None:
    """Fifty pairs of options in five sessions 1 % apart: half of the pairs are alike, half 4 % faster or slower."""
    steps = [1.0, 1.04, 1.0, 1 / 1.04]

    def ratio(cell: Cell) -> float:
        number = 0 if cell.option == "default" else int(cell.option[1:])
        return steps[number // 2 % 4] if number % 2 else 1.0

    rows, found = results(tmp_path, synthetic.Truth(ratio=ratio, block=0.05), 100, 5)
    assert len(rows) == 500 and all(r.sufficient for r in found)
    held, wrong, seen = 0, 0, 0
    for number, (under, over) in enumerate(zip(found[::2], found[1::2], strict=True)):
        truth = steps[number % 4]
        expected = "faster" if truth > 1 else "slower" if truth < 1 else "no difference shown"
        comparison = paired_ratio(sessions_of(over, rows), sessions_of(under, rows))
        held += comparison.low <= truth <= comparison.high
        wrong += comparison.verdict not in (expected, "no difference shown")
        seen += truth != 1 and comparison.verdict == expected
    assert held >= 44 and wrong <= 3 and seen >= 22, (held, wrong, seen)


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
    assert set(HEADER.split(",")) <= set(table.columns)
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


def test_unlikely_text_is_broken(tmp_path: Path) -> None:
    """A perplexity beyond the limit overrules the cheap signs; without a score they stand alone."""
    config = synthetic.config()
    cells = synthetic.write_run(tmp_path, config, lambda cell: synthetic.record(cell, samples=[synthetic.sample()] * 3))
    scores = {f"raw/{cells[0].path}": [1.2, 1.4, None], f"raw/{cells[1].path}": [1.2, 1.3, 400.0]}
    file = tmp_path / "perplexity" / "torch2.11.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"reason": "", "cells": scores}))
    likely, unlikely, plain = collect.collect(config, tmp_path)[0][:3]
    assert likely.coherent and likely.perplexity == pytest.approx(1.3) and not likely.coherence_notes
    assert unlikely.coherent is False and unlikely.coherence_notes == ["perplexity 400"]
    assert plain.coherent and plain.perplexity is None
    for text, why in (
        ('{"cells":', "not what `flexroll perplexity` writes"),
        ('{"reason": "no room", "cells": {}}', "no room"),
    ):
        file.write_text(text)
        found = analyse(config, tmp_path, CLAIMS)
        assert why in found.unscored["torch2.11"] and found.cells[0].perplexity is None and found.cells[0].coherent
