"""The stand-in for Apptainer: what it hands to podman and docker, what it keeps outside, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

DIGEST = "sha256:" + "ab" * 32
# Notes each call; `image inspect` fails with FAULT's words where that is set; `run` does what RUN says; `stop` ends it.
RUNTIME = """#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
case $1 in
  image) [ -z "${FAULT:-}" ] || { echo "$FAULT" >&2; exit 125; } ;;
  run) eval "${RUN:-exit 0}" ;;
  stop) kill "$(cat "$CALLS.pid")" ;;
esac
"""


@pytest.fixture
def place(tmp_path, root, monkeypatch):
    """A folder with a runtime of each name, an image record for podman, and nothing of the caller's environment."""
    for name in ("podman", "docker"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RUNTIME)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("podman", "docker"):
        record = {"name": "torch2.11", "runtime": name, "digest": DIGEST}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def script(root):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("oci_exec", root / "workflow/scripts/oci_exec.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(root, *arguments, name="apptainer", **env):
    return subprocess.run(
        [root / "workflow/bin" / name, *arguments], capture_output=True, text=True, env={**os.environ, **env}
    )


def calls(place, verb="run"):
    """Argument lists of the runtime's calls."""
    lines = (place / "calls").read_text().splitlines() if (place / "calls").exists() else []
    return [line.split() for line in lines if line.split()[:1] == [verb]]


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_snakemake_takes_it_for_apptainer(root, name):
    from packaging.version import parse

    version = call(root, "--version", name=name).stdout
    assert version.startswith("apptainer") and parse(version.split()[-1]) >= parse("1.0.0")


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_the_image_is_run_by_its_digest_in_the_working_folder(place, root, runtime):
    done = call(root, "exec", "--home", str(place), "--cleanenv", f"{runtime}.json", "bash", "-c", "true")
    assert done.returncode == 0, done.stderr
    [line] = calls(place)
    assert DIGEST in line and f"{place}:{place}" in line and f"FLEXROLL_IMAGE={DIGEST}" in line
    assert f"HOME={place}" in line and line[line.index("-w") + 1] == str(place)
    assert ("--user" in line) == (runtime == "docker")


def test_binds_are_nested_from_the_outside_in(place, root):
    call(root, "exec", "--bind", "/a/b:/a/b:ro,/c", "-B", "/a", "podman.json", "bash", "-c", "true")
    [line] = calls(place)
    mounted = [line[i + 1] for i, word in enumerate(line) if word == "-v"]
    assert {"/a:/a", "/a/b:/a/b:ro", "/c:/c", f"{place}:{place}"} == set(mounted)
    assert mounted.index("/a:/a") < mounted.index("/a/b:/a/b:ro")


def test_only_named_variables_reach_the_container(place, root):
    secrets = {"HF_TOKEN": "hf_secret", "PYTHONPATH": "/mine", "APPTAINERENV_WANTED": "geheim", "WANTED": "other"}
    call(root, "exec", "podman.json", "bash", "-c", "true", **secrets)
    [line] = calls(place)
    given = [line[i + 1] for i, word in enumerate(line) if word == "-e"]
    assert sorted(entry.partition("=")[0] for entry in given) == ["FLEXROLL_IMAGE", "HOME", "WANTED"]
    assert not any(value in " ".join(line) for value in ("hf_secret", "/mine", "geheim"))  # ps shows command lines


def test_gpus_come_through_cdi_or_docker(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(script, "CDI", (str(tmp_path / "cdi"),))
    assert script.gpus("podman") == script.gpus("docker") == []
    (tmp_path / "version").touch()
    assert script.gpus("docker") == ["--gpus", "all"]
    with pytest.raises(SystemExit):
        script.gpus("podman")  # a GPU, and no way in
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    assert script.gpus("podman") == ["--device", "nvidia.com/gpu=all"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exec", "none.json", "bash", "-c", "true"], "no image none.json: run `make images`"),
        (["exec", "calls.txt", "bash", "-c", "true"], "is no image record"),
        (["exec", "--overlay", "x", "podman.json", "bash"], "--overlay: this stand-in"),
        (["exec", "--home"], "--home needs a value"),
        (["exec", "podman.json"], "needs an image and a command"),
        (["pull", "docker://x"], "knows --version and exec"),
    ],
)
def test_errors_are_one_line(place, root, arguments, words):
    (place / "calls.txt").write_text("no json")
    done = call(root, *arguments)
    assert done.returncode == 255 and words in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("runtime", "fault", "why"),
    [
        ("podman", f"Error: inspecting object: {DIGEST}: image not known", "it was removed, or built anew elsewhere"),
        ("docker", f"Error: No such image: {DIGEST}", "it was removed, or built anew elsewhere"),
        ("podman", "Error: layer not known", "Error: layer not known"),
        ("docker", "Cannot connect to the Docker daemon", "Cannot connect to the Docker daemon"),
    ],
)
def test_an_image_that_is_gone_is_named(place, root, runtime, fault, why):
    """The workflow has asked before its first job; this is for what happens to an image later."""
    done = call(root, "exec", f"{runtime}.json", "bash", "-c", "true", FAULT=fault)
    assert done.returncode == 255 and not calls(place)
    assert done.stderr == (
        f"flexroll: {runtime} cannot use the image of torch2.11 ({DIGEST[:19]}): {why}; run `make images`\n"
    )


def test_a_missing_runtime_is_named(place, root):
    done = subprocess.run(
        [sys.executable, "-I", root / "workflow/scripts/oci_exec.py", "exec", "podman.json", "bash"],
        capture_output=True,
        text=True,
        env={"PATH": "/nonexistent"},
    )
    assert done.returncode == 255 and "podman is not installed" in done.stderr


def test_the_exit_code_is_the_commands(place, root):
    assert call(root, "exec", "podman.json", "bash", RUN="exit 7").returncode == 7


@pytest.mark.parametrize("how", ["signal", "caller killed"])
def test_no_container_is_left_behind(place, root, how):
    """Asked to stop, or with Snakemake gone by kill -9, it ends its container."""
    env = {**os.environ, "RUN": 'echo $$ > "$CALLS.pid"; exec sleep 60'}
    line = [root / "workflow/bin/apptainer", "exec", "podman.json", "bash"]
    if how == "signal":
        process = caller = subprocess.Popen(line, env=env)
    else:
        caller = subprocess.Popen(
            [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *line], env=env
        )
        process = None
    held = place / "calls.pid"
    wait_until(lambda: held.exists() and held.read_text())
    container = int(held.read_text())
    caller.send_signal(signal.SIGTERM if process else signal.SIGKILL)
    caller.wait()
    wait_until(lambda: not alive(container))
    assert calls(place, "stop")
    if process:
        assert process.returncode == 128 + signal.SIGTERM


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_the_first_process_hands_signals_on_and_gives_the_commands_code(script, tmp_path):
    """As it is process 1 of a container it must not end before its command, and its code is the command's."""
    body = script.INIT.replace("kill -TERM -1", 'kill -TERM "$job"')  # here it is not process 1: not all processes
    line = ["bash", "-c", body, "flexroll", "bash", "-c"]
    assert subprocess.run([*line, "exit 5"]).returncode == 5
    tidy = f"trap 'sleep 0.3; touch {tmp_path}/tidy; exit 3' TERM; touch {tmp_path}/on; while :; do sleep 0.05; done"
    process = subprocess.Popen([*line, tidy])
    wait_until((tmp_path / "on").exists)
    process.terminate()
    assert process.wait(20) == 3 and (tmp_path / "tidy").exists()
