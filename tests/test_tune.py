"""Autotuning's log, successive halving, its records, and the defaults file. None of it needs torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexroll import cli, provenance
from flexroll.errors import FlexrollError
from flexroll.report.figures import sweep as heat_map
from flexroll.schema.load import parse_config
from flexroll.tune import agreement, autotune, inductor_log
from flexroll.tune import sweep as tune
from flexroll.tune.defaults_file import FILE, Defaults, Entry, read_defaults, write_default
from flexroll.tune.evaluator import WorkerEvaluator
from flexroll.tune.grid import GRIDS, Grid, Point
from flexroll.tune.halving import Sweep
from flexroll.tune.journal import Journal, read_journal
from flexroll.tune.plan import SHORTEST, Outcome, Plan
from flexroll.tune.replay import replay_options, replay_problem
from flexroll.tune.result import read_summary, summarise
from flexroll.tune.summary import as_markdown, finish, write

# --- the log


def entry(key: object, *candidates: dict) -> dict:
    return {str(key): [{"type": "triton", "time": ms, **rest} for ms, rest in ((c.pop("ms"), c) for c in candidates)]}


def tuned(ms: float, **options: object) -> dict:
    return {"ms": ms, "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4, "USE_TMA": False, **options}


DECODE = ("forward", 64, 32, 8, 1, 131136, 128, 128)
PREFILL = ("forward", 1, 32, 8, 1024, 131136, 128, 128)


def test_the_fastest_decode_candidate_is_taken_whatever_the_order_and_what_else_is_logged():
    text = json.dumps(
        [
            entry(PREFILL, tuned(0.1, num_warps=2)),
            entry(DECODE, tuned(0.5), tuned(0.3, num_warps=8, some_field=[1], SPARSE_KV_BLOCK_SIZE=64)),
            entry(("backward", *DECODE[1:]), tuned(0.01)),
            entry(DECODE, tuned(0.4)),  # another layer's call
            {"('forward', s0, 32, 8, 1, s1, 128, 128)": []},
        ],
        indent=4,
    )
    shape, candidates = inductor_log.decode_candidates(inductor_log.parse_log(text), 64)
    assert (shape.batch, shape.q_length, shape.kv_length, shape.head_dim) == (64, 1, 131136, 128)
    assert [c.ms for c in candidates] == [0.3, 0.4]  # of the same options the faster time
    assert candidates[0].options == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "USE_TMA": False}


def test_of_a_cut_log_every_whole_entry_counts():
    text = json.dumps([entry(DECODE, tuned(0.5)), entry(PREFILL, tuned(0.1))], indent=4)
    second = text.index("1024")
    for cut in (second, second + 60, len(text) - 1):
        assert inductor_log.decode_candidates(inductor_log.parse_log(text[:cut]), 64)[1][0].ms == 0.5


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "null", "{}", "[1, null]"),
        json.dumps([{str(DECODE): []}]),
        json.dumps([entry(DECODE, tuned(0.1))])[:40],
        json.dumps([{str(DECODE): [{"type": "extern", "time": 0.1}, {"type": "triton", "time": None}, 3]}]),
        json.dumps([entry(DECODE, tuned(float("inf")), tuned(float("nan")))]),
        json.dumps([entry(("backward", *DECODE[1:]), tuned(0.1)), entry((1, 2), tuned(0.1)), entry("(", tuned(0.1))]),
    ],
)
def test_a_log_without_a_usable_candidate_is_one_line(text):
    with pytest.raises(FlexrollError, match="no forward kernel"):
        inductor_log.parse_log(text)


@given(st.text(alphabet="[]{}(),:'\" \n0123456789abcforwdtime", max_size=80))
def test_no_text_breaks_the_parser(text):
    with contextlib.suppress(FlexrollError):
        assert inductor_log.parse_log(text)


def test_a_missing_log_or_shape_is_one_line(tmp_path):
    with pytest.raises(FlexrollError, match="nothing was tuned"):
        inductor_log.read_log(tmp_path / "log.json")
    with pytest.raises(FlexrollError, match=r"no decode step of batch 8, only 64 x 1"):
        inductor_log.decode_candidates(inductor_log.parse_log(json.dumps([entry(DECODE, tuned(1.0))])), 8)
    assert inductor_log.log_file(tmp_path / "log") == tmp_path / "log.json"


# --- autotune and replay

CONFIG = {
    "run": "r",
    "title": "t",
    "model": {"name": "m", "source": "local", "path": "models/tiny-gsm"},
    "prompts": {"source": "file", "path": "p.json", "field": "q", "format": "text", "count": 64, "max_tokens": 8},
    "adapter": {"rank": 4, "alpha": 8, "b_std": 0.01},
    "max_model_len": 320,
    "drift": {"cycles": 1, "noise_std": 0.1, "stacks": []},
    "samplings": {"greedy": {"temperature": 0}},
    "options": {"replay": {"flex": {"replay": "plain", "page_size": 128}}, "other": {"flex": {"page_size": 32}}},
    "experiments": {
        "batch": {
            "title": "b",
            "section": "batch_sweep",
            "batches": [64],
            "new_tokens": 8,
            "stacks": ["torch2.11"],
            "backends": [{"backend": "flex", "options": ["replay"]}],
        },
        "options": {
            "title": "o",
            "section": "options",
            "batches": [2, 16, 8],
            "new_tokens": 8,
            "stacks": ["torch2.11"],
            "backends": [{"backend": "flex", "options": ["other", "replay"]}, {"backend": "vllm", "batches": [32]}],
        },
    },
}


def test_the_largest_options_batch_that_replays_is_tuned_for():
    config = parse_config(CONFIG)
    cell = autotune.tuned_cell(config, "torch2.11", "plain")
    assert (cell.section, cell.running, cell.option) == ("options", 16, "replay")
    assert autotune.decode_shape(cell) == {
        "dtype": "bfloat16",
        "batch": 16,
        "max_model_len": 320,
        "page_size": 128,
        "kv_tokens": None,
    }
    assert autotune.tuned_cell(config, "torch2.11", "tma").section == "options"  # nobody replays it: any of the section
    with pytest.raises(FlexrollError, match=r"no flex cell in section options on torch2\.9\.1"):
        autotune.tuned_cell(config, "torch2.9.1", "plain")


def test_what_is_replayed_is_the_tuned_template_and_kind():
    shape = inductor_log.Shape(*DECODE)
    candidates = [inductor_log.Candidate(0.1, {"num_warps": 8, "USE_TMA": False})]
    candidates.append(inductor_log.Candidate(0.2, {"num_warps": 4, "USE_TMA": True}))
    plain, tma = (autotune.outcome(kind, shape, candidates) for kind in ("plain", "tma"))
    assert plain["options"] == {"num_warps": 8, "USE_TMA": False, "FORCE_USE_FLEX_ATTENTION": True}
    assert tma["options"] == {"num_warps": 4, "USE_TMA": True, "FORCE_USE_FLEX_ATTENTION": True}
    none = autotune.outcome("tma", shape, candidates[:1])
    assert "options" not in none and "USE_TMA" in none["reason"]


def test_without_a_gpu_there_is_a_file_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "device_class", lambda: "cpu")
    (tmp_path / "model.json").write_text(json.dumps({"path": "models/tiny-gsm", "files": {}}))
    out = tmp_path / "autotune" / "torch2.11-plain.json"
    args = {"stack": "torch2.11", "kind": "plain", "work": tmp_path, "out": out, "root": tmp_path}
    autotune.autotune(parse_config(CONFIG), **args)
    assert json.loads(out.read_text())["options"] is None
    assert "no GPU" in replay_problem(out)
    with pytest.raises(FlexrollError, match="nothing to replay: no GPU"):
        replay_options(out)


WORKERS = {
    "log": ("pass", "wrote no log"),
    "old": ("print('torch 2.9.1 writes no log of it'); sys.exit(3)", "torch 2.9.1 writes no log of it"),
    "crash": ("os.kill(os.getpid(), 9)", "signal 9"),
    "hang": ("time.sleep(60)", "longer than limits.start_s"),
}


@pytest.mark.parametrize("kind", WORKERS)
def test_a_tuning_that_fails_is_a_result(kind, tmp_path, monkeypatch):
    """The worker is replaced by a program that ends as a real one may."""
    code, reason = WORKERS[kind]
    package = tmp_path / "src" / "flexroll" / "tune"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "autotune_worker.py").write_text(f"import os, sys, time\n{code}\n")
    monkeypatch.setattr(autotune, "device_class", lambda: "NVIDIA H200")
    monkeypatch.setattr(autotune, "device_lease", lambda root, device: contextlib.nullcontext())
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    monkeypatch.setattr(autotune, "worker_env", lambda root, stack, device: env)
    (tmp_path / "model.json").write_text(json.dumps({"path": "models/tiny-gsm", "files": {}}))
    config = parse_config(CONFIG | {"limits": {"start_s": 1 if kind == "hang" else 60, "cell_s": 1}})
    out = tmp_path / "a.json"
    found = autotune.autotune(config, stack="torch2.11", kind="plain", work=tmp_path, out=out, root=tmp_path)
    assert found.options is None and reason in found.reason
    assert reason in replay_problem(out)


def test_a_real_log_is_read_back(tmp_path, monkeypatch):
    package = tmp_path / "src" / "flexroll" / "tune"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    key = ("forward", 16, 8, 4, 1, 6272, 64, 64)
    (package / "autotune_worker.py").write_text(
        f"import os, json, pathlib\np = pathlib.Path(os.environ['{autotune.LOG_VARIABLE}']).with_suffix('.json')\n"
        f"p.write_text({json.dumps([entry(key, tuned(0.2, num_warps=8))])!r})\n"
    )
    monkeypatch.setattr(autotune, "device_class", lambda: "NVIDIA H200")
    monkeypatch.setattr(autotune, "device_lease", lambda root, device: contextlib.nullcontext())
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    monkeypatch.setattr(autotune, "worker_env", lambda root, stack, device: env)
    (tmp_path / "model.json").write_text(json.dumps({"path": "models/tiny-gsm", "files": {}}))
    out = tmp_path / "a.json"
    config = parse_config(CONFIG)
    found = autotune.autotune(config, stack="torch2.11", kind="plain", work=tmp_path, out=out, root=tmp_path)
    assert replay_options(out)["num_warps"] == 8 and replay_problem(out) is None
    assert found.shape["batch"] == 16 and found.candidates[0]["ms"] == 0.2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"options": 3, "reason": ""}', '{"options": null}'])
def test_a_file_that_autotune_did_not_write_is_one_line(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FlexrollError, match="not what `flexroll autotune` writes"):
        replay_problem(path)
    with pytest.raises(FlexrollError, match="missing"):
        replay_problem(tmp_path / "b.json")
    with pytest.raises(FlexrollError, match="no file"):
        replay_problem(None)


# --- grids


def test_the_prefill_grid_is_the_one_of_144_points():
    grid = GRIDS["prefill"]
    points = grid.points()
    assert len(points) == len({p.id for p in points}) == 144
    assert {p.values["num_stages"] for p in points} == {1, 3, 4, 5}
    assert sum(p.misfit(64) is not None for p in points) == 48 and not any(p.misfit(128) for p in points)
    assert points[0].engine_arguments == {"prefill_kernel_options": points[0].values}


def test_a_value_that_is_left_to_torch_is_not_given():
    point = next(p for p in GRIDS["decode"].points() if p.values["SPLIT_KV"] is None)
    assert "SPLIT_KV" not in point.engine_arguments["decode_kernel_options"]
    assert Point("decode", {}).engine_arguments == {}


def test_a_part_of_a_grid_and_what_it_has_not():
    part = GRIDS["decode"].only({"num_warps": ["4"], "SPLIT_KV": ["None", "2"]})
    assert {(p.values["num_warps"], p.values["SPLIT_KV"]) for p in part.points()} == {(4, None), (4, 2)}
    with pytest.raises(FlexrollError, match="--only BLOCK_Q: the decode grid has BLOCK_N"):
        GRIDS["decode"].only({"BLOCK_Q": ["1"]})
    with pytest.raises(FlexrollError, match="--only num_warps=5: the grid has 2, 4, 8"):
        GRIDS["decode"].only({"num_warps": ["5"]})


# --- successive halving


class Fake:
    """Rollouts of points with known rates, at `cost` seconds a point and a ten-thousandth of one a token and round."""

    def __init__(self, rates, crashes=(), cost=1.0, at=()):
        self.rates, self.crashes, self.cost, self.at = rates, crashes, cost, dict(at)
        self.calls = []

    def measure(self, points, new_tokens, rounds, check, limit_s):
        self.calls.append([p.id for p in points])
        found, seconds = {p.id: Outcome() for p in points}, 0.0
        for p in points:
            run_s = new_tokens * rounds * 1e-4
            if seconds + self.cost + run_s > limit_s:
                found[p.id] = Outcome(reason="too long", timed_out=True)
                return found, limit_s
            if p.id in self.crashes or self.at.get(p.id) == len(points):
                found[p.id] = Outcome(reason="crashed: misaligned address")
                seconds += self.cost
                if len(points) > 1:
                    return {i: o if i == p.id else Outcome() for i, o in found.items()}, seconds
                continue
            rate = self.rates.get(p.id, 100.0)
            seconds += self.cost + run_s
            found[p.id] = Outcome([rate] * rounds, run_s, 1.0 if check else None)
        return found, seconds


class Lines:
    def __init__(self, records=()):
        self.records, self.n = list(records), None

    def add(self, record):
        if self.n is not None and len(self.records) >= self.n:
            raise KeyboardInterrupt
        self.records.append(json.loads(json.dumps(record)))


def points_of(n):
    return [Point("engine", {"page_size": i}) for i in range(n)]


def rates_of(values):
    return {p.id: rate for p, rate in zip(points_of(len(values)), values, strict=True)}


def run(values, plan=None, records=None, **fake):
    evaluator = Fake(rates_of(values), **fake)
    sweep = Sweep(points_of(len(values)), evaluator, records or Lines(), plan or Plan(128, 5, 1e9), 64)
    return sweep.run(), evaluator


RATES = st.lists(st.integers(1, 10_000).map(float), min_size=1, max_size=40, unique=True)


@given(RATES)
def test_the_true_best_of_a_noiseless_grid_wins(values):
    found, evaluator = run(values)
    assert found.winner.values["page_size"] == values.index(max(values))
    assert found.standings[0].point is found.winner
    assert median(found.duel) == pytest.approx(max(values) / 100) and len(found.duel) == 5
    assert not found.notes
    # Twice as many screenings as points at the most, besides the default's, the final and the duel.
    assert len(evaluator.calls) <= 2 * len(values) + 4 * 8 + 2


@given(RATES, st.integers(0, 60), st.sampled_from([1e9, 30.0]))
def test_a_sweep_that_goes_on_from_its_records_finds_the_same_and_repeats_nothing(values, n, budget):
    plan = Plan(128, 5, budget)
    whole, first = run(values, plan)
    records = Lines()
    records.n = n
    with contextlib.suppress(KeyboardInterrupt):
        run(values, plan, records)
    records.n = None
    resumed, second = run(values, plan, records)
    assert (resumed.winner, resumed.duel, resumed.spent_s) == (whole.winner, whole.duel, whole.spent_s)
    assert [vars(s) for s in resumed.standings] == [vars(s) for s in whole.standings]
    assert len(second.calls) == max(0, len(first.calls) - n)


@given(RATES, st.floats(3, 120), st.floats(0.5, 3))
def test_the_budget_is_kept_and_what_it_left_out_is_said(values, budget, cost):
    try:
        found, evaluator = run(values, Plan(128, 5, budget), cost=cost)
    except FlexrollError as error:  # not even the default fits
        assert "default" in str(error)
        return
    assert found.spent_s <= budget + 1e-6
    unmeasured = [s for s in found.standings if s.rank < 0]
    assert not unmeasured or found.notes
    assert found.winner is not None or found.notes
    if len(evaluator.calls) > 1:
        assert found.winner is not None  # what is left is kept for the duel


def test_a_larger_budget_goes_on_where_the_smaller_one_ended():
    records, values = Lines(), [float(i) for i in range(1, 25)]
    small, _ = run(values, Plan(128, 5, 25.0), records)
    assert small.notes
    large, evaluator = run(values, Plan(128, 5, 1e9), records)
    assert large.winner.values["page_size"] == 23 and not large.notes
    assert sum(len(call) == 1 and call != ["default"] for call in evaluator.calls) < 48


@given(RATES, st.data())
def test_crashes_are_recorded_and_out(values, data):
    ids = [p.id for p in points_of(len(values))]
    crashes = set(data.draw(st.lists(st.sampled_from(ids))))
    found, _ = run(values, crashes=crashes)
    assert {s.point.id for s in found.standings if s.reason} == crashes
    assert all("misaligned" in s.reason for s in found.standings if s.point.id in crashes)
    left = {i: rate for i, rate in rates_of(values).items() if i not in crashes}
    assert (found.winner.id if found.winner else None) == (max(left, key=left.get) if left else None)


def test_who_crashes_in_the_final_or_in_the_duel_leaves_it_to_the_next():
    values = [float(i) for i in range(1, 9)]
    best = points_of(8)[7].id
    in_final, _ = run(values, at={best: 5}.items())
    in_duel, _ = run(values, at={best: 2}.items())
    for found in (in_final, in_duel):
        assert found.winner.values["page_size"] == 6
        assert [s.point.id for s in found.standings if s.reason] == [best]


def test_a_default_that_does_not_run_ends_the_sweep_in_one_line():
    with pytest.raises(FlexrollError, match="the default does not run: crashed"):
        run([1.0, 2.0], crashes={"default"})


def test_what_cannot_fit_is_out_without_a_measurement():
    points = GRIDS["prefill"].only({"num_warps": ["4"], "num_stages": ["3"]}).points()
    evaluator = Fake({p.id: 100.0 + i for i, p in enumerate(points)})
    found = Sweep(points, evaluator, Lines(), Plan(128, 5, 1e9), 64).run()
    out = {s.point.id for s in found.standings if s.reason}
    assert out == {p.id for p in points if p.values["BLOCK_N"] == 128} and len(out) == 4
    assert not out & {i for call in evaluator.calls for i in call}


@given(st.integers(1, 500), st.integers(1, 1024))
def test_rungs_halve_the_points_and_lengthen_the_rollouts(n, new_tokens):
    rungs = Plan(new_tokens, 5, 1.0).rungs(n)
    assert rungs[0][0] == n
    for (more, short), (fewer, long) in pairwise(rungs):
        assert fewer == max(4, -(-more // 2)) and short <= long
    assert rungs[-1][0] <= 8 and all(min(SHORTEST, new_tokens) <= tokens <= new_tokens for _, tokens in rungs)


# --- records


def test_a_killed_writer_loses_its_last_line_only(tmp_path):
    path, facts = tmp_path / "s.jsonl", {"torch": "2.11"}
    record = {"stage": "rung 0", "group": ["default"], "new_tokens": 16, "rounds": 3, "seconds": 1.0, "cut": False}
    record["outcomes"] = {}
    journal = Journal(path, "k", facts)
    journal.add(record)
    with path.open("ab") as file:
        file.write(b'{"stage": "rung 0", "gro')
    again = Journal(path, "k", facts)
    assert again.records == [record]
    again.add(record)
    assert len(read_journal(path)[1]) == 2
    path.write_bytes(b'{"key": "k", "fac')  # killed in the first line
    assert Journal(path, "k", facts).records == []


def test_another_sweeps_folder_is_refused(tmp_path):
    path = tmp_path / "s.jsonl"
    Journal(path, "k", {"torch": "2.11", "device": "cpu"})
    with pytest.raises(FlexrollError, match=r"another sweep \(other torch\); give another --out"):
        Journal(path, "l", {"torch": "2.12", "device": "cpu"})
    for text in ("no json\n", "[]\n", '{"key": 1}\n', '{"key": "k", "facts": {}}\n{"stage": 1}\n'):
        path.write_text(text)
        with pytest.raises(FlexrollError, match="not what `flexroll sweep` writes"):
            Journal(path, "k", {})


# --- tokens


def test_near_ties_may_part_and_nothing_else():
    base = agreement.Text([[1, 2, 3, 4], [5, 6, 7, 8]], [[-0.1] * 4, [-0.5] * 4])
    assert agreement.problem(base, base) is None and agreement.agreement(base.tokens, base.tokens) == 1
    tie = agreement.Text([[1, 2, 3, 4], [5, 9, 1, 1]], [[-0.1] * 4, [-0.5, -0.55, -3.0, -3.0]])
    assert agreement.problem(base, tie) is None
    assert agreement.agreement(base.tokens, tie.tokens) == 5 / 8
    far = agreement.Text(tie.tokens, [[-0.1] * 4, [-0.5, -1.5, -3.0, -3.0]])
    assert "1 of 2 sequences" in agreement.problem(base, far)
    shifted = agreement.Text(base.tokens, [[-0.1, -0.1, -0.9, -0.1], [-0.5] * 4])
    assert "1 of 2 sequences" in agreement.problem(base, shifted)
    nan = agreement.Text(base.tokens, [[float("nan")] * 4, [-0.5] * 4])
    assert agreement.problem(base, nan)
    other = agreement.Text([[2, 2, 3, 4], [6, 6, 7, 8]], base.logprobs)
    assert "first token" in agreement.problem(base, other)


# --- results


def facts_of(**changes):
    facts = {"kind": "decode", "torch": "2.11.0", "device": "NVIDIA H200", "model": "m", "dummy": True}
    facts |= {"dtype": "bfloat16", "batch": 64, "prompt_tokens": 128, "new_tokens": 128, "page_size": 64}
    return facts | changes


def summary_of(gain, rounds=9, **changes):
    grid: Grid = GRIDS["decode"].only({"SPLIT_KV": ["None", "2"], "PRESCALE_QK": ["False"]})
    points = grid.points()
    rates = {p.id: 90.0 - i / 10 for i, p in enumerate(points)} | {points[4].id: 100.0 * gain}
    evaluator = Fake(rates, crashes={points[5].id})
    found = Sweep(points, evaluator, Lines(), Plan(128, rounds, 1e9), 64).run()
    # A noise of one part in a thousand, without which no interval has a width.
    found.duel = [g * (1 + (i % 3 - 1) / 1000) for i, g in enumerate(found.duel)]
    return summarise(grid, found, facts_of(**changes), 1e9), points


def test_json_document_and_figure_tell_the_winner_the_interval_and_who_is_out(tmp_path):
    summary, points = summary_of(1.05)
    assert summary.winner.values == points[4].values and not summary.winner.faster  # not before there is an interval
    summary = finish(summary)
    assert summary.winner.faster and summary.winner.low < 1.05 < summary.winner.high
    written, document, figure = write(summary, tmp_path)
    assert read_summary(written) == summary
    text = document.read_text()
    assert "1.050 times the default's tok/s" in text and ": faster" in text
    assert "1 points: crashed: misaligned address" in text
    assert "12 points: BLOCK_N 128 does not divide a page of 64 tokens" not in text  # 6: only two of four SPLIT_KV
    assert "BLOCK_N 128 does not divide a page of 64 tokens" in text and "Not run" not in text
    assert text.count("\n| ") == 11  # a header and ten rows
    before = figure.read_bytes()
    assert b"<svg" in before
    assert write(summary, tmp_path)[2].read_bytes() == before


def test_the_heat_map_hatches_what_is_out_and_frames_the_winner():
    rows, columns = {"a": [1, None]}, {"b": [2, 4]}
    figure = heat_map.draw(rows, columns, {(1, 2): 1.1, (1, 4): 0.9}, {(None, 2)}, (1, 2), "t")
    patches = figure.axes[0].patches
    assert [p.get_xy() for p in patches if p.get_hatch()] == [(-0.5, 0.5)]
    assert [p.get_xy() for p in patches if p.get_linewidth() == 2] == [(-0.5, -0.5)]
    assert {t.get_text() for t in figure.axes[0].texts} == {"+10.0", "-10.0"}
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["1", "auto"]
    assert heat_map.draw(rows, columns, {}, {(1, 2)}, None, "t") is None


def test_without_a_winner_the_document_says_so(tmp_path):
    found, _ = run([1.0], crashes={points_of(1)[0].id})
    grid = Grid("engine", {"page_size": (0,)}, {})
    summary = finish(summarise(grid, found, facts_of(kind="engine"), 1.0))
    assert "**No winner**" in as_markdown(summary, False)
    assert [p.name for p in write(summary, tmp_path)] == ["sweep.json", "sweep.md"]


# --- defaults


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernel_defaults.json"
    path.write_bytes(FILE.read_bytes())
    return path


def test_the_file_of_defaults_is_valid():
    assert {"", "H200"} <= set(read_defaults().root)


def test_only_a_faster_winner_becomes_the_default(file):
    before = file.read_bytes()
    for summary, why in (
        (summary_of(0.95)[0], "no point is faster"),
        (summary_of(1.05, rounds=3)[0], "no point is faster"),  # no interval was computed
        (finish(summary_of(1.05, page_size=128)[0]), "pages of 128"),
        (finish(summary_of(1.05, device="cpu")[0]), "kernel options of a GPU"),
        (finish(summary_of(1.05, kind="engine")[0]), "kernel options of a GPU"),
    ):
        with pytest.raises(FlexrollError, match=why):
            tune.become_default(summary, file)
        assert file.read_bytes() == before
    summary = finish(summary_of(1.05)[0])
    assert tune.become_default(summary, file) == "H200"
    written = read_defaults(file).root["H200"]
    assert written["decode"].options == summary.winner.options and "1.050" in written["decode"].note
    assert written["prefill"] == read_defaults().root["H200"]["prefill"]


def test_a_gpu_that_the_file_does_not_know_gets_an_entry_of_its_own(file):
    entry_ = Entry(options={"num_warps": 8}, note="measured")
    assert write_default("NVIDIA B200", "prefill", entry_, file) == "NVIDIA B200"
    assert write_default("NVIDIA H200", "prefill", entry_, file) == "H200"
    assert read_defaults(file).root["NVIDIA B200"] == {"prefill": entry_}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop(""), "every other GPU"),
        (lambda d: d["H200"].update(backward=d["H200"]["decode"]), "unknown kind"),
        (lambda d: d["H200"]["decode"].update(note=" "), "needs a note"),
        (lambda d: d["H200"]["decode"]["options"].update(BLOCKS_ARE_CONTIGUOUS=True), "pages lie anywhere"),
        (lambda d: d["H200"]["decode"].update(extra=1), "Extra inputs"),
    ],
)
def test_a_bad_file_of_defaults_is_one_line(change, why, file):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(FlexrollError, match=why):
        read_defaults(file)
    assert Defaults.model_validate_json(FILE.read_text())


def test_a_change_of_the_defaults_makes_flex_stale_and_no_other_backend(tmp_path, root):
    src = tmp_path / "src"
    shutil.copytree(root / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
    before = {name: provenance.backend_source_hash(name, src) for name in ("flex", "vllm")}
    path = src / "flexroll" / "engine" / "kernel_defaults.json"
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8', 1))
    after = {name: provenance.backend_source_hash(name, src) for name in ("flex", "vllm")}
    assert after["flex"] != before["flex"] and after["vllm"] == before["vllm"]
    path.unlink()
    with pytest.raises(FlexrollError, match=r"kernel_defaults\.json: missing"):
        provenance.backend_source_hash("flex", src)


# --- the worker process, from outside

WORKER = """
import json, os, sys, time
fd = int(sys.argv[2])
tell = lambda **event: os.write(fd, (json.dumps(event) + "\\n").encode())
tell(event="hello", torch="t", device="cpu")
for line in sys.stdin:
    request = json.loads(line)
    for i, point in enumerate(request["points"]):
        tell(event="begin", index=i)
        size = point.get("page_size", 0)
        if size == 1: os.kill(os.getpid(), 11)
        if size == 2: time.sleep(60)
        if size == 3: print("out of shared memory"); sys.stdout.flush(); sys.exit(4)
        if size == 6: tell(event="failed", index=i, reason="misaligned address", agreement=None); sys.exit(4)
        if size == 4: tell(event="failed", index=i, reason="wrong tokens", agreement=0.1)
        else: tell(event="ready", index=i, agreement=1.0)
    for i, point in enumerate(request["points"]):
        if point.get("page_size") == 4: continue
        for _ in range(request["rounds"]):
            tell(event="run", index=i)
            if point.get("page_size") == 5: os.kill(os.getpid(), 6)
            tell(event="round", index=i, seconds=0.5, tps=10.0)
    tell(event="done")
"""


@pytest.fixture
def evaluator(tmp_path):
    package = tmp_path / "src" / "flexroll" / "tune"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "sweep_worker.py").write_text(WORKER)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    found = WorkerEvaluator(Path(sys.executable), {}, tmp_path / "out", env)
    yield found
    found.close()


def test_crash_and_hang_cost_the_point_that_met_them(evaluator):
    p = {i: Point("engine", {"page_size": i} if i else {}) for i in range(7)}

    def measure(*points, limit_s=20.0):
        return evaluator.measure([p[i] for i in points], 16, 2, True, limit_s)[0]

    assert measure(0)["default"] == Outcome([10.0, 10.0], 1.0, 1.0)
    first = evaluator._process.pid
    crash = measure(0, 1)
    assert "signal 11" in crash[p[1].id].reason and not crash["default"].tps and not crash["default"].reason
    assert measure(0)["default"].tps and evaluator._process.pid != first
    hang = measure(2, limit_s=1.0)[p[2].id]
    assert hang.timed_out and "longer than 1 s" in hang.reason
    assert "out of shared memory" in measure(3)[p[3].id].reason
    assert measure(4)[p[4].id] == Outcome(reason="wrong tokens", agreement=0.1)
    assert measure(6)[p[6].id].reason == "misaligned address"  # its own words, not that its process ended
    evaluator.start()
    os.kill(evaluator._process.pid, 9)
    evaluator._process.wait()
    assert measure(0)["default"].tps  # what ended a process between two measurements is no point's fault
    late = measure(0, 5)
    assert "signal 6" in late[p[5].id].reason and not late["default"].reason


def test_a_worker_that_does_not_start_is_one_line(tmp_path):
    found = WorkerEvaluator(Path(sys.executable), {}, tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(FlexrollError, match="worker did not start"):
        found.start()


# --- the command


def test_a_request_that_cannot_be_served_is_one_line(tmp_path, monkeypatch, root, capsys):
    model = root / "models" / "tiny-gsm"
    monkeypatch.setattr(tune, "device_class", lambda: "cpu")
    for request, why in (
        (tune.Request(model, "decode", tmp_path), "--kind engine runs"),
        (tune.Request(tmp_path, "engine", tmp_path), "no config.json"),
        (tune.Request(model, "engine", tmp_path, rounds=2), "at least 3"),
        (tune.Request(model, "engine", tmp_path), "name the one that measures"),
    ):
        with pytest.raises(FlexrollError, match=why):
            tune.sweep(request, tmp_path, None)
    monkeypatch.setattr(provenance, "device_class", lambda: "NVIDIA H200")
    monkeypatch.setattr(tune, "sweep", lambda *_: pytest.fail("was measured"))
    line = ["flexroll", "sweep", "--model", str(model), "--kind", "prefill", "--out", str(tmp_path / "sweep")]
    monkeypatch.setattr(sys, "argv", [*line, "--page-size", "128", "--write-defaults"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "pages of 128 tokens, the engine's default is 64" in " ".join(said.split())
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_without_a_stack_or_a_result_is_one_line(tmp_path, monkeypatch, root):
    model = root / "models" / "tiny-gsm"
    monkeypatch.setattr(tune, "device_class", lambda: "cpu")
    with pytest.raises(FlexrollError, match="stack torch9 is not set up"):
        tune.sweep(tune.Request(model, "engine", tmp_path), tmp_path, "torch9")
    with pytest.raises(FlexrollError, match=r"sweep\.json: missing"):
        tune.report(tmp_path, False)
