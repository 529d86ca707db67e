"""Who runs next: admission by free slots and pages, prefill in chunks, preemption by recomputing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flexroll.engine.page_table import PageTable
from flexroll.engine.sampling import SamplingParams


@dataclass
class Sequence:
    """One request. `tokens` is the prompt and what was generated; `n_cached` of them have their K and V in the pool."""

    index: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_length: int
    slot: int = 0
    n_cached: int = 0
    prefilling: bool = True
    finish_reason: str | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def append(self, token: int) -> None:
        """Take a generated token and see whether it ends the sequence."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) - self.prompt_length >= self.params.max_new_tokens or len(self.tokens) >= self.max_length:
            self.finish_reason = "length"


@dataclass
class Scheduler:
    """Continuous batching over one page table.

    running is in order of admission. A sequence holds a slot while it is in `running`; preemption takes slot and pages
    away and puts it first in line, with all its tokens to be prefilled again.
    """

    pages: PageTable
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> None:
        """Move waiting sequences into free slots, first come first, while their tokens and one more fit free pages."""
        while self.waiting and self.pages.free_slots:
            first = self.waiting[0]
            if self.pages.blocks_for(len(first.tokens) + 1) > self.pages.free_pages:
                return
            first.slot = self.pages.take_slot()
            self.pages.reserve(first.slot, len(first.tokens))
            first.n_cached, first.prefilling = 0, True
            self.running.append(self.waiting.popleft())

    def prefill_chunks(self, budget: int) -> list[tuple[Sequence, int, int]]:
        """(sequence, start, stop) of the tokens to prefill now, at most `budget` in all; [] when none waits."""
        chunks = []
        for sequence in self.running:
            if sequence.prefilling and budget > 0:
                stop = min(len(sequence.tokens), sequence.n_cached + budget)
                chunks.append((sequence, sequence.n_cached, stop))
                budget -= stop - sequence.n_cached
        return chunks

    def decodable(self) -> list[Sequence]:
        """Sequences of the next decode step, each with a page for its token; preempts the newest where short."""
        for sequence in list(self.running):
            while sequence in self.running and not self.pages.reserve(sequence.slot, sequence.n_cached + 1):
                self._preempt(self.running[-1])
        return [s for s in self.running if not s.prefilling]

    def retire(self) -> list[Sequence]:
        """Take finished sequences out and give their slots and pages back."""
        done = [s for s in self.running if s.finish_reason is not None]
        for sequence in done:
            self.pages.release(sequence.slot)
        self.running = [s for s in self.running if s.finish_reason is None]
        return done

    def abort(self) -> None:
        """Drop everything; the page table is then as it was before."""
        for sequence in self.running:
            self.pages.release(sequence.slot)
        self.running.clear()
        self.waiting.clear()

    def _preempt(self, sequence: Sequence) -> None:
        self.pages.release(sequence.slot)
        self.running.remove(sequence)
        sequence.slot = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
