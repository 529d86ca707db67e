"""What the device knows of each slot, and the first and last act of a decode step on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexroll.engine.kv_cache import KVCache, upload
from flexroll.engine.masks import DecodeMask
from flexroll.engine.sampling import SamplingColumns, SamplingParams


class Slots:
    """Per slot, 0 being the padding's: the token to go on from, its position, and how to sample the next.

    tokens, lengths: int64 [n_slots + 1]; columns: SamplingColumns of as many rows.
    """

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.columns = SamplingColumns.empty(n_slots + 1, device)

    def write(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        lengths: Sequence[int],
        params: Sequence[SamplingParams],
        requests: Sequence[int],
        samples: Sequence[int],
    ) -> None:
        """Set the given slots: token at position `length`, not yet in the cache, and the sampling of what follows."""
        rows = upload(np.array([slots, tokens, lengths], dtype=np.int64), self.tokens.device)
        self.tokens.index_copy_(0, rows[0], rows[1])
        self.lengths.index_copy_(0, rows[0], rows[2])
        self.columns.write(slots, params, requests, samples)


class Rows:
    """The rows of one decode step, a bucket of fixed size; rows beyond the sequences are the padding slot's.

    staged: int32 [2, rows], the step's only input: slots, and the page of each slot's position.
    ids, slots, positions: int64 [rows]; columns: their sampling; out: int32 [rows, 3], token and the bits of two fp32
    log probabilities, raw and after temperature and filters: the step's only output.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.staged = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.columns = SamplingColumns.empty(rows, device)
        self.out = torch.zeros(rows, 3, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.ids)


def prepare(rows: Rows, slots: Slots, cache: KVCache, mask: DecodeMask | None, fused: bool) -> None:
    """Fill rows from staged: enter each page into the cache's table, gather token, position and sampling; the mask."""
    if fused:
        from flexroll.engine.kernels.step import prepare as prepare_fused

        prepare_fused(rows, slots, cache, mask)
        return
    index, pages = rows.staged.long()
    positions = slots.lengths[index]
    blocks = positions // cache.pages.page_size
    cache.table[index, blocks] = pages.int()
    cache.block_of[pages] = blocks.int()
    rows.ids.copy_(slots.tokens[index].clamp(min=0))  # -1 is a row that was not finite; the host will raise on it
    rows.slots.copy_(index)
    rows.positions.copy_(positions)
    rows.columns.copy_(slots.columns.take(index))
    if mask is not None:
        mask.fill()


def advance(rows: Rows, slots: Slots, tokens: torch.Tensor, logprobs: torch.Tensor, fused: bool) -> None:
    """Sampled tokens int64 [rows] become the slots' own, a position further; rows.out for the host."""
    if fused:
        from flexroll.engine.kernels.step import advance as advance_fused

        advance_fused(rows, slots, tokens, logprobs)
        return
    used = rows.slots > 0
    slots.tokens.index_copy_(0, rows.slots, torch.where(used, tokens, 0))
    slots.lengths.index_copy_(0, rows.slots, torch.where(used, rows.positions + 1, 0))
    rows.out[:, 0] = tokens
    rows.out[:, 1:] = logprobs.view(torch.int32)
