"""What the flex engine cannot run on a device, told without torch: before a process is started, and in it."""

from __future__ import annotations

from typing import Any

from flexroll.backends.base import EngineSpec
from flexroll.tune.replay import replay_problem

# What sets only a GPU's attention kernels; torch/_inductor/kernel/flex/flex_cpu.py reads none of FlexKernelOptions.
GPU_KERNELS = ("decode_kernel_options", "prefill_kernel_options", "replay")


def problem(spec: EngineSpec) -> str | None:
    """What of the spec's option would change nothing here, or could not run, in one line, or None: a measurement of it
    would be one of something else."""
    if spec.device == "cpu" and (reason := cpu_problem(spec.option)):
        return reason
    return replay_problem(spec.replay) if spec.option.get("replay") else None


def cpu_problem(option: dict[str, Any]) -> str | None:
    """The same of an option's values on a CPU, whatever was autotuned."""
    named = [name for name in GPU_KERNELS if option.get(name)]
    if named:
        return f"{' and '.join(named)}: kernel options are those of GPU kernels; torch's CPU kernel reads none"
    if option.get("fused"):
        return "fused: the fused kernels are Triton's and need a GPU"
    if option.get("attention") == "triton":
        return "attention triton: the paged kernels need a GPU"
    return None
