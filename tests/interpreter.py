"""Kernel tests run natively on a GPU; elsewhere one test runs its file again under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so that takes a process of its own. There a row of a product has the
same bits wherever in a tile it lies, as on a GPU; what the interpreter asks, a BLAS, gives other bits by place on CPUs
with AVX2.
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

if INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *_):
        """d + a @ b, the depth added up in its order."""
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., :, k, None].astype(total.dtype) * b.data[..., None, k, :].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


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
