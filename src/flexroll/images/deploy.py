"""What the workflow needs to run its rules in images: which runtime, what is mounted, which variables pass."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flexroll.errors import FlexrollError
from flexroll.images.here import DEPLOYMENT
from flexroll.images.record import REPORT, Runtime, candidates, container, problem, read
from flexroll.images.runtimes import Oci
from flexroll.provenance import GIT, git_state
from flexroll.schema.config import Config

__all__ = ["REPORT", "binds", "choose_runtime", "container", "environment", "look_alike", "split_runtime"]

MAKE = "run `make images`"
# All else of the caller's environment stays outside. FLEXROLL_PASS names more, separated by commas: HF_TOKEN, say.
PASSED = (
    *("FLEXROLL_STACKS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("FLEXROLL_DEBUG", "TZ", "LANG"),
)
FOLDERS = ("HF_HOME", "HF_HUB_CACHE")  # of those, folders to mount
ASKED = "FLEXROLL_PASS"
# A CA bundle of the host, for downloads behind a proxy that intercepts TLS; mounted, so never part of an image.
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def choose_runtime(root: Path, names: list[str], device_variant: str, wanted: str | None, ask: bool = True) -> Runtime:
    """The runtime whose images can serve all of `names`; `wanted` or, where that is None, the first that can.

    Args:
        ask: ask podman or docker whether it holds the images; else only their records are read.
    Raises:
        FlexrollError: `wanted` is no runtime, or an image is missing, not the tree's, or not to be had of its runtime.
    """
    problems: dict[Runtime, str] = {}
    for runtime in candidates(wanted):
        found = next(filter(None, (problem(root, runtime, name, device_variant) for name in names)), None)
        if found is None and ask and runtime != "apptainer":
            found = _not_held(root, runtime, names)
        if found is None:
            return runtime
        problems[runtime] = found
    built = [runtime for runtime in problems if any(read(root, runtime, name) for name in names)]
    what = problems[built[0]] if built else "no container images here" + (f" for {wanted}" if wanted else "")
    raise FlexrollError(
        f"{what}: {MAKE}, or leave containers out with `--workflow-profile profiles/native`; `make demo` runs anywhere"
    )


def _not_held(root: Path, runtime: Runtime, names: list[str]) -> str | None:
    """Why podman or docker cannot run the recorded images; None if it holds them all."""
    digests = {name: record.digest for name in names if (record := read(root, runtime, name))}
    try:
        lost = Oci(runtime, root).lost(list(digests.values()))
    except FlexrollError as error:
        return str(error)
    gone = [name for name, digest in digests.items() if digest in lost]
    return f"{runtime} has lost the image{'s' if len(gone) > 1 else ''} of {', '.join(gone)}" if gone else None


def split_runtime(arguments: str) -> tuple[str | None, str]:
    """(runtime that a profile asks for, the other arguments) of --apptainer-args."""
    found = re.search(r"--runtime=(\S+)", arguments)
    return (found.group(1), arguments.replace(found.group(), "").strip()) if found else (None, arguments)


def binds(root: Path, cwd: Path, config_path: Path, config: Config) -> list[str]:
    """--bind options: the tree where it is not the working folder, its src read-only, and what lies elsewhere."""
    folders = [] if cwd == root else [f"{root}:{root}"]
    folders.append(f"{root / 'src'}:{root / 'src'}:ro")
    read = [config_path.absolute(), config.model.path, config.prompts.path]
    read += [os.environ.get(name) for name in CA_VARIABLES]
    outside = {str(path): ":ro" for path in read if path}
    outside |= {os.environ[name]: "" for name in FOLDERS if name in os.environ}
    for path, mode in outside.items():
        place = Path(path)
        if place.is_absolute() and place.exists() and not place.is_relative_to(cwd):
            folders.append(f"{place}:{place}{mode}")
    return [f"--bind {folder}" for folder in folders]


def environment(root: Path, runtime: str) -> dict[str, str]:
    """Variables for the workflow's process: PATH, and as APPTAINERENV_* those that reach the containers."""
    commit, dirty = git_state(root)
    inside = {name: os.environ[name] for name in (*PASSED, *CA_VARIABLES, *_asked()) if name in os.environ}
    inside |= {"FLEXROLL_ROOT": str(root), DEPLOYMENT: "container", "MPLCONFIGDIR": str(root / ".cache" / "matplotlib")}
    if commit:
        inside[GIT] = f"{commit}+dirty" if dirty else commit
    env = {f"APPTAINERENV_{name}": value for name, value in inside.items()} | {DEPLOYMENT: "container"}
    return env if runtime == "apptainer" else env | look_alike(root)


def look_alike(root: Path) -> dict[str, str]:
    """PATH on which Snakemake finds this tree's stand-in for Apptainer."""
    return {"PATH": os.pathsep.join([str(root / "workflow" / "bin"), os.environ.get("PATH", "")])}


def _asked() -> list[str]:
    return [name for name in re.split(r"[,\s]+", os.environ.get(ASKED, "")) if name]
