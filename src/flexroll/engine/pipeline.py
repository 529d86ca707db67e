"""Decode steps launched ahead of reading their tokens, so that the device never waits for the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flexroll.engine.decode import DecodeStep
from flexroll.engine.page_table import PageTable
from flexroll.engine.sampling import NOT_FINITE
from flexroll.engine.scheduler import Sequence as Running
from flexroll.errors import FlexrollError

DEPTH = 2  # steps in flight: one runs while the next waits behind it; a stop is seen that many steps late


class NotFiniteError(FlexrollError):
    """A running sequence's logits were not finite."""


class Pipeline:
    """Launches steps, and hands tokens to their sequences in the order of the launches.

    steps: by bucket. A token that comes after its sequence has ended is dropped there.
    """

    def __init__(self, steps: dict[int, DecodeStep], pages: PageTable, max_batch: int, device: torch.device) -> None:
        self._steps, self._pages, self._on_gpu = steps, pages, device.type == "cuda"
        self._in_flight: deque[tuple[Any, torch.Tensor, list[Running]]] = deque()
        # One more than can be in flight: what is being filled is not what is being copied.
        self._inputs = [
            torch.zeros(2 * max_batch, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(DEPTH + 1)
        ]
        self._outputs = [
            torch.zeros(max_batch, 3, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(DEPTH + 1)
        ]
        self._turn = 0
        self.first_read: float | None = None  # time.perf_counter() when the first tokens were here, see `begin`

    def begin(self) -> None:
        """A call of `generate` begins."""
        self.first_read = None

    def launch(self, batch: Sequence[Running]) -> None:
        """Launch one step for these sequences, each of which has a page for its position n_cached."""
        while len(self._in_flight) >= DEPTH:
            self._read_oldest()
        n = len(batch)
        bucket = next(b for b in self._steps if b >= n)
        step, turn = self._steps[bucket], self._turn
        self._turn = (turn + 1) % (DEPTH + 1)
        staged = self._inputs[turn][: 2 * bucket].view(2, bucket)
        host = staged.numpy()
        host[:, n:] = 0
        host[0, :n] = [s.slot for s in batch]
        host[1, :n] = self._pages.table[host[0, :n], np.array([s.n_cached for s in batch]) // self._pages.page_size]
        step.rows.staged.copy_(staged, non_blocking=True)
        step.launch()
        out = self._outputs[turn][:n]
        out.copy_(step.rows.out[:n], non_blocking=True)
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._in_flight.append((event, out, list(batch)))

    def read(self, wait: bool) -> None:
        """Take what has arrived; with `wait`, at least the oldest step in flight."""
        if wait and self._in_flight:
            self._read_oldest()
        while self._in_flight and (self._in_flight[0][0] is None or self._in_flight[0][0].query()):
            self._read_oldest()

    def drain(self) -> None:
        """Take everything in flight."""
        while self._in_flight:
            self._read_oldest()

    def abandon(self) -> None:
        """Forget what is in flight, once the device is done with it."""
        for event, _, _ in self._in_flight:
            if event is not None:
                event.synchronize()
        self._in_flight.clear()

    def _read_oldest(self) -> None:
        event, out, batch = self._in_flight.popleft()
        if event is not None:
            event.synchronize()
        if self.first_read is None:
            self.first_read = time.perf_counter()
        values = out.numpy()
        tokens, logprobs = values[:, 0].tolist(), values[:, 1:].view(np.float32).tolist()
        if min(tokens) < 0 and any(t < 0 for t, s in zip(tokens, batch, strict=True) if s.finish_reason is None):
            raise NotFiniteError(NOT_FINITE)
        for sequence, token, (raw, kept) in zip(batch, tokens, logprobs, strict=True):
            sequence.append(token, (raw, kept) if sequence.params.logprobs else None)
