"""What Snakemake asks of Apptainer, done by podman or docker: `--version` and `exec OPTIONS IMAGE COMMAND...`.

Snakemake knows no podman or docker (snakemake#2414), but runs whatever is called apptainer. IMAGE is a record that
`make images` wrote; the image is run by its id, so it is the one that was built and tested. Only APPTAINERENV_*
variables reach the container. Standard library only: this starts for every job.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NoReturn

VERSION = "1.4.0"  # the Apptainer whose options these are
FLAGS = ("--nv", "--cleanenv", "-e", "--quiet", "--silent", "--no-home", "--containall")
VALUED = ("--home", "--bind", "-B", "--pwd", "--cwd", "--env")
PREFIXES = ("APPTAINERENV_", "SINGULARITYENV_")
DRIVER = Path("/proc/driver/nvidia/version")
CDI = ("/etc/cdi", "/var/run/cdi")
STOP_S = 10  # from asking a container to end until it is killed
# As process 1 a shell heeds no signal that it does not trap, so the job is a child; the job's own children are ended
# with it, and a stop waits for it to put things in order.
INIT = """"$@" & job=$!
trap 'kill -TERM -1 2> /dev/null' TERM INT HUP
wait "$job"; code=$?
while kill -0 "$job" 2> /dev/null; do wait "$job"; code=$?; done
exit "$code"
"""


def fail(text: str) -> NoReturn:
    print(f"flexroll: {text}", file=sys.stderr)
    sys.exit(255)


def parse(arguments: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    """({option: values}, image, command) of `exec`'s arguments."""
    options: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        name, given, value = rest.pop(0).partition("=")
        if name in FLAGS:
            options.setdefault(name, [])
        elif name not in VALUED:
            fail(f"{name}: this stand-in for Apptainer knows {' '.join(FLAGS + VALUED)}")
        elif not given and not rest:
            fail(f"{name} needs a value")
        else:
            options.setdefault(name, []).append(value if given else rest.pop(0))
    if len(rest) < 2:
        fail("exec needs an image and a command")
    return options, rest[0], rest[1:]


def read_record(path: str) -> dict[str, str]:
    try:
        record = json.loads(Path(path).read_text())
        return {key: str(record[key]) for key in ("name", "runtime", "digest")}
    except OSError:
        fail(f"no image {path}: run `make images`")
    except (ValueError, KeyError, TypeError):
        fail(f"{path} is no image record: run `make images`")


def mounts(options: dict[str, list[str]], home: str) -> list[str]:
    """-v for the working folder and everything bound, the outermost first."""
    binds = [f"{home}:{home}"]
    for value in [v for name in ("--bind", "-B") for v in options.get(name, [])]:
        for bind in value.split(","):
            binds.append(bind if ":" in bind else f"{bind}:{bind}")
    return [part for bind in sorted(dict.fromkeys(binds), key=lambda b: b.split(":")[1]) for part in ("-v", bind)]


def gpus(runtime: str) -> list[str]:
    """The runtime's options for all GPUs; [] without a driver (podman: or a CDI specification)."""
    if runtime == "docker":
        return ["--gpus", "all"] if DRIVER.exists() else []
    specs = [path for folder in CDI for path in glob.glob(f"{folder}/*") if "nvidia.com/gpu" in Path(path).read_text()]
    if not specs and DRIVER.exists():
        fail("podman reaches GPUs through CDI; run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` as root")
    return ["--device", "nvidia.com/gpu=all"] if specs else []


def variables() -> dict[str, str]:
    """What the container's environment gets of the caller's."""
    env = {}
    for name, text in os.environ.items():
        for prefix in PREFIXES:
            if name.startswith(prefix):
                env[name.removeprefix(prefix)] = text
    return env


def command_line(
    options: dict[str, list[str]], record: dict[str, str], command: list[str], env: dict[str, str], name: str
) -> list[str]:
    """The runtime's command; the caller's variables go by name, for a command line is seen by every user."""
    runtime, here = record["runtime"], os.getcwd()
    home = options.get("--home", [here])[-1]
    line = [runtime, "run", "--rm", "--name", name, "--network=host", "--ipc=host", "--security-opt", "label=disable"]
    if runtime == "docker":
        line += ["--user", f"{os.getuid()}:{os.getgid()}"]
    elif os.getuid():
        line += ["--userns=keep-id"]
    line += [*mounts(options, home), "-w", (options.get("--pwd") or options.get("--cwd") or [here])[-1]]
    line += gpus(runtime) if "--nv" in options else []
    own = [f"HOME={home}", f"FLEXROLL_IMAGE={record['digest']}", *options.get("--env", [])]
    line += [part for variable in [*env, *own] for part in ("-e", variable)]
    return [*line, "--entrypoint", "bash", record["digest"], "-c", INIT, "flexroll", *command]


def run(line: list[str], env: dict[str, str], name: str) -> int:
    """Run to the end. Asked to stop, or with its caller gone, it ends the container first: none is left behind."""
    caller = os.getppid()
    stopped: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: stopped.append(number))
    child = subprocess.Popen(line, env={**os.environ, **env}, start_new_session=True)
    while True:
        try:
            code = child.wait(timeout=0.2)
            return 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            if not stopped and os.getppid() == caller:
                continue
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([line[0], "stop", "-t", str(STOP_S), name], **quiet)
        child.wait()
        return 128 + (stopped[0] if stopped else signal.SIGHUP)


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"apptainer version {VERSION}")
        return 0
    while arguments and arguments[0] in ("--quiet", "--silent", "-q", "-s"):
        arguments = arguments[1:]
    if not arguments or arguments[0] != "exec":
        fail("this stand-in for Apptainer knows --version and exec")
    options, image, command = parse(arguments[1:])
    record = read_record(image)
    runtime = record["runtime"]
    if runtime not in ("podman", "docker"):
        fail(f"{image} is an image of {runtime}, which is not on PATH")
    if shutil.which(runtime) is None:
        fail(f"{runtime} is not installed, and the image of {record['name']} is {runtime}'s; see `make images`")
    known = subprocess.run([runtime, "image", "inspect", record["digest"]], capture_output=True, text=True)
    if known.returncode:
        gone = any(words in known.stderr.lower() for words in ("no such image", "image not known"))
        last = (known.stderr.strip().splitlines() or ["no message"])[-1]
        why = "it was removed, or built anew elsewhere" if gone else last
        fail(f"{runtime} cannot use the image of {record['name']} ({record['digest'][:19]}): {why}; run `make images`")
    name = f"flexroll-{record['name']}-{uuid.uuid4().hex[:12]}"
    env = variables()
    return run(command_line(options, record, command, env, name), env, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
