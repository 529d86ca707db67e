"""One measurement a device: an advisory lock, taken inside the job, that goes with the process however it ends.

Snakemake's resources only count; they name no GPU (snakemake#281). A job takes a free GPU of the machine's class, by
UUID, before anything starts CUDA, and hides all others from what it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flexroll.bench.console import say
from flexroll.bench.device import in_use_by_others, visible_gpus
from flexroll.bench.isolate import file_name
from flexroll.errors import FlexrollError

# A GPU's memory comes back some seconds after the process that held it was killed.
GRACE_S = 20.0
POLL_S = 0.5
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@contextmanager
def device_lease(root: Path, device: str, prefer: str | None = None) -> Iterator[str | None]:
    """Hold a device of this class: "cpu", or the name of a GPU; yields its UUID, None on a CPU.

    prefer: UUID of the GPU to wait for, unless a foreign program keeps it: cards of one model differ.

    While it is held, this process and what it starts see that GPU alone. Waits for other flexroll processes of this
    tree. A GPU on which anything else runs or holds memory is left alone.

    Raises:
        FlexrollError: nothing but foreign programs holds the GPUs, for longer than a killed one takes to let go.
    """
    folder = root / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        lock, uuid, settings = _cpu(folder), None, {}
    else:
        lock, gpu = _gpu(folder, device, prefer)
        # By index, for vLLM up to 0.22 cannot start with a UUID there (vllm#32569); NVML's indices are in bus order.
        uuid, settings = gpu["uuid"], {VISIBLE: str(gpu["index"]), ORDER: "PCI_BUS_ID"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield uuid
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        lock.release()


def _cpu(folder: Path) -> FileLock:
    lock = _lock(folder, "cpu")
    if not _taken(lock):
        say("another flexroll process is measuring here; waiting for it to end")
        lock.acquire()
    return lock


def _gpu(folder: Path, name: str, prefer: str | None) -> tuple[FileLock, dict[str, Any]]:
    """The preferred GPU, else the first, that no flexroll process has locked and no other program uses."""
    begun, told = time.monotonic(), False
    while True:
        foreign, locked = [], 0
        for gpu in sorted(_of_class(name), key=lambda gpu: gpu["uuid"] != prefer):
            wanted = gpu["uuid"] == prefer
            lock = _lock(folder, gpu["uuid"])
            if not _taken(lock):
                locked += 1
                if wanted:
                    break
                continue
            use = in_use_by_others(gpu["index"])
            if use is None:
                if prefer and not wanted:
                    say(f"measuring on {gpu['uuid']}: {prefer}, which this session began on, is not to be had")
                return lock, gpu
            lock.release()
            foreign.append(f"GPU {gpu['index']} ({gpu['uuid']}): {use}")
            if wanted and time.monotonic() - begun <= GRACE_S:
                break
        if not locked and time.monotonic() - begun > GRACE_S:
            raise FlexrollError(
                f"no free {name}: {'; '.join(foreign)}; end that program, or choose another GPU with {VISIBLE}"
            )
        if locked and not told:
            which = f"{name} {prefer}" if prefer else f"every free {name}"
            say(f"{which} is being measured on by another flexroll process; waiting for it to end")
            told = True
        time.sleep(POLL_S)


def _of_class(name: str) -> list[dict[str, Any]]:
    gpus = [gpu for gpu in visible_gpus() if gpu["name"] == name]
    if not gpus:
        raise FlexrollError(f"no {name} is visible any more; see nvidia-smi and {VISIBLE}")
    return gpus


def _lock(folder: Path, device: str) -> FileLock:
    return FileLock(folder / f"measuring-{file_name(device)}.lock")


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True
