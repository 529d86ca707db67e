"""Peak memory bandwidth of GPUs: the floor under any step that reads its weights from memory."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """pattern: of the driver's name for it. bandwidth: peak of its memory, bytes/s. source: who says so."""

    pattern: str
    bandwidth: float
    source: str


# Names are matched by whole words, so that a GB200 is told from a B200; the first that matches counts.
DEVICES = (
    Device(r"\bG?B300\b", 8.0e12, "NVIDIA HGX B300 and GB300 NVL72 data sheets: 8 TB/s a GPU"),
    Device(r"\bG?B200\b", 8.0e12, "NVIDIA HGX B200 and GB200 NVL72 data sheets: 8 TB/s a GPU"),
    Device(r"\bH200\b", 4.8e12, "NVIDIA H200 data sheet: 4.8 TB/s, SXM and NVL"),
    Device(r"\bH100 PCIe\b", 2.0e12, "NVIDIA H100 data sheet: 2 TB/s, PCIe"),
    Device(r"\bH100 NVL\b", 3.9e12, "NVIDIA H100 data sheet: 3.9 TB/s, NVL"),
    Device(r"\bH100 80GB HBM3\b", 3.35e12, "NVIDIA H100 data sheet: 3.35 TB/s, SXM"),
    Device(r"\bA100-SXM4-80GB\b", 2.039e12, "NVIDIA A100 data sheet: 2,039 GB/s, 80GB SXM"),
    Device(r"\bA100 80GB PCIe\b", 1.935e12, "NVIDIA A100 data sheet: 1,935 GB/s, 80GB PCIe"),
    Device(r"\bA100-(SXM4|PCIE)-40GB\b", 1.555e12, "NVIDIA A100 data sheet: 1,555 GB/s, 40GB"),
    Device(r"\bL40S\b", 0.864e12, "NVIDIA L40S data sheet: 864 GB/s"),
    Device(r"\bL4\b", 0.3e12, "NVIDIA L4 data sheet: 300 GB/s"),
    Device(r"\bRTX 5090\b(?! Laptop)", 1.792e12, "NVIDIA RTX Blackwell white paper: 1,792 GB/s"),
    Device(r"\bRTX 4090\b(?! Laptop)", 1.008e12, "NVIDIA Ada white paper: 1,008 GB/s"),
)


def find_device(name: str) -> Device | None:
    """The device of this name; None for one that the table does not hold, as a CPU or a slice of a GPU (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)
