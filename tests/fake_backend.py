"""Backends that behave, hang, crash or lie, for the tests of the bench. Named to the worker by file and class."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flexroll.backends.base import Backend, EngineSpec, Generation


class Good(Backend):
    """Token ids 5, 6, 7, ... after each prompt. FAKE_LOG names a file that gets one line a start and a call."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.batch = 0
        self.note(f"start {os.getpid()}")

    def note(self, text: str) -> None:
        if "FAKE_LOG" in os.environ:
            with Path(os.environ["FAKE_LOG"]).open("a") as file:
                file.write(text + "\n")

    def prepare(self, running: int) -> None:
        self.batch = running

    def forget(self) -> None:
        self.note("forget")

    def start_parts(self) -> dict[str, float]:
        return {"load": 0.5}

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        self.note(f"generate {self.batch} {len(prompts)} {max(new_tokens)} {samples}")
        rows = [[5 + i for i in range(new)] for new in new_tokens for _ in range(samples)]
        return Generation(rows, prefill_s=0.25, decode_s=0.75)

    def memory(self) -> dict[str, int | None]:
        return {"weights": 10, "kv_reserved": None}


class Hangs(Good):
    """Never returns at batch 2, not even on SIGTERM, and leaves a child behind that does not either."""

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        if self.batch == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = os.fork()
            self.note(f"hanging {child or os.getpid()}")
            while True:
                time.sleep(1)
        return super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)


class HangsLate(Good):
    """Hangs in the second measured round of batch 2."""

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        self.calls = getattr(self, "calls", {})
        self.calls[self.batch] = self.calls.get(self.batch, 0) + 1
        if self.batch == 2 and self.calls[2] == 3:
            time.sleep(600)
        return super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)


class Crashes(Good):
    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        if self.batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)


class Raises(Good):
    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        if self.batch == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)


class Short(Good):
    """One token too few for the last prompt at batch 2."""

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        done = super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)
        if self.batch == 2:
            done.tokens[-1].pop()
        return done


class Drops(Good):
    """Loses a prompt at batch 2."""

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        kept = new_tokens[:-1] if self.batch == 2 else new_tokens
        return super().generate(prompts[: len(kept)], sampling, kept, ignore_eos, seed, samples)


class NoStart(Good):
    def __init__(self, spec: EngineSpec) -> None:
        raise ValueError("no kernel image\nis available")


class DiesAtStart(Good):
    def __init__(self, spec: EngineSpec) -> None:
        print("about to go", flush=True)
        os._exit(7)


class HangsAtStart(Good):
    def __init__(self, spec: EngineSpec) -> None:
        time.sleep(600)


class Absent(Good):
    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        return "needs a CUDA GPU"


class Slow(Good):
    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        time.sleep(0.25)
        return super().generate(prompts, sampling, new_tokens, ignore_eos, seed, samples)


class HangsAtClose(Good):
    def close(self) -> None:
        time.sleep(600)
