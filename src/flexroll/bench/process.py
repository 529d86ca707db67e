"""Worker processes as the supervisor sees them: their event pipe, how they ended, and how to end them for good."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

GRACE_S = 3.0  # between SIGTERM and SIGKILL


class Stopped(SystemExit):
    """SIGTERM or SIGINT arrived; the worker is gone and finished cells are on disk."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def start_worker(
    command: Sequence[str], log: IO[bytes], env: dict[str, str], stdin: int = subprocess.DEVNULL
) -> tuple[subprocess.Popen, int]:
    """Start a process group of its own whose last argument is an event pipe: (process, the pipe's end to read).

    Args:
        log: where its output goes. stdin: subprocess.PIPE for a worker that is told things while it runs.
    """
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(write_end)],
            stdin=stdin,
            stdout=log,
            stderr=log,
            env=env,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return process, read_end


@contextmanager
def worker(command: Sequence[str], log: IO[bytes], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen, int]]:
    """start_worker, and nothing of it left afterwards, however that comes."""
    process, read_end = start_worker(command, log, env)
    try:
        yield process, read_end
    finally:
        end_group(process)
        os.close(read_end)


def event_lines(read_end: int, process: subprocess.Popen) -> Iterator[bytes | None]:
    """Lines of the event pipe; None whenever a moment passes without one; ends when the process has ended."""
    buffer = b""
    open_ = True
    with selectors.DefaultSelector() as selector:
        selector.register(read_end, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None  # asked before reading: what it wrote last is then in the pipe
            if open_ and selector.select(0.0 if ended else 0.1):
                data = os.read(read_end, 1 << 16)
                if data:
                    *lines, buffer = (buffer + data).split(b"\n")
                    yield from lines
                    continue
                open_ = False
                selector.unregister(read_end)
            elif not open_ and not ended:
                time.sleep(0.05)
            if ended:
                return
            yield None


def end_group(process: subprocess.Popen) -> None:
    """End a worker's process group and its descendants: politely, then by force. Nothing of it is left."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    for child in family:  # those that left the group
        try:
            child.kill()
        except psutil.Error:
            continue
    process.wait()


def _signal_group(group: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def describe_exit(code: int, log: Path) -> str:
    """How a process ended without saying so itself."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        hint = "; the kernel's out-of-memory killer does this" if -code == signal.SIGKILL else ""
        return f"crashed: signal {-code} ({name}{hint})"
    last = next((line for line in reversed(tail(log)) if line.strip() and not line.startswith("===")), "")
    return f"crashed: exit code {code}" + (f"; last words: {last.strip()[:200]}" if last else "")


def tail(path: Path, size: int = 4000) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into Stopped, so that `finally` ends the worker. A no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _frame: Any) -> None:
        raise Stopped(signum)

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
