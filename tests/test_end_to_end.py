"""The smoke preset for real: every rule, on the embedded model, killed on its way and taken up again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("snakemake")

import psutil

from tree_copy import copy_tree

GENERATE = "torch2.11-transformers_generate-none-default-s1"
FLEX = "torch2.11-flex-none-eager-s1"
COMMAND = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/native", "--nolock", "--cores", "all"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(__file__).parents[1] / ".stacks/torch2.11/flexroll-stack.json").exists(),
        reason="stack torch2.11 is not set up: make stack STACK=torch2.11",
    ),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A copy of the tree on which the smoke preset was killed as soon as a first engine was measured."""
    tree = copy_tree(root, tmp_path_factory.mktemp("smoke"))
    for linked in ("models", ".stacks"):
        (tree / linked).symlink_to(root / linked)
    first_try = subprocess.Popen(
        [*COMMAND, "--config", "preset=smoke"],
        cwd=tree,
        stdout=(tree / "first.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    manifests = [tree / "results/smoke/raw" / job / "job.json" for job in (GENERATE, FLEX)]
    while not any(path.exists() for path in manifests) and first_try.poll() is None:
        assert time.monotonic() < deadline, (tree / "first.log").read_text()
        time.sleep(0.1)
    kill_tree(first_try.pid)
    first_try.wait()
    return tree


def kill_tree(pid: int) -> None:
    """kill -9 of a process and all it started: what a power cut leaves."""
    family = [psutil.Process(pid)]
    family += family[0].children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def smoke(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments, "--config", "preset=smoke"], cwd=tree, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def record(tree: Path, job: str) -> Path:
    return tree / "results/smoke/raw" / job / "batch_sweep_greedy-greedy-b2.json"


def test_killed_run_is_taken_up_again(tree: Path) -> None:
    files = {path: path.read_bytes() for path in tree.glob("results/smoke/raw/*/batch_*.json")}
    # What was skipped is asked again: the reason may be gone.
    measured = {path: content for path, content in files.items() if json.loads(content)["status"] == "ok"}
    assert measured, (tree / "first.log").read_text()
    smoke(tree)
    for path, content in measured.items():
        assert path.read_bytes() == content, f"{path.name} was measured twice"
    for job in (GENERATE, FLEX):
        data = json.loads(record(tree, job).read_text())
        assert data["status"] == "ok", data["reason"]
        assert [r["tokens"] for r in data["rounds"]] == [2 * 8]
        assert data["environment"]["image"] == "not containerised"
    skipped = json.loads(record(tree, "torch2.11-unsloth-none-default-s1").read_text())
    assert skipped["status"] in ("skipped", "ok") and (skipped["status"] == "ok" or skipped["reason"])
    assert json.loads((tree / "results/smoke/drift/torch2.11.json").read_text())["base_identical"] is True
    assert (tree / "results/smoke/table.csv").read_text().count("\n") == 4
    document = (tree / "results/smoke/results.md").read_text()
    sections = [part.strip() for part in document.split("\n## ")[1:]]
    assert len(sections) >= 8
    assert all("\n" in part for part in sections), "an empty section"
    assert list((tree / "results/smoke/figures").glob("*.svg"))


def test_nothing_is_left_to_do(tree: Path) -> None:
    assert "Nothing to be done" in smoke(tree)


def test_half_a_record_is_measured_again_and_loses_no_other(tree: Path) -> None:
    path = record(tree, FLEX)
    other = record(tree, GENERATE).read_bytes()
    path.write_text(path.read_text()[:200])
    flexroll = [sys.executable, "-m", "flexroll"]
    environment = {**os.environ, "FLEXROLL_ROOT": str(tree)}
    done = subprocess.run(
        [*flexroll, "retry", "smoke"], cwd=tree, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert FLEX in done.stdout
    smoke(tree)
    assert json.loads(path.read_text())["status"] == "ok"
    assert record(tree, GENERATE).read_bytes() == other


def test_compile_caches_are_filled_by_a_step_of_their_own(tree: Path) -> None:
    preset = (tree / "workflow/presets/smoke.yaml").read_text()
    (tree / "warm.yaml").write_text(
        preset.replace("run: smoke", "run: warm").replace("options: [eager]", "options: [default]")
    )
    told = tree / "work/warm/warmup/torch2.11-flex-none-default.json"
    wanted = str(told.relative_to(tree))
    done = subprocess.run(
        [*COMMAND, wanted, "--configfile", "warm.yaml"], cwd=tree, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(told.read_text())["status"] == "ok"
    assert any((tree / ".cache").glob("torch2.11-*/inductor/*"))
    assert not (tree / "results/warm/raw").exists()  # nothing was measured
