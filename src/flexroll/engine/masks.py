"""Block masks over the paged pool with static shapes, one a bucket, refilled in place at every step.

A mask function sees physical positions; `KVCache.block_of` turns them into logical ones, so where a page lies never
changes the result. The block lists say which pages belong to a query at all. Eager flex_attention ignores them, so
there the mask function looks that up too. BoundsMask looks nothing up; it needs pages that follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex

from flexroll.engine.kv_cache import KVCache, upload

Q_BLOCK = 64  # query rows a block list of a prefill speaks for: prompts of rollouts are short


class RowMask:
    """What every mask has: query rows with a slot and a position each, and block lists of partial and full pages.

    slots, positions: int64 [rows] on the device, the owner writes them in place: one compiled kernel serves every step.
    partial, full: (counts int32 [*shape], pages int32 [*shape, pages of the pool]), as wide as the pool, for
    flex_attention asks for lists that could name every page. full: pages that a query sees as a whole.
    lists_hold: whether flex_attention heeds the lists, as it does when compiled.
    """

    def __init__(
        self, cache: KVCache, slots: torch.Tensor, positions: torch.Tensor, lists_hold: bool, *shape: int
    ) -> None:
        self.cache, self.slots, self.positions, self._lists_hold = cache, slots, positions, lists_hold
        self.partial, self.full = self._lists(shape), self._lists(shape)

    def visible(self, row: Any, kv: Any) -> Any:
        """Whether a query row sees physical position kv: not in its future and, unless the lists say so, its own."""
        size = self.cache.pages.page_size
        page = kv // size
        block = self.cache.block_of[page]
        past = block * size + kv % size <= self.positions[row]
        return past if self._lists_hold else past & (self.cache.table[self.slots[row], block] == page)

    def build(self, length: int, q_block: int, mask_mod: Callable[..., Any]) -> flex.BlockMask:
        """The BlockMask over the pool for `length` queries."""
        size, n_pages = self.cache.pages.page_size, len(self.cache.block_of)
        return flex.BlockMask.from_kv_blocks(
            *self.partial,
            *self.full,
            BLOCK_SIZE=(q_block, size),
            mask_mod=mask_mod,
            seq_lengths=(length, n_pages * size),
            compute_q_blocks=False,
        )

    def _lists(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.cache.device
        return (
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros((*shape, len(self.cache.block_of)), dtype=torch.int32, device=device),
        )


class DecodeMask(RowMask):
    """Mask of one decode step of `rows` sequences, one query each: a batch of `rows`; filled on the device."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, positions: torch.Tensor, lists_hold: bool) -> None:
        super().__init__(cache, slots, positions, lists_hold, len(slots), 1, 1)
        self.block_mask = self.build(1, 128, lambda b, h, q, kv: self.visible(b, kv))

    def fill(self) -> None:
        """Refill the lists from slots, positions and the cache's table; the torch form of what prepare_kernel does."""
        size = self.cache.pages.page_size
        last = self.positions // size
        table = self.cache.table[self.slots]
        self.full[0].view(-1).copy_((self.positions + 1) // size)
        width = min(table.shape[1], self.full[1].shape[-1])
        self.full[1][:, 0, 0, :width].copy_(table[:, :width])
        self.partial[0].view(-1).copy_((self.positions + 1) % size != 0)
        self.partial[1][:, 0, 0, 0].copy_(table.gather(1, last[:, None])[:, 0])


class PrefillMask(RowMask):
    """Mask of one prefill pass: queries of many sequences in a batch of one, a block of rows for one sequence only.

    Rows that are not used see nothing; what comes out for them is 0 and used by nobody.
    """

    def __init__(
        self, cache: KVCache, slots: torch.Tensor, positions: torch.Tensor, lists_hold: bool, q_block: int
    ) -> None:
        super().__init__(cache, slots, positions, lists_hold, 1, 1, len(slots) // q_block)
        self.q_block = q_block
        self.block_mask = self.build(len(slots), q_block, lambda b, h, q, kv: self.visible(q, kv))

    def fill(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """(slot, start, stop) of each sequence's tokens; their rows follow each other, each beginning with a block."""
        pages = self.cache.pages
        entries = []
        for slot, start, stop in spans:
            for begin in range(start, stop, self.q_block):
                end = min(begin + self.q_block, stop)
                whole = (begin + 1) // pages.page_size  # pages that end at or before the block's first query
                entries.append((pages.table[slot, : pages.blocks_for(end)], whole))
        counts = np.zeros((2, self.partial[0].numel()), dtype=np.int32)
        width = max((len(listed) for listed, _ in entries), default=0)
        lists = np.zeros((2, len(entries), width), dtype=np.int32)
        for row, (listed, whole) in enumerate(entries):
            for kind, part in enumerate((listed[whole:], listed[:whole])):
                counts[kind, row] = len(part)
                lists[kind, row, : len(part)] = part
        counts_there, lists_there = upload(counts, self.cache.device), upload(lists, self.cache.device)
        for kind, (count, listed) in enumerate((self.partial, self.full)):
            count.view(-1).copy_(counts_there[kind])
            listed[0, 0, : len(entries), :width].copy_(lists_there[kind])


class BoundsMask(PrefillMask):
    """PrefillMask by two physical positions a query, the first and the last it sees; nothing is looked up by key.

    Right only where a sequence's pages are one ascending run (ContiguousPageTable): then it is exact by itself, with or
    without the lists. A kernel that reads whole vectors of keys at once, as flash-attention's does, is spared a lookup
    a key.

    first, last: int32 [rows] on the device; tensors of their own, for that kernel takes no views.
    """

    def __init__(
        self, cache: KVCache, slots: torch.Tensor, positions: torch.Tensor, lists_hold: bool, q_block: int
    ) -> None:
        self.first, self.last = (torch.zeros(len(slots), dtype=torch.int32, device=cache.device) for _ in range(2))
        super().__init__(cache, slots, positions, lists_hold, q_block)

    def visible(self, row: Any, kv: Any) -> Any:
        return (kv >= self.first[row]) & (kv <= self.last[row])

    def fill(self, spans: Sequence[tuple[int, int, int]]) -> None:
        super().fill(spans)
        self.first.copy_(self.cache.table[self.slots, 0] * self.cache.pages.page_size)
        self.last.copy_(self.first + self.positions)  # position -1, a row that is not used: nothing
