"""Invariants of the page table under any order of operations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexroll.engine.page_table import PageTable, Prefix
from flexroll.errors import FlexrollError

SLOTS, PAGES, SIZE, BLOCKS = 4, 9, 8, 5


class PageTableMachine(RuleBasedStateMachine):
    """The model: the list of pages of every slot, the pages of every prefix; all else follows from these."""

    def __init__(self):
        super().__init__()
        self.pages = PageTable(SLOTS, PAGES, SIZE, BLOCKS)
        self.owned: dict[int, list[int]] = {}
        self.prefixes: list[Prefix] = []

    def mapped(self, slot: int) -> list[int]:
        return self.pages.table[slot, : self.pages.n_blocks[slot]].tolist()

    def references(self) -> Counter:
        return Counter(p for pages in [*self.owned.values(), *(x.pages for x in self.prefixes)] for p in pages)

    @precondition(lambda self: self.pages.free_slots)
    @rule()
    def take(self):
        slot = self.pages.take_slot()
        assert slot not in self.owned and 1 <= slot <= SLOTS
        self.owned[slot] = []

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), tokens=st.integers(1, SIZE * BLOCKS))
    def reserve(self, data, tokens):
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        before, used = self.pages.free_pages, self.references()
        need = max(0, self.pages.blocks_for(tokens) - len(self.owned[slot]))
        done = self.pages.reserve(slot, tokens)
        assert done == (need <= before)
        now = self.mapped(slot)
        assert len(now) == len(self.owned[slot]) + need * done and now[: len(self.owned[slot])] == self.owned[slot]
        assert not any(used[page] for page in now[len(self.owned[slot]) :])  # new pages were nobody's
        self.owned[slot] = now

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        self.pages.release(slot)
        del self.owned[slot]

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def hold(self, data):
        slot = data.draw(st.sampled_from(sorted(s for s, pages in self.owned.items() if pages)))
        tokens = data.draw(st.integers(1, SIZE * len(self.owned[slot])))
        prefix = self.pages.hold(slot, tokens)
        assert prefix.n_tokens == tokens
        assert list(prefix.pages) == self.owned[slot][: -(-tokens // SIZE)]
        self.prefixes.append(prefix)

    @precondition(lambda self: self.prefixes and self.pages.free_slots)
    @rule(data=st.data())
    def adopt(self, data):
        prefix = data.draw(st.sampled_from(self.prefixes))
        free, used, full = self.pages.free_pages, self.references(), prefix.n_tokens // SIZE
        need = self.pages.pages_to_adopt(prefix)
        assert need == (prefix.n_tokens % SIZE > 0)
        slot = self.pages.take_slot()
        if need > free:
            with pytest.raises(IndexError):
                self.pages.adopt(slot, prefix)
            self.owned[slot] = []
            return
        copy = self.pages.adopt(slot, prefix)
        assert self.pages.free_pages == free - need
        self.owned[slot] = list(prefix.pages[:full])
        if need:
            source, target = copy
            assert source == prefix.pages[full] and not used[target]
            self.owned[slot].append(target)
        else:
            assert copy is None

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data())
    def drop(self, data):
        prefix = self.prefixes.pop(data.draw(st.integers(0, len(self.prefixes) - 1)))
        free, gain = self.pages.free_pages, self.pages.pages_to_gain(prefix)
        self.pages.drop(prefix)
        assert self.pages.free_pages == free + gain

    @invariant()
    def every_page_counts_who_refers_to_it(self):
        used = self.references()
        assert 0 not in used
        assert self.pages._references == [used[page] for page in range(PAGES + 1)]
        assert sorted([*used, *self.pages._free_pages]) == list(range(1, PAGES + 1))

    @invariant()
    def table_lists_what_each_slot_owns(self):
        table = np.zeros((SLOTS + 1, BLOCKS))
        for slot, pages in self.owned.items():
            table[slot, : len(pages)] = pages
        assert (self.pages.table == table).all()

    @invariant()
    def a_page_is_the_same_block_to_all_who_share_it(self):
        block_of = {}
        for pages in self.owned.values():
            for block, page in enumerate(pages):
                assert block_of.setdefault(page, block) == block


TestPageTable = PageTableMachine.TestCase


def test_a_fresh_pool_hands_out_ascending_pages():
    pages = PageTable(2, 6, 8, 5)
    for _ in range(2):
        assert pages.reserve(pages.take_slot(), 24)
    assert pages.table[1, :3].tolist() + pages.table[2, :3].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_prefix_outlives_its_slot():
    pages = PageTable(2, 4, 8, 4)
    slot = pages.take_slot()
    pages.reserve(slot, 20)
    prefix = pages.hold(slot, 11)
    pages.release(slot)
    assert pages.free_pages == 2  # the third page went back, the two of the prefix did not
    follower = pages.take_slot()
    source, target = pages.adopt(follower, prefix)
    assert pages.table[follower].tolist() == [prefix.pages[0], target, 0, 0] and source == prefix.pages[1]
    pages.drop(prefix)
    assert pages.free_pages == 2  # the tail is free again, the full page is the follower's
    pages.release(follower)
    assert pages.free_pages == 4


def test_a_sequence_longer_than_a_slot_is_an_error():
    pages = PageTable(1, 9, 8, 2)
    with pytest.raises(FlexrollError, match="exceeds the 16"):
        pages.reserve(pages.take_slot(), 17)


def test_slots_are_released_once():
    pages = PageTable(2, 4, 8, 2)
    slot = pages.take_slot()
    pages.release(slot)
    for wrong in (slot, 0):
        with pytest.raises(ValueError):
            pages.release(wrong)
        with pytest.raises(ValueError, match="not in use"):
            pages.hold(wrong, 1)


def test_wrong_use_of_a_prefix_is_an_error():
    pages = PageTable(3, 4, 8, 2)
    slot = pages.take_slot()
    pages.reserve(slot, 8)
    for n_tokens in (0, 9):
        with pytest.raises(ValueError, match="no pages for a prefix"):
            pages.hold(slot, n_tokens)
    prefix = pages.hold(slot, 8)
    with pytest.raises(ValueError, match="has pages already"):
        pages.adopt(slot, prefix)
    pages.drop(prefix)
    for use in (lambda: pages.drop(prefix), lambda: pages.adopt(pages.take_slot(), prefix)):
        with pytest.raises(ValueError, match="not held"):
            use()
    assert pages.free_pages == 3
