"""`flexroll plan`: what GRPO runs a config makes, and for how long. Rough, and said to be so."""

from __future__ import annotations

from collections.abc import Iterable

from flexroll.bench.plan import CPU_TPS, GPU_TPS, interpolate, start_seconds
from flexroll.provenance import device_class
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.config import Config
from flexroll.schema.grpo import OPTIONS_OF
from flexroll.schema.grpo_records import GrpoTarget, grpo_targets

# Tokens a second of the loss, its log probabilities and the backward pass: a guess for a model of 4e9 parameters on a
# GPU, and the embedded model on two idle cores.
TRAIN_TPS = {"cuda": 6000.0, "cpu": 1500.0}
COMPLETION = 0.7  # of max_completion_length: where most completions end


def trainings(config: Config, stacks: Iterable[str] | None = None) -> tuple[list[GrpoTarget], float]:
    """(the runs, hours of all of them), on this machine's device or on the one that the config requires."""
    found = grpo_targets(config, stacks)
    on_gpu = config.requires.gpu is not None or device_class() != "cpu"
    return found, sum(run_seconds(config, target, on_gpu) for target in found) / 3600


def run_seconds(config: Config, target: GrpoTarget, on_gpu: bool) -> float:
    """Start of the engine and the trainer, then all steps; of a backend that needs a GPU, nothing without one."""
    assert config.grpo is not None
    backend = OPTIONS_OF.get(target.backend, target.backend)
    if BACKENDS[backend].needs_gpu and not on_gpu:
        return 0.0
    batch = config.grpo.prompts_per_step * config.grpo.num_generations
    tokens = batch * config.grpo.max_completion_length * COMPLETION
    points = (GPU_TPS if on_gpu else CPU_TPS).get(backend) or {32: 100.0}
    step = tokens / interpolate(points, batch) + tokens / TRAIN_TPS["cuda" if on_gpu else "cpu"]
    return start_seconds(backend, on_gpu) + target.steps * step


def sentence(config: Config, stacks: Iterable[str] | None = None) -> str:
    """`GRPO: 12 runs of 10 steps; about 35 minutes, beside the above.`; empty where nothing is to be trained."""
    found, hours = trainings(config, stacks)
    if not found:
        return ""
    steps = ", ".join(sorted({str(target.steps) for target in found}, key=int))
    long = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
    runs = f"{len(found)} run{'s' if len(found) > 1 else ''}"
    beside = ", beside the above" if config.experiments else ""
    return f"GRPO: {runs} of {steps} steps; about {long}{beside}."
