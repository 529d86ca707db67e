"""Invariants of the page table under any order of operations."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexroll.engine.page_table import PageTable
from flexroll.errors import FlexrollError

SLOTS, PAGES, SIZE, BLOCKS = 4, 9, 8, 5


class PageTableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pages = PageTable(SLOTS, PAGES, SIZE, BLOCKS)
        self.lengths: dict[int, int] = {}
        self.mirror = self.pages.logical.copy()

    @precondition(lambda self: self.pages.free_slots)
    @rule()
    def take(self):
        slot = self.pages.take_slot()
        assert slot not in self.lengths and 1 <= slot <= SLOTS
        self.lengths[slot] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), tokens=st.integers(1, SIZE * BLOCKS))
    def reserve(self, data, tokens):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        before = self.pages.free_pages
        need = self.pages.blocks_for(tokens) - int(self.pages.n_blocks[slot])
        done = self.pages.reserve(slot, tokens)
        assert done == (need <= before)
        assert self.pages.free_pages == (before - max(need, 0) if done else before)
        if done:
            self.lengths[slot] = max(self.lengths[slot], tokens)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.pages.release(slot)
        del self.lengths[slot]

    @rule()
    def mirror_changes(self):
        slots, pages, blocks = self.pages.take_changes()
        self.mirror[slots, pages] = blocks
        assert (self.mirror == self.pages.logical).all()

    @invariant()
    def every_page_has_one_place(self):
        owned = [int(self.pages.table[s, b]) for s in self.lengths for b in range(int(self.pages.n_blocks[s]))]
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert sorted(owned + self.pages._free_pages) == list(range(1, PAGES + 1))

    @invariant()
    def logical_inverts_table(self):
        expected = np.full((SLOTS + 1, PAGES + 1), -1)
        expected[0, 0] = 0
        for slot in self.lengths:
            for block in range(int(self.pages.n_blocks[slot])):
                expected[slot, self.pages.table[slot, block]] = block
        assert (self.pages.logical == expected).all()

    @invariant()
    def lengths_are_covered(self):
        for slot, length in self.lengths.items():
            assert self.pages.n_blocks[slot] * SIZE >= length


TestPageTable = PageTableMachine.TestCase


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
