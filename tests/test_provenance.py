"""What changes a hash, and what does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flexroll import launch, provenance
from flexroll.bench import device
from flexroll.errors import FlexrollError
from flexroll.images import here
from flexroll.schema.cells import expand, jobs
from flexroll.schema.load import parse_config

FILES = {
    "flexroll/__init__.py": "import importlib\n\ndef f(name):\n    return importlib.import_module('flexroll.engine')\n",
    "flexroll/a.py": '"""Doc."""\nimport flexroll.b\nX = 1\n',
    "flexroll/b.py": "def f():\n    '''Doc.'''\n    from .deep import inner\n    return inner.Y\n",
    "flexroll/deep/__init__.py": "",
    "flexroll/deep/inner.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flexroll import typed\nY = 2\n"
    ),
    "flexroll/typed.py": "Z = 3\n",
    "flexroll/engine.py": "import torch\n",
}


@pytest.fixture
def src(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "src"


def edit(src: Path, name: str, text: str) -> str:
    (src / "flexroll" / name).write_text(text)
    return provenance.source_hash("flexroll.a", src=src)


def test_imports_are_followed_at_any_depth_and_by_statement_only(src):
    found = set(provenance.imported_modules("flexroll.a", src=src))
    assert found == {"flexroll", "flexroll.a", "flexroll.b", "flexroll.deep", "flexroll.deep.inner"}


def test_comments_docstrings_and_layout_do_not_count_code_does(src):
    before = provenance.source_hash("flexroll.a", src=src)
    assert edit(src, "a.py", '"""Other words."""\n# a comment\nimport flexroll.b\n\n\nX = (\n    1\n)\n') == before
    assert edit(src, "engine.py", "import torch, os\n") == before
    assert edit(src, "typed.py", "Z = 4\n") == before
    assert edit(src, "deep/inner.py", FILES["flexroll/deep/inner.py"].replace("2", "20")) != before
    assert edit(src, "deep/inner.py", FILES["flexroll/deep/inner.py"]) == before
    assert edit(src, "a.py", 'import flexroll.b\nX = "1"\n') != before


def test_unknown_roots_and_broken_code_are_one_line(src):
    with pytest.raises(FlexrollError, match=r"no module flexroll\.c under"):
        provenance.source_hash("flexroll.c", src=src)
    (src / "flexroll" / "b.py").write_text("def f(:\n")
    with pytest.raises(FlexrollError, match=r"b\.py:1: not valid Python"):
        provenance.source_hash("flexroll.a", src=src)


def test_a_backends_hash_holds_its_own_code_and_no_other_layers():
    found = set(provenance.imported_modules("flexroll.backends.vllm", "flexroll.bench.worker"))
    assert "flexroll.bench.memory" in found and "flexroll.schema.records" in found
    layers = {name.split(".")[1] for name in found if "." in name}
    assert not layers & {"engine", "analysis", "report", "cli", "provenance", "launch"}
    assert not found & {"flexroll.backends.flex", "flexroll.bench.job", "flexroll.bench.plan", "flexroll.bench.prompts"}


def make_root(root: Path) -> Path:
    folder = root / "containers" / "s"
    folder.mkdir(parents=True)
    (folder / "requirements.in").write_text("torch\n")
    (folder / "cpu.lock").write_text("torch==1\n")
    return folder


def one_job(**experiment):
    data = {
        "run": "t",
        "model": {"name": "m", "path": "m"},
        "prompts": {"path": "q.json"},
        "drift": {"stacks": ["s"]},
        "experiments": {
            "e": {
                "title": "E",
                "section": "grpo",
                "batches": [1, 2],
                "stacks": ["s"],
                "backends": [{"backend": "transformers_generate"}],
            }
            | experiment
        },
    }
    (job,) = jobs(expand(parse_config(data)))
    return job


def test_a_cells_key_changes_with_what_makes_it_stale(tmp_path):
    folder = make_root(tmp_path)
    cell = one_job().cells[0]
    keys = [provenance.cell_key(tmp_path, cell, "cpu")]
    assert keys[0] == provenance.cell_key(tmp_path, cell, "cpu")
    keys.append(provenance.cell_key(tmp_path, one_job(new_tokens=7).cells[0], "cpu"))
    keys.append(provenance.cell_key(tmp_path, cell, "cpu", {"model": "x"}))
    (folder / "cpu.lock").write_text("torch==2\n")
    keys.append(provenance.cell_key(tmp_path, cell, "cpu"))
    (folder / "Containerfile").write_text("FROM x\n")
    keys.append(provenance.cell_key(tmp_path, cell, "cpu"))
    (folder / "cuda.lock").write_text("torch==2\n")
    keys.append(provenance.cell_key(tmp_path, cell, "NVIDIA H200"))
    keys.append(provenance.cell_key(tmp_path, cell, "NVIDIA B200"))
    assert len(set(keys)) == len(keys)


def test_a_title_is_no_reason_and_a_new_cell_changes_the_job(tmp_path):
    make_root(tmp_path)
    key = provenance.job_key(tmp_path, one_job(), "cpu")
    assert provenance.job_key(tmp_path, one_job(title="Other"), "cpu") == key
    assert provenance.job_key(tmp_path, one_job(batches=[1, 2, 4]), "cpu") != key


def test_a_missing_lock_says_how_to_write_it(tmp_path):
    make_root(tmp_path)
    with pytest.raises(FlexrollError, match=r"stack 's' has no cuda\.lock .*make lock"):
        provenance.lock_hash(tmp_path, "s", "NVIDIA H200")


def test_visible_devices():
    gpus = [{"index": i, "uuid": f"GPU-{i}a", "name": f"n{i}"} for i in range(3)]
    assert [g["index"] for g in device._visible(gpus, None)] == [0, 1, 2]
    assert [g["index"] for g in device._visible(gpus, "2,0")] == [2, 0]
    assert [g["index"] for g in device._visible(gpus, "GPU-1a")] == [1]
    assert device._visible(gpus, "") == device._visible(gpus, "-1,0") == []


def test_no_git_is_no_error(tmp_path):
    assert provenance.git_state(tmp_path) == (None, None)


def test_the_stack_of_an_interpreter_is_its_stamp(tmp_path, monkeypatch):
    make_root(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(here, "IMAGE_FILE", tmp_path / "image.json")
    assert launch.running_stack() is None
    made_from = {"stack": "s", "variant": "cpu", "inputs": provenance.image_inputs(tmp_path, "s", "cpu")}
    (tmp_path / "image.json").write_text(json.dumps(made_from))
    assert launch.running_stack() == "s"
    launch.enter_stack("s", tmp_path, ["plan"])  # already there: returns
    with pytest.raises(FlexrollError, match="bench needs stack t, but this is stack s"):
        launch.require_stack("t", "bench")


def test_entering_a_stack(tmp_path, monkeypatch):
    make_root(tmp_path)
    monkeypatch.setattr(launch, "running_stack", lambda: None)
    with pytest.raises(FlexrollError, match="unknown stack 'u'; known: s"):
        launch.enter_stack("u", tmp_path, [])
    with pytest.raises(FlexrollError, match="is not set up; run `make stack STACK=s`"):
        launch.enter_stack("s", tmp_path, [])
    python = tmp_path / ".stacks" / "s" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(FlexrollError, match="set-up of stack s did not finish"):
        launch.enter_stack("s", tmp_path, [])
    (tmp_path / ".stacks" / "s" / launch.STAMP).write_text(json.dumps({"stack": "s"}))
    called = []
    monkeypatch.setattr(launch.os, "execve", lambda *arguments: called.append(arguments))
    launch.enter_stack("s", tmp_path, ["plan", "--config", "c"])
    assert called[0][1] == [str(python), "-m", "flexroll", "plan", "--config", "c"]
    assert called[0][2]["PYTHONNOUSERSITE"] == "1"
