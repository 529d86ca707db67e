"""How an engine runs; the meaning of each option stands at `engine.Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexroll.errors import FlexrollError

ATTENTION = ("flex", "triton")
COMPILE_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs")
PREFILL_MASKS = ("logical", "bounds")


@dataclass
class Options:
    """As given; None where the engine chooses."""

    max_batch: int = 64
    max_model_len: int = 2048
    kv_tokens: int | None = None
    page_size: int = 64
    max_prefill_tokens: int | None = None
    buckets: Sequence[int] | None = None
    attention: str | None = None
    cuda_graphs: bool = True
    compiled: bool = True
    compile_mode: str = "default"
    compile_forward: bool = False
    fused: bool | None = None
    decode_kernel_options: dict[str, Any] = field(default_factory=dict)
    prefill_kernel_options: dict[str, Any] = field(default_factory=dict)
    contiguous: bool = False
    prefill_mask: str = "logical"
    unchecked: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_model_len < 2:
            raise FlexrollError("max_batch must be at least 1 and max_model_len at least 2")
        for name, value, choices in (
            ("attention", self.attention, (None, *ATTENTION)),
            ("compile_mode", self.compile_mode, COMPILE_MODES),
            ("prefill_mask", self.prefill_mask, PREFILL_MASKS),
        ):
            if value not in choices:
                raise FlexrollError(f"unknown {name} '{value}'; choose {' or '.join(c for c in choices if c)}")
        if self.attention == "triton" and self.decode_kernel_options:
            raise FlexrollError("decode_kernel_options are flex_attention's; attention 'triton' takes none")
        if self.attention == "triton" and self.compile_mode != "default":
            raise FlexrollError("compile_mode is flex_attention's; attention 'triton' takes none")
        if not self.compiled and (self.compile_forward or self.compile_mode != "default"):
            raise FlexrollError("compile_mode and compile_forward need compiled=True")
        if self.compile_forward:
            if self.fused or self.attention == "triton":
                given = "fused=True" if self.fused else "attention 'triton'"
                raise FlexrollError(f"compile_forward is for flex_attention and torch's operations; leave {given} out")
            self.attention, self.fused = "flex", False
        if self.prefill_mask == "bounds" and not self.contiguous:
            raise FlexrollError("prefill_mask 'bounds' needs pages that lie one after another; give contiguous=True")
        if self.contiguous and self.kv_tokens is not None:
            raise FlexrollError("contiguous pages fix the pool's size; leave kv_tokens out")


def buckets_for(max_batch: int, given: Sequence[int] | None, on_gpu: bool, fine: bool) -> list[int]:
    """Ascending batch sizes, the last one max_batch."""
    if given is None:
        octaves = [1 << n for n in range(max_batch.bit_length())] if on_gpu else []
        given = [b * step // 4 for b in octaves for step in ((4, 5, 6, 7) if fine and b >= 8 else (4,))]
    if any(b < 1 for b in given):
        raise FlexrollError("buckets must be at least 1")
    return sorted({b for b in given if b < max_batch} | {max_batch})
