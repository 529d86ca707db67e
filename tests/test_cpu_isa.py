"""What depends on the CPU's instruction sets: Inductor's checks of them, and which compiled code can be loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from torch._inductor import cpu_vec_isa

from flexroll.cpu_isa import remember_checks


class Isa:
    def __init__(self, flags: str) -> None:
        self._arch_flags = flags


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What torch was asked, as (flags, code); it answers no to code that holds `no`."""
    calls: list[tuple[str, str]] = []

    def check_build(self, code):
        calls.append((self._arch_flags, code))
        return "no" not in code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    return calls


def ask(flags: str, code: str) -> bool:
    return cpu_vec_isa.VecISA.check_build(Isa(flags), code)


def test_a_yes_is_kept_by_flags_and_code_and_a_no_is_not(asked):
    remember_checks()
    assert [ask("-mavx2", "a"), ask("-mavx2", "a"), ask("-mavx512f", "a"), ask("-mavx2", "b")] == [True] * 4
    assert asked == [("-mavx2", "a"), ("-mavx512f", "a"), ("-mavx2", "b")]
    assert not ask("-mavx2", "no") and not ask("-mavx2", "no")
    assert len(asked) == 5


def test_another_process_reads_what_was_kept(asked, monkeypatch, tmp_path):
    own = cpu_vec_isa.VecISA.check_build
    remember_checks()
    remember_checks()  # twice changes nothing
    assert ask("-mavx2", "a") and len(asked) == 1
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", own)  # as a fresh process begins
    remember_checks()
    assert ask("-mavx2", "a") and len(asked) == 1
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert ask("-mavx2", "a") and len(asked) == 2


def test_a_torch_that_asks_otherwise_is_left_alone(monkeypatch):
    monkeypatch.delattr(cpu_vec_isa, "_get_isa_dry_compile_fingerprint")
    before = cpu_vec_isa.VecISA.check_build
    remember_checks()
    assert cpu_vec_isa.VecISA.check_build is before


def test_the_compiled_code_of_this_stack_loads_on_this_cpu():
    """As the self-test of an image asks: of several builds of an extension, the one that this CPU can run."""
    code = "import json; from flexroll.images import selftest; print(json.dumps(selftest.library_problems()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr[-2000:]
