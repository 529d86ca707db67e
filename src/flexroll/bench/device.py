"""What NVML says about the GPUs this process may use. Never starts CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) by plain names.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}

CUDA_FILE = "/dev/nvidia-uvm"  # open in every process that started CUDA, and in none that only asks NVML


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


@contextlib.contextmanager
def open_gpu() -> Iterator[Gpu | None]:
    """The GPU that this process may use, as NVML sees it; None without one."""
    gpus = visible_gpus()
    if not gpus:
        yield None
        return
    import pynvml

    card = None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        card = Gpu(pynvml, gpus[0]["index"])
    try:
        yield card
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class Gpu:
    """One card. nvml: the module, initialised; any call of it may be unsupported here."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml, self.handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self, pids: set[int]) -> dict[str, Any]:
        """Fields of a Reading. pids: the job's processes."""
        sm, memory = self.nvml.NVML_CLOCK_SM, self.nvml.NVML_CLOCK_MEM
        power, limit, energy = map(self._ask, ("PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption"))
        bits = self._ask("CurrentClocksEventReasons")
        bits = self._ask("CurrentClocksThrottleReasons") if bits is None else bits
        info = self._ask("MemoryInfo")
        listed = self._ask("ComputeRunningProcesses")
        count, held = foreign({p.pid: p.usedGpuMemory for p in listed or []}, pids)
        return {
            "sm_mhz": self._ask("ClockInfo", sm),
            "sm_max_mhz": self._ask("MaxClockInfo", sm),
            "memory_mhz": self._ask("ClockInfo", memory),
            "memory_max_mhz": self._ask("MaxClockInfo", memory),
            "power_w": None if power is None else power / 1e3,
            "power_limit_w": None if limit is None else limit / 1e3,
            "temperature_c": self._ask("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "energy_j": None if energy is None else energy / 1e3,
            "memory_bytes": None if info is None else int(info.used),
            "reasons": None if bits is None else frozenset(name for bit, name in REASONS.items() if bits & bit),
            "foreign_processes": count,
            "foreign_bytes": held,
        }

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self.handle, *arguments)
        except (self.nvml.NVMLError, AttributeError):  # AttributeError: a binding older than the call
            return None


def foreign(listed: dict[int, int | None], pids: set[int]) -> tuple[int | None, int | None]:
    """(processes on the card that are not the job's, their bytes); None where that cannot be told.

    Where the driver lists a process of the job, all others are foreign. In a container it may list ids of the host,
    none of which is known here: then those beyond the job's own that have started CUDA are. An empty list tells
    nothing, for the job's engine is missing from it.

    Args:
        listed: {process on the card: its bytes}. pids: the job's processes.
    """
    if listed.keys() & pids:
        others = [used for pid, used in listed.items() if pid not in pids]
        return len(others), None if None in others else sum(others)
    try:
        own = sum(map(_started_cuda, pids)) if listed else 0
    except PermissionError:
        own = 0
    if not own or len(listed) < own:
        return None, None
    return len(listed) - own, None


def _started_cuda(pid: int) -> bool:
    """Whether a process has, and lives. Raises PermissionError."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{file}") == CUDA_FILE:
                    return True
    return False


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
