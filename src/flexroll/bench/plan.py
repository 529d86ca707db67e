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

from flexroll.backends.flex_support import cpu_problem
from flexroll.bench.inputs import wants_shard
from flexroll.bench.quality import own_model, scored_config, seats
from flexroll.bench.quantise import dense_modules
from flexroll.bench.steps import needs_warmup, reads_merged, workflow_steps
from flexroll.provenance import device_class
from flexroll.schema import architecture
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import Cell, Job, expand, jobs
from flexroll.schema.config import Config
from flexroll.schema.quality import job_of, targets

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
SKIP_S = 1.0  # a job that is known not to run here
# Steps beside jobs and scoring, by whether there is a GPU, seconds.
OTHER_S = {
    "autotune": (1.0, 90.0),
    "quantise": (10.0, 60.0),
    "quality_quantise": (10.0, 30.0),
    "quality_reference": (10.0, 30.0),
    "drift": (15.0, 60.0),
    "perplexity": (10.0, 40.0),
}
STACK_GB = {"cpu": 7.0, "cuda": 9.0}  # one stack's environment on disk


@dataclass(frozen=True)
class Plan:
    """hours: engine starts, warm-ups, rounds, scoring, autotuning and quantising. steps: of the workflow, by rule.
    download_gb: weights not here yet. device_gb: weights and the largest batch's KV cache of one engine, None without a
    config.json. disk_gb: weights, merged copies, NF4 shards and missing stacks; shard_gb: the shards alone."""

    cells: list[Cell]
    jobs: list[Job]
    job_hours: dict[str, float]
    hours: float
    steps: dict[str, int]
    download_gb: float | None
    device_gb: float | None
    disk_gb: float
    shard_gb: float


def make_plan(config: Config, root: Path, stacks: Iterable[str] | None = None) -> Plan:
    """Expand the config and estimate it for this machine's device, or for the one it requires."""
    cells = expand(config, stacks)
    grouped = jobs(cells)
    on_gpu = config.requires.gpu is not None or device_class() != "cpu"
    hours = {job.name: job_seconds(job, on_gpu) / 3600 for job in grouped}
    engines = {job.engine: job for job in grouped}
    warmups = sum(
        start_seconds(job.backend, on_gpu) for job in engines.values() if needs_warmup(job, engines, config, on_gpu)
    )
    steps = workflow_steps(config, stacks, on_gpu)
    weights = weights_gb(config, root)
    scored = targets(config, stacks)
    scored_by = scored_config(config)
    scoring = [job_of(target, scored_by) for target in scored]
    # Side by side on a GPU; on a CPU they share what one would have.
    beside = [seats(config, target, "a GPU") if on_gpu else 1 for target in scored]
    others = sum(scoring_seconds(job, on_gpu) / n for job, n in zip(scoring, beside, strict=True))
    others += sum(OTHER_S[rule][on_gpu] * count for rule, count in steps.items() if rule in OTHER_S)
    reading = [(config, grouped + ([] if own_model(config) else scoring))]
    if own_model(config) and scored:
        reading.append((scored_by, scoring))
    shards = sum(shard_gb(held, root) for held, some in reading if any(map(wants_shard, some)))
    kv = kv_bytes_per_token(config, root)
    largest = max((c.running * c.max_model_len for c in cells), default=0)
    device = None if weights is None or kv is None else weights + largest * kv / 1e9
    kind = "cuda" if on_gpu else "cpu"
    missing = [
        s for s in dict.fromkeys(c.stack for c in cells) if not (root / ".stacks" / s / "bin" / "python").exists()
    ]
    disk = sum(
        (weights_gb(held, root) or 0.0) * (1 + any(map(reads_merged, some)))
        for held, some in reading
        if held.model.weights != "drawn"
    )
    return Plan(
        cells=cells,
        jobs=grouped,
        job_hours=hours,
        hours=sum(hours.values()) + (warmups + others) / 3600,
        steps=steps,
        download_gb=_downloads(reading, root),
        device_gb=device,
        disk_gb=disk + shards + len(missing) * STACK_GB[kind],
        shard_gb=shards,
    )


def _downloads(reading: list[tuple[Config, list[Job]]], root: Path) -> float | None:
    """Gigabytes of checkpoints that are on the hub and not here; None where one's size is unknown."""
    absent = {
        config.model.name: weights_gb(config, root)
        for config, _ in reading
        if config.model.source == "hub" and not (root / "models" / config.model.name / "config.json").exists()
    }
    return None if None in absent.values() else sum(size for size in absent.values() if size is not None)


def shard_gb(config: Config, root: Path) -> float:
    """Size of the NF4 checkpoint: 4 bits a weight and an fp32 scale every 64, what stays dense in the model's dtype;
    without a config.json a third of the checkpoint."""
    shape = _model_config(config, root)
    if shape is None:
        return (weights_gb(config, root) or 0.0) / 3
    dense = set(dense_modules(shape, config.four_bit.skip))
    size = 0.0
    for name, dims in architecture.tensors(shape):
        packed = len(dims) == 2 and "embed_tokens" not in name and name.removesuffix(".weight") not in dense
        size += math.prod(dims) * (0.5 + 4 / 64 if packed else architecture.DTYPE_BYTES[config.model.dtype])
    return size / 1e9


def scoring_seconds(job: Job, on_gpu: bool) -> float:
    """Start of the engine, a free run, and the same tokens again by teacher forcing."""
    if is_skipped(job, on_gpu):
        return SKIP_S
    return start_seconds(job.backend, on_gpu) + 2 * cell_seconds(job.cells[0], on_gpu)


def is_skipped(job: Job, on_gpu: bool) -> bool:
    """Whether this machine can be known to skip it, before any process is started."""
    if on_gpu:
        return False
    on_kernels = job.backend == "flex" and cpu_problem(job.cells[0].option_values) is not None
    return BACKENDS[job.backend].needs_gpu or on_kernels


def job_seconds(job: Job, on_gpu: bool) -> float:
    """Start of the engine, then every cell's warm-up and measured rounds."""
    if is_skipped(job, on_gpu):
        return SKIP_S
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
