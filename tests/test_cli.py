"""The command line: one line and exit code 2 for what a user can mend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flexroll import cli
from flexroll.bench import preflight as machine
from flexroll.schema.load import parse_config

TINY = Path(__file__).parents[1] / "models" / "tiny-gsm"
CONFIG = {
    "run": "t",
    "model": {"name": "tiny", "path": "model"},
    "prompts": {"path": "q.json", "field": "q", "count": 2},
    "drift": {"stacks": ["s"]},
    "max_model_len": 128,
    "options": {"fast": {"note": "x"}},
    "experiments": {
        "e": {
            "title": "E",
            "section": "grpo",
            "batches": [2],
            "new_tokens": 16,
            "stacks": ["s"],
            "backends": [{"backend": "flex", "options": ["fast"]}],
        }
    },
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "containers" / "s").mkdir(parents=True)
    (tmp_path / "containers" / "s" / "requirements.in").write_text("")
    (tmp_path / "src").mkdir()
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "q.json").write_text('[{"q": "a"}, {"q": ""}]')
    monkeypatch.setenv("FLEXROLL_ROOT", str(tmp_path))
    monkeypatch.delenv("FLEXROLL_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["flexroll", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def write(tree, change=None):
    data = json.loads(json.dumps(CONFIG))
    if change:
        change(data)
    (tree / "c.yaml").write_text(yaml.safe_dump(data))
    return tree / "c.yaml"


def experiment(data):
    return data["experiments"]["e"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(modle={}), ["unknown key 'modle'", "did you mean 'model'"]),
        (lambda d: experiment(d)["backends"][0].update(backend="flx"), ["unknown backend 'flx'", "'flex'"]),
        (lambda d: experiment(d)["backends"][0].update(options=["fats"]), ["unknown option 'fats'", "'fast'"]),
        (lambda d: experiment(d).update(stacks=["torch9"]), ["unknown stack 'torch9'", "known: s"]),
        (lambda d: d["experiments"].clear(), ["experiments"]),
    ],
)
def test_config_errors_are_one_line(tree, monkeypatch, capsys, change, words):
    code, _, errors = run(monkeypatch, capsys, "plan", "--config", write(tree, change))
    assert code == 2 and errors.count("\n") == 1 and all(word in errors for word in words), errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--config", "none.yaml"], "none.yaml: no such config file"),
        (["plan", "--config", "c.yaml", "--stacks", "s,u"], "unknown stack 'u'; known: s"),
        (["--stack", "u", "plan", "--config", "c.yaml"], "unknown stack 'u'; known: s"),
        (["--stack=s", "plan", "--config", "c.yaml"], "make stack STACK=s"),
        (["nonsense"], "No such command 'nonsense'"),
        (["plan", "--confg", "c.yaml"], "No such option"),
        (["retry", "none"], "no such run"),
        (
            ["prompts", "--config", "c.yaml", "--model", "m.json", "--out", "p.json"],
            "m.json: missing; `flexroll model`",
        ),
        (["bench", "--config", "c.yaml", "--job", "x", "--work", "w", "--raw", "r", "--out", "o"], "no job 'x'"),
        (
            ["bench", "--config", "c.yaml", "--job", "s-flex-none-fast-s1", "--work", "w", "--raw", "r", "--out", "o"],
            "bench needs stack s, but",
        ),
    ],
)
def test_command_errors_are_one_line(tree, monkeypatch, capsys, arguments, words):
    write(tree)
    code, _, errors = run(monkeypatch, capsys, *arguments)
    assert code == 2 and errors.count("\n") == 1 and words in errors, errors


def test_a_corrupt_checkpoint_and_an_empty_prompt(tree, monkeypatch, capsys):
    config = write(tree)
    code, _, errors = run(monkeypatch, capsys, "model", "--config", config, "--out", "w/model.json")
    assert code == 0, errors
    if __import__("importlib.util").util.find_spec("tokenizers"):
        code, _, errors = run(
            monkeypatch, capsys, "prompts", "--config", config, "--model", "w/model.json", "--out", "p"
        )
        assert code == 2 and errors.count("\n") == 1 and "prompt 1 is empty" in errors
    (tree / "model" / "model.safetensors").write_bytes(b"short")
    code, _, errors = run(monkeypatch, capsys, "model", "--config", config, "--out", "w/model.json")
    assert code == 2 and errors.count("\n") == 1 and "not a whole safetensors file" in errors
    shutil.rmtree(tree / "model")
    code, _, errors = run(monkeypatch, capsys, "model", "--config", config, "--out", "w/model.json")
    assert code == 2 and "no such checkpoint folder" in errors


def test_plan_prints_cells_hours_and_gigabytes(tree, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "plan", "--config", write(tree))
    assert code == 0 and "1 cells in 1 jobs" in out and "minutes" in out and "GB" in out and "fast" in out


def test_preflight_names_what_is_missing_and_the_demo(tree, monkeypatch, capsys):
    monkeypatch.setattr(machine, "visible_gpus", list)
    code, _, _ = run(monkeypatch, capsys, "preflight", "--config", write(tree), "--out", "w/preflight.json")
    facts = json.loads((tree / "w" / "preflight.json").read_text())
    assert code == 0 and facts["device_class"] == "cpu" and facts["cores"] >= 1 and facts["disk_free"] > 0
    config = write(tree, lambda d: d.update(requires={"gpu": "B200", "disk_gb": 1e9}))
    code, _, errors = run(monkeypatch, capsys, "preflight", "--config", config, "--out", "w/other.json")
    assert code == 2 and errors.count("\n") == 1 and not (tree / "w" / "other.json").exists()
    assert "needs a B200" in errors and "GB of disk" in errors and "make demo" in errors


def test_what_a_machine_must_have():
    gpu = {"name": "NVIDIA H200", "memory_bytes": 140e9}

    def unmet(requires, gpus):
        return machine.unmet(parse_config(CONFIG | {"requires": requires}), {"gpus": gpus, "disk_free": 5e9})

    assert unmet({"gpu": "any", "gpu_memory_gb": 100}, [gpu]) == unmet({"gpu": "h200"}, [gpu]) == unmet({}, []) == []
    assert "it needs a B200" in unmet({"gpu": "B200"}, [gpu])[0]
    assert "it needs 180 GB" in unmet({"gpu_memory_gb": 180}, [gpu])[0]
    assert "a CUDA GPU" in unmet({"gpu": "any"}, [])[0]
    assert "5 GB of disk free" in unmet({"disk_gb": 6}, [])[0]


def test_a_missing_compiler_warns_only(tree, monkeypatch, capsys):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    code, _, errors = run(monkeypatch, capsys, "preflight", "--config", write(tree), "--out", "w/preflight.json")
    assert (
        code == 0 and "no g++" in errors and json.loads((tree / "w" / "preflight.json").read_text())["compiler"] is None
    )


def test_the_unexpected_is_one_line_with_a_traceback_file(tree, monkeypatch, capsys):
    from flexroll.bench import retry

    def broken(_path):
        raise KeyError("surprise")

    monkeypatch.setattr(retry, "retry", broken)
    code, _, errors = run(monkeypatch, capsys, "retry", "t")
    assert code == 1 and errors.count("\n") == 1 and "KeyError: 'surprise'" in errors
    log = Path(errors.split("traceback: ")[1].rstrip(")\n"))
    assert "in broken" in log.read_text()
    monkeypatch.setenv("FLEXROLL_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["flexroll", "retry", "t"])
    with pytest.raises(KeyError):
        cli.main()


def test_the_package_and_its_command_line_import_no_torch():
    code = (
        "import sys, flexroll.cli, flexroll.provenance, flexroll.bench.job, flexroll.bench.worker\n"
        "import flexroll.bench.model, flexroll.bench.prompts, flexroll.bench.plan_table\n"
        "import flexroll.bench.preflight, flexroll.bench.retry\n"
        "assert not {'torch', 'transformers', 'snakemake'} & set(sys.modules)"
    )
    env = dict(os.environ, PYTHONPATH=str(Path(cli.__file__).parents[1]))
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_version(monkeypatch, capsys, tree):
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert code == 0 and out.strip() == "0.1.0"
