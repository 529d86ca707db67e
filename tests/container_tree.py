"""What the tests that really run containers share: a base image without a registry, a copy of the tree, a small run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = "models/tiny-gsm"  # copied: a link would lead outside of what is mounted
CONFIG = """\
run: RUN
title: containers
model: {name: tiny_gsm, source: local, path: models/tiny-gsm, dtype: float32}
prompts: {source: file, path: models/tiny-gsm/gsm_test.json, field: q, format: chat, count: 4, max_tokens: 256}
adapter: {rank: 4, alpha: 8}
max_model_len: 256
repeats: {sessions: 1, rounds: 1, warmup_rounds: 0}
limits: {start_s: 120, cell_s: 60}
drift: {cycles: 2, stacks: []}
options:
  eager: {flex: {compile: false}}
experiments:
  batch_sweep_greedy:
    title: One batch, greedy
    section: batch_sweep
    batches: [2]
    new_tokens: 8
    stacks: STACKS
    backends:
      - {backend: transformers_generate}
      - {backend: flex, options: [eager]}
"""


def base_archive(root: Path) -> Path:
    """A Debian with Python as a tar file, made once; skips the test where it cannot be made."""
    path = root / ".cache" / "test-base" / "rootfs.tar"
    if not path.exists():
        if os.geteuid() or not shutil.which("mmdebstrap"):
            pytest.skip("no base image: it takes root and mmdebstrap (apt-get install mmdebstrap)")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.tar")
        packages = "ca-certificates,python3,python3-venv"
        line = ["mmdebstrap", "--variant=minbase", "--skip=output/dev", f"--include={packages}", "bookworm", str(part)]
        subprocess.run(line, check=True, capture_output=True)
        part.replace(path)
    return path


def write_config(tree: Path, run: str, stacks: list[str]) -> Path:
    path = tree / f"{run}.yaml"
    path.write_text(CONFIG.replace("RUN", run).replace("STACKS", json.dumps(stacks)))
    return path


def snakemake_line(profile: str, config: Path, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", "snakemake", "--workflow-profile", f"profiles/{profile}", "--cores", "all"]
    return [*line, "--configfile", str(config), *arguments]


def snakemake(tree: Path, profile: str, config: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """(exit code, output); with a PYTHONPATH that must stay outside of the images."""
    (tree / "leak").mkdir(exist_ok=True)
    (tree / "leak/torch.py").write_text("raise SystemExit('the PYTHONPATH of the caller leaked')\n")
    done = subprocess.run(
        snakemake_line(profile, config, *arguments),
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(tree / "leak"), **env},
    )
    return done.returncode, done.stdout


def images(tree: Path, runtime: str, base: str, *names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexroll", "images", *names, "--runtime", runtime, "--base", base],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "FLEXROLL_ROOT": str(tree)},
    )
    assert done.returncode == 0, done.stdout[-3000:]


def image_of(tree: Path, runtime: str, name: str) -> dict:
    return json.loads((tree / ".images" / runtime / f"{name}.json").read_text())


def raw_records(tree: Path, run: str) -> dict[str, dict]:
    """{job: record} of the run's cells."""
    paths = (tree / "results" / run / "raw").glob("*/*.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths if path.name != "job.json"}


def check_records(tree: Path, run: str, runtime: str, stacks: list[str]) -> None:
    """Each cell was measured in its own stack's image, as the records say; the document links what is in it."""
    records = raw_records(tree, run)
    assert sorted(r["cell"]["stack"] for r in records.values()) == sorted(stacks * 2)
    for job, record in records.items():
        image, environment = image_of(tree, runtime, record["cell"]["stack"]), record["environment"]
        assert record["status"] == "ok", (job, record["reason"])
        assert environment["image"] == image["digest"]
        assert environment["packages"]["torch"] == image["torch"]
        assert image["torch"].startswith(record["cell"]["stack"].removeprefix("torch"))
    assert len({image_of(tree, runtime, stack)["digest"] for stack in stacks}) == len(stacks)
    document = (tree / "results" / run / "results.md").read_text()
    for stack in stacks:
        digest = image_of(tree, runtime, stack)["digest"]
        bill = f"sbom/{stack}-{digest.removeprefix('sha256:')[:12]}.cdx.json"
        assert digest in document and f"({bill})" in document
        assert json.loads((tree / "results" / run / bill).read_text())["bomFormat"] == "CycloneDX"
