"""Kernel tests run natively on a GPU; elsewhere one test runs its file again under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so that takes a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if NATIVE else "cpu"

runs_kernel = pytest.mark.skipif(not (INTERPRETED or NATIVE), reason="runs in test_under_the_interpreter")
starts_interpreter = pytest.mark.skipif(INTERPRETED or NATIVE, reason="the other tests run in this process")


def run_interpreted(file: str) -> None:
    """Run the tests of a file under the interpreter; fails with their output."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
