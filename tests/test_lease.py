"""A device is measured on by one process at a time: real processes, with a stand-in for NVML."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexroll.bench import lease as lease_module
from flexroll.provenance import SRC

NVML = """
import json, os
class NVMLError(Exception): pass
def _gpus(): return json.load(open(os.environ["FAKE_GPUS"]))
class _Memory:
    def __init__(self, used): self.used, self.total = used, 150 * 10**9
class _Process:
    def __init__(self, pid): self.pid, self.usedGpuMemory = pid, None
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "1.0"
def nvmlDeviceGetCount(): return len(_gpus())
def nvmlDeviceGetHandleByIndex(index): return _gpus()[index]
def nvmlDeviceGetName(gpu): return gpu.get("name", "Fake GPU")
def nvmlDeviceGetUUID(gpu): return gpu["uuid"]
def nvmlDeviceGetMemoryInfo(gpu): return _Memory(gpu.get("used", 600_000_000))
def nvmlDeviceGetComputeRunningProcesses(gpu): return [_Process(p) for p in gpu.get("pids", [])]
"""
HOLD = """
import os, sys, time
from pathlib import Path
from flexroll.bench.lease import device_lease
with device_lease(Path.cwd(), sys.argv[4], sys.argv[2] or None, int(sys.argv[3])) as uuid:
    begun = time.monotonic()
    print(uuid, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"), flush=True)
    time.sleep(float(sys.argv[1]))
    print(begun, time.monotonic(), flush=True)
"""


class Machine:
    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "fake").mkdir()
        (folder / "fake" / "pynvml.py").write_text(NVML)
        self.started = []

    def has(self, *gpus: dict) -> None:
        (self.folder / "gpus.json").write_text(json.dumps(gpus))

    def hold(
        self, seconds: float, prefer: str = "", seats: int = 1, device: str = "Fake GPU", **env: str
    ) -> subprocess.Popen:
        env = {**os.environ, "FAKE_GPUS": str(self.folder / "gpus.json"), **env}
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder / "fake"), str(SRC)])
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(seconds), prefer, str(seats), device],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    made = Machine(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def test_six_jobs_on_two_gpus_never_share_one(machine):
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    spans = {"GPU-a": [], "GPU-b": []}
    for process in [machine.hold(1.5) for _ in range(6)]:
        seen, span = process.communicate(timeout=60)[0].splitlines()
        uuid, visible, order = seen.split()
        assert (visible, order) == ({"GPU-a": "0", "GPU-b": "1"}[uuid], "PCI_BUS_ID")
        spans[uuid].append(tuple(map(float, span.split())))
    for held in spans.values():
        assert held
        ordered = sorted(held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def test_a_killed_job_leaves_its_gpu_free(machine):
    machine.has({"uuid": "GPU-a"})
    first = machine.hold(600)
    assert first.stdout.readline().startswith("GPU-a")
    second = machine.hold(0)
    time.sleep(1)
    assert second.poll() is None  # it waits
    first.send_signal(signal.SIGKILL)
    assert second.communicate(timeout=60)[0].splitlines()[-2].startswith("GPU-a")


def test_the_gpu_of_a_session_is_waited_for_though_another_is_free(machine):
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"}, {"uuid": "GPU-c"})
    first = machine.hold(600, prefer="GPU-b")
    assert first.stdout.readline().startswith("GPU-b")
    second = machine.hold(0, prefer="GPU-b")
    assert machine.hold(0).communicate(timeout=60)[0].startswith("GPU-a")
    assert second.poll() is None
    first.kill()
    assert second.communicate(timeout=60)[0].startswith("GPU-b")


def test_seats_are_filled_one_gpu_after_another_and_no_measurement_has_company(machine):
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    spans = {"GPU-a": [], "GPU-b": []}
    held = [(machine.hold(1.0, seats=1 if n % 3 == 0 else 2), n % 3 == 0) for n in range(9)]
    for process, alone in held:
        seen, span = process.communicate(timeout=60)[0].splitlines()
        spans[seen.split()[0]].append((*map(float, span.split()), alone))
    for of_one in spans.values():
        for moment, _, _ in of_one:
            there = [alone for begin, end, alone in of_one if begin <= moment < end]
            assert len(there) <= (1 if any(there) else 2)


def test_who_shares_a_gpu_goes_where_others_share_and_what_they_use_is_not_foreign(machine):
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    measuring = machine.hold(600)
    assert measuring.stdout.readline().startswith("GPU-a")
    first = machine.hold(600, seats=3)
    assert first.stdout.readline().startswith("GPU-b")
    measuring.kill()
    measuring.wait()
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b", "used": 20 * 10**9, "pids": [first.pid]})
    second = machine.hold(600, seats=3)
    assert second.stdout.readline().startswith("GPU-b")  # what the first has on it is no foreign program's
    third = machine.hold(600, prefer="GPU-b")
    time.sleep(1)
    assert third.poll() is None  # a measurement waits for both
    first.kill()
    second.kill()
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    assert third.stdout.readline().startswith("GPU-b")


def test_a_cpu_is_shared_by_seats_and_measured_on_alone(machine):
    machine.has()
    first, second = (machine.hold(600, seats=2, device="cpu") for _ in range(2))
    assert first.stdout.readline() == second.stdout.readline() == "None None None\n"
    third, measuring = machine.hold(0, seats=2, device="cpu"), machine.hold(0, device="cpu")
    time.sleep(1.5)
    assert third.poll() is None and measuring.poll() is None
    first.kill()  # its seat is free, the device is not
    assert third.communicate(timeout=60)[0]
    assert measuring.poll() is None
    second.kill()
    assert measuring.communicate(timeout=60)[0]


@pytest.mark.parametrize("state", [{"used": 20 * 10**9}, None], ids=["foreign", "gone"])
def test_another_gpu_serves_where_that_of_a_session_is_not_to_be_had(here, capfd, state):
    here.has({"uuid": "GPU-a"}, *([{"uuid": "GPU-b", **state}] if state else []))
    with lease_module.device_lease(here.folder, "Fake GPU", "GPU-b") as uuid:
        assert uuid == "GPU-a"
    assert "GPU-b, which this session began on, is not to be had" in capfd.readouterr().err


@pytest.mark.parametrize(("setting", "uuid"), [("1", "GPU-b"), ("GPU-c", "GPU-c")])
def test_only_visible_gpus_of_the_class_are_taken(machine, setting, uuid):
    machine.has({"uuid": "GPU-a"}, {"uuid": "GPU-b"}, {"uuid": "GPU-c"}, {"uuid": "GPU-d", "name": "Other"})
    out = machine.hold(0, CUDA_VISIBLE_DEVICES=setting).communicate(timeout=60)[0]
    assert out.split()[:2] == [uuid, {"GPU-b": "1", "GPU-c": "2"}[uuid]]


@pytest.fixture
def here(machine, monkeypatch):
    """The stand-in for NVML in this process, without the wait for a killed program's memory."""
    monkeypatch.setenv("FAKE_GPUS", str(machine.folder / "gpus.json"))
    monkeypatch.syspath_prepend(str(machine.folder / "fake"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(lease_module, "GRACE_S", 0.0)
    monkeypatch.setattr(lease_module, "POLL_S", 0.05)
    yield machine
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize(
    ("busy", "words"),
    [({"used": 20 * 10**9}, "20.0 GB in use;"), ({"pids": [77]}, "0.6 GB in use by process 77;")],
    ids=["memory", "process"],
)
def test_a_gpu_in_foreign_hands_is_refused_and_another_taken(here, monkeypatch, busy, words):
    here.has({"uuid": "GPU-a", **busy}, {"uuid": "GPU-b"})
    with lease_module.device_lease(here.folder, "Fake GPU") as uuid:
        assert (uuid, os.environ["CUDA_VISIBLE_DEVICES"]) == ("GPU-b", "1")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and "CUDA_DEVICE_ORDER" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with (
        pytest.raises(lease_module.FlexrollError, match="no free Fake GPU: GPU 0") as error,
        lease_module.device_lease(here.folder, "Fake GPU"),
    ):
        pass
    assert words in str(error.value) and "\n" not in str(error.value)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_memory_that_comes_back_in_time_is_waited_for(here, monkeypatch):
    monkeypatch.setattr(lease_module, "GRACE_S", 30.0)
    here.has({"uuid": "GPU-a", "used": 90 * 10**9})
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        here.has({"uuid": "GPU-a"})

    monkeypatch.setattr(lease_module.time, "sleep", sleep)
    with lease_module.device_lease(here.folder, "Fake GPU") as uuid:
        assert uuid == "GPU-a" and len(waited) == 1


def test_a_gpu_that_is_gone_is_an_error(here):
    here.has({"uuid": "GPU-a", "name": "Other"})
    with (
        pytest.raises(lease_module.FlexrollError, match="no Fake GPU is visible any more"),
        lease_module.device_lease(here.folder, "Fake GPU"),
    ):
        pass
