"""Set up the environments of this tree: `setup.py [driver] [stack ...] [--all]`. Standard library only.

The driver environment is `.venv` (requirements.lock), a stack's is `.stacks/<stack>` (containers/<stack>/cpu.lock, or
cuda.lock where there is an NVIDIA GPU). Every install is hash-checked. A stamp, written last, holds the lock's hash: an
environment whose stamp is right is left alone, one whose installation was cut short is built again.
"""

from __future__ import annotations

import argparse
import ctypes.util
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / ".venv"
STAMP = "flexroll-stack.json"
PYTHONS = ((3, 11), (3, 13))  # oldest and newest Python that the locks were made for
LAUNCHER = """#!/bin/sh
# The driver environment's launcher: no user packages, no PYTHONPATH, no current folder on sys.path.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
exec "$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)/python" -P -m flexroll "$@"
"""


class SetupError(Exception):
    """A problem the user can mend; the message is one line and says how."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def clean_environment() -> None:
    """Nothing of the caller's Python may leak in: other folders, user packages, another active environment."""
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_USER", "PIP_PREFIX"):
        os.environ.pop(name, None)
    os.environ.update(PYTHONNOUSERSITE="1", UV_SYSTEM_CERTS="1", UV_PYTHON_DOWNLOADS="never")
    os.environ.setdefault("UV_HTTP_TIMEOUT", "180")


def version_of(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter, None where it cannot run."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True
        )
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError):
        return None


def base_python() -> str:
    """An interpreter of a version the locks hold for: the one running, else a python3.x on PATH."""
    wanted = os.environ.get("FLEXROLL_PYTHON")
    names = [wanted] if wanted else [sys.executable, "python3.13", "python3.12", "python3.11"]
    for name in names:
        found = shutil.which(name)
        version = version_of(found) if found else None
        if version and PYTHONS[0] <= version <= PYTHONS[1]:
            return found
    have = ".".join(map(str, sys.version_info[:2]))
    raise SetupError(f"flexroll needs Python 3.11, 3.12 or 3.13 and found {have}: install one, or set FLEXROLL_PYTHON")


def bootstrap_uv(python: str) -> str:
    """uv: the pinned one of `.venv`, else the one on PATH, else installed with pip, hash-checked, into `.venv`."""
    pinned = DRIVER / "bin" / "uv"
    if pinned.exists():
        return str(pinned)
    found = shutil.which("uv")
    if found:
        return found
    say("uv is not installed: bootstrapping it into .venv with pip")
    pip = [str(DRIVER / "bin" / "python"), "-m", "pip"]
    if subprocess.run([python, "-m", "venv", "--clear", str(DRIVER)], capture_output=True).returncode != 0:
        # Debian keeps ensurepip in a package of its own; a pip of the system can still install into the environment.
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", str(DRIVER)], check=True)
        pip = [python, "-m", "pip", "--python", str(DRIVER / "bin" / "python")]
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            shutil.rmtree(DRIVER, ignore_errors=True)
            raise SetupError(
                "this Python has neither ensurepip nor pip: `apt-get install python3-venv`, or put uv on PATH"
            )
    block = re.search(r"^uv==.*?(?=^\S)", (ROOT / "requirements.lock").read_text(), re.M | re.S)
    if block is None:
        raise SetupError("requirements.lock holds no uv: run `make lock` on a machine that has uv")
    only = DRIVER / "uv.lock.txt"
    only.write_text(block.group())
    run([*pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(only)], "installing uv")
    return str(pinned)


def run(command: list[str], what: str, attempts: int = 3) -> None:
    """Run with the output shown; a download may fail for a moment, so try again twice before giving up."""
    for attempt in range(1, attempts + 1):
        code = subprocess.run(command, cwd=ROOT).returncode
        if code == 0:
            return
        if code < 0:
            raise SetupError(f"{what} was stopped; run the same command again to go on")
        if attempt < attempts:
            say(f"{what} failed (exit code {code}); trying again")
            time.sleep(3 * attempt)
    raise SetupError(
        f"{what} failed (exit code {code}): see the lines above; check network and disk space, then run it again"
    )


def variant() -> str:
    """cuda where an NVIDIA driver is loaded, else cpu. FLEXROLL_VARIANT decides where it is set."""
    wanted = os.environ.get("FLEXROLL_VARIANT")
    if wanted:
        if wanted not in ("cpu", "cuda"):
            raise SetupError(f"FLEXROLL_VARIANT is '{wanted}': use cpu or cuda")
        return wanted
    if glob.glob("/proc/driver/nvidia/gpus/*"):
        return "cuda"
    smi = shutil.which("nvidia-smi")
    return "cuda" if smi and subprocess.run([smi, "-L"], capture_output=True).returncode == 0 else "cpu"


def known_stacks() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "containers").glob("*/requirements.in"))


def is_current(venv: Path, stamp: dict[str, str]) -> bool:
    try:
        return json.loads((venv / STAMP).read_text()) == stamp and version_of(str(venv / "bin" / "python")) is not None
    except (OSError, ValueError):
        return False


def install(venv: Path, stack: str, lock: Path, kind: str, python: str) -> None:
    """Make `venv` hold exactly what `lock` says and this tree's src. The stamp comes last."""
    if not lock.exists():
        raise SetupError(f"{lock.relative_to(ROOT)} is missing: run `make lock`")
    stamp = {
        "stack": stack,
        "variant": kind,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest(),
        "root": str(ROOT),  # scripts and .pth name absolute paths: a moved tree is set up afresh
    }
    if is_current(venv, stamp):
        return
    began = time.monotonic()
    uv = bootstrap_uv(python)
    mark = venv / ".installing"
    if mark.exists() or version_of(str(venv / "bin" / "python")) is None or not (venv / "pyvenv.cfg").exists():
        if venv.exists() and not uv.startswith(str(venv)):
            shutil.rmtree(venv)
        if not venv.exists():
            run([uv, "venv", "--quiet", "--python", python, str(venv)], f"creating {venv.relative_to(ROOT)}")
    (venv / STAMP).unlink(missing_ok=True)
    mark.touch()
    count = sum(line[:1].isalnum() for line in lock.read_text().splitlines())
    say(f"{stack} ({kind}): bringing {venv.relative_to(ROOT)} in line with {count} locked packages, hash-checked")
    target = ["--python", str(venv / "bin" / "python")]
    run([uv, "pip", "sync", *target, "--require-hashes", str(lock.relative_to(ROOT))], f"installing {stack}")
    for site in venv.glob("lib/python3*/site-packages"):
        (site / "flexroll.pth").write_text(f"{ROOT / 'src'}\n")
    mark.unlink()
    part = venv / f"{STAMP}.part"
    part.write_text(json.dumps(stamp, indent=1) + "\n")
    part.replace(venv / STAMP)
    say(f"{stack}: ready after {time.monotonic() - began:.0f} s")


def install_driver(python: str) -> None:
    install(DRIVER, "driver", ROOT / "requirements.lock", "cpu", python)
    launcher = DRIVER / "bin" / "flexroll"
    if not launcher.exists() or launcher.read_text() != LAUNCHER:
        launcher.write_text(LAUNCHER)
        launcher.chmod(0o755)


def check_system() -> None:
    """torch.compile builds C++ on the CPU and a small C module on a GPU; without them flex runs eagerly."""
    missing = [] if shutil.which("g++") else ["g++"]
    if not Path(subprocess_output("import sysconfig; print(sysconfig.get_path('include'))"), "Python.h").exists():
        missing.append("Python.h (python3-dev)")
    if missing:
        say(
            f"warning: {' and '.join(missing)} not found: flex runs eagerly; `apt-get install g++ python3-dev` mends it"
        )
    if variant() == "cpu" and ctypes.util.find_library("numa") is None:
        say("warning: libnuma not found: vLLM cannot start; `apt-get install libnuma1` mends it")


def subprocess_output(code: str) -> str:
    return subprocess.run([str(DRIVER / "bin" / "python"), "-c", code], capture_output=True, text=True).stdout.strip()


@contextmanager
def one_at_a_time():
    """Two set-ups of one tree wait for each other. The kernel drops the lock when its holder ends, however it ends."""
    path = ROOT / ".cache" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this tree is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.set_inheritable(handle.fileno(), False)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up the driver environment and stacks.")
    parser.add_argument("names", nargs="*", help="stacks, separated by commas or spaces; the driver is always set up")
    parser.add_argument("--all", action="store_true", help="every stack of containers/")
    options = parser.parse_args()
    clean_environment()
    try:
        wanted = [name for text in options.names for name in re.split(r"[,\s]+", text) if name]
        known = known_stacks()
        for name in wanted:
            if name not in known:
                raise SetupError(
                    f"unknown stack '{name}'; known: {', '.join(known)} (a stack is a folder of containers/)"
                )
        with one_at_a_time():
            python = base_python()
            install_driver(python)
            kind = variant()
            for name in known if options.all else wanted:
                install(ROOT / ".stacks" / name, name, ROOT / "containers" / name / f"{kind}.lock", kind, python)
            check_system()
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("[setup] interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
