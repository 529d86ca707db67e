"""What a call of `generate` cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Stats:
    """Of the last `generate`. prefill_s: device seconds of prefill; decode_s: all other seconds of the call.

    first_token_s: seconds until the host had the first token of any sequence. steps: decode steps. A prompt's last
    token is counted with decode, where it goes through the model.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


class Clock:
    """Seconds of the device inside `with clock:` blocks; on a GPU by events, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self._begun = self._mark()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._begun, self._mark()))

    def seconds(self) -> float:
        """Of all blocks so far; waits for the last."""
        if self._on_gpu and self._spans:
            self._spans[-1][1].synchronize()
            return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        return sum(end - begin for begin, end in self._spans)
