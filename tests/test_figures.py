"""Figures: drawn where there is data and only there, honest about what their bars are, the same bytes every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

for name in ("matplotlib", "pandas"):
    pytest.importorskip(name)

import report_runs
import synthetic
from flexroll.analysis.model import Analysis, MemoryRow
from flexroll.report import roofline
from flexroll.report.figures import (
    ALT,
    DRAW,
    batch,
    captions,
    draw_all,
    memory_parts,
    options,
    ratio,
    rounds,
    throughput,
)
from flexroll.report.figures.style import style
from flexroll.schema.cells import Cell
from flexroll.schema.devices import find_device
from flexroll.schema.records import Record

# What needs no interval over sessions.
ALWAYS = {"throughput", "memory", "memory_parts", "ratio", "roofline", "rounds", "drift"}
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Five sessions of everything."""
    return report_runs.build(tmp_path_factory.mktemp("five"), report_runs.config(grpo=report_runs.TRAINING))


def one_cell(tmp_path: Path, make=report_runs.record, **changes) -> Analysis:
    """A run of one configuration and session."""
    experiment = {
        "title": "One",
        "section": "batch_sweep",
        "batches": [8],
        "new_tokens": 64,
        "stacks": ["torch2.11"],
        "backends": [{"backend": "flex"}],
    }
    config = report_runs.config(1, experiments={"one": experiment | changes}, drift={"stacks": []})
    return report_runs.build(tmp_path, config, make, drift=False)


def words(path: Path) -> set[str]:
    """Texts of a figure: matplotlib notes each beside its outlines."""
    return set(re.findall(r"<!-- (.+?) -->", path.read_text()))


def test_five_sessions_fill_every_figure(five: Analysis, tmp_path: Path) -> None:
    drawn = draw_all(five, tmp_path)
    assert drawn == {name: f"figures/{name}.svg" for name in DRAW} and set(ALT) == set(DRAW)
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(DRAW)
    assert throughput.bars(five) == "interval"
    told = captions(five, drawn)
    assert list(told) == list(drawn) and "95 % intervals over sessions" in told["throughput"]
    assert "4.8 TB/s on NVIDIA H200" in told["roofline"]
    assert {"95 % interval over sessions", "transformers CB: failed"} <= words(tmp_path / "throughput.svg")
    assert "slowest to best round" not in words(tmp_path / "throughput.svg")
    assert {"faster", "slower", "no difference shown"} <= words(tmp_path / "options.svg")
    assert {"flagged", "SM clock, MHz", "session 1", "5"} <= words(tmp_path / "rounds.svg")


def test_every_axis_is_named(five: Analysis) -> None:
    with style():
        for name, draw in DRAW.items():
            figure = draw(five)
            assert figure is not None
            for ax in figure.axes:
                shared = name == "rounds" and ax is not figure.axes[-1]  # time stands below the lower panel
                assert shared or ax.get_xlabel(), name
                assert ax.get_ylabel() or all(label.get_text() for label in ax.get_yticklabels()), name


def test_one_session_has_no_intervals(tmp_path: Path) -> None:
    analysis = report_runs.build(tmp_path, report_runs.config(1))
    drawn = draw_all(analysis, tmp_path / "figures")
    assert set(drawn) == ALWAYS
    assert throughput.bars(analysis) == "range"
    assert "an interval needs 3 sessions" in captions(analysis, drawn)["throughput"]
    assert "slowest to best round" in words(tmp_path / "figures" / "throughput.svg")
    found = words(tmp_path / "figures" / "ratio.svg")
    assert "hollow: insufficient n" in found and "filled: the interval excludes 1" not in found
    assert "session 1" not in words(tmp_path / "figures" / "rounds.svg")


def test_a_figure_with_both_kinds_of_bars_says_so(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        late = cell.backend == "flex" and cell.session > 2
        return synthetic.skipped(cell) if late else report_runs.record(cell)

    analysis = report_runs.build(tmp_path, make=make)
    assert throughput.bars(analysis) == "mixed"
    assert "thin ones" in captions(analysis, ["throughput"])["throughput"]
    draw_all(analysis, tmp_path / "figures")
    assert set(batch.BARS.values()) <= words(tmp_path / "figures" / "throughput.svg")


def test_one_row_alone(tmp_path: Path) -> None:
    drawn = draw_all(one_cell(tmp_path), tmp_path / "figures")
    assert set(drawn) == ALWAYS - {"ratio", "drift"}


def test_a_cpu_has_no_device_memory_and_no_floor(tmp_path: Path) -> None:
    analysis = one_cell(tmp_path, synthetic.record, batches=[2, 8])
    assert set(draw_all(analysis, tmp_path / "figures")) == {"throughput", "memory"}
    assert "Peak resident memory, GB" in words(tmp_path / "figures" / "memory.svg")


@pytest.mark.parametrize("make", [lambda cell: None, synthetic.skipped], ids=["missing", "skipped"])
def test_nothing_to_draw(tmp_path: Path, make) -> None:
    folder = tmp_path / "figures"
    draw_all(one_cell(tmp_path / "some"), folder)
    assert list(folder.iterdir())
    analysis = report_runs.build(tmp_path, make=make, drift=False)
    assert draw_all(analysis, folder) == {} and not list(folder.iterdir())
    assert throughput.bars(analysis) == "" and captions(analysis, []) == {}


def test_all_cells_failed(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        return synthetic.record(cell, status="failed", reason="out of memory", rounds=[], samples=[])

    assert draw_all(report_runs.build(tmp_path, make=make, drift=False), tmp_path / "figures") == {}


def test_rounds_without_begins_are_not_drawn(tmp_path: Path) -> None:
    def old(cell: Cell) -> Record:
        made = report_runs.record(cell)
        for r in made.rounds:
            r.started = r.telemetry = None
        return made

    assert "rounds" not in draw_all(one_cell(tmp_path, old), tmp_path / "figures")


def test_rounds_without_clocks_and_flags(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        made = report_runs.record(cell, clocks=False)
        made.rounds[-1].started = None
        return made

    analysis = one_cell(tmp_path, make)
    draw_all(analysis, tmp_path / "figures")
    assert not {"flagged", "SM clock, MHz"} & words(tmp_path / "figures" / "rounds.svg")
    found = rounds.dots(analysis)
    assert len(found) == 4 and all(dot.sm_clock is None for dot in found)


def test_rounds_are_relative_to_their_cell(five: Analysis) -> None:
    found = rounds.dots(five)
    assert len(found) == sum(c.n for c in five.cells) and sum(dot.flagged for dot in found) == 5
    assert all(abs(dot.change) < 3 for dot in found)
    slow = [dot for dot in found if dot.sm_clock is not None and dot.sm_clock < 1800]
    assert len(slow) == 5 and all(dot.flagged for dot in slow)


def test_ratios_are_hollow_where_nothing_is_shown(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        truth = synthetic.Truth(ratio=lambda c: 1.3 if c.backend == "flex" and c.batch < 32 else 1.0, between=0.01)
        return report_runs.record(cell, truth)

    analysis = report_runs.build(tmp_path, make=make)
    assert ratio.against_batch(analysis) == ["sweep"]
    [panel] = ratio._panels(analysis)
    line = next(line for line in panel.lines if line.name == "flex")
    assert [p.batch for p in line.points] == [8, 16, 32, 64]
    assert [p.hollow for p in line.points] == [False, False, True, True]
    assert all(p.bar == "interval" and p.low <= p.value <= p.high for p in line.points)
    draw_all(analysis, tmp_path / "figures")
    assert "hollow: no difference shown" in words(tmp_path / "figures" / "ratio.svg")


def test_a_grid_of_options_is_cut(tmp_path: Path) -> None:
    truth = synthetic.Truth(ratio=lambda c: 1 + 0.01 * int(c.option[1:] if c.option != "default" else 0))
    config = synthetic.grid(60, 3)
    synthetic.write_run(tmp_path, config, truth.record)
    analysis = report_runs.build(tmp_path, config, truth.record, drift=False)
    [shown] = options.by_setting(analysis)
    gains = [pair.comparison.ratio for pair in shown]
    assert len(shown) == options.BEST + options.WORST and gains == sorted(gains, reverse=True)
    assert options.left_out(analysis) == 59 - 30
    assert "20 best and the 10 worst" in captions(analysis, ["options"])["options"]


def test_parts_of_memory_add_up() -> None:
    whole = MemoryRow(weights=8, kv_reserved=4, peak_allocated=15, device_total=20)
    assert memory_parts.split(whole) == (8, 4, 3, 5)
    assert memory_parts.split(whole.model_copy(update={"peak_allocated": 10})) == (8, 4, 0, 8)
    assert memory_parts.split(whole.model_copy(update={"peak_allocated": 30})) == (8, 4, 8, 0)
    assert memory_parts.split(whole.model_copy(update={"peak_allocated": None})) is None
    assert memory_parts.split(whole.model_copy(update={"device_total": 11})) is None


def test_memory_is_shown_of_the_memory_experiment(five: Analysis) -> None:
    assert {(r.experiment, r.batch) for r in memory_parts.choose(five)} == {("memory", 16)}


def draw_in_process(results: Path, seed: str) -> dict[str, bytes]:
    code = (
        "import sys; from pathlib import Path; from flexroll.analysis.run import read_analysis;"
        "from flexroll.report.figures import draw_all; p = Path(sys.argv[1]); draw_all(read_analysis(p), p / 'figures')"
    )
    subprocess.run([sys.executable, "-c", code, str(results)], check=True, env=os.environ | {"PYTHONHASHSEED": seed})
    return {path.name: path.read_bytes() for path in (results / "figures").glob("*.svg")}


def test_same_bytes_in_any_process(tmp_path: Path) -> None:
    analysis = report_runs.build(tmp_path)
    draw_all(analysis, tmp_path / "figures")
    first = {path.name: path.read_bytes() for path in (tmp_path / "figures").glob("*.svg")}
    draw_all(analysis, tmp_path / "figures")
    assert {path.name: path.read_bytes() for path in (tmp_path / "figures").glob("*.svg")} == first
    assert draw_in_process(tmp_path, "1") == draw_in_process(tmp_path, "2") == first
    assert not any(re.search(rb"/(home|root|tmp|work)/|<dc:date>", data) for data in first.values())


def test_settings_of_the_user_are_left_alone(five: Analysis, tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30}):
        draw_all(five, tmp_path / "a")
        assert matplotlib.rcParams["font.size"] == 30
    draw_all(five, tmp_path / "b")
    assert all(path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() for path in (tmp_path / "a").iterdir())


def test_the_floor_by_hand(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        made = report_runs.record(cell)
        made.memory.weights, made.prompt_tokens = 15_443_688_448, 8552
        for r in made.measured:
            r.decode_tokens, r.decode_s = 32704, 2.0
        return made

    [one] = roofline.rooflines(one_cell(tmp_path, make, batches=[64], new_tokens=512), SHAPE)
    # 4 022 468 096 parameters in bf16, a tied head counted once; the engine holds a pristine copy as well.
    assert one.weights == 8_044_936_192
    # K and V of a token: 2 tensors, 36 layers, 8 heads of 128, 2 bytes. Tokens: 8552 of prompts and 64 times 512 / 2.
    assert one.kv == 2 * 36 * 8 * 128 * 2 * (8552 + 64 * 256) == 147_456 * 24_936
    # (8.044936 + 3.676963) GB at 4800 GB/s; 32704 tokens in 2 s are 64 a step in 3.9139 ms.
    assert one.floor_s == pytest.approx(2.44206e-3, rel=1e-5) and one.step_s == pytest.approx(3.91389e-3, rel=1e-5)
    assert one.share == pytest.approx(0.623947, rel=1e-5) and one.ceiling == pytest.approx(26207.4, rel=1e-5)
    assert one.read_rate == pytest.approx(one.share * 4.8e12)
    assert one.low is one.high is None
    half = replace(one, decode_low=one.decode_tps / 2, decode_high=one.decode_tps * 2)
    assert half.low == pytest.approx(one.share / 2) and half.high == pytest.approx(one.share * 2)
    [row] = roofline.table([one]).rows
    assert row["Floor, ms"] == "2.44" and row["Step, ms"] == "3.91" and row["Share of the floor"] == "62 %"


def test_weights_that_a_step_reads() -> None:
    untied = SHAPE | {
        "tie_word_embeddings": False
    }  # a table of its own for the head; that of the embedding is not read
    assert roofline.weights_read(untied, "bfloat16", 10**12) == roofline.weights_read(SHAPE, "bfloat16", 10**12)
    assert roofline.weights_read(SHAPE, "bfloat16", 2_500_000_000) == 2_500_000_000  # quantised


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore_eos": False},
        {"new_tokens": {"min": 8, "max": 64}},
        {"slots": 4},
    ],
    ids=["EOS stops", "lengths differ", "some wait"],
)
def test_no_floor_where_lengths_are_not_alike(tmp_path: Path, changes: dict) -> None:
    assert roofline.rooflines(one_cell(tmp_path, **changes), SHAPE) == []


def test_no_floor_where_something_is_not_known(five: Analysis, tmp_path: Path) -> None:
    def elsewhere(cell: Cell) -> Record:
        made = report_runs.record(cell)
        made.environment.device = "NVIDIA Future 9000"
        return made

    assert roofline.rooflines(one_cell(tmp_path / "a", elsewhere), SHAPE) == []
    without = five.model_copy(update={"config": five.config | {"model": {"name": "m", "path": "nowhere"}}})
    assert roofline.rooflines(without) == []
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert roofline.read_shape({"name": "m", "path": str(tmp_path)}) is None
    (tmp_path / "config.json").write_text("{")
    assert roofline.read_shape({"name": "m", "path": str(tmp_path / "config.json")}) is None


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H200 NVL", 4.8e12),
        ("NVIDIA B200", 8.0e12),
        ("NVIDIA GB200", 8.0e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("NVIDIA L4", 0.3e12),
        ("NVIDIA L40S", 0.864e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_devices(name: str, bandwidth: float | None) -> None:
    found = find_device(name)
    assert (found.bandwidth if found else None) == bandwidth
