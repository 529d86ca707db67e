"""`flexroll plan`: what a config will measure, for how long, and how many gigabytes it needs. Estimates, said to be so.

GPU speeds of flex (decode steps alone) and vLLM are by batch, as measured on an H200, the rest the published ones of a
B200 at batch 32; CPU speeds are rough figures of the embedded model on two idle cores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.provenance import device_class
from flexroll.schema import architecture
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import Cell, Job, expand, jobs
from flexroll.schema.config import Config

# tok/s of a whole batch: {batch: tok/s}; between and beyond, interpolated in log-log and clamped at the ends' slope.
GPU_TPS: dict[str, dict[int, float]] = {
    "flex": {8: 2100, 16: 4085, 32: 7485, 64: 13700, 128: 21000, 256: 26500},
    "flex/unmerged": {64: 2683},
    "flex/eager": {32: 450, 64: 420},
    "vllm": {8: 1949, 16: 3769, 32: 6840, 64: 11673, 128: 17819, 256: 22799},
    "vllm/request": {64: 8517},
    "transformers_generate": {32: 641},
    "transformers_cb": {32: 430},
    "unsloth": {32: 641},
}
CPU_TPS: dict[str, dict[int, float]] = {
    "flex": {2: 300, 8: 820},
    "flex/eager": {4: 43},
    "vllm": {8: 200},
    "transformers_generate": {2: 230, 8: 580},
    "transformers_cb": {2: 115, 8: 350},
}
# Process, imports and compile of a job, seconds (same run).
CPU_START_S = {"flex": 15.0, "vllm": 40.0, "transformers_generate": 9.0, "transformers_cb": 9.0, "unsloth": 1.0}
STACK_GB = {"cpu": 7.0, "cuda": 9.0}  # one stack's environment on disk


@dataclass(frozen=True)
class Plan:
    """hours: engine starts, warm-ups and rounds. download_gb: weights not here yet. device_gb: weights and the largest
    batch's KV cache of one engine, None without a config.json. disk_gb: weights, merged copy and missing stacks."""

    cells: list[Cell]
    jobs: list[Job]
    job_hours: dict[str, float]
    hours: float
    download_gb: float | None
    device_gb: float | None
    disk_gb: float


def make_plan(config: Config, root: Path, stacks: Iterable[str] | None = None) -> Plan:
    """Expand the config and estimate it for this machine's device, or for the one it requires."""
    cells = expand(config, stacks)
    grouped = jobs(cells)
    on_gpu = config.requires.gpu is not None or device_class() != "cpu"
    hours = {job.name: job_seconds(job, on_gpu) / 3600 for job in grouped}
    warmups = {job.engine: start_seconds(job.backend, on_gpu) for job in grouped if BACKENDS[job.backend].warmup}
    weights = weights_gb(config, root)
    here = config.model.source != "hub" or (root / "models" / config.model.name / "config.json").exists()
    kv = kv_bytes_per_token(config, root)
    largest = max((c.running * c.max_model_len for c in cells), default=0)
    device = None if weights is None or kv is None else weights + largest * kv / 1e9
    kind = "cuda" if on_gpu else "cpu"
    missing = [
        s for s in dict.fromkeys(c.stack for c in cells) if not (root / ".stacks" / s / "bin" / "python").exists()
    ]
    copies = 1 + any(c.engine_adapter == "merged" and c.backend != "flex" for c in cells)
    if config.model.weights == "drawn":
        copies = 0
    return Plan(
        cells=cells,
        jobs=grouped,
        job_hours=hours,
        hours=sum(hours.values()) + sum(warmups.values()) / 3600,
        download_gb=0.0 if here else weights,
        device_gb=device,
        disk_gb=copies * (weights or 0.0) + len(missing) * STACK_GB[kind],
    )


def job_seconds(job: Job, on_gpu: bool) -> float:
    """Start of the engine, then every cell's warm-up and measured rounds."""
    return start_seconds(job.backend, on_gpu) + sum(cell_seconds(cell, on_gpu) for cell in job.cells)


def cell_seconds(cell: Cell, on_gpu: bool) -> float:
    if BACKENDS[cell.backend].needs_gpu and not on_gpu:
        return 0.0
    speed = tokens_per_s(cell, on_gpu)
    measured, warm = (sum(cell.lengths(n)) * cell.samples / speed for n in (cell.prompts, cell.warmup_prompts))
    calls = max(1, math.ceil(cell.min_round_s / measured))
    return cell.rounds * calls * measured + cell.warmup_rounds * warm


def start_seconds(backend: str, on_gpu: bool) -> float:
    return BACKENDS[backend].start_s if on_gpu else CPU_START_S.get(backend, 15.0)


def tokens_per_s(cell: Cell, on_gpu: bool) -> float:
    """Expected tok/s of all running sequences."""
    table = GPU_TPS if on_gpu else CPU_TPS
    eager = cell.backend == "flex" and cell.option_values.get("compile") is False
    special = f"{cell.backend}/{'eager' if eager else cell.adapter}"
    points = table.get(cell.backend) or {32: 100.0}
    speed = interpolate(points, cell.running)
    if special in table:  # scale the backend's curve so that it passes through the special form's own point
        batch, known = next(iter(table[special].items()))
        speed *= known / interpolate(points, batch)
    return speed


def weights_gb(config: Config, root: Path) -> float | None:
    """Size of the checkpoint: of the files that are here, of random weights by config.json, else by the parameter count
    in its name (4B: 4e9)."""
    folder = root / (config.model.path or Path("models") / config.model.name)
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    if files:
        return sum(f.stat().st_size for f in files) / 1e9
    held = _model_config(config, root)
    if config.model.source == "random" and held is not None:
        return architecture.parameters(held) * architecture.DTYPE_BYTES[config.model.dtype] / 1e9
    match = re.search(r"(\d+(?:\.\d+)?)\s*[Bb](?![a-zA-Z])", f"{config.model.repo or ''} {config.model.name}")
    return float(match.group(1)) * (2 if config.model.dtype == "bfloat16" else 4) if match else None


def kv_bytes_per_token(config: Config, root: Path) -> int | None:
    """Bytes of K and V one token takes, from config.json; None while it is not here."""
    held = _model_config(config, root)
    return None if held is None else architecture.kv_token_bytes(held, config.model.dtype)


def _model_config(config: Config, root: Path) -> dict[str, Any] | None:
    """The model's config.json, None while it is not here or is no decoder's."""
    return architecture.read_shape(root / (config.model.path or Path("models") / config.model.name))


def interpolate(points: dict[int, float], batch: int) -> float:
    """Power law between neighbours; beyond the ends in proportion to the batch below, flat above."""
    known = sorted(points)
    if batch <= known[0]:
        return points[known[0]] * batch / known[0]
    if batch >= known[-1]:
        return points[known[-1]] * (1.0 if len(known) > 1 else (batch / known[-1]) ** 0.7)
    high = next(b for b in known if b >= batch)
    low = known[known.index(high) - 1]
    share = math.log(batch / low) / math.log(high / low)
    return points[low] ** (1 - share) * points[high] ** share
