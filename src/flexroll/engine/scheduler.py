"""Who runs next: admission by free slots and pages, shared prompts, prefill in chunks, decode steps launched ahead.

Prefill covers all known tokens but the last, which always goes through a decode step. Decode steps may be launched
before the tokens of earlier ones are read back, so counts come in two kinds: what is launched (`n_cached`, `pending`)
and what is known (`tokens`). All work runs in the order of its launch, so a page given back here may be used by
whatever is launched later, even while the work that used it before is still in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexroll.engine.page_table import PageTable, Prefix

if TYPE_CHECKING:  # its module needs torch, this one does not
    from flexroll.engine.sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One sample of one prompt.

    index: the prompt's. sample: 0..n-1 among those of the prompt. tokens: the prompt and what is known of the generated
    ones. slot: 0 while it waits. n_cached: positions whose K and V are computed, or will be by what is launched.
    pending: tokens launched, not yet read. logprobs: (raw, processed) of the generated tokens that came with them.
    """

    index: int
    sample: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_length: int
    slot: int = 0
    n_cached: int = 0
    pending: int = 0
    finish_reason: str | None = None
    logprobs: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._limit = min(self.prompt_length + self.params.max_new_tokens, self.max_length)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - len(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether all but its last token are in the cache, so that a decode step can go on from there."""
        return self.slot != 0 and self.n_cached >= len(self.tokens) - 1 + self.pending

    @property
    def launchable(self) -> bool:
        """Whether one more decode step makes sense: ready, not known to have ended, no limit reached by what flies."""
        return self.finish_reason is None and len(self.tokens) + self.pending < self._limit and self.ready

    def append(self, token: int, logprobs: tuple[float, float] | None = None) -> None:
        """Take a token that was read back and see whether it ends the sequence; what comes after the end is dropped."""
        self.pending -= 1
        if self.finish_reason is not None:
            return
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish_reason = "length"


@dataclass(eq=False)
class Group:
    """The samples of one prompt. prefix: the prompt's pages, held while members wait that can adopt them."""

    sequences: list[Sequence]
    prefix: Prefix | None = None

    @property
    def n_shared(self) -> int:
        """Tokens whose K and V the members can share: the prompt's but the last, where each starts to decode."""
        return self.sequences[0].prompt_length - 1

    @property
    def waits(self) -> bool:
        """Whether a member has still to be admitted, or admitted again."""
        return any(s.slot == 0 and s.finish_reason is None for s in self.sequences)

    @property
    def runs(self) -> bool:
        """Whether a member has the prompt in its pages, or is prefilling it."""
        return any(s.slot for s in self.sequences)

    @property
    def source(self) -> Sequence | None:
        """A member whose pages hold the shared tokens."""
        return next((s for s in self.sequences if s.slot and s.n_cached >= self.n_shared), None)


@dataclass
class Scheduler:
    """Continuous batching over one page table.

    A prompt is prefilled by the first of its group, the leader; the others wait for that and then adopt its pages.
    running is in order of admission. A sequence holds a slot while it is in `running`; preemption takes slot and pages
    away and puts it first in line, with all its known tokens to be cached again.

    Every decode step advances the oldest running sequence, or a prefill brings it nearer to that, and it is never
    preempted: so every workload ends. For that `make_room` hands the pages it gains to the running ones at once, before
    an admission can take them again.
    """

    pages: PageTable
    max_prefill_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    _groups: dict[Sequence, Group] = field(default_factory=dict)

    def add(self, groups: Iterable[Group]) -> None:
        """Put groups at the end of the line. Each sequence must fit the pool alone, with one token to spare."""
        for group in groups:
            self.waiting.extend(group.sequences)
            self._groups.update((s, group) for s in group.sequences)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> list[tuple[int, int]]:
        """Move waiting sequences into free slots while their tokens and one more fit the free pages.

        First come, first served. Those whose leader is prefilling stay in line, but the slots and pages they will need
        are set aside, so that later groups overtake them only into what is left.

        Returns (source, target) pages to copy on the device before anything else is launched. No page is both a source
        and a target, so they may be copied in any order or at once.
        """
        copies, passed, started = [], [], []
        slots, free = self.pages.free_slots, self.pages.free_pages
        while self.waiting and slots and self._need(self.waiting[0]) <= free:
            sequence = self.waiting.popleft()
            group = self._groups[sequence]
            slots, free = slots - 1, free - self._need(sequence)
            if self.pages.shares and group.prefix is None and group.runs and group.source is None:
                passed.append(sequence)
            else:
                copies += self._start(sequence, group)
                started.append(group)
        self.waiting.extendleft(reversed(passed))
        for group in started:  # not before: a source page freed within the loop could become a target
            if not group.waits:
                self._drop(group)
        return copies

    def prefill_chunks(self) -> list[tuple[Sequence, int, int]]:
        """(sequence, start, stop) of the tokens to prefill now, at most max_prefill_tokens in all; [] where none is."""
        chunks, budget = [], self.max_prefill_tokens
        for sequence in self.running:
            stop = min(len(sequence.tokens) - 1, sequence.n_cached + budget)
            if stop > sequence.n_cached:
                chunks.append((sequence, sequence.n_cached, stop))
                budget -= stop - sequence.n_cached
        return chunks

    def prefilled(self, chunks: Iterable[tuple[Sequence, int, int]]) -> None:
        """Note that chunks were launched; a prompt that is then complete is held for those who wait to share it."""
        for sequence, _, stop in chunks:
            sequence.n_cached = stop
            group = self._groups[sequence]
            if group.waits:
                self._hold(group)

    def step(self) -> list[Sequence] | None:
        """Sequences of the next decode step, in order of admission, each with a page for its token.

        [] where only a prefill, an admission or tokens read back can lead on. None where the pool is short of pages:
        read everything in flight, `make_room` and ask again.
        """
        if not self.running:
            return None if self.waiting and self._need(self.waiting[0]) > self.pages.free_pages else []
        batch = [s for s in self.running if s.launchable]
        return batch if all(self.pages.reserve(s.slot, s.n_cached + 1) for s in batch) else None

    def make_room(self) -> None:
        """Give up what is needed for `step` not to be None: finished sequences first, then prefixes, then the newest.

        Raises:
            RuntimeError: tokens are in flight, or a sequence does not fit the pool even alone.
        """
        if any(s.pending for s in self.running):
            raise RuntimeError("make_room while tokens are in flight; read them first")
        for sequence in self.running:
            if sequence.finish_reason is not None:
                self._release(sequence)
        while self.step() is None:
            self._give_up_one()

    def launched(self, sequences: Iterable[Sequence]) -> None:
        """Note that a decode step of these was launched."""
        for sequence in sequences:
            sequence.n_cached += 1
            sequence.pending += 1

    def retire(self) -> list[Sequence]:
        """Take finished sequences out and give their slots and pages back, tokens in flight or not.

        The prompt's pages stay held where members of the group still wait.
        """
        done = [s for s in self.running if s.finish_reason is not None]
        if done:
            self.running = [s for s in self.running if s.finish_reason is None]
        for sequence in done:
            group = self._groups.pop(sequence)
            if group.waits:
                self._hold(group)
            self._release(sequence)
        return done

    def abort(self) -> None:
        """Drop everything; the page table is then as it was before."""
        for sequence in self.running:
            self._release(sequence)
        for group in self._groups.values():
            self._drop(group)
        self.running.clear()
        self.waiting.clear()
        self._groups.clear()

    def _need(self, sequence: Sequence) -> int:
        """Free pages that an admission asks for: for the known tokens and one more, less those that are shared."""
        group = self._groups[sequence]
        sharing = self.pages.shares and (group.prefix is not None or group.runs)
        shared = group.n_shared // self.pages.page_size if sharing else 0
        return self.pages.blocks_for(len(sequence.tokens) + 1) - shared

    def _start(self, sequence: Sequence, group: Group) -> list[tuple[int, int]]:
        """Give a sequence its slot and pages, shared ones where there are; the page to copy, if any."""
        self._hold(group)  # dropped, or never held, while a member still runs: taken from that one
        sequence.slot = self.pages.take_slot()
        copy = None
        if group.prefix is not None:
            copy = self.pages.adopt(sequence.slot, group.prefix)
            sequence.n_cached = group.prefix.n_tokens
        self.pages.reserve(sequence.slot, len(sequence.tokens))
        self.running.append(sequence)
        return [] if copy is None else [copy]

    def _give_up_one(self) -> None:
        for sequence in reversed(self.waiting):
            group = self._groups[sequence]
            if group.prefix is not None and self.pages.pages_to_gain(group.prefix):
                self._drop(group)
                return
        running = [s for s in self.running if s.slot]
        if len(running) < 2:
            raise RuntimeError("a sequence does not fit the page pool; it should have been refused")
        newest = running[-1]
        self.running.remove(newest)
        self._release(newest)
        self.waiting.appendleft(newest)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot:
            self.pages.release(sequence.slot)
            sequence.slot = sequence.n_cached = 0

    def _hold(self, group: Group) -> None:
        """Hold the group's prefix if it is not held and a member has it."""
        source = group.source
        if self.pages.shares and group.prefix is None and group.n_shared and source is not None:
            group.prefix = self.pages.hold(source.slot, group.n_shared)

    def _drop(self, group: Group) -> None:
        if group.prefix is not None:
            self.pages.drop(group.prefix)
            group.prefix = None
