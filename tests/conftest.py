"""Which tests run where, and the fixtures that several files share.

Tests run in the driver environment (no torch; Snakemake) and in each stack's (torch; no Snakemake). A file that needs
torch says so with importorskip and runs in the stacks only; every other file runs in the driver environment only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Models here are tiny: a second thread costs more in waiting than it computes, five times over on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each process tests the compiler's instruction sets anew
os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide a line that a started program does not flush
settings.register_profile("flexroll", deadline=None, print_blob=True)
settings.load_profile("flexroll")


def running_stack() -> str | None:
    """Name of the stack whose environment runs the tests, None in the driver environment."""
    stamp = Path(sys.prefix, "flexroll-stack.json")
    name = json.loads(stamp.read_text())["stack"] if stamp.exists() else "driver"
    return None if name == "driver" else name


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In a stack, leave out the files that the driver environment has run already."""
    if running_stack() and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return None if 'importorskip("torch' in collection_path.read_text() else True
    return None


@pytest.fixture(scope="session")
def root() -> Path:
    """The tree under test."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_gsm() -> Path:
    """The embedded checkpoint: Qwen3, 6.4 M parameters, with tokenizer and chat template."""
    return ROOT / "models" / "tiny-gsm"
