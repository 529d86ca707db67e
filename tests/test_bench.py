"""One job: every cell ends with a record, whatever the engine does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flexroll.bench import job as job_module
from flexroll.bench import memory as memory_module
from flexroll.bench import process as worker_process
from flexroll.bench import quality as quality_module
from flexroll.bench import supervisor
from flexroll.bench.availability import cannot_run
from flexroll.bench.coherence import before_end, judge, longest_repeat, nonprintable_share
from flexroll.bench.inputs import find_job
from flexroll.bench.job import bench, warmup
from flexroll.bench.plan import cell_seconds, make_plan, start_seconds
from flexroll.bench.progress import Progress
from flexroll.bench.retry import retry
from flexroll.bench.worker import check_counts, prompts_of_round
from flexroll.errors import FlexrollError
from flexroll.schema.cells import expand
from flexroll.schema.load import parse_config
from flexroll.schema.quality import read_quality
from flexroll.schema.records import Round, read_record

FAKE = Path(__file__).with_name("fake_backend.py")
JOB = "s-transformers_generate-none-default-s1"
NEW_TOKENS = 4


def config_data(**changes):
    data = {
        "run": "t",
        "model": {"name": "m", "path": "model"},
        "prompts": {"path": "q.json", "count": 4},
        "drift": {"stacks": ["s"]},
        "repeats": {"rounds": 2, "warmup_rounds": 1},
        "limits": {"start_s": 60, "cell_s": 20},
        "experiments": {
            "e": {
                "title": "E",
                "section": "batch_sweep",
                "batches": [1, 2, 3],
                "new_tokens": NEW_TOKENS,
                "stacks": ["s"],
                "backends": [{"backend": "transformers_generate"}],
            }
        },
    }
    return data | changes


class Tree:
    """A tree with one stack, a model folder, and what earlier commands would have written."""

    def __init__(self, root: Path) -> None:
        self.root, self.work, self.results = root, root / "work" / "t", root / "results" / "t"
        (root / "containers" / "s").mkdir(parents=True)
        (root / "containers" / "s" / "requirements.in").write_text("")
        (root / "containers" / "s" / "cpu.lock").write_text("torch==0\n")
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 2}')
        self.work.mkdir(parents=True)
        (self.work / "model.json").write_text(json.dumps({"path": "model", "files": {"config.json": "00"}}))
        self.write_prompts(4)
        self.log = root / "fake.log"

    def write_prompts(self, count: int) -> None:
        prompts = [{"text": "", "ids": [i + 1] * (i + 2)} for i in range(count)]
        (self.work / "prompts.json").write_text(json.dumps({"sha256": f"p{count}", "prompts": prompts}))

    @property
    def raw(self) -> Path:
        return self.results / "raw"

    def bench(self, backend: str, **changes) -> None:
        bench(
            parse_config(config_data(**changes)),
            JOB,
            work=self.work,
            raw=self.raw,
            out=self.raw / JOB / "job.json",
            root=self.root,
            stack="s",
            backend=f"{FAKE}:{backend}",
        )

    def path(self, batch: int) -> Path:
        return self.raw / JOB / f"e-greedy-b{batch}.json"

    def records(self):
        return [read_record(self.path(batch)) for batch in (1, 2, 3)]

    def statuses(self) -> list[str]:
        return [record.status for record in self.records()]

    def calls(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(word)]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    tree = Tree(tmp_path)
    monkeypatch.setenv("FAKE_LOG", str(tree.log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(worker_process, "GRACE_S", 0.3)
    return tree


def test_a_good_job_has_full_records_and_a_manifest(tree):
    tree.bench("Good")
    for batch, record in zip((1, 2, 3), tree.records(), strict=True):
        assert record.status == "ok" and record.reason == ""
        assert [r.warmup for r in record.rounds] == [True, False, False]
        assert [r.tokens for r in record.measured] == [batch * NEW_TOKENS] * 2
        assert record.measured[0].decode_tokens == batch * (NEW_TOKENS - 1)
        assert record.measured[0].decode_tps == pytest.approx(batch * 3 / 0.75)
        assert record.measured[0].tokens_sha256 == record.measured[1].tokens_sha256 != ""
        assert record.prompt_tokens == sum(i + 2 for i in range(batch)) and record.prompts_sha256 == "p4"
        assert record.memory.weights == 10 and record.memory.kv_reserved is None
        assert record.memory.peak_allocated > 1e6 and record.memory.device_total > 1e6
        assert record.environment.stack == "s" and record.environment.device == "cpu" and record.start_s >= 0
        assert (tree.results / record.log).exists()
    manifest = json.loads((tree.raw / JOB / "job.json").read_text())
    assert manifest["job"] == JOB and list(manifest["cells"]) == [tree.path(b).name for b in (1, 2, 3)]
    assert {c["status"] for c in manifest["cells"].values()} == {"ok"}
    assert len(tree.calls("start")) == 1


def test_measured_cells_are_kept_and_a_change_of_prompts_measures_again(tree):
    tree.bench("Good")
    before = {batch: tree.path(batch).read_bytes() for batch in (1, 2, 3)}
    tree.bench("NoStart")  # would fail every cell it is asked for
    assert {batch: tree.path(batch).read_bytes() for batch in (1, 2, 3)} == before
    tree.write_prompts(5)
    tree.bench("Good")
    assert all(tree.path(batch).read_bytes() != before[batch] for batch in before)


def test_a_cut_record_and_a_failed_one_are_measured_again_the_good_one_is_not(tree):
    tree.bench("Crashes")
    assert tree.statuses() == ["ok", "failed", "ok"]
    third = tree.path(3).read_bytes()
    tree.path(1).write_bytes(tree.path(1).read_bytes()[:100])
    tree.log.unlink()
    tree.bench("Good")
    assert tree.statuses() == ["ok"] * 3 and tree.path(3).read_bytes() == third
    assert {line.split()[1] for line in tree.calls("generate")} == {"1", "2"}


@pytest.mark.slow
def test_a_hanging_cell_times_out_and_the_rest_goes_on(tree):
    tree.bench("Hangs", limits={"start_s": 60, "cell_s": 3})
    assert tree.statuses() == ["ok", "failed", "ok"]
    assert tree.records()[1].reason.startswith("timeout: the cell took longer than 3 s")
    for pid in (int(line.split()[1]) for line in tree.calls("hanging") + tree.calls("start")):
        assert not alive(pid)


@pytest.mark.slow
def test_rounds_before_a_timeout_are_kept_and_do_not_extend_the_limit(tree):
    tree.bench("HangsLate", limits={"start_s": 60, "cell_s": 3})
    record = tree.records()[1]
    assert record.status == "failed" and len(record.measured) == 1 and len(record.rounds) == 2


def test_a_crash_names_the_signal_and_the_rest_goes_on(tree):
    tree.bench("Crashes")
    assert tree.statuses() == ["ok", "failed", "ok"]
    assert "signal 9 (SIGKILL" in tree.records()[1].reason
    assert len(tree.calls("start")) == 2


def test_an_exception_costs_one_cell_and_the_next_gets_a_fresh_process(tree):
    tree.bench("Raises")
    assert tree.statuses() == ["ok", "failed", "ok"]
    assert tree.records()[1].reason == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert len(tree.calls("start")) == 2


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("Short", "wrong count: prompt 1 got 3 tokens, asked for 4"),
        ("Drops", "wrong count: 1 completions for 2 prompts"),
    ],
)
def test_wrong_token_counts_fail_the_cell_in_the_same_process(tree, backend, reason):
    tree.bench(backend)
    assert tree.statuses() == ["ok", "failed", "ok"] and tree.records()[1].reason == reason
    assert len(tree.calls("start")) == 1


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        ("NoStart", "failed", "engine did not start: ValueError: no kernel image is available"),
        ("DiesAtStart", "failed", "engine did not start: crashed: exit code 7; last words: about to go"),
        ("HangsAtStart", "failed", "timeout: the engine took longer than 2 s to start (limits.start_s)"),
        ("Absent", "skipped", "needs a CUDA GPU"),
        ("Missing", "failed", "engine did not start: AttributeError"),
    ],
)
def test_an_engine_that_does_not_start_leaves_a_record_for_every_cell(tree, backend, status, reason):
    tree.bench(backend, limits={"start_s": 2 if backend == "HangsAtStart" else 30, "cell_s": 20})
    assert tree.statuses() == [status] * 3
    assert all(record.reason.startswith(reason) and record.environment is not None for record in tree.records())
    assert (tree.raw / JOB / "job.json").exists()


def test_an_engine_that_hangs_at_its_end_loses_nothing(tree, monkeypatch):
    monkeypatch.setattr(supervisor, "CLOSE_S", 0.5)
    tree.bench("HangsAtClose")
    assert tree.statuses() == ["ok"] * 3


def start_in_background(tree, backend):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from test_bench import Tree\n"
        "tree = Tree.__new__(Tree); tree.root = Path(sys.argv[2])\n"
        "tree.work, tree.results = tree.root / 'work' / 't', tree.root / 'results' / 't'\n"
        "tree.bench(sys.argv[3])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(FAKE.parent), str(tree.root), backend], stderr=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_job_keeps_finished_cells_and_goes_on_from_there(tree, signum):
    process = start_in_background(tree, "Slow")
    wait_for(tree.path(1).exists, process)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum), errors.decode()
    first = tree.path(1).read_bytes()
    worker = int(tree.calls("start")[0].split()[1])
    wait_for(lambda: not alive(worker))
    assert not (tree.raw / JOB / "job.json").exists() and not tree.path(3).exists()
    tree.bench("Good")
    assert tree.statuses() == ["ok"] * 3 and tree.path(1).read_bytes() == first


@pytest.mark.slow
def test_two_jobs_at_once_wait_for_each_other(tree):
    process = start_in_background(tree, "Slow")
    wait_for(lambda: tree.log.exists(), process)
    tree.bench("NoStart")  # by the time it gets the lock nothing is left to do
    assert process.wait(30) == 0 and tree.statuses() == ["ok"] * 3


def test_warmup_runs_every_cell_briefly_and_writes_down_a_failure(tree):
    config = parse_config(config_data())
    out = tree.work / "warmup" / "e.json"
    warmup(config, JOB, work=tree.work, out=out, root=tree.root, backend=f"{FAKE}:Good")
    assert json.loads(out.read_text())["status"] == "ok"
    assert {line.split()[1] for line in tree.calls("generate")} == {"1", "2", "3"}
    warmup(config, JOB, work=tree.work, out=out, root=tree.root, backend=f"{FAKE}:Crashes")
    assert json.loads(out.read_text())["status"] == "failed" and not tree.results.exists()


def test_a_large_warm_up_goes_in_slices_of_the_batch(tree):
    data = config_data()
    data["experiments"]["e"] |= {"batches": [2], "warmup_prompts": 3}
    tree.bench("Good", experiments=data["experiments"])
    assert [line.split()[2] for line in tree.calls("generate")] == ["2", "1", "2", "2"]
    assert read_record(tree.path(2)).rounds[0].tokens == 3 * NEW_TOKENS


def test_progress_counts_the_runs_cells_and_scales_the_plan(tree, capfd, monkeypatch):
    """Cells of other jobs count, those of a stack left out do not; an estimate four times too long is scaled."""
    data = config_data(repeats={"rounds": 2, "sessions": 2})
    config = parse_config(data)
    cells = expand(config)
    mine = [cell for cell in cells if cell.session == 1]
    expected = [cell_seconds(cell, False) for cell in mine]
    now = [0.0]
    progress = Progress(config, tree.raw, mine, False, clock=lambda: now[0])
    whole = 2 * sum(expected) + start_seconds("transformers_generate", False)
    assert progress.seconds_left == pytest.approx(whole) and progress.summary().startswith("0 of 6 cells done, about ")
    now[0] = expected[0] / 4
    progress.cell_done(mine[0], measured=True)
    assert progress.seconds_left == pytest.approx((2 * sum(expected) - expected[0]) / 4 + progress.starts)
    done = Round(index=2, tokens=80, wall_s=2)
    progress.round(mine[1], done)
    progress.round(mine[1], done)  # too soon to say it again
    now[0] += 6
    progress.round(mine[1], Round(index=0, tokens=80, wall_s=2, warmup=True))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and "1 of 6 cells done, about " in lines[0]
    assert lines[0].endswith("now e, batch 2: round 2 of 2, 40 tok/s") and "warm-up round, 40 tok/s" in lines[1]
    tree.bench("Good", repeats={"rounds": 2, "sessions": 2})
    assert "3 of 6 cells done" in capfd.readouterr().err
    monkeypatch.setenv("FLEXROLL_STACKS", "other")
    assert Progress(config, tree.raw, [], False).total == 0


def test_a_measured_round_goes_on_until_it_is_long_enough(tree):
    """The batch is run again as a whole, what it left behind forgotten in between; counts and times are sums."""
    tree.bench("Slow", repeats={"rounds": 2, "warmup_rounds": 1, "min_round_s": 0.6})
    for record in tree.records():
        warm, *rounds = record.rounds
        assert warm.calls == 1 and [r.calls for r in rounds] == [3, 3]  # a quarter of a second each
        for r in rounds:
            assert r.tokens == 3 * warm.tokens and r.wall_s >= 0.6 and r.tokens_sha256 == warm.tokens_sha256
            assert (r.prefill_s, r.decode_s) == (0.75, 2.25) and r.decode_tokens == 3 * warm.decode_tokens
    assert len(tree.calls("forget")) == len(tree.calls("generate")) == 7 * 3


def test_missing_inputs_and_unknown_jobs_are_one_line(tree):
    config = parse_config(config_data())
    with pytest.raises(FlexrollError, match="did you mean 's-transformers_generate-none-default-s1'"):
        find_job(config, "s-transformer_generate-none-default-s1")
    tree.write_prompts(2)
    with pytest.raises(FlexrollError, match="2 prompts, the job needs 3"):
        tree.bench("Good")
    (tree.work / "prompts.json").write_text('{"sha')
    with pytest.raises(FlexrollError, match="not what `flexroll prompts` writes"):
        tree.bench("Good")
    (tree.work / "model.json").unlink()
    with pytest.raises(FlexrollError, match=r"model\.json: missing; `flexroll model` writes it"):
        tree.bench("Good")


def test_retry_clears_what_is_bad_and_nothing_else(tree):
    tree.bench("Crashes")
    tree.path(1).write_bytes(tree.path(1).read_bytes()[:100])
    cleared = retry(tree.results)
    assert [line.split(":")[0] for line in cleared] == [f"{JOB}/{tree.path(b).name}" for b in (1, 2)]
    assert "unreadable" in cleared[0] and "signal 9" in cleared[1]
    assert tree.path(3).exists() and not tree.path(2).exists() and not (tree.raw / JOB / "job.json").exists()
    tree.bench("Good")
    assert retry(tree.results) == [] and (tree.raw / JOB / "job.json").exists()
    tree.path(2).unlink()
    assert retry(tree.results) == [f"{JOB}/{tree.path(2).name}: missing"]
    with pytest.raises(FlexrollError, match="no such run; there are: t"):
        retry(tree.results.parent / "u")


def test_coherence_sees_loops_noise_and_single_tokens():
    text = [7, 8, 9, 4, 7, 3, 2, 9, 11, 12, 8, 7, 5, 6, 13, 14]
    assert judge(text, "William has 3 tubes.").ok
    assert longest_repeat([1] * 64) == 1.0 and not judge([1] * 64, "!" * 64).ok
    assert longest_repeat(text + [1, 2, 3] * 8) == pytest.approx(24 / 40)
    assert longest_repeat([1, 2, 1, 2]) == 0.0  # twice is no loop
    assert not judge(list(range(200)), "x" * 200).ok
    assert nonprintable_share("a\n\ufffd\x00") == 0.5
    assert judge([], "").ok


def test_text_ends_before_the_first_end_token():
    assert before_end([5, 6, 2, 7, 2], {2, 3}) == [5, 6]
    assert before_end([2, 7], [2]) == []
    assert before_end((5, 6), []) == [5, 6]


def test_plan_counts_cells_and_estimates(tree):
    config = parse_config(config_data())
    plan = make_plan(config, tree.root)
    assert len(plan.cells) == 3 and len(plan.jobs) == 1 and 0 < plan.hours < 1
    assert plan.download_gb == 0.0 and plan.device_gb is None
    twice = make_plan(parse_config(config_data(repeats={"rounds": 4, "warmup_rounds": 1})), tree.root)
    assert twice.hours > plan.hours
    assert make_plan(config, tree.root, ["other"]).cells == []


def test_plan_tells_steps_scoring_and_the_shard(tree):
    shape = {
        **{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    }
    (tree.root / "model" / "config.json").write_text(json.dumps(shape))

    def plan(*options, **changes):
        use = {"backend": "flex", "options": ["default", *options]}
        named = {"packed": {"flex": {"four_bit": "shard"}}, "replayed": {"flex": {"replay": "plain"}}}
        return make_plan(
            parse_config(config_data(options=named, experiments=experiments(backends=[use]), **changes)), tree.root
        )

    plain, packed = plan(), plan("packed")
    assert plain.shard_gb == 0 and not {"quantise", "autotune", "quality"} & set(plain.steps)
    assert packed.steps["quantise"] == 1 and packed.hours > plain.hours
    assert packed.disk_gb - plain.disk_gb == pytest.approx(packed.shard_gb)
    # Embeddings and norms in bf16; products of a layer: q, k, v, o, gate, up, down.
    products = 2 * 64 * (128 + 64 + 64 + 128 + 3 * 128)
    dense = 64 * 100 + 64 + 2 * (2 * 64 + 2 * 32)
    assert packed.shard_gb * 1e9 == pytest.approx(products * (0.5 + 4 / 64) + dense * 2)
    kept = plan("packed", four_bit={"skip": ["lm_head", "model.layers.0.self_attn"]})
    attention = 64 * (128 + 64 + 64 + 128)
    assert kept.shard_gb * 1e9 == pytest.approx(packed.shard_gb * 1e9 + attention * (2 - 0.5 - 4 / 64))
    assert plan("replayed").steps["autotune"] == 1
    scored = plan("packed", quality={"count": 4, "new_tokens": 8})
    assert scored.steps["quality"] == 2 and scored.steps["quality_reference"] == 1
    assert scored.hours > packed.hours and scored.disk_gb == packed.disk_gb
    assert sum(scored.steps.values()) == sum(packed.steps.values()) + 3


@pytest.mark.parametrize(
    ("backend", "values", "reason"),
    [
        ("flex", {"decode_kernel_options": {"num_warps": 4}}, "kernel options are those of GPU kernels"),
        ("flex", {"attention": "triton"}, "the paged kernels need a GPU"),
        ("unsloth", {}, "Unsloth needs a CUDA GPU"),
    ],
)
def test_what_cannot_run_here_is_skipped_without_a_process(tree, monkeypatch, backend, values, reason):
    monkeypatch.setattr(worker_process, "start_worker", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(job_module, "device_class", lambda: "cpu")
    use = {"backend": backend, "options": ["it"]}
    config = parse_config(config_data(options={"it": {backend: values}}, experiments=experiments(backends=[use])))
    name = f"s-{backend}-none-it-s1"
    out = tree.raw / name / "job.json"
    bench(config, name, work=tree.work, raw=tree.raw, out=out, root=tree.root, stack="s")
    cells = json.loads(out.read_text())["cells"]
    assert {cell["status"] for cell in cells.values()} == {"skipped"} and len(cells) == 3
    records = [read_record(out.parent / file) for file in cells]
    assert all(reason in record.reason and record.environment is not None for record in records)
    assert records[0].reason in (tree.results / records[0].log).read_text()
    warmup(config, name, work=tree.work, out=tree.work / "warmup.json", root=tree.root)
    assert json.loads((tree.work / "warmup.json").read_text())["reason"] == records[0].reason


def test_what_cannot_run_here_is_scored_without_a_process(tree, monkeypatch):
    monkeypatch.setattr(worker_process, "start_worker", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(quality_module, "device_class", lambda: "cpu")
    use = {"backend": "flex", "options": ["it"]}
    named = {"it": {"flex": {"prefill_kernel_options": {"num_warps": 4}}}}
    scoring = {"count": 4, "new_tokens": 8}
    config = parse_config(config_data(options=named, experiments=experiments(backends=[use]), quality=scoring))
    (tree.work / "quality").mkdir()
    (tree.work / "quality" / "reference-none.safetensors").touch()
    out = tree.results / "quality" / "s-flex-none-it.json"
    quality_module.quality(config, "s-flex-none-it", work=tree.work, out=out, root=tree.root, stack="s")
    record = read_quality(out)
    assert record.status == "skipped" and record.reason.startswith("prefill_kernel_options: ")
    assert record.reason in (tree.results / record.log).read_text()


def test_what_may_run_here_is_left_to_the_worker():
    spec = {name: None for name in ("model", "adapter", "merged", "shard", "replay")} | {
        **{"model": "m", "adapter_mode": "none", "dtype": "bfloat16", "device": "cuda", "max_batch": 1},
        **{"max_model_len": 64, "seed": 0, "option": {"decode_kernel_options": {"num_warps": 4}}},
    }
    assert cannot_run("flex", spec) is None
    assert cannot_run("flex", spec | {"device": "cpu"}) is not None
    assert cannot_run("no_file.py:Engine", spec | {"device": "cpu"}) is None


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_for(condition, process=None, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        assert process is None or process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)


def test_worker_environment_is_shut_off(tree):
    from flexroll.bench.isolate import worker_env

    env = worker_env(tree.root, "s", "cpu")
    assert env["PYTHONNOUSERSITE"] == "1" and env["HF_HUB_OFFLINE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert Path(env["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tree.root / ".cache")
    assert worker_env(tree.root, "s", "NVIDIA H200")["TRITON_CACHE_DIR"].count("s-NVIDIA-H200") == 1


def experiments(**changes):
    return {"e": config_data()["experiments"]["e"] | changes}


def test_a_group_is_given_its_prompts_once_and_counts_every_sample(tree):
    changes = {"batches": [6], "samples": 3, "sampling": "hot"}
    tree.bench("Good", experiments=experiments(**changes), samplings={"hot": {"temperature": 1}})
    record = read_record(tree.raw / JOB / "e-hot-b6.json")
    assert record.status == "ok" and record.note == "a prompt is computed once a sample"
    assert {r.tokens for r in record.rounds} == {6 * NEW_TOKENS}
    assert {r.decode_tokens for r in record.rounds} == {6 * (NEW_TOKENS - 1)}
    assert record.prompt_tokens == 2 + 3  # of two prompts
    assert tree.calls("generate") == ["generate 6 2 4 3"] * 3
    assert len(tree.calls("forget")) == 3 and record.start_parts == {"load": 0.5}


def test_uneven_lengths_are_the_same_list_in_every_round(tree):
    tree.bench("Good", experiments=experiments(batches=[4], slots=2, new_tokens={"min": 2, "max": 9, "seed": 3}))
    record = read_record(tree.path(4))
    wanted = sum(record.cell.new_tokens.draw(4))
    assert record.status == "ok" and [r.tokens for r in record.rounds] == [wanted] * 3
    assert {line.split()[1] for line in tree.calls("generate")} == {"2"}  # prepared for two at once
    assert {r.decode_tokens for r in record.rounds} == {wanted - 4}


def test_counts_are_checked_for_every_sample_and_length():
    check_counts([[1], [1], [1, 2], [3, 4]], [1, 2], 2, True)
    check_counts([[1], [1]], [2, 2], 1, False)
    with pytest.raises(FlexrollError, match="3 completions for 2 prompts of 2 samples"):
        check_counts([[1], [1], [1, 2]], [1, 2], 2, True)
    with pytest.raises(FlexrollError, match="prompt 1 got 1 tokens, asked for 2"):
        check_counts([[1], [1], [1, 2], [3]], [1, 2], 2, True)
    with pytest.raises(FlexrollError, match="prompt 0 got 0 tokens, asked for 1 to 2"):
        check_counts([[]], [2], 1, False)


def test_the_engine_is_sized_for_what_runs_at_once_and_told_to_draw(tree, monkeypatch):
    tasks = []
    monkeypatch.setattr(job_module.Supervisor, "run", lambda self: tasks.append(self.task))
    monkeypatch.setattr(job_module, "cannot_run", lambda *_: None)  # vLLM need not be installed here
    model = {"name": "m", "source": "random", "weights": "drawn", "path": "model"}
    one = experiments(batches=[2, 4], slots=3, max_model_len=64, backends=[{"backend": "vllm"}])
    data = config_data(experiments=one, model=model, drift={"stacks": []}, max_model_len=512)
    name = "s-vllm-none-default-len64-slots3-s1"
    with pytest.raises(FlexrollError, match="missing"):  # the records that nothing has written
        bench(parse_config(data), name, work=tree.work, raw=tree.raw, out=tree.raw / "o", root=tree.root, stack="s")
    spec = tasks[0].spec
    assert (spec["max_batch"], spec["first_batch"], spec["max_model_len"], spec["dummy"]) == (3, 2, 64, True)


def test_plan_counts_lengths_samples_and_slots(tree):
    def seconds(**changes):
        samplings = {"greedy": {}, "hot": {"temperature": 1}}
        config = parse_config(config_data(experiments=experiments(**changes), samplings=samplings))
        return sum(cell_seconds(cell, True) for cell in make_plan(config, tree.root).cells)

    plain = seconds(batches=[4], new_tokens=8)
    assert seconds(batches=[4], new_tokens={"min": 8, "max": 8}) == pytest.approx(plain)
    assert seconds(batches=[4], new_tokens=8, samples=2, sampling="hot") == pytest.approx(plain)
    assert seconds(batches=[4], new_tokens=8, slots=2) > plain


@pytest.mark.parametrize(
    ("pids", "known", "peak"),
    [([7], 500, 500), ([7], None, 900 - 300), ([], None, None)],
    ids=["told apart", "a container", "no child"],
)
def test_memory_of_an_engine_in_another_process(monkeypatch, pids, known, peak):
    asked = []

    def used(index, ours=None):
        asked.append(ours)
        return 900, known

    monkeypatch.setattr(memory_module, "visible_gpus", lambda: [{"index": 0}])
    monkeypatch.setattr(memory_module, "memory_used", used)
    assert memory_module.device_in_use("cuda") == 900 and memory_module.device_in_use("cpu") is None
    watch = memory_module.MemoryWatch("cuda", lambda: pids, 300)
    watch.sample()
    assert asked[-1] == {os.getpid(), *pids}
    found = watch.result({"weights": 1})
    assert (found.peak_allocated, found.device_total, found.weights) == (peak, 900, 1)


def test_prompts_vary_by_round_where_asked():
    """Round after round the next prompts, from the first one again at the end of the list; warm-up takes the first."""
    prompts = [[i] for i in range(5)]
    for varied, expected in ((True, [[0, 1], [0, 1], [2, 3], [4, 0]]), (False, [[0, 1]] * 4)):
        cell = expand(parse_config(config_data()))[1].model_copy(update={"vary_prompts": varied})
        assert cell.batch == 2
        rounds = [prompts_of_round(cell, prompts, index) for index in (-1, 0, 1, 2)]
        assert [[ids[0] for ids in prompts] for prompts in rounds] == expected
