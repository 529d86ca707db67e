"""Kernel options for flex_attention where the caller gives none, by measurement; `Engine` merges them in.

A GPU is found by a part of its name. One that was not measured gets the last entry.
"""

from __future__ import annotations

from typing import Any

import torch

# Part of the GPU's name -> kind of step -> kernel_options.
MEASURED: dict[str, dict[str, dict[str, Any]]] = {
    # Prefill of 63 prompts of 130 tokens at Qwen3-4B's shape: 221 us a layer; Inductor's own 8 warps 410, query blocks
    # of 128 rows 317, 2 stages 346.
    # A decode step at 330 to 440 tokens a sequence: 4.107 ms at batch 64 (Inductor's own 2 warps 4.142, 1 warp 4.426),
    # 3.552 at batch 8 (2 warps 3.597, and with SPLIT_KV 4 3.599).
    "H200": {"prefill": {"num_warps": 4}, "decode": {"num_warps": 4}},
    "": {"prefill": {"num_warps": 4}, "decode": {"num_warps": 4}},
}


def kernel_options(kind: str, device: torch.device) -> dict[str, Any]:
    """Options of kind "decode" or "prefill" for this device; none on a CPU."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    return dict(next(options for part, options in MEASURED.items() if part in name)[kind])
