"""One measurement a device: an advisory lock, taken inside the job, that goes with the process however it ends.

What measures no time may share a device with its like, up to a number of seats, and never with a measurement.

Snakemake's resources only count; they name no GPU (snakemake#281). A job takes a free GPU of the machine's class, by
UUID, before anything starts CUDA, and hides all others from what it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, ReadWriteLock, Timeout

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
def device_lease(root: Path, device: str, prefer: str | None = None, seats: int = 1) -> Iterator[str | None]:
    """Hold a device of this class: "cpu", or the name of a GPU; yields its UUID, None on a CPU.

    prefer: UUID of the GPU to wait for, unless a foreign program keeps it: cards of one model differ. seats: how many
    that say so may share a device, those of one device before another is begun on; 1: it is this process's alone.

    While it is held, this process and what it starts see that GPU alone. Waits for other flexroll processes of this
    tree. A GPU on which anything else runs or holds memory is left alone.

    Raises:
        FlexrollError: nothing but foreign programs holds the GPUs, for longer than a killed one takes to let go.
    """
    folder = root / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        held, uuid, settings = _cpu(folder, seats), None, {}
    else:
        held, gpu = _gpu(folder, device, prefer, seats)
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
        held.release()


def first_gpu(records: Iterable[Path], read: Callable[[Path], Any]) -> str | None:
    """UUID of the GPU that the first of these records was made on: what is held against each other keeps to one card.
    One that cannot be read, or is of no GPU, tells none."""
    for path in records:
        with suppress(FlexrollError):
            environment = read(path).environment
            if environment is not None and environment.device_uuid:
                return environment.device_uuid
    return None


class _Device:
    """A device's locks: who measures on it writes, who shares it reads and has a seat."""

    def __init__(self, folder: Path, device: str, seats: int) -> None:
        self.lock = ReadWriteLock(folder / f"measuring-{file_name(device)}.db", is_singleton=False)
        self.seats = [FileLock(folder / f"seat{n}-{file_name(device)}.lock") for n in range(seats if seats > 1 else 0)]

    def take(self) -> bool:
        """Have it alone, if nobody has it."""
        return _taken(self.lock.acquire_write)

    def join(self) -> bool:
        """Have it with others, if nobody has it alone and there is a seat."""
        if not self.seats or not _taken(self.lock.acquire_read):
            return False
        if any(_taken(seat.acquire) for seat in self.seats):
            return True
        self.lock.release()
        return False

    def share(self) -> bool:
        """After `take`: let others in, where it has seats. False where one who wants it alone was quicker."""
        if not self.seats:
            return True
        self.lock.release()
        return self.join()

    def release(self) -> None:
        self.lock.release()
        for seat in self.seats:
            seat.release()


def _cpu(folder: Path, seats: int) -> _Device:
    held, told = _Device(folder, "cpu", seats), False
    while not held.join() and not (held.take() and held.share()):
        if not told:
            say("another flexroll process is measuring here; waiting for it to end")
            told = True
        time.sleep(POLL_S)
    return held


def _gpu(folder: Path, name: str, prefer: str | None, seats: int) -> tuple[_Device, dict[str, Any]]:
    """The preferred GPU, else the first, that no flexroll process has locked and no other program uses; with seats, one
    that others share before all."""
    begun, told = time.monotonic(), False
    while True:
        gpus = sorted(_of_class(name), key=lambda gpu: gpu["uuid"] != prefer)
        if (shared := _shared(folder, gpus, seats)) is not None:
            return shared
        foreign, locked = [], 0
        for gpu in gpus:
            wanted = gpu["uuid"] == prefer
            held = _Device(folder, gpu["uuid"], seats)
            if not held.take():
                locked += 1
                if wanted:
                    break
                continue
            use = in_use_by_others(gpu["index"])
            if use is None:
                if not held.share():
                    locked += 1
                    continue
                if prefer and not wanted:
                    say(f"measuring on {gpu['uuid']}: {prefer}, which this session began on, is not to be had")
                return held, gpu
            held.release()
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


def _shared(folder: Path, gpus: list[dict[str, Any]], seats: int) -> tuple[_Device, dict[str, Any]] | None:
    """A seat beside others. Their use of the GPU is no foreign one, which the first of them looked for."""
    for gpu in gpus if seats > 1 else ():
        held = _Device(folder, gpu["uuid"], seats)
        if held.take():
            held.release()  # nobody is there
        elif held.join():
            return held, gpu
    return None


def _of_class(name: str) -> list[dict[str, Any]]:
    gpus = [gpu for gpu in visible_gpus() if gpu["name"] == name]
    if not gpus:
        raise FlexrollError(f"no {name} is visible any more; see nvidia-smi and {VISIBLE}")
    return gpus


def _taken(acquire: Callable[..., Any]) -> bool:
    try:
        acquire(timeout=0)
    except Timeout:
        return False
    return True
