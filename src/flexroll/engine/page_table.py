"""Which physical page holds which logical block of which slot. Host side, no tensors of a device.

A slot is a row of the running batch. Slot 0 and page 0 are reserved for padding: padded rows read and write there, so
they never touch a sequence and never see an empty row. The idea of a page table over one flat pool that
flex_attention's mask can see through is flex-nano-vllm's; the bookkeeping here is our own.
"""

from __future__ import annotations

import numpy as np

from flexroll.errors import FlexrollError


class PageTable:
    """Pages of `page_size` tokens for `n_slots` sequences out of a pool of `n_pages`, the reserved ones not counted.

    table: int32 [n_slots + 1, max_blocks], (slot, logical block) -> physical page; 0 where nothing is mapped.
    logical: int32 [n_slots + 1, n_pages + 1], (slot, physical page) -> logical block; -1 where the slot does not own
    the page.
    """

    def __init__(self, n_slots: int, n_pages: int, page_size: int, max_blocks: int) -> None:
        if min(n_slots, n_pages, page_size, max_blocks) < 1:
            raise ValueError("a page table needs at least one slot, page, token and block")
        self.n_slots, self.n_pages, self.page_size, self.max_blocks = n_slots, n_pages, page_size, max_blocks
        self.table = np.zeros((n_slots + 1, max_blocks), dtype=np.int32)
        self.logical = np.full((n_slots + 1, n_pages + 1), -1, dtype=np.int32)
        self.logical[0, 0] = 0
        self.n_blocks = np.zeros(n_slots + 1, dtype=np.int32)
        self._free_pages = list(range(n_pages, 0, -1))
        self._free_slots = list(range(n_slots, 0, -1))
        self._changed: list[tuple[int, int]] = []

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_for(self, n_tokens: int) -> int:
        """Pages that hold n_tokens."""
        return -(-n_tokens // self.page_size)

    def take_slot(self) -> int:
        """A free slot, 1..n_slots. Raises IndexError where none is free: ask `free_slots` first."""
        return self._free_slots.pop()

    def reserve(self, slot: int, n_tokens: int) -> bool:
        """Make the slot's pages cover n_tokens. False, and nothing changed, where the pool has too few free pages."""
        want = self.blocks_for(n_tokens)
        if want > self.max_blocks:
            raise FlexrollError(
                f"a sequence of {n_tokens} tokens exceeds the {self.max_blocks * self.page_size} a slot can hold"
            )
        have = int(self.n_blocks[slot])
        if want - have > len(self._free_pages):
            return False
        for block in range(have, want):
            page = self._free_pages.pop()
            self.table[slot, block] = page
            self.logical[slot, page] = block
            self._changed.append((slot, page))
        self.n_blocks[slot] = max(have, want)
        return True

    def release(self, slot: int) -> None:
        """Give the slot and its pages back."""
        if slot == 0 or slot in self._free_slots:
            raise ValueError(f"slot {slot} is not in use")
        for block in range(int(self.n_blocks[slot]) - 1, -1, -1):
            page = int(self.table[slot, block])
            self.logical[slot, page] = -1
            self._changed.append((slot, page))
            self._free_pages.append(page)
        self.table[slot] = 0
        self.n_blocks[slot] = 0
        self._free_slots.append(slot)

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(slots, pages, logical blocks) of `logical` entries written since the last call, for a device's mirror."""
        changed = np.array(sorted(set(self._changed)), dtype=np.int64).reshape(-1, 2)
        self._changed.clear()
        return changed[:, 0], changed[:, 1], self.logical[changed[:, 0], changed[:, 1]]
