"""What NVML says about the GPUs this process may use. Never starts CUDA."""

from __future__ import annotations

import os
from typing import Any


def visible_gpus() -> list[dict[str, Any]]:
    """[{index, name, uuid, memory_bytes, driver}] in the order CUDA would number them; [] without a GPU or driver.

    CUDA_VISIBLE_DEVICES is honoured (indices or UUIDs; an empty value hides all).
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                {
                    "index": index,
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "driver": driver,
                }
            )
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def memory_used(index: int, pids: set[int] | None = None) -> tuple[int | None, int | None]:
    """(bytes in use on the GPU, bytes used by `pids`), None where NVML cannot tell (process ids of a container's
    namespace differ from the driver's)."""
    total, by_process = _in_use(index)
    known = [used for pid, used in by_process.items() if pid in (pids or set()) and used]
    return total, sum(known) if known else None


# What a driver keeps for itself on an idle card, and more than that: an idle H200 shows 0.6 GB.
IDLE_BYTES = 1_500_000_000


def in_use_by_others(index: int) -> str | None:
    """Who uses a GPU that this process does not, in words; None if it is free or NVML cannot tell.

    Asked before CUDA starts here, so that every process and all memory in use is another's: a container sees other
    process ids than the driver reports, and some see none.
    """
    used, by_process = _in_use(index)
    if used is None or (not by_process and used <= IDLE_BYTES):
        return None
    by = f" by process {', '.join(map(str, by_process))}" if by_process else ""
    return f"{used / 1e9:.1f} GB in use{by}"


def _in_use(index: int) -> tuple[int | None, dict[int, int | None]]:
    """(bytes in use on the GPU, {process that computes there: its bytes}); None for bytes that NVML cannot tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used, {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return None, {}


def _visible(gpus: list[dict[str, Any]], setting: str | None) -> list[dict[str, Any]]:
    if setting is None:
        return gpus
    chosen = []
    for part in (p.strip() for p in setting.split(",")):
        match = [g for g in gpus if part and (part == str(g["index"]) or g["uuid"].startswith(part))]
        if not match:  # CUDA ignores everything from the first bad entry on
            break
        chosen.append(match[0])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
