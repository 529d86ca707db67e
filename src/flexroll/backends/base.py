"""The protocol every backend implements: start, prepare a cell, generate, tell memory, close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexroll.schema.config import Sampling


@dataclass(frozen=True)
class EngineSpec:
    """What a backend needs to start, once a process.

    model: checkpoint folder; adapter: PEFT folder or None; merged: folder of a checkpoint with the adapter merged in
    (written by `flexroll merge`), for backends that merge nothing themselves. max_batch: most sequences that run at
    once; it and max_model_len bound every later `prepare`. first_batch: what the first `prepare` will ask for. dummy:
    draw weights on the device, from config.json alone. option: the backend's own options, as validated by the config.
    shard: folder of the NF4 checkpoint (`flexroll quantise`), where the option wants it. replay: file of the decode
    kernel options that autotuning found (`flexroll autotune`), where the option wants them.
    """

    model: Path
    adapter_mode: str  # none | merged | unmerged | request
    adapter: Path | None
    merged: Path | None
    dtype: str  # bfloat16 | float32
    device: str  # cuda | cpu
    max_batch: int
    max_model_len: int
    seed: int
    first_batch: int = 1
    dummy: bool = False
    shard: Path | None = None
    replay: Path | None = None
    option: dict[str, Any] = field(default_factory=dict)


def four_bit_missing() -> str | None:
    """One line saying why there are no 4-bit weights in this environment, or None."""
    if find_spec("bitsandbytes") is not None:
        return None
    return "4-bit weights need bitsandbytes, which is not installed here; the stack's lock has none"


def option_problem(spec: EngineSpec) -> str | None:
    """Why the spec's option can run on no backend of this environment, or None."""
    return four_bit_missing() if spec.option.get("four_bit") is not None else None


def unavailable(backend: type[Backend], spec: EngineSpec) -> str | None:
    """One line saying why the backend cannot run the spec here, or None: the backend's own reason, or the option's."""
    return backend.unavailable(spec) or option_problem(spec)


@dataclass
class Generation:
    """Result of one call: generated ids without the prompt, all samples of a prompt together, in prompt order.

    What follows where the backend can tell. decode_tokens: of its decode steps, where that is not all but the first
    ones; steps: how many those were; first_token_s: seconds until the first token of any sequence was there. notes:
    counts and seconds of the backend's own, which a round sums up by name.
    """

    tokens: list[list[int]]
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_tokens: int | None = None
    steps: int | None = None
    first_token_s: float | None = None
    notes: dict[str, float] = field(default_factory=dict)


@dataclass
class Scores:
    """What an engine thinks of the n given tokens that follow one prompt.

    logprobs: natural log of each given token's probability, of the model's own distribution. argmax: the most likely
    token at each place. full: fp32 tensor [n, vocab] on the host, the whole distribution; None where it is not told.
    """

    logprobs: list[float]
    argmax: list[int]
    full: Any = None

    @classmethod
    def of(cls, full: Any, tokens: list[int]) -> Scores:
        """From log probabilities fp32 [n, vocab] on the host."""
        given = full[range(len(tokens)), tokens]
        return cls(given.tolist(), full.argmax(-1).tolist(), full)


class Backend(ABC):
    """One engine in this process.

    Life: `unavailable(spec)` -> constructor (loads, compiles) -> for each cell `prepare`, then `forget` and `generate`
    per round -> `close`. Import of the heavy library happens in the constructor, never at module import.
    """

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        """One line saying why this backend cannot run here (the cell is then `skipped`), or None."""
        return None

    @abstractmethod
    def __init__(self, spec: EngineSpec) -> None: ...

    def prepare(self, running: int) -> None:
        """Called before a cell's rounds: at most `running` sequences run at once; a backend may size its KV cache."""

    def forget(self) -> None:
        """Called before a round, untimed: drop what was kept of earlier rounds' prompts."""

    @abstractmethod
    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        new_tokens: list[int],
        ignore_eos: bool,
        seed: int,
        samples: int = 1,
    ) -> Generation:
        """Generate `samples` continuations of every prompt, in one call.

        Args:
            new_tokens: a length a prompt, at most; with ignore_eos exactly.

        Raises whatever the library raises; the runner records it as the cell's reason. A request the library drops
        silently must raise here.
        """

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[Scores]:
        """Teacher forcing: what this engine thinks of given continuations, one Scores a prompt; no temperature.

        Raises:
            NotImplementedError: it cannot tell the probability of a token it did not choose; the message says so.
        """
        raise NotImplementedError("this backend does not tell the probabilities of given tokens")

    @abstractmethod
    def memory(self) -> dict[str, int | None]:
        """{"weights": bytes, "kv_reserved": bytes}; None where it cannot be told."""

    def start_parts(self) -> dict[str, float]:
        """Seconds until the engine was ready for the prepared cell: load, compile, capture; where it tells."""
        return {}

    def child_pids(self) -> list[int]:
        """Processes of this engine besides the current one, for memory accounting."""
        return []

    def close(self) -> None: ...
