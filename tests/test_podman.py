"""Podman for real: images from the Containerfiles, a run of both stacks in them, killed and resumed, and its faults.

The images hold everything their locks name, torch's GPU libraries included. There is no GPU: a CDI specification stands
in for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("snakemake")

from container_tree import (
    MODEL,
    base_archive,
    check_records,
    image_of,
    images,
    raw_records,
    snakemake,
    snakemake_line,
    write_config,
)
from tree_copy import copy_tree

STACKS = ["torch2.11", "torch2.9.1"]
BASE = "localhost/flexroll-test-base:bookworm"
RUN = "containers"
BUILD_BYTES = 45e9  # two images, and for a while the second one twice more
CDI = Path("/etc/cdi/flexroll-stand-in.yaml")
SPECIFICATION = """\
cdiVersion: "0.3.0"
kind: nvidia.com/gpu
devices:
  - name: all
    containerEdits:
      env: [FLEXROLL_STAND_IN_GPU=0]
      deviceNodes: [{path: /dev/flexroll-stand-in-gpu, type: c, major: 1, minor: 3}]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def podman(root):
    """Podman that can run a container here, with a base image; else the tests are skipped and say why."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    archive = base_archive(root)
    store = subprocess.run(["podman", "info", "--format", "{{.Store.GraphRoot}}"], capture_output=True, text=True)
    free = shutil.disk_usage(store.stdout.strip() or "/").free
    if free < BUILD_BYTES:
        pytest.skip(f"building both stacks takes {BUILD_BYTES / 1e9:.0f} GB at times, {free / 1e9:.0f} are free")
    with pytest.MonkeyPatch.context() as patch:
        if subprocess.run(["podman", "image", "exists", BASE]).returncode:
            subprocess.run(["podman", "import", str(archive), BASE], check=True, capture_output=True)
        line = ["podman", "run", "--rm", BASE, "true"]
        if subprocess.run(line, capture_output=True).returncode:
            patch.setenv("CONTAINERS_CONF", str(root / ".ci/containers.conf"))
            done = subprocess.run(line, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"podman runs no container here: {done.stderr.strip()[-200:]}")
        yield "podman"


@pytest.fixture(scope="module")
def gpu(podman):
    """A CDI specification that stands in for a GPU's, where there is no real one."""
    if os.geteuid() or list(CDI.parent.glob("*")):
        pytest.skip("a stand-in CDI specification takes root and a machine that has none")
    CDI.parent.mkdir(parents=True, exist_ok=True)
    CDI.write_text(SPECIFICATION)
    yield
    CDI.unlink()


@pytest.fixture(scope="module")
def tree(podman, gpu, root, tmp_path_factory):
    """A copy of the tree with its images, on which the run was killed after its first engine and then ended."""
    tree = copy_tree(root, tmp_path_factory.mktemp("podman"), MODEL)
    images(tree, podman, BASE)
    config = write_config(tree, RUN, STACKS)
    line = snakemake_line(podman, config, "--nolock")
    with (tree / "first.log").open("w") as log:
        first = subprocess.Popen(line, cwd=tree, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: manifests(tree) or first.poll() is not None, 300)
    wait_until(lambda: containers() or first.poll() is not None, 60)  # the next job's
    assert first.poll() is None, (tree / "first.log").read_text()
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not containers(), 60)
    kept = {path: path.read_bytes() for path in (tree / "results" / RUN / "raw").glob("*/*.json")}
    code, output = snakemake(tree, podman, config, "--nolock")
    assert code == 0, output
    (tree / "kept.json").write_text(json.dumps({str(path): text.decode() for path, text in kept.items()}))
    return tree


def manifests(tree):
    return list((tree / "results" / RUN / "raw").glob("*/job.json"))


def containers():
    line = ["podman", "ps", "--quiet", "--filter", "name=flexroll-"]
    return subprocess.run(line, capture_output=True, text=True).stdout.split()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def inside(tree, command, *options, **env):
    """Run a command in the image of torch2.11 as the workflow would."""
    line = [tree / "workflow/bin/apptainer", "exec", "--home", str(tree), "--nv", "--cleanenv", *options]
    line += [f"{tree}/.images/podman/torch2.11.json", "bash", "-c", command]
    return subprocess.run(line, cwd=tree, capture_output=True, text=True, env={**os.environ, **env})


def test_each_cell_ran_in_its_own_stacks_image(tree):
    check_records(tree, RUN, "podman", STACKS)


def test_a_kill_in_mid_run_loses_nothing_and_doubles_nothing(tree):
    """What was measured before kill -9 is there unchanged; no container outlived it (the fixture waits for that)."""
    kept = json.loads((tree / "kept.json").read_text())
    assert kept
    for path, text in kept.items():
        assert Path(path).read_text() == text
    assert len(raw_records(tree, RUN)) == 4


def test_no_profile_makes_finished_cells_stale(tree):
    for profile in ("native", "podman", "default"):
        code, output = snakemake(tree, profile, tree / f"{RUN}.yaml", "--dry-run", "--nolock")
        assert code == 0 and "Nothing to be done" in output, output


def test_what_a_container_sees(tree):
    """The stand-in GPU, the tree with src read-only; nothing of the caller's Python, and no secret."""
    shown = inside(tree, "env; ls /dev/flexroll-stand-in-gpu", HF_TOKEN="hf_secret", PYTHONPATH="/mine")
    assert shown.returncode == 0, shown.stderr
    env = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    assert env["FLEXROLL_STAND_IN_GPU"] == "0" and env["HOME"] == str(tree)
    assert not {"HF_TOKEN", "PYTHONPATH", "CONTAINERS_CONF"} & env.keys()
    src = f"{tree}/src"
    locked = inside(tree, f"touch {src}/x", "--bind", f"{src}:{src}:ro")
    assert locked.returncode == 1 and "Read-only" in locked.stderr
    assert inside(tree, "command -v g++ && python -c 'import torch'").returncode == 0


def test_an_image_of_another_lock_is_refused_before_any_job(tree):
    lock = tree / "containers/torch2.9.1/cpu.lock"
    before = lock.read_text()
    lock.write_text(before + "# a change\n")
    try:
        code, output = snakemake(tree, "podman", tree / f"{RUN}.yaml", "--nolock")
        assert code != 0 and "made from another containers/torch2.9.1/cpu.lock: run `make images`" in output
        code, output = snakemake(tree, "native", tree / f"{RUN}.yaml", "--nolock", "--dry-run")
        assert "torch2.9.1-flex" in output and "torch2.11-flex-none-eager-s1/job.json\n    log" not in output
    finally:
        lock.write_text(before)
    done = inside(tree, "flexroll --stack torch2.9.1 plan --config config.yaml", APPTAINERENV_FLEXROLL_ROOT=str(tree))
    assert done.returncode == 2 and "this is the image of torch2.11" in done.stderr


def test_an_image_that_was_removed_is_named_before_any_job(tree):
    path = tree / ".images/podman/report.json"
    before = path.read_text()
    path.write_text(before.replace(image_of(tree, "podman", "report")["digest"], "sha256:" + "0" * 64))
    document = tree / "results" / RUN / "results.md"
    kept = document.read_bytes()
    document.unlink()
    try:
        code, output = snakemake(tree, "podman", tree / f"{RUN}.yaml", "--nolock")
        assert code != 0 and "podman has lost the image of report: run `make images`" in output
        assert "rule report:" not in output and not document.exists()
    finally:
        path.write_text(before)
    code, output = snakemake(tree, "podman", tree / f"{RUN}.yaml", "--nolock")
    assert code == 0, output
    assert document.read_bytes() == kept


def test_a_full_disk_ends_a_build_in_one_line(tree, root, tmp_path, monkeypatch):
    """Podman's storage on 600 MB of memory: the base fits, the report's packages do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        (tmp_path / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{disk}/graph"\nrunroot = "{tmp_path}/run"\n'
        )
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
        monkeypatch.setenv("TMPDIR", str(disk))
        subprocess.run(["podman", "import", str(base_archive(root)), BASE], check=True, capture_output=True)
        small = copy_tree(root, tmp_path / "tree", MODEL)
        with pytest.raises(AssertionError, match="no space left on the device; make room"):
            images(small, "podman", BASE, "report")
        assert not (small / ".images/podman/report.json").exists()
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["podman", "rmi", "--all", "--force"], capture_output=True)
        subprocess.run(["umount", "-l", disk])
