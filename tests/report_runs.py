"""Synthetic runs on a GPU that fill every figure: sessions, options, disturbed rounds, failed cells, clocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpo_runs
import synthetic
from flexroll.analysis.model import Analysis
from flexroll.analysis.run import analyse
from flexroll.schema.cells import Cell
from flexroll.schema.config import Config
from flexroll.schema.records import Range, Record, Telemetry

REPORT = Path(__file__).parent.parent / "report"
BEGIN = 1_767_225_600.0  # 2026-01-01 00:00 UTC
SPEED = {"flex": 1.0, "vllm": 1.25, "transformers_generate": 0.05, "transformers_cb": 0.12, "unsloth": 0.2}
TRAINING = {
    "rewards": ["format"],
    "seeds": [0, 1],
    "sampling": "equivalence",
    "backends": [{"backend": "flex"}, {"backend": "trl"}],
}
GAIN = {"page32": 1.04, "page128": 0.97, "eager": 0.4}


def config(sessions: int = 5, **changes: Any) -> Config:
    base = {"new_tokens": 64, "stacks": ["torch2.11"]}
    lora = [
        {"backend": "flex", "adapters": ["merged", "unmerged"]},
        {"backend": "vllm", "adapters": ["request", "merged"]},
        {"backend": "unsloth", "adapters": ["unmerged"]},
    ]
    sweep = [{"backend": name} for name in ("flex", "vllm", "transformers_generate", "transformers_cb")]
    experiments = {
        "sweep": base | {"title": "Batch sweep", "section": "batch_sweep", "batches": [8, 16, 32, 64]},
        "lora": base | {"title": "LoRA", "section": "grpo", "batches": [16], "backends": lora},
        "memory": base | {"title": "Memory", "section": "memory", "batches": [16], "backends": sweep},
        "options": base | {"title": "Options", "section": "options", "batches": [16]},
    }
    experiments["sweep"]["backends"] = sweep
    experiments["options"]["backends"] = [{"backend": "flex", "options": ["default", *GAIN]}]
    values = {
        "prompts": synthetic.CONFIG["prompts"] | {"count": 64},
        "max_model_len": 1024,
        "repeats": {"sessions": sessions, "rounds": 5},
        "options": {
            "page32": {"flex": {"page_size": 32}},
            "page128": {"flex": {"page_size": 128}},
            "eager": {"flex": {"compile": False}},
        },
        "experiments": experiments,
    }
    return synthetic.config(**(values | changes))


def ratio(cell: Cell) -> float:
    return SPEED[cell.backend] * cell.batch**0.8 / 8**0.8 * GAIN.get(cell.option, 1.0)


def flags(cell: Cell, index: int) -> list[str]:
    """A disturbed round in one cell of each session."""
    disturbed = cell.experiment == "sweep" and cell.backend == "flex" and cell.batch == 32
    return ["SM clock below 90 % of its maximum"] if disturbed and index == 2 else []


def record(cell: Cell, truth: synthetic.Truth | None = None, clocks: bool = True) -> Record:
    """A record with memory that grows with the batch, and with begins and clocks of its rounds."""
    if cell.backend == "unsloth":
        return synthetic.record(cell, status="failed", reason="out of memory", rounds=[], samples=[])
    if cell.backend == "transformers_cb" and cell.batch == 64:
        return synthetic.record(cell, status="failed", reason="timeout", rounds=[], samples=[])
    truth = truth or synthetic.Truth(ratio=ratio, between=0.02, within=0.004, flags=flags)
    wide = cell.backend == "vllm"
    made = truth.record(cell, memory_gb=120 if wide else 4 + cell.batch / 4, prompts_sha256=f"{cell.batch:064}")
    made.memory.kv_reserved = 110 * 10**9 if wide else cell.batch * 10**8
    made.memory.peak_allocated = (118 if wide else 3) * 10**9 + (0 if wide else 2 * cell.batch * 10**8)
    made.prompt_tokens = 100 * cell.prompts
    rng = random.Random(cell.path)
    begin = BEGIN + 3600 * cell.session + rng.randrange(2400)
    for r in made.rounds:
        r.started = begin + 12.0 * r.index
        if clocks:
            clock = 1980 - rng.randrange(12) - (250 if r.flags else 0)
            r.telemetry = Telemetry(samples=9, sm_mhz=Range(median=clock, min=clock - 15, max=1980), sm_max_mhz=1980)
    return made


def build(results: Path, made: Config | None = None, make: Any = record, drift: bool = True) -> Analysis:
    """Write a run and analyse it."""
    made = made or config()
    synthetic.write_run(results, made, make)
    grpo_runs.write(results, made, lambda target: grpo_runs.record(target, made, gpu="NVIDIA H200"))
    if drift:
        synthetic.write_drift(results, "torch2.11")
    return analyse(made, results, REPORT / "claims.yaml")
