"""Which physical page holds which logical block of which slot. Host side, no tensors of a device.

A slot is a row of the running batch. Slot 0 and page 0 are reserved for padding: padded rows read and write there, so
they never touch a sequence and never see an empty row. The idea of a page table over one flat pool that
flex_attention's mask can see through is flex-nano-vllm's, that of counted references to pages of a shared prompt is
vLLM's; the bookkeeping here is our own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flexroll.errors import FlexrollError


@dataclass(frozen=True, eq=False)
class Prefix:
    """Pages kept alive because they hold the first n_tokens of a sequence, whoever else maps them.

    Nobody writes positions below n_tokens. Where n_tokens ends inside the last page, the sequence that the prefix was
    held from may go on writing the rest of that page; those who adopt it copy the page.
    """

    pages: tuple[int, ...]
    n_tokens: int


class PageTable:
    """Pages of `page_size` tokens for `n_slots` sequences out of a pool of `n_pages`, the reserved ones not counted.

    A page may be mapped by several slots and held by prefixes; it is free when nobody refers to it.

    table: int32 [n_slots + 1, max_blocks], (slot, logical block) -> physical page; 0 where nothing is mapped.
    n_blocks: int32 [n_slots + 1], blocks mapped by each slot, without gaps.
    """

    shares = True  # whether slots may share pages

    def __init__(self, n_slots: int, n_pages: int, page_size: int, max_blocks: int) -> None:
        if min(n_slots, n_pages, page_size, max_blocks) < 1:
            raise ValueError("a page table needs at least one slot, page, token and block")
        self.n_slots, self.n_pages, self.page_size, self.max_blocks = n_slots, n_pages, page_size, max_blocks
        self.table = np.zeros((n_slots + 1, max_blocks), dtype=np.int32)
        self.n_blocks = np.zeros(n_slots + 1, dtype=np.int32)
        self._references = [0] * (n_pages + 1)
        self._prefixes: set[Prefix] = set()
        self._free_pages = list(range(n_pages, 0, -1))
        self._free_slots = list(range(n_slots, 0, -1))

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
        want, have = self.blocks_for(n_tokens), int(self.n_blocks[slot])
        if want <= have:
            return True
        if want > self.max_blocks:
            raise FlexrollError(
                f"a sequence of {n_tokens} tokens exceeds the {self.max_blocks * self.page_size} a slot can hold"
            )
        if want - have > len(self._free_pages):
            return False
        for block in range(have, want):
            self._map(slot, self._take_page(slot, block))
        return True

    def release(self, slot: int) -> None:
        """Give the slot back, and those of its pages that nobody else refers to."""
        self._check_in_use(slot)
        pages = self.table[slot, : self.n_blocks[slot]][::-1].tolist()
        self.table[slot] = 0
        self.n_blocks[slot] = 0
        self._forget(pages)
        self._free_slots.append(slot)

    def hold(self, slot: int, n_tokens: int) -> Prefix:
        """Keep the pages of the slot's first n_tokens beyond the slot's release, until `drop`."""
        self._check_in_use(slot)
        n_blocks = self.blocks_for(n_tokens)
        if not 1 <= n_blocks <= self.n_blocks[slot]:
            raise ValueError(f"slot {slot} has no pages for a prefix of {n_tokens} tokens")
        prefix = Prefix(tuple(self.table[slot, :n_blocks].tolist()), n_tokens)
        for page in prefix.pages:
            self._references[page] += 1
        self._prefixes.add(prefix)
        return prefix

    def pages_to_adopt(self, prefix: Prefix) -> int:
        """Free pages that `adopt` takes: 1 for a copy of a last page that is not full, else 0."""
        return 1 if prefix.n_tokens % self.page_size else 0

    def adopt(self, slot: int, prefix: Prefix) -> tuple[int, int] | None:
        """Give a fresh slot the prefix's tokens: full pages shared, a last page that is not full as a copy.

        Returns (source page, new page), to be copied on the device before the slot is used; None with no such page.

        Raises:
            IndexError: no free page for the copy; ask `pages_to_adopt` first.
            ValueError: the slot is not in use or has pages already, or the prefix was dropped.
        """
        self._check_in_use(slot)
        self._check_held(prefix)
        if self.n_blocks[slot]:
            raise ValueError(f"slot {slot} has pages already")
        if self.pages_to_adopt(prefix) > len(self._free_pages):
            raise IndexError("no free page for the last tokens of a prefix")
        for page in prefix.pages[: prefix.n_tokens // self.page_size]:
            self._map(slot, page)
        if not self.pages_to_adopt(prefix):
            return None
        page = self._free_pages.pop()
        self._map(slot, page)
        return prefix.pages[-1], page

    def pages_to_gain(self, prefix: Prefix) -> int:
        """Pages that `drop` would free: those that nobody else refers to."""
        return sum(self._references[page] == 1 for page in prefix.pages)

    def drop(self, prefix: Prefix) -> None:
        """End a `hold`."""
        self._check_held(prefix)
        self._prefixes.remove(prefix)
        self._forget(reversed(prefix.pages))

    def _take_page(self, slot: int, block: int) -> int:
        """A free page, there being one, for the next block of a slot."""
        return self._free_pages.pop()

    def _map(self, slot: int, page: int) -> None:
        block = int(self.n_blocks[slot])
        self.table[slot, block] = page
        self.n_blocks[slot] = block + 1
        self._references[page] += 1

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free_pages.append(page)

    def _check_in_use(self, slot: int) -> None:
        if slot == 0 or slot in self._free_slots:
            raise ValueError(f"slot {slot} is not in use")

    def _check_held(self, prefix: Prefix) -> None:
        if prefix not in self._prefixes:
            raise ValueError("the prefix is not held")


class ContiguousPageTable(PageTable):
    """Each slot has a run of pages of its own, so a sequence's pages ascend without gaps for its whole life.

    What flex_attention's BLOCKS_ARE_CONTIGUOUS needs. The price: the pool is as large as all slots at their longest,
    and samples of one prompt share nothing.
    """

    shares = False

    def __init__(self, n_slots: int, page_size: int, max_blocks: int) -> None:
        super().__init__(n_slots, n_slots * max_blocks, page_size, max_blocks)

    def _take_page(self, slot: int, block: int) -> int:
        page = 1 + (slot - 1) * self.max_blocks + block
        self._free_pages.remove(page)
        return page
