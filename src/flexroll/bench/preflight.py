"""`flexroll preflight`: may this machine run this config? Asked before anything is downloaded or run."""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from flexroll.bench.console import say
from flexroll.bench.device import visible_gpus
from flexroll.bench.environment import cores, cpu_name
from flexroll.errors import FlexrollError
from flexroll.schema.config import Config
from flexroll.schema.records import write_json


def preflight(config: Config, out: Path, root: Path) -> None:
    """Write the machine's facts, or raise FlexrollError naming all that is missing and `make demo`.

    A missing compiler is a warning: flex then runs eager.
    """
    facts = machine_facts(root)
    missing = unmet(config, facts)
    if missing:
        raise FlexrollError(f"this machine cannot run '{config.run}': {'; '.join(missing)}. `make demo` runs anywhere")
    for warning in facts["warnings"]:
        say(f"warning: {warning}")
    write_json(out, json.dumps(facts, indent=1) + "\n")


def machine_facts(root: Path) -> dict[str, Any]:
    """{device_class, gpus, cpu, cores, memory_bytes, disk_free, compiler, python_headers, platform, warnings}."""
    import psutil

    gpus = visible_gpus()
    compiler = shutil.which("g++") or shutil.which("c++")
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    warnings = []
    if compiler is None:
        warnings.append("no g++: torch.compile cannot build kernels, flex runs eager (slow); install g++")
    if not headers:
        warnings.append("no Python.h: torch.compile cannot build kernels, flex runs eager (slow); install python3-dev")
    return {
        "device_class": gpus[0]["name"] if gpus else "cpu",
        "gpus": gpus,
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free": shutil.disk_usage(root).free,
        "compiler": compiler,
        "python_headers": headers,
        "platform": platform.platform(),
        "warnings": warnings,
    }


def unmet(config: Config, facts: dict[str, Any]) -> list[str]:
    """What `requires` asks for and the machine lacks, one phrase each."""
    requires = config.requires
    missing = []
    gpus = facts["gpus"]
    if requires.gpu is not None or requires.gpu_memory_gb:
        wanted = "" if requires.gpu in (None, "any") else str(requires.gpu)
        first = gpus[0] if gpus else None
        if first is None:
            missing.append(f"no GPU found, it needs {'a CUDA GPU' if not wanted else 'a ' + wanted}")
        elif wanted.lower() not in first["name"].lower():
            missing.append(f"the GPU is {first['name']}, it needs a {wanted}")
        elif first["memory_bytes"] < requires.gpu_memory_gb * 1e9:
            missing.append(f"the GPU has {first['memory_bytes'] / 1e9:.0f} GB, it needs {requires.gpu_memory_gb:g} GB")
    if facts["disk_free"] < requires.disk_gb * 1e9:
        missing.append(f"{facts['disk_free'] / 1e9:.0f} GB of disk free, it needs {requires.disk_gb:g} GB")
    return missing
