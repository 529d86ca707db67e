"""What disturbed a round is seen and said; nothing that cannot be told fails, and a clean round has no flag."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexroll.backends.base import Generation
from flexroll.bench import device, telemetry
from flexroll.bench.device import REASONS, Gpu, foreign, open_gpu
from flexroll.bench.inputs import find_job
from flexroll.bench.telemetry import RULES, Machine, Reading, Sampler, flags, load_limit, summarise
from flexroll.bench.worker import _round
from flexroll.schema.load import parse_config
from flexroll.schema.records import Round, Telemetry
from test_bench import JOB, NEW_TOKENS, Tree, config_data

OWN, OTHER = 5_000_101, 5_000_202  # above Linux's largest process id
BIT = {name: bit for bit, name in REASONS.items()}
GIB = 1 << 30


class FakeNvml:
    """pynvml with one card. values: per call; failing: calls that raise; absent: calls that the binding lacks."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, failing=(), absent=(), **values) -> None:
        self.failing, self.absent = failing, absent
        self.values = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "1.0",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "card",
            "nvmlDeviceGetName": b"Fake GPU",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetPowerUsage": 512_300,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetCurrentClocksThrottleReasons": BIT["sync_boost"],
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=9 * GIB, total=140 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": [process(OWN, 8 * GIB)],
        } | {f"nvmlDeviceGet{name}": value for name, value in values.items()}

    def __getattr__(self, name):
        if name in self.absent or name not in self.values:
            raise AttributeError(name)

        def call(*arguments):
            if name in self.failing:
                raise self.NVMLError(name)
            value = self.values[name]
            return value[arguments[-1]] if isinstance(value, dict) else value

        return call


def process(pid, used=None):
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


TOLD_BY = {
    "sm_mhz": "ClockInfo",
    "memory_mhz": "ClockInfo",
    "sm_max_mhz": "MaxClockInfo",
    "memory_max_mhz": "MaxClockInfo",
    "power_w": "PowerUsage",
    "power_limit_w": "EnforcedPowerLimit",
    "temperature_c": "Temperature",
    "energy_j": "TotalEnergyConsumption",
    "memory_bytes": "MemoryInfo",
    "foreign_processes": "ComputeRunningProcesses",
    "foreign_bytes": "ComputeRunningProcesses",
}
REASON_CALLS = ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"]
CALLS = st.sets(st.sampled_from([f"nvmlDeviceGet{name}" for name in (*TOLD_BY.values(), *REASON_CALLS)]))


def read(nvml: FakeNvml, time: float = 0.0, **fields) -> Reading:
    return Reading(time, **(Gpu(nvml, 0).read({OWN}) | fields))


def telling(**values) -> Telemetry:
    """Telemetry of a round whose every reading shows a card in this state."""
    found = summarise([read(FakeNvml(**values), t / 5) for t in range(20)], 0, 10, 2)
    assert found is not None and found.samples == 20
    return found


@given(failing=CALLS, absent=CALLS)
def test_any_call_may_be_unsupported_and_costs_its_own_field_alone(failing, absent):
    gone = {name.removeprefix("nvmlDeviceGet") for name in failing | absent}
    full = Gpu(FakeNvml(), 0).read({OWN})
    found = Gpu(FakeNvml(failing, absent), 0).read({OWN})
    assert set(found) == {*TOLD_BY, "reasons"} and None not in full.values()
    for field, call in TOLD_BY.items():
        assert found[field] == (None if call in gone else full[field])
    told = [call for call in REASON_CALLS if call not in gone]
    wanted = {"CurrentClocksEventReasons": set(), "CurrentClocksThrottleReasons": {"sync_boost"}}
    assert found["reasons"] == (wanted[told[0]] if told else None)
    summary = summarise([Reading(0.0, **found)], 0, 1, 2)
    assert summary.samples == 1 and flags(summary) == []


def test_quantities_have_their_units():
    found = telling()
    assert (found.sm_mhz.median, found.sm_max_mhz) == (1980, 1980)
    assert (found.memory_mhz.max, found.memory_max_mhz) == (3201, 3201)
    assert (found.power_w.median, found.power_limit_w, found.temperature_c.min) == (512.3, 700, 61)
    assert (found.memory_bytes, found.foreign_processes, found.foreign_bytes) == (9 * GIB, 0, 0)
    assert found.reasons == {} and found.low_clock_share == 0 and found.other_load_cores is None


def test_energy_is_the_counters_difference_over_the_round():
    readings = [Reading(float(t), energy_j=1000 + 100.0 * t) for t in range(5)]
    assert summarise(readings, 1.0, 3.0, 2).energy_j == 200
    assert summarise(readings, 1.25, 1.75, 2).energy_j == 50  # between two readings
    assert summarise(readings, 1.5, 4.5, 2).energy_j is None  # nothing after its end
    assert summarise([Reading(0.0, energy_j=9), Reading(1.0), Reading(2.0, energy_j=1)], 0, 2, 2).energy_j is None


@pytest.mark.parametrize(
    ("reason", "flag"),
    [
        ("sw_power_cap", "throttled: power cap"),
        ("hw_slowdown", "throttled: hardware slowdown"),
        ("sw_thermal", "throttled: thermal (software)"),
        ("hw_thermal", "throttled: thermal (hardware)"),
        ("power_brake", "throttled: power brake"),
        ("gpu_idle", None),
        ("applications_clocks", None),
        ("sync_boost", None),
    ],
)
def test_a_throttled_round_is_flagged_by_its_reason(reason, flag):
    found = telling(CurrentClocksEventReasons=BIT[reason], ClockInfo={1: 1700, 2: 3201})
    assert found.reasons == {reason: 1.0} and flags(found) == ([flag] if flag else [])


def test_a_power_cap_that_costs_no_clock_is_no_throttle():
    capped = {"CurrentClocksEventReasons": BIT["sw_power_cap"]}
    assert flags(telling(**capped)) == []
    assert flags(telling(**capped, ClockInfo={1: 1900, 2: 3201})) == ["throttled: power cap"]
    untold = summarise([read(FakeNvml({"nvmlDeviceGetClockInfo"}, **capped))], 0, 1, 2)
    assert untold.sm_mhz is None and flags(untold) == ["throttled: power cap"]


@pytest.mark.parametrize(("reason", "few", "many"), [("sw_power_cap", 2, 3), ("hw_slowdown", 0, 1)])
def test_a_reason_flags_where_it_held_in_enough_samples(reason, few, many):
    def round_with(count):
        return [Reading(float(t), reasons=frozenset([reason] if t < count else [])) for t in range(20)]

    assert flags(summarise(round_with(few), 0, 20, 2)) == []
    assert len(flags(summarise(round_with(many), 0, 20, 2))) == 1


def test_a_low_clock_flags_a_card_that_works_and_not_an_idle_one():
    low = {1: 1200, 2: 3201}
    assert flags(telling(ClockInfo=low)) == ["low SM clock"]
    assert flags(telling(ClockInfo=low, CurrentClocksEventReasons=BIT["gpu_idle"])) == []
    silent = FakeNvml({f"nvmlDeviceGet{call}" for call in REASON_CALLS}, ClockInfo=low)
    untold = summarise([read(silent)], 0, 1, 2)
    assert untold.low_clock_share is None and flags(untold) == []


def test_another_process_on_the_card_is_flagged():
    found = telling(ComputeRunningProcesses=[process(OWN, GIB), process(OTHER, 2 * GIB), process(OTHER + 1, GIB)])
    assert (found.foreign_processes, found.foreign_bytes) == (2, 3 * GIB)
    assert flags(found) == ["another process on the GPU"]
    assert foreign({OWN: 1, OTHER: None}, {OWN}) == (1, None)


def test_process_ids_of_another_namespace_are_counted_against_those_that_started_cuda(tmp_path, monkeypatch, start):
    held = tmp_path / "uvm"
    held.write_text("")
    monkeypatch.setattr(device, "CUDA_FILE", str(held))
    engine = start("import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)", str(held))
    engine.stdout.readline()
    pids = {os.getpid(), engine.pid, OWN}  # OWN has ended
    assert foreign({}, pids) == (None, None)
    assert foreign({OTHER: 5}, pids) == (0, None)
    assert foreign({OTHER: 5, OTHER + 1: 6}, pids) == (1, None)
    assert foreign({OTHER: 5}, {os.getpid()}) == (None, None)  # ours is not seen to use the card at all
    with held.open():  # two of the job's
        assert foreign({OTHER: 5}, pids) == (None, None)

    def refuse(_):
        raise PermissionError

    monkeypatch.setattr(device.os, "listdir", refuse)
    assert foreign({OTHER: 5, OTHER + 1: 6}, pids) == (None, None)


def test_load_of_others_is_flagged_past_its_limit_only():
    assert load_limit(2) == 0.5 and load_limit(64) == 6.4

    def round_with(load, cores):
        return summarise([Reading(float(t), other_load_cores=load) for t in range(10)], 0, 10, cores)

    assert flags(round_with(0.6, 2)) == ["other processes used the CPU"] and flags(round_with(0.6, 64)) == []
    assert flags(round_with(0.4, 2)) == [] and round_with(0.4, 2).other_load_cores.max == 0.4


def test_every_rule_has_its_own_words():
    assert len({rule.flag for rule in RULES}) == len(RULES) and flags(None) == []


numbers = st.none() | st.floats(0, 1e4).map(lambda x: round(x, 3))
readings_lists = st.lists(
    st.builds(
        Reading,
        time=st.floats(0, 10),
        sm_mhz=numbers,
        sm_max_mhz=numbers,
        memory_bytes=st.none() | st.integers(0, 10**12),
        reasons=st.none() | st.frozensets(st.sampled_from(sorted(BIT)), max_size=3),
        foreign_processes=st.none() | st.integers(0, 3),
        other_load_cores=st.none() | st.floats(0, 4),
    ),
    max_size=12,
).map(lambda rs: sorted(rs, key=lambda r: r.time))


@given(readings_lists, st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted))
def test_a_summary_is_that_of_a_plain_loop(readings, span):
    begin, end = span
    chosen, after = [], []
    for r in readings:
        if begin <= r.time <= end:
            chosen.append(r)
        elif r.time > end:
            after.append(r)
    chosen = chosen or after[:1]
    found = summarise(readings, begin, end, 4)
    if not chosen:
        assert found is None
        return
    assert found.samples == len(chosen)
    clocks = sorted(r.sm_mhz for r in chosen if r.sm_mhz is not None)
    if clocks:
        half = len(clocks) // 2
        middle = clocks[half] if len(clocks) % 2 else (clocks[half - 1] + clocks[half]) / 2
        assert found.sm_mhz.median == pytest.approx(middle, abs=0.01)
        assert (found.sm_mhz.min, found.sm_mhz.max) == pytest.approx((clocks[0], clocks[-1]), abs=0.01)
    else:
        assert found.sm_mhz is None
    told = [r for r in chosen if r.reasons is not None]
    assert (found.reasons is None) == (not told)
    for name in BIT:
        count = sum(name in r.reasons for r in told)
        assert (found.reasons or {}).get(name, 0) == pytest.approx(count / max(1, len(told)), abs=1e-4)
    loads = [r.other_load_cores for r in chosen if r.other_load_cores is not None]
    over = sum(load > 0.5 for load in loads)
    assert found.other_load_share == (pytest.approx(over / len(loads), abs=1e-4) if loads else None)
    low, known = 0, 0
    for r in told:
        if r.sm_mhz is not None and r.sm_max_mhz:
            known += 1
            low += "gpu_idle" not in r.reasons and r.sm_mhz < 0.8 * r.sm_max_mhz
    assert found.low_clock_share == (pytest.approx(low / known, abs=1e-4) if known else None)
    seen = [r.foreign_processes for r in chosen if r.foreign_processes is not None]
    assert found.foreign_processes == (max(seen) if seen else None)
    assert found.memory_bytes == max((r.memory_bytes for r in chosen if r.memory_bytes is not None), default=None)
    assert Telemetry.model_validate_json(found.model_dump_json()) == found


@pytest.fixture
def start():
    """Start a Python program; it is killed when the test ends."""
    running = []

    def run(code, *arguments):
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return running[-1]

    yield run
    for one in running:
        one.kill()
        one.wait()
        one.stdout.close()


def test_a_busy_process_outside_the_job_is_seen(start):
    machine = Machine(start("import time; time.sleep(60)").pid)
    assert machine.read(time.monotonic())["other_load_cores"] is None  # nothing to compare with
    busy = start("while True: pass")
    for _ in range(40):
        time.sleep(0.3)
        load = machine.read(time.monotonic())["other_load_cores"]
        if load is None:
            pytest.skip("this machine does not count its CPU time")
        if load > 0.5:
            break
    assert load > 0.5 and busy.pid not in machine.pids and busy.poll() is None
    assert machine.read(time.monotonic())["other_load_cores"] == load  # too soon to tell anew


def test_what_ended_children_used_stays_the_jobs(start):
    job = start(
        "import subprocess, sys, time\n"
        "burn = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "for _ in range(2): subprocess.run([sys.executable, '-c', burn]); print(flush=True)\n"
        "time.sleep(60)"
    )
    machine = Machine(job.pid)
    used = []
    for _ in range(2):
        job.stdout.readline()
        machine.read(time.monotonic())
        used.append(machine._job_seconds())
    assert used[0] > 0.25 and used[1] - used[0] > 0.25
    assert {job.pid} == set(machine._job)


def test_a_process_whose_parent_ended_before_it_was_seen_is_the_jobs(start):
    job = start(
        "import os, time\n"
        "if not (child := os.fork()):\n"
        "    if not os.fork():\n"
        "        print(os.getpid(), flush=True); time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0); print(flush=True); time.sleep(60)"
    )
    orphan = int(next(line for line in (job.stdout.readline(), job.stdout.readline()) if line.strip()))
    machine = Machine(job.pid)
    try:
        machine.read(time.monotonic())
        assert psutil.Process(orphan).ppid() != job.pid and orphan in machine.pids
        assert os.getpid() not in machine.pids
    finally:
        psutil.Process(orphan).kill()


def test_a_machine_that_tells_nothing_of_its_cpu(monkeypatch):
    monkeypatch.setattr(telemetry.psutil, "cpu_times", lambda: SimpleNamespace(user=0.0, nice=0.0, system=0.0))
    for error in (FileNotFoundError, NotImplementedError, AttributeError):
        monkeypatch.setattr(telemetry.psutil, "cpu_freq", lambda error=error: (_ for _ in ()).throw(error))
        assert Machine(os.getpid()).read(0.0) == {"other_load_cores": None, "cpu_mhz": None}
    monkeypatch.setattr(telemetry.psutil, "cpu_freq", lambda: None)
    assert Machine(os.getpid()).read(0.0)["cpu_mhz"] is None


def test_a_sampler_looks_at_the_card_that_this_process_may_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(ComputeRunningProcesses=[process(os.getpid()), process(OTHER)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = []
    with Sampler(True, told.append) as sampler:
        now = time.monotonic()
        found = sampler.between(now, now)
    assert found.samples == 1 and found.sm_mhz.median == 1980
    assert flags(found)[0] == "another process on the GPU" and told == []
    assert sampler.between(now, now) is None  # it is over


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlShutdown"])
def test_without_a_card_or_driver_the_rest_is_told(monkeypatch, call):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(device, "visible_gpus", lambda: [{"index": 0}])
    nvml.failing = {call}
    told = []
    with Sampler(True, told.append) as sampler:
        now = time.monotonic()
        assert (sampler.between(now, now).sm_mhz is None) == (call != "nvmlShutdown")
    monkeypatch.setattr(device, "visible_gpus", lambda: [])
    with open_gpu() as card:
        assert card is None and told == []


def test_a_reading_that_fails_ends_telemetry_with_one_line_and_one_that_hangs_holds_nothing_up(monkeypatch):
    told = []
    monkeypatch.setattr(telemetry, "WAIT_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Machine, "read", lambda *_: 1 / 0)
        with Sampler(False, told.append) as sampler:
            assert sampler.between(0, 1) is None and sampler.between(1, 2) is None
            sampler._thread.join(30)
    assert told == ["no telemetry from here on: ZeroDivisionError: division by zero"]
    free = threading.Event()
    monkeypatch.setattr(Machine, "read", lambda *_: {"cpu_mhz": free.wait(60)})
    with Sampler(False, told.append) as sampler:
        assert sampler.between(0, 1) is None
    free.set()
    sampler._thread.join(30)
    assert not sampler._thread.is_alive() and len(told) == 1


def test_a_round_keeps_its_telemetry_and_an_old_one_loads():
    full = telling(ComputeRunningProcesses=[process(OWN, GIB), process(OTHER, GIB)])
    done = Round(index=0, tokens=4, wall_s=0.5, started=1.7e9, telemetry=full, flags=flags(full))
    assert Round.model_validate_json(done.model_dump_json()) == done and done.flags
    assert "null" not in full.model_dump_json()  # what is not told is not written
    old = Round.model_validate({"index": 1, "tokens": 4, "wall_s": 0.5, "warmup": False, "tokens_sha256": "ab"})
    assert (old.started, old.telemetry, old.flags) == (None, None, [])


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Tree(tmp_path)


def test_every_round_of_a_job_has_telemetry(tree):
    tree.bench("Good")
    assert tree.statuses() == ["ok"] * 3
    for record in tree.records():
        for done in record.rounds:
            assert done.telemetry.samples >= 1
            assert (done.telemetry.other_load_cores is None) == (telemetry._busy_seconds() == 0)
            assert done.telemetry.sm_mhz is None and set(done.flags) <= {"other processes used the CPU"}


def test_a_round_in_slices_is_one_span():
    job = find_job(parse_config(config_data()), JOB)
    calls = []

    def generate(prompts, _, new_tokens, *__):
        calls.append(time.monotonic())
        return Generation([[5] * new for new in new_tokens])

    backend = SimpleNamespace(forget=lambda: None, generate=generate)
    before = time.time()
    done, _, (begin, end) = _round(backend, job.cells[1], [[1], [2], [3]], 0, True)
    assert len(calls) == 2 and begin <= calls[0] <= calls[1] <= end and done.tokens == 3 * NEW_TOKENS
    assert before <= done.started <= time.time()


def test_a_job_outlives_its_telemetry(tree, monkeypatch):
    monkeypatch.setattr(Machine, "read", lambda *_: 1 / 0)
    tree.bench("Good")
    records = tree.records()
    assert tree.statuses() == ["ok"] * 3
    assert all(r.telemetry is None and r.flags == [] for record in records for r in record.rounds)
    assert (tree.results / records[0].log).read_text().count("=== no telemetry from here on: ZeroDivisionError") == 1
