"""Synthetic runs for the tests of analysis and report: records with chosen rounds, no engine behind them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.bench import telemetry
from flexroll.schema.cells import Cell, expand, jobs, remark
from flexroll.schema.config import Config
from flexroll.schema.load import parse_config
from flexroll.schema.quality import QualityRecord, Target, targets
from flexroll.schema.records import (
    Coherence,
    Environment,
    Memory,
    Range,
    Record,
    Round,
    Sample,
    Telemetry,
    write_json,
    write_record,
)

CONFIG: dict[str, Any] = {
    "run": "synthetic",
    "title": "a synthetic run",
    "model": {"name": "tiny_gsm", "source": "local", "path": "models/tiny-gsm"},
    "prompts": {"source": "file", "path": "models/tiny-gsm/gsm_test.json", "field": "q", "count": 16},
    "max_model_len": 512,
    "repeats": {"sessions": 1, "rounds": 3},
    "drift": {"cycles": 3, "stacks": ["torch2.11", "torch2.9.1"]},
    "samplings": {"greedy": {}, "equivalence": {"temperature": 0.1, "top_k": 5}},
    "options": {"page32": {"flex": {"page_size": 32}}},
    "experiments": {
        "sweep": {
            "title": "Batch sweep",
            "section": "batch_sweep",
            "batches": [2, 4, 8],
            "new_tokens": 64,
            "stacks": ["torch2.11"],
            "backends": [{"backend": "flex"}, {"backend": "transformers_cb"}, {"backend": "vllm", "batches": [8]}],
        },
        "lora": {
            "title": "LoRA",
            "section": "grpo",
            "batches": [8],
            "new_tokens": 64,
            "stacks": ["torch2.11"],
            "backends": [
                {"backend": "flex", "adapters": ["merged", "unmerged"]},
                {"backend": "vllm", "adapters": ["request"]},
                {"backend": "unsloth", "adapters": ["unmerged"]},
            ],
        },
        "options": {
            "title": "Options",
            "section": "options",
            "batches": [8],
            "new_tokens": 64,
            "stacks": ["torch2.11"],
            "backends": [{"backend": "flex", "options": ["default", "page32"]}],
        },
        "torch_versions": {
            "title": "Torch versions",
            "section": "torch_versions",
            "batches": [8],
            "new_tokens": 64,
            "stacks": ["torch2.9.1", "torch2.11"],
            "backends": [{"backend": "flex", "adapters": ["merged"]}],
        },
    },
}


def config(**changes: Any) -> Config:
    return parse_config(CONFIG | changes)


def environment(stack: str = "torch2.11", gpu: str | None = None, uuid: str = "GPU-1") -> Environment:
    return Environment(
        stack=stack,
        image="not containerised",
        python="3.12.0",
        platform="Linux",
        cpu="a CPU",
        cores=2,
        device=gpu or "cpu",
        device_uuid=uuid if gpu else None,
        driver="580" if gpu else None,
        packages={"torch": "2.11.0", "transformers": "5.17.0"},
        lock_sha256="a" * 64,
        source_sha256="b" * 64,
        commit="c" * 40,
        dirty=False,
        started="2026-01-01T00:00:00",
    )


def sample(ok: bool = True, text: str = "The answer is 4.") -> Sample:
    notes = [] if ok else ["one unit repeats"]
    coherence = Coherence(ok=ok, distinct_ratio=0.9, longest_repeat=0.1, nonprintable=0.0, notes=notes)
    return Sample(prompt="What is 2 + 2?", text=text, tokens=6, coherence=coherence)


def record(
    cell: Cell,
    rates: Iterable[float] = (100.0, 120.0, 110.0),
    *,
    gpu: str | None = None,
    uuid: str = "GPU-1",
    memory_gb: float = 44,
    **changes: Any,
) -> Record:
    """A record whose measured rounds have these rates in tok/s, after a warm-up round faster than any of them."""
    tokens = sum(cell.lengths(cell.prompts)) * cell.samples
    rounds = [Round(index=0, tokens=tokens, wall_s=tokens / 9999, warmup=True)]
    rounds += [Round(index=i, tokens=tokens, wall_s=tokens / r, tokens_sha256="d" * 64) for i, r in enumerate(rates, 1)]
    memory = Memory(weights=10**9, kv_reserved=10**8, peak_allocated=2 * 10**9, device_total=int(memory_gb * 1e9))
    values: dict[str, Any] = {
        "status": "ok",
        "rounds": rounds,
        "memory": memory,
        "environment": environment(cell.stack, gpu, uuid),
        "samples": [sample()],
        "prompts_sha256": "e" * 64,
        "prompt_tokens": 100,
        "note": remark(cell),
    }
    return Record(cell=cell, **(values | changes))


def looks(sm_mhz: float = 1980, **changes: Any) -> Telemetry:
    """Telemetry of a round on a quiet card, with what `changes` says of it."""
    clock = Range(median=sm_mhz, min=sm_mhz - 15, max=1980)
    quiet = {"reasons": {}, "low_clock_share": 0.0, "foreign_processes": 0, "other_load_share": 0.0}
    return Telemetry(**({"samples": 20, "sm_mhz": clock, "sm_max_mhz": 1980} | quiet | changes))


def write_manifests(results: Path, config: Config) -> None:
    """The jobs' manifests, which the workflow waits for and nothing reads."""
    for job in jobs(expand(config)):
        write_json(results / "raw" / job.name / "job.json", "{}\n")


def write_run(results: Path, config: Config, make: Callable[[Cell], Record | None]) -> list[Cell]:
    """Write `make(cell)` for every cell of the config; None writes nothing. Returns the cells."""
    cells = expand(config)
    for cell in cells:
        made = make(cell)
        if made is not None:
            write_record(results / "raw" / cell.path, made)
    return cells


@dataclass(frozen=True)
class Truth:
    """A run with known truth: pass `truth.record` to write_run. The same seed makes the same records.

    rate: tok/s of a configuration whose ratio is 1. ratio: of a cell's configuration. between, within, block: sd of the
    log of what a session does to one configuration, of what a round does, and of what a session does to all of them.
    decode: decode rate over whole rate. drift: relative change from the first measured round to the last. flags: of a
    measured round, by its index from 1. telemetry: of a measured round likewise; its flags are those of the rules.
    """

    rate: float = 1000.0
    ratio: Callable[[Cell], float] = lambda cell: 1.0
    between: float = 0.01
    within: float = 0.002
    block: float = 0.0
    rounds: int = 5
    decode: float = 1.25
    drift: float = 0.0
    gpu: str | None = "NVIDIA H200"
    uuid: Callable[[Cell], str] = lambda cell: "GPU-1"
    flags: Callable[[Cell, int], list[str]] | None = None
    telemetry: Callable[[Cell, int], Telemetry | None] | None = None
    seed: int = 0

    def rates(self, cell: Cell) -> list[float]:
        """tok/s of the measured rounds."""
        rng = random.Random(f"{self.seed} {cell.path}")
        shared = random.Random(f"{self.seed} {cell.session}").gauss(0, self.block)
        session = self.rate * self.ratio(cell) * math.exp(shared + rng.gauss(0, self.between))
        steps = max(self.rounds - 1, 1)
        return [
            session * (1 + self.drift * i / steps) * math.exp(rng.gauss(0, self.within)) for i in range(self.rounds)
        ]

    def record(self, cell: Cell, **changes: Any) -> Record:
        made = record(cell, self.rates(cell), gpu=self.gpu, uuid=self.uuid(cell), **changes)
        for r in made.measured:
            r.decode_tokens = r.tokens - cell.batch
            r.decode_s = r.decode_tokens / (r.tps * self.decode)
            if self.flags:
                r.flags = self.flags(cell, r.index)
            if self.telemetry:
                r.telemetry = self.telemetry(cell, r.index)
                r.flags = telemetry.flags(r.telemetry)
        return made


def grid(configurations: int, sessions: int, **changes: Any) -> Config:
    """A matrix of `configurations` x `sessions` cells: options `default`, `o001`, ... of one experiment."""
    names = [f"o{i:03}" for i in range(1, configurations)]
    experiment = CONFIG["experiments"]["options"] | {"backends": [{"backend": "flex", "options": ["default", *names]}]}
    values = {
        "repeats": {"sessions": sessions, "rounds": 5},
        "drift": {"cycles": 3, "stacks": []},
        "options": {name: {} for name in names},
        "experiments": {"options": experiment},
    }
    return config(**(values | changes))


def skipped(cell: Cell, reason: str = "needs a GPU") -> Record:
    return Record(cell=cell, status="skipped", reason=reason)


def quality(target: Target, config: Config, **changes: Any) -> QualityRecord:
    """A quality record as `flexroll quality` writes it: a divergence at a near-tie, and a KL a little off 1e-4, every
    sequence's where kl_sequences are not given."""
    asked = config.quality
    assert asked is not None
    model, whole = asked.model or config.model, target.backend in ("flex", "transformers_generate")
    values: dict[str, Any] = {
        "model": model.name,
        "dtype": model.dtype,
        "status": "ok",
        "device": "cpu",
        "prompts": asked.count,
        "tokens": asked.count * asked.new_tokens,
        "unscored": "" if target.backend != "transformers_cb" else "cannot be scored: it tells no probabilities",
        "kl": 1e-4 * (1 if target.option == asked.baseline else 1.05) if whole else None,
        "logprob_rms": 0.01 if target.backend != "transformers_cb" else None,
        "top1_agreement": 0.99 if target.backend != "transformers_cb" else None,
        "diverged": 1,
        "divergences": [{"prompt": 0, "place": 3, "expected": 7, "got": 8, "gap": 0.01}],
        "near_tie": asked.near_tie,
        "near_ties": 1,
        "coherent": True,
        "environment": environment(target.stack),
        "key": "f" * 64,
    }
    identity = {name: getattr(target, name) for name in ("stack", "backend", "adapter", "option", "option_values")}
    made = identity | values | changes
    if made["kl"] is not None:
        made.setdefault("kl_sequences", [made["kl"]] * made["prompts"])
        made.setdefault("sequence_tokens", [asked.new_tokens] * made["prompts"])
    return QualityRecord.model_validate(made)


def write_quality(results: Path, config: Config, make: Callable[[Target], QualityRecord | None]) -> None:
    """Write `make(target)` for every configuration that the config scores; None writes nothing."""
    for target in targets(config):
        made = make(target)
        if made is not None:
            write_json(results / target.file, made.model_dump_json())


def drift(stack: str, cycles: int = 3, **changes: Any) -> dict[str, Any]:
    """A drift record as `flexroll drift` writes it."""
    peft = [{"cycle": i, "max_abs_diff": 6e-5 * i, "share_changed": 0.05 * i} for i in range(1, cycles + 1)]
    return {
        "model": "tiny_gsm",
        "dtype": "bfloat16",
        "device": "cpu",
        "stack": stack,
        "cycles": cycles,
        "base_sha256_before": "f" * 64,
        "base_sha256_after": "f" * 64,
        "base_identical": True,
        "inference_identical": True,
        "merged_exact": True,
        "merged_wrong": 0,
        "weights_checked": 1234,
        "refresh_ms_median": 12.5,
        "peft": {"cycles": peft},
        "peft_version": "0.21.2",
        "torch_version": "2.11.0",
    } | changes


def write_drift(results: Path, stack: str, **changes: Any) -> None:
    write_json(results / "drift" / f"{stack}.json", json.dumps(drift(stack, **changes)))
