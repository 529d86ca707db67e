"""Letting kernels overlap by programmatic dependent launch.

With it (compute capability 9 and later) a kernel may start while the one before it still runs, and must wait for its
data. Every kernel of the chain calls `wait` before it touches what another one wrote, so that the completion of one
implies that of all before it, and lets the next one in only after that: what a kernel two places earlier wrote may be
read without waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents as launch_dependents
from triton.language.extra.cuda import gdc_wait as wait

__all__ = ["launch_dependents", "launch_options", "wait"]


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a kernel launch that say whether it takes part; {"PDL": False} where the device cannot."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
