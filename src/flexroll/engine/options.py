"""How an engine runs; the meaning of each option stands at `engine.Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexroll.errors import FlexrollError

ATTENTION = ("flex", "triton")


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
    fused: bool | None = None
    decode_kernel_options: dict[str, Any] = field(default_factory=dict)
    prefill_kernel_options: dict[str, Any] = field(default_factory=dict)
    contiguous: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_model_len < 2:
            raise FlexrollError("max_batch must be at least 1 and max_model_len at least 2")
        if self.attention not in (None, *ATTENTION):
            raise FlexrollError(f"unknown attention '{self.attention}'; choose {' or '.join(ATTENTION)}")
        if self.attention == "triton" and self.decode_kernel_options:
            raise FlexrollError("decode_kernel_options are flex_attention's; attention 'triton' takes none")
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
