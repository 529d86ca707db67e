"""Memory of one cell: a thread samples the process tree (CPU) or the card (CUDA) while the rounds run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil

from flexroll.bench.device import memory_used, visible_gpus
from flexroll.schema.records import Memory

PERIOD_S = 0.2


class MemoryWatch:
    """Context manager around a cell's rounds; `result` gives the cell's four figures in bytes.

    On the CPU the peak is the largest sum of resident sets of this process and its descendants, and device_total the
    machine's memory in use. On CUDA it is torch's peak in this process; where the engine is another process what NVML
    counts for the tree, or, where it cannot tell processes apart (in a container), what the card's use has grown by
    since before the engine's start. device_total is the card's memory in use.

    Args:
        before: bytes in use on the card before the engine's start, see device_in_use.
    """

    def __init__(
        self, device: str, child_pids: Callable[[], list[int]] | None = None, before: int | None = None
    ) -> None:
        self.device, self.before = device, before
        self.child_pids = child_pids or (lambda: [])
        self.peak: int | None = None
        self.total: int | None = None
        self._stop = threading.Event()
        gpus = visible_gpus() if device == "cuda" else []
        self._gpu = gpus[0]["index"] if gpus else None
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        if self.device == "cuda" and "torch" in sys.modules:
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def result(self, backend: dict[str, int | None]) -> Memory:
        peak = self.peak
        torch = sys.modules.get("torch")
        if self.device == "cuda" and self.child_pids():
            # This process's own counters say nothing about the engine.
            if peak is None and self.total is not None and self.before is not None:
                peak = self.total - self.before
        elif self.device == "cuda" and torch is not None and torch.cuda.is_initialized():
            peak = int(torch.cuda.max_memory_allocated()) or peak
        return Memory(
            weights=backend.get("weights"),
            kv_reserved=backend.get("kv_reserved"),
            peak_allocated=peak,
            device_total=self.total,
        )

    def sample(self) -> None:
        if self.device == "cuda":
            if self._gpu is None:
                return
            total, mine = memory_used(self._gpu, {os.getpid(), *self.child_pids()})
        else:
            total, mine = _machine_in_use(), tree_rss(os.getpid(), self.child_pids())
        self.total = _larger(self.total, total)
        self.peak = _larger(self.peak, mine)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.sample()


def device_in_use(device: str) -> int | None:
    """Bytes in use on the card; None on a CPU or where NVML does not tell. Starts no CUDA."""
    gpus = visible_gpus() if device == "cuda" else []
    return memory_used(gpus[0]["index"])[0] if gpus else None


def tree_rss(pid: int, more: list[int] | None = None) -> int:
    """Resident bytes of a process, its descendants and `more`; shared pages count once a process."""
    pids = {pid, *(more or [])}
    with contextlib.suppress(psutil.Error):
        pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    total = 0
    for each in pids:
        try:
            total += psutil.Process(each).memory_info().rss
        except psutil.Error:
            continue
    return total


def _machine_in_use() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
