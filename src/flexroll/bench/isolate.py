"""What keeps a measurement apart from the rest of the machine: the worker's environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flexroll.bench.environment import cores
from flexroll.images.here import image_file
from flexroll.provenance import SRC


def worker_env(root: Path, stack: str, device: str) -> dict[str, str]:
    """The worker's environment: compile caches a stack and device, no network, no user site, this package."""
    # What a compiler built against an image's libraries is no use to the host's, and the other way round.
    place = f"{stack}-{file_name(device)}" + ("-image" if image_file() else "")
    cache = (root / ".cache" / place).resolve()
    env = dict(os.environ)
    env |= {
        "PYTHONPATH": str(SRC),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
    }
    if device == "cpu":
        env |= {
            # A workflow's thread count, or none at all, must not decide what is measured.
            "OMP_NUM_THREADS": str(cores()),
            "MKL_NUM_THREADS": str(cores()),
            # libgomp's threads spin for each other for milliseconds and collapse as soon as anything else runs: beside
            # one busy process flex fell from 850 to 50 tok/s on two cores. With a short spin: 520, and 860 alone.
            "GOMP_SPINCOUNT": "1000",
            # Inductor tests each instruction set in a process that imports torch: 9 s a worker. The CPU's flags decide.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return env


def file_name(device: str) -> str:
    """A device class as part of a file name: "NVIDIA H200" -> "NVIDIA-H200"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", device)
