"""The machine while a round runs: clocks, power, heat and company, and which rounds they disturbed. Flag, never drop.

A thread of the supervisor looks five times a second: the engine is another process, whose interpreter it never holds
up. A look costs less than 1 ms of one core here, the driver's answers not counted; the first one, which meets every
process of the machine, more. Imported by no worker, so that a change here makes no measurement stale.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

import psutil

from flexroll.bench.device import REASONS, open_gpu
from flexroll.errors import one_line
from flexroll.schema.records import Range, Telemetry

PERIOD_S = 0.2
KEPT = 1 << 14  # readings: near an hour
WAIT_S = 2.0  # for a reading; a driver that hangs must not hold up the supervisor
CPU_MHZ_EVERY_S = 1.0  # asks every core

# Undisturbed cards run at 85 to 100 % of the maximum that NVML tells.
LOW_CLOCK = 0.8
# At most 3 % of a round's time, as much as rounds differ anyway.
FULL_CLOCK = 0.97


def load_limit(cores: int) -> float:
    """Cores that others may use: daemons of an idle machine take a few hundredths of one. Half a core is a quarter of
    the smallest machine; on a large one the scheduler finds another core, until a tenth of them is taken."""
    return max(0.5, 0.1 * cores)


@dataclass(frozen=True)
class Rule:
    """A round gets `flag` if `value` of its telemetry is more than `limit`."""

    flag: str
    value: Callable[[Telemetry], float | None]
    limit: float


def _reason(name: str) -> Callable[[Telemetry], float]:
    return lambda t: (t.reasons or {}).get(name, 0.0)


def _power_cap(t: Telemetry) -> float:
    """The reason's share, 0 where the clock stayed up all the same: a loaded H200 names its cap at full clock too."""
    stayed = t.sm_mhz and t.sm_max_mhz and t.sm_mhz.median >= FULL_CLOCK * t.sm_max_mhz
    return 0.0 if stayed else _reason("sw_power_cap")(t)


# What the driver's software does to the clock costs up to a fifth of it: in a tenth of the round that is 2 %, which is
# noise. What the hardware does halves the clock or worse, so that a fiftieth of the round is as much.
SOFT, HARD = 0.1, 0.02
RULES = (
    Rule("throttled: power cap", _power_cap, SOFT),
    Rule("throttled: hardware slowdown", _reason("hw_slowdown"), HARD),
    Rule("throttled: thermal (software)", _reason("sw_thermal"), SOFT),
    Rule("throttled: thermal (hardware)", _reason("hw_thermal"), HARD),
    Rule("throttled: power brake", _reason("power_brake"), HARD),
    Rule("low SM clock", lambda t: t.low_clock_share, SOFT),
    Rule("another process on the GPU", lambda t: t.foreign_processes, 0),
    Rule("other processes used the CPU", lambda t: t.other_load_share, SOFT),
)


def flags(telemetry: Telemetry | None) -> list[str]:
    """What disturbed a round, in words; [] too where nothing can be told."""
    return [] if telemetry is None else [rule.flag for rule in RULES if (rule.value(telemetry) or 0) > rule.limit]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look. time: time.monotonic() when it began. Units as in Telemetry; None: not told."""

    time: float
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    memory_mhz: float | None = None
    memory_max_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    memory_bytes: int | None = None
    reasons: frozenset[str] | None = None
    foreign_processes: int | None = None
    foreign_bytes: int | None = None
    other_load_cores: float | None = None  # since the reading before
    cpu_mhz: float | None = None

    @property
    def low_clock(self) -> bool | None:
        """None also where it cannot be told that the card was not idle."""
        if self.reasons is None or self.sm_mhz is None or not self.sm_max_mhz:
            return None
        return "gpu_idle" not in self.reasons and self.sm_mhz < LOW_CLOCK * self.sm_max_mhz


RANGES = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "other_load_cores", "cpu_mhz")
MOST = ("sm_max_mhz", "memory_max_mhz", "power_limit_w", "memory_bytes", "foreign_processes", "foreign_bytes")


def summarise(readings: Sequence[Reading], begin: float, end: float, cores: int) -> Telemetry | None:
    """The readings of a round; of one that ended between two readings, the first after it; None if that is missing.

    Args:
        readings: in order of time. begin, end: of the round, on time.monotonic(). cores: of the machine.
    """
    inside = [r for r in readings if begin <= r.time <= end] or [r for r in readings if r.time > end][:1]
    if not inside:
        return None
    columns = {name: [x for r in inside if (x := getattr(r, name)) is not None] for name in Reading.__slots__}
    reasons = columns["reasons"]
    held = {name: _share(name in r for r in reasons) for name in REASONS.values()}
    return Telemetry(
        samples=len(inside),
        reasons={name: share for name, share in held.items() if share} if reasons else None,
        low_clock_share=_share(r.low_clock for r in inside),
        other_load_share=_share(x > load_limit(cores) for x in columns["other_load_cores"]),
        energy_j=_used(readings, begin, end),
        **{name: _range(columns[name]) for name in RANGES},
        **{name: max(columns[name], default=None) for name in MOST},
    )


def _share(held: Iterable[bool | None]) -> float | None:
    told = [h for h in held if h is not None]
    return round(sum(told) / len(told), 4) if told else None


def _range(values: list[float]) -> Range | None:
    if not values:
        return None
    return Range(median=round(median(values), 2), min=round(min(values), 2), max=round(max(values), 2))


def _used(readings: Sequence[Reading], begin: float, end: float) -> float | None:
    """Energy between two moments; None unless readings lie on both sides of each."""
    points = [(r.time, r.energy_j) for r in readings if r.energy_j is not None]
    counters = [_at(points, moment) for moment in (begin, end)]
    if None in counters or counters[1] < counters[0]:  # the driver was loaded anew
        return None
    return round(counters[1] - counters[0], 2)


def _at(points: list[tuple[float, float]], moment: float) -> float | None:
    before = next((p for p in reversed(points) if p[0] <= moment), None)
    after = next((p for p in points if p[0] >= moment), None)
    if before is None or after is None:
        return None
    gap = after[0] - before[0]
    return before[1] + (after[1] - before[1]) * ((moment - before[0]) / gap if gap else 0.0)


class Sampler:
    """Context manager: readings, in a thread, while it is open. Nothing that goes wrong in it reaches the job.

    Args:
        gpu: look at the GPU that this process may use, too.
        complain: gets one line if sampling has to end; from then on rounds have no telemetry.
        root: the process whose descendants are the job; default: this one.
    """

    def __init__(self, gpu: bool, complain: Callable[[str], None], root: int | None = None) -> None:
        self.gpu, self.complain, self.root = gpu, complain, root or os.getpid()
        self.readings: deque[Reading] = deque(maxlen=KEPT)
        # Whoever wants a reading now puts a queue for the answer. No locks: the supervisor's main thread may be thrown
        # out of here by a signal at any point.
        self._asked: SimpleQueue[SimpleQueue | None] = SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Sampler:
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left
            self._end(error)
        return self

    def __exit__(self, *_: Any) -> None:
        self._over = True
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)

    def between(self, begin: float, end: float) -> Telemetry | None:
        """Telemetry of a round that has just ended; takes a reading now, so that there is one. See summarise."""
        if not self._over:
            answer: SimpleQueue = SimpleQueue()
            self._asked.put(answer)
            with contextlib.suppress(Empty):
                answer.get(timeout=WAIT_S)
        return None if self._over else summarise(list(self.readings), begin, end, psutil.cpu_count() or 1)

    def _run(self) -> None:
        answer = None
        try:
            with contextlib.ExitStack() as stack:
                machine = Machine(self.root)
                card = stack.enter_context(open_gpu()) if self.gpu else None
                while not self._over:
                    now = time.monotonic()
                    reading = machine.read(now)
                    if card is not None:
                        reading |= card.read(machine.pids)
                    self.readings.append(Reading(now, **reading))
                    if answer is not None:
                        answer.put(None)
                    try:  # the whole period, whatever a reading took: a slow driver is left in peace
                        answer = self._asked.get(timeout=PERIOD_S)
                    except Empty:
                        answer = None
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._over = True
        with contextlib.suppress(OSError):
            self.complain(f"no telemetry from here on: {one_line(error)}")


class Machine:
    """What others take of the machine's CPU, and its clock. pids: of the job's processes, ended ones too."""

    def __init__(self, root: int) -> None:
        self.pids = {root}
        self._job = {root: psutil.Process(root)}
        self._known = {root}
        self._before: tuple[float, float, float] | None = None
        self._load: float | None = None
        self._mhz: float | None = None
        self._mhz_due = 0.0

    def read(self, now: float) -> dict[str, Any]:
        if now >= self._mhz_due:
            self._mhz, self._mhz_due = _cpu_mhz(), now + CPU_MHZ_EVERY_S
        self._follow()
        return {"other_load_cores": self._other_load(), "cpu_mhz": self._mhz}

    def _follow(self) -> None:
        """Find the job's new processes. Only process ids not seen before are asked: a walk over all takes long.

        A process belongs to the job for good, also when its parent ends; so does what runs in a session of the job's.
        """
        running = set(psutil.pids())
        for pid in sorted(running - self._known):
            with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile
                process = psutil.Process(pid)
                if process.ppid() in self._job or os.getsid(pid) in self._job:
                    self._job[pid] = process
        self._known = running
        self._job = {pid: process for pid, process in self._job.items() if pid in running}
        self.pids |= self._job.keys()

    def _other_load(self) -> float | None:
        """Cores since the last call; the last answer where that was too short ago for the kernel's clock ticks."""
        now, machine, job = time.monotonic(), _busy_seconds(), self._job_seconds()
        if not machine:  # some sandboxes show zeros
            return None
        if self._before is None or now - self._before[0] >= PERIOD_S / 2:
            if self._before is not None:
                took, busy, own = (a - b for a, b in zip((now, machine, job), self._before, strict=True))
                # Less than before: a process of the job ended whose time nobody took over.
                self._load = None if own < 0 else max(0.0, (busy - own) / took)
            self._before = (now, machine, job)
        return self._load

    def _job_seconds(self) -> float:
        """CPU seconds of the job's processes; one that ended is in its parent's account."""
        total = 0.0
        for process in self._job.values():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])  # user, system, and both of ended children
        return total


def _busy_seconds() -> float:
    """CPU seconds of all processes, and those that a hypervisor gave to other machines; no interrupts."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "steal"))


def _cpu_mhz() -> float | None:
    try:
        return psutil.cpu_freq().current or None
    except Exception:  # psutil raises what it meets: missing files, odd contents, None
        return None
