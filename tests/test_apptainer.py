"""Apptainer for real: images from image.def, a workflow that runs in them, a SIF that is not the one recorded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("snakemake")

from container_tree import MODEL, base_archive, check_records, snakemake, write_config
from flexroll.errors import FlexrollError
from flexroll.images.record import REPORT, ImageRecord, build_inputs, container, file_digest, problem, read, record_path
from flexroll.images.runtimes import find_runtime
from flexroll.schema.records import write_json
from tree_copy import copy_tree

STACK = "torch2.11"


@pytest.fixture(scope="module")
def base(root: Path) -> Iterator[Path]:
    """A Debian with Python as a sandbox folder, from a tar that later runs find again: no registry is needed."""
    try:
        find_runtime(root, "apptainer")
    except FlexrollError as error:
        pytest.skip(str(error))
    tar = base_archive(root)
    with workspace(root, "base") as folder:
        # As one owner's: in the user namespace of a build its root could not read what belongs to others.
        subprocess.run(["tar", "-xf", tar, "-C", folder, "--no-same-owner", "--exclude=./dev/*"], check=True)
        yield folder


@pytest.fixture(scope="module")
def tree(root: Path, base: Path) -> Iterator[Path]:
    """A copy of the tree in which the images of the report and of one stack were built."""
    with workspace(root, "tree") as tree, workspace(root, "build") as build:
        copy_tree(root, tree, MODEL)
        line = [sys.executable, "-P", "-m", "flexroll", "images", REPORT, STACK]
        done = subprocess.run(
            [*line, "--runtime", "apptainer", "--variant", "cpu", "--base", base],
            cwd=tree,
            env={**os.environ, "FLEXROLL_ROOT": str(tree), "APPTAINER_TMPDIR": str(build)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2400,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert not list(build.iterdir())
        yield tree


@contextmanager
def workspace(root: Path, name: str) -> Iterator[Path]:
    """An empty folder for a time, on the tree's own disk: it gets gigabytes, and /tmp may be memory."""
    folder = root / ".cache" / "test-apptainer" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_small(tree: Path, run: str) -> tuple[int, str]:
    """(exit code, output) of the small workflow as run `run`."""
    return snakemake(tree, "apptainer", write_config(tree, run, [STACK]), "--nolock")


def refused(tree: Path, run: str) -> str:
    """The line in which a workflow names its images as the reason for running nothing."""
    code, output = run_small(tree, run)
    assert code != 0, output
    assert not (tree / "work" / run).exists() and not (tree / "results" / run / "raw").exists(), output
    lines = [line.strip() for line in output.splitlines() if "make images" in line]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "torch"), [(REPORT, "any", None), (STACK, "cpu", "2.11.0")])
def test_built_and_recorded(tree: Path, base: Path, name: str, variant: str, torch: str | None) -> None:
    record = read(tree, "apptainer", name)
    assert record is not None
    sif = tree / record.reference
    assert sif == container(tree, "apptainer", name)
    assert (record.digest, record.size_bytes) == (file_digest(sif), sif.stat().st_size)
    assert (record.variant, record.torch, record.base) == (variant, torch, str(base))
    parts = json.loads((tree / record.sbom).read_text())["components"]
    assert ("torch" in {part["name"] for part in parts}) == (torch is not None)
    assert problem(tree, "apptainer", name, "cpu") is None


@pytest.mark.slow
def test_nothing_of_the_build_is_left(tree: Path) -> None:
    sif = container(tree, "apptainer", REPORT)
    line = ["apptainer", "exec", "--cleanenv", "--containall", "--no-home", sif, "sh", "-c"]
    done = subprocess.run(
        [*line, "ls -d /inputs /run/secrets /root/.cache /opt/flexroll; ls -A /var/cache/uv"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["/opt/flexroll"], done.stdout + done.stderr


@pytest.mark.slow
def test_workflow_runs_in_the_images(tree: Path) -> None:
    code, output = run_small(tree, "inside")
    assert code == 0, output
    check_records(tree, "inside", "apptainer", [STACK])
    code, output = run_small(tree, "inside")
    assert code == 0 and "Nothing to be done" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("change", ["other bytes", "more bytes", "gone"])
def test_changed_sif_runs_nothing(tree: Path, change: str) -> None:
    sif = container(tree, "apptainer", REPORT)
    whole = sif.read_bytes()
    times = sif.stat()
    try:
        if change == "gone":
            sif.unlink()
        else:
            sif.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if change == "other bytes" else whole + b"\0")
        line = refused(tree, "refused")
        assert f".images/apptainer/{REPORT}.sif is {'gone' if change == 'gone' else 'not the file'}" in line
    finally:
        sif.write_bytes(whole)
        sif.chmod(times.st_mode)
        os.utime(sif, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert problem(tree, "apptainer", REPORT, "cpu") is None


@pytest.fixture
def recorded(tmp_path: Path, root: Path) -> tuple[Path, Path]:
    """(a tree, the SIF of its one image), made by no Apptainer."""
    shutil.copytree(root / "containers", tmp_path / "containers")
    sif = container(tmp_path, "apptainer", REPORT)
    sif.parent.mkdir(parents=True)
    sif.write_bytes(b"a SIF")
    record = ImageRecord(
        name=REPORT,
        variant="any",
        runtime="apptainer",
        runtime_version="1.4.5",
        reference=str(sif.relative_to(tmp_path)),
        digest=f"sha256:{hashlib.sha256(b'a SIF').hexdigest()}",
        inputs=build_inputs(tmp_path, "apptainer", REPORT, "any"),
        base="base",
        size_bytes=5,
        created="2026-01-01T00:00:00+00:00",
        build_s=1.0,
        python="3.12.1",
        sbom="none",
    )
    path = record_path(tmp_path, "apptainer", REPORT)
    write_json(path, record.model_dump_json())
    age(path, 100)
    age(sif, 200)
    return tmp_path, sif


def age(path: Path, seconds: float) -> None:
    """Make the file as old as that."""
    moment = path.stat().st_ctime - seconds
    os.utime(path, (moment, moment))


def test_sif_as_recorded(recorded: tuple[Path, Path]) -> None:
    tree, sif = recorded
    assert problem(tree, "apptainer", REPORT, "cpu") is None
    age(sif, 0)  # as in a copied tree
    assert problem(tree, "apptainer", REPORT, "cpu") is None


@pytest.mark.parametrize("content", [b"another", b"B SIF"])
def test_sif_written_after_its_record(recorded: tuple[Path, Path], content: bytes) -> None:
    tree, sif = recorded
    sif.write_bytes(content)
    found = problem(tree, "apptainer", REPORT, "cpu")
    assert found == f".images/apptainer/{REPORT}.sif is not the file that was recorded"


def test_sif_is_read_only_where_it_is_newer(recorded: tuple[Path, Path]) -> None:
    """Gigabytes at every start would take as long as the workflow's own."""
    tree, sif = recorded
    sif.write_bytes(b"B SIF")
    age(sif, 200)
    assert problem(tree, "apptainer", REPORT, "cpu") is None


def test_sif_gone(recorded: tuple[Path, Path]) -> None:
    tree, sif = recorded
    sif.unlink()
    assert problem(tree, "apptainer", REPORT, "cpu") == f".images/apptainer/{REPORT}.sif is gone"
