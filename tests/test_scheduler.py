"""The scheduler against a simulated device whose every output depends on all it can read through the page table."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flexroll.engine.page_table import PageTable
from flexroll.engine.scheduler import Group, Scheduler, Sequence

VOCAB = 11


@dataclass(frozen=True)
class Params:
    """What the scheduler reads of SamplingParams, without torch."""

    max_new_tokens: int


def digest(*values) -> int:
    return zlib.crc32(repr(values).encode())


def entry(token: int, before: list[int]) -> int:
    """The fake model's K and V of a token: like real ones, they depend on all that was attended to."""
    return digest(token, before)


def choose(sequence: Sequence, entries: list[int]) -> int:
    """The fake model's next token."""
    return digest(sequence.index, sequence.sample, entries) % VOCAB


def make_group(
    index: int, prompt_length: int, n: int = 1, new: int = 4, stop: frozenset[int] = frozenset(), max_length: int = 32
) -> Group:
    prompt = [digest("prompt", index, position) % VOCAB for position in range(prompt_length)]
    return Group(
        [Sequence(index, i, prompt_length, list(prompt), Params(new), frozenset(stop), max_length) for i in range(n)]
    )


def direct(sequence: Sequence) -> tuple[list[int], str]:
    """(generated, finish reason) of a sequence that was not run yet, without pages or scheduling."""
    tokens, entries = list(sequence.tokens), []
    while True:
        while len(entries) < len(tokens):
            entries.append(entry(tokens[len(entries)], list(entries)))
        tokens.append(choose(sequence, entries))
        if tokens[-1] in sequence.stop_ids:
            return tokens[sequence.prompt_length :], "stop"
        generated = len(tokens) - sequence.prompt_length
        if generated == sequence.params.max_new_tokens or len(tokens) == sequence.max_length:
            return tokens[sequence.prompt_length :], "length"


class Device:
    """Runs what is launched at once and in order. Free pages hold junk.

    As on a real one, its table is set when a slot is given out, and a decode step brings one page a sequence.
    """

    def __init__(self, pages: PageTable) -> None:
        self.pages = pages
        self.memory = np.zeros((pages.n_pages + 1, pages.page_size), dtype=np.int64)
        self.table = np.zeros_like(pages.table)
        self.last = [0] * (pages.n_slots + 1)
        self.prefilled: Counter[int] = Counter()
        self.junk = -1

    def copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        assert len({target for _, target in copies}) == len(copies)
        for source, target in copies:
            self.memory[target] = self.memory[source]

    def place(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.table[sequence.slot] = self.pages.table[sequence.slot]

    def prefill(self, chunks: list[tuple[Sequence, int, int]]) -> None:
        self._spoil()
        for sequence, start, stop in reversed(chunks):  # a chunk that needs another one of this launch would show
            assert 0 <= start < stop < len(sequence.tokens)
            for position in range(start, stop):
                self._write(sequence.slot, position, sequence.tokens[position])
            self.prefilled[sequence.index] += stop - start

    def decode(self, batch: list[Sequence]) -> list[int]:
        self._spoil()
        for sequence in batch:
            block = sequence.n_cached // self.pages.page_size
            self.table[sequence.slot, block] = self.pages.table[sequence.slot, block]
            token = self.last[sequence.slot] if sequence.pending else sequence.tokens[-1]
            self._write(sequence.slot, sequence.n_cached, token)
        for sequence in batch:
            self.last[sequence.slot] = choose(sequence, self._read(sequence.slot, sequence.n_cached + 1))
        return [self.last[sequence.slot] for sequence in batch]

    def _spoil(self) -> None:
        for page in self.pages._free_pages:
            self.memory[page] = self.junk
            self.junk -= 1

    def _write(self, slot: int, position: int, token: int) -> None:
        size = self.pages.page_size
        self.memory[self.table[slot, position // size], position % size] = entry(token, self._read(slot, position))

    def _read(self, slot: int, n_tokens: int) -> list[int]:
        blocks = range(self.pages.blocks_for(n_tokens))
        return [int(v) for block in blocks for v in self.memory[self.table[slot, block]]][:n_tokens]


@dataclass
class Policy:
    """How an engine may drive the scheduler; none of it may change an output."""

    depth: int = 1  # decode steps in flight
    interleave: bool = False  # decode in the same round as a prefill, not only once nothing is left to prefill
    retry: bool = True  # ask for a step again right after make_room, not after another admission
    retire_late: bool = False  # leave what has finished in place when the pool is short


class Engine:
    """The loop of an engine around a scheduler, and what it saw."""

    def __init__(self, pages: PageTable, groups: list[Group], budget: int = 64, policy: Policy | None = None) -> None:
        self.pages, self.budget, self.policy = pages, budget, policy or Policy()
        self.scheduler, self.device = Scheduler(pages, budget), Device(pages)
        self.scheduler.add(groups)
        self.flying: deque[tuple[list[Sequence], list[int]]] = deque()
        self.done: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.shortages = self.most_running = 0

    def round(self) -> None:
        scheduler = self.scheduler
        before = len(scheduler.running)
        self.device.copy(scheduler.admit())
        self.device.place(scheduler.running[before:])
        self.admitted += [s for s in scheduler.running if s not in self.admitted]
        self.most_running = max(self.most_running, len(scheduler.running))
        chunks = scheduler.prefill_chunks()
        if chunks:
            assert sum(stop - start for _, start, stop in chunks) <= self.budget
            self.device.prefill(chunks)
            scheduler.prefilled(chunks)
            if not self.policy.interleave:
                return
        batch = self._next_batch()
        if batch:
            assert batch == [s for s in scheduler.running if s in batch]
            assert all(s.launchable and s.n_cached == len(s.tokens) - 1 + s.pending for s in batch)
            self.flying.append((batch, self.device.decode(batch)))
            scheduler.launched(batch)
        while self.flying and (not batch or len(self.flying) >= self.policy.depth):
            self.read()
        self.done += scheduler.retire()

    def run(self, max_rounds: int = 1000) -> None:
        rounds = 0
        while self.scheduler.busy:
            rounds += 1
            assert rounds <= max_rounds, "no end in sight"
            self.round()
        while self.flying:
            self.read()

    def read(self) -> None:
        for sequence, token in zip(*self.flying.popleft(), strict=True):
            sequence.append(token, (float(token), -float(token)))

    def _next_batch(self) -> list[Sequence]:
        while (batch := self.scheduler.step()) is None:
            self.shortages += 1
            while self.flying:
                self.read()
            if not self.policy.retire_late:
                self.done += self.scheduler.retire()
            self.scheduler.make_room()
            if not self.policy.retry:
                return []
        return batch


def assert_pristine(pages: PageTable) -> None:
    fresh = PageTable(pages.n_slots, pages.n_pages, pages.page_size, pages.max_blocks)
    assert (pages.free_pages, pages.free_slots) == (fresh.free_pages, fresh.free_slots)
    assert (pages.table == fresh.table).all() and (pages.n_blocks == fresh.n_blocks).all()


MAX_LENGTH = 14
group_shapes = st.tuples(st.integers(1, 11), st.integers(1, 5), st.integers(1, 8))
policies = st.builds(
    Policy, depth=st.integers(1, 4), interleave=st.booleans(), retry=st.booleans(), retire_late=st.booleans()
)


@settings(deadline=None, max_examples=400)
@given(
    shapes=st.lists(group_shapes, min_size=1, max_size=5),
    stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    page_size=st.sampled_from([1, 2, 4, 8]),
    n_slots=st.integers(1, 6),
    spare=st.just(0) | st.integers(1, 4) | st.integers(5, 40),
    budget=st.integers(1, 24),
    policy=policies,
)
def test_every_workload_ends_with_the_outputs_of_the_direct_computation(
    shapes, stop, page_size, n_slots, spare, budget, policy
):
    groups = [make_group(i, *shape, stop=stop, max_length=MAX_LENGTH) for i, shape in enumerate(shapes)]
    sequences = [s for group in groups for s in group.sequences]
    expected = [direct(s) for s in sequences]
    longest = max(min(length + new, MAX_LENGTH) for length, _, new in shapes)
    max_blocks = -(-MAX_LENGTH // page_size)
    pages = PageTable(n_slots, -(-longest // page_size) + spare, page_size, max_blocks)
    engine = Engine(pages, groups, budget, policy)

    # Between two tokens of the oldest sequence all others may be computed anew, not more: see Scheduler.
    work = sum(min(length + new, MAX_LENGTH) * n for length, n, new in shapes)
    engine.run(max_rounds=(work + 4) * (sum(n * new for _, n, new in shapes) + 1))

    assert [(s.generated, s.finish_reason) for s in sequences] == expected
    assert all(s.logprobs == [(t, -t) for t in s.generated] and s.pending == 0 for s in sequences)
    assert len(engine.done) == len(sequences) and set(engine.done) == set(sequences)
    assert all(group.prefix is None for group in groups)
    assert_pristine(pages)
    event(f"short of pages: {engine.shortages > 0}, preempted: {engine.scheduler.preemptions > 0}")
    if pages.n_pages >= n_slots * max_blocks:
        assert engine.scheduler.preemptions == 0
    if not engine.shortages:
        assert engine.device.prefilled == Counter({i: length - 1 for i, (length, _, _) in enumerate(shapes)})
        first = [s.index for s in engine.admitted if s.sample == 0]
        assert first == sorted(first)
        for group in groups:
            assert [s for s in engine.admitted if s.index == group.sequences[0].index] == group.sequences


@settings(deadline=None, max_examples=60)
@given(rounds=st.integers(0, 12), spare=st.integers(0, 8), policy=policies)
def test_abort_midway_leaves_the_page_table_as_it_was(rounds, spare, policy):
    pages = PageTable(3, 3 + spare, 4, 4)
    groups = [make_group(0, 7, 4, 5), make_group(1, 6, 3, 4)]
    engine = Engine(pages, groups, 5, policy)
    for _ in range(rounds):
        if engine.scheduler.busy:
            engine.round()
    engine.scheduler.abort()
    assert not engine.scheduler.busy and all(g.prefix is None for g in groups)
    assert_pristine(pages)
    again = make_group(2, 7, 2, 3)
    expected = [direct(s)[0] for s in again.sequences]
    engine.scheduler.add([again])
    engine.flying.clear()
    engine.run()
    assert [s.generated for s in again.sequences] == expected


def test_a_stop_token_first_ends_a_sequence_while_more_is_in_flight():
    group = make_group(0, 5, 1, 8)
    tokens, _ = direct(group.sequences[0])
    group.sequences[0].stop_ids = frozenset(tokens[:1])
    engine = Engine(PageTable(1, 8, 2, 16), [group], policy=Policy(depth=4))
    engine.run()
    assert (group.sequences[0].generated, group.sequences[0].finish_reason) == (tokens[:1], "stop")
    assert len(group.sequences[0].logprobs) == 1


def test_no_step_is_launched_past_a_limit():
    for new, max_length, last in ((3, 32, 8), (9, 7, 7)):
        sequence = make_group(0, 5, 1, new, max_length=max_length).sequences[0]
        engine = Engine(PageTable(1, 8, 2, 16), [Group([sequence])], policy=Policy(depth=64))
        launched = 0
        for _ in range(20):
            if not sequence.finish_reason:
                engine.round()
                launched = max(launched, len(sequence.tokens) + sequence.pending)
        assert launched == len(sequence.tokens) == last and sequence.finish_reason == "length"


def test_late_tokens_of_a_retired_sequence_are_dropped_and_its_slot_is_free_at_once():
    sequence = make_group(0, 3, 1, 8, stop=frozenset({7})).sequences[0]
    pages = PageTable(1, 4, 4, 4)
    scheduler = Scheduler(pages, 8)
    scheduler.add([Group([sequence])])
    scheduler.admit()
    scheduler.prefilled(scheduler.prefill_chunks())
    for _ in range(3):
        scheduler.launched(scheduler.step())
    sequence.append(7, (-1.0, -2.0))
    assert scheduler.step() == [] and scheduler.retire() == [sequence] and not scheduler.busy
    assert sequence.pending == 2
    assert_pristine(pages)
    sequence.append(3, (-1.0, -2.0))
    sequence.append(4)
    assert (sequence.generated, sequence.logprobs, sequence.pending) == ([7], [(-1.0, -2.0)], 0)


def test_followers_wait_for_their_leader_and_then_start_ready():
    group = make_group(0, 10, 3)
    leader, *followers = group.sequences
    scheduler = Scheduler(PageTable(4, 20, 4, 8), 6)
    scheduler.add([group])
    assert scheduler.admit() == [] and scheduler.running == [leader]
    chunks = scheduler.prefill_chunks()
    assert chunks == [(leader, 0, 6)]
    scheduler.prefilled(chunks)
    assert scheduler.admit() == [] and scheduler.running == [leader] and not leader.ready and group.prefix is None
    scheduler.prefilled([(leader, 6, 9)])
    assert group.prefix.n_tokens == 9 and leader.ready
    copies = scheduler.admit()
    table = scheduler.pages.table
    assert copies == [(table[leader.slot, 2], table[s.slot, 2]) for s in followers]
    assert all(table[s.slot, :2].tolist() == table[leader.slot, :2].tolist() for s in followers)
    assert all(s.ready and s.n_cached == 9 for s in followers) and group.prefix is None  # the last one has come
    assert scheduler.prefill_chunks() == [] and scheduler.step() == group.sequences


def test_a_prompt_of_full_pages_is_shared_without_a_copy_and_one_of_one_token_not_at_all():
    full, single = make_group(0, 9, 2), make_group(1, 1, 2)
    scheduler = Scheduler(PageTable(4, 20, 4, 8), 64)
    scheduler.add([full, single])
    assert scheduler.admit() == []
    assert scheduler.running == [full.sequences[0], *single.sequences]
    assert scheduler.step() == single.sequences
    scheduler.prefilled(scheduler.prefill_chunks())
    assert scheduler.admit() == [] and single.prefix is None
    assert scheduler.step() == [full.sequences[0], *single.sequences, full.sequences[1]]


def test_later_groups_overtake_waiting_followers_only_into_what_those_leave():
    def admitted(n_slots: int, n_pages: int) -> list[tuple[int, int]]:
        scheduler = Scheduler(PageTable(n_slots, n_pages, 4, 8), 64)
        scheduler.add([make_group(0, 10, 3), make_group(1, 10, 3)])
        scheduler.admit()
        return [(s.index, s.sample) for s in scheduler.running]

    # A leader takes 3 pages, each of its followers will take 1 beside the 2 it shares.
    assert admitted(3, 20) == [(0, 0)]
    assert admitted(4, 20) == [(0, 0), (1, 0)]
    assert admitted(6, 7) == [(0, 0)]
    assert admitted(6, 8) == [(0, 0), (1, 0)]


def test_the_chunk_budget_goes_to_the_oldest_first():
    groups = [make_group(i, length) for i, length in enumerate((6, 1, 9, 4))]
    scheduler = Scheduler(PageTable(4, 20, 4, 8), 8)
    scheduler.add(groups)
    scheduler.admit()
    a, _, c, d = scheduler.running
    chunks = scheduler.prefill_chunks()
    assert chunks == [(a, 0, 5), (c, 0, 3)]
    scheduler.prefilled(chunks)
    assert scheduler.prefill_chunks() == [(c, 3, 8), (d, 0, 3)]


@pytest.mark.parametrize("sibling_runs", [False, True])
def test_a_preempted_sample_comes_back_first_and_shares_the_prompt_of_its_sibling(sibling_runs):
    group, beside, later = make_group(0, 9, 2, new=8), make_group(1, 1, new=7), make_group(2, 3, new=1)
    groups = [group, beside, later] if sibling_runs else [group, later]
    expected = [direct(s)[0] for g in groups for s in g.sequences]
    # 2 shared pages and 2 more for each of the two are one too many; `beside` ends, and gives 2, before they do.
    engine = Engine(PageTable(len(groups), 7 if sibling_runs else 5, 4, 8), groups)
    first, second = group.sequences
    while not engine.scheduler.preemptions:
        engine.round()
    assert engine.scheduler.waiting[0] is second and (second.slot, second.n_cached) == (0, 0)
    again = len(second.generated)
    assert again > 0
    while not second.slot:
        engine.round()
    assert (first.slot > 0) == sibling_runs
    engine.run()
    assert [s.generated for g in groups for s in g.sequences] == expected
    assert engine.scheduler.preemptions == 1 and engine.device.prefilled[0] == 8 + again


def test_a_prefix_is_given_up_before_a_running_sequence():
    grows, group = make_group(0, 1, 1, new=9), make_group(1, 12, 2, new=1)
    sequences = grows.sequences + group.sequences
    expected = [direct(s)[0] for s in sequences]
    # The leader's 3 pages stay held for a follower that lacks 1 of 2 pages, until the other sequence needs a third.
    engine = Engine(PageTable(2, 5, 4, 8), [grows, group])
    engine.run()
    assert [s.generated for s in sequences] == expected
    assert (engine.shortages, engine.scheduler.preemptions) == (1, 0)
    assert engine.device.prefilled[1] == 2 * 11


@pytest.mark.parametrize("leaders_finished", [False, True])
def test_only_a_prefix_that_frees_pages_is_given_up_that_of_the_last_in_line_first(leaders_finished):
    grows, a, b = make_group(0, 1, new=24), make_group(1, 12, 2), make_group(2, 12, 2)
    scheduler = Scheduler(PageTable(5, 11, 4, 8), 64)
    scheduler.add([grows, a, b])
    scheduler.admit()
    (long,), leaders = grows.sequences, [a.sequences[0], b.sequences[0]]
    assert scheduler.running == [long, *leaders]
    chunks = scheduler.prefill_chunks()
    for _ in range(20):  # it takes the pages set aside for the followers before their leaders are done
        scheduler.launched(scheduler.step())
        long.append(1)
    scheduler.prefilled(chunks)
    assert scheduler.pages.free_pages == 0 and a.prefix is not None and b.prefix is not None
    if leaders_finished:
        for leader in leaders:
            leader.finish_reason = "stop"
        scheduler.retire()
    assert scheduler.step() is None
    scheduler.make_room()
    assert a.prefix is not None and b.prefix is None
    assert scheduler.preemptions == (0 if leaders_finished else 1)
    assert long in scheduler.step()


def test_make_room_takes_finished_sequences_first_and_refuses_while_tokens_fly():
    a, b = make_group(0, 4, new=1), make_group(1, 4, new=9)
    scheduler = Scheduler(PageTable(2, 2, 4, 8), 64)
    scheduler.add([a, b])
    scheduler.admit()
    assert [s.index for s in scheduler.running] == [0]
    scheduler.prefilled(scheduler.prefill_chunks())
    scheduler.launched(scheduler.step())
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.make_room()
    a.sequences[0].append(5)
    scheduler.make_room()
    assert scheduler.pages.free_pages == 2 and scheduler.retire() == a.sequences and scheduler.preemptions == 0


def test_what_cannot_fit_even_alone_is_refused_at_last():
    scheduler = Scheduler(PageTable(2, 2, 4, 8), 64)
    scheduler.add([make_group(0, 9)])
    assert scheduler.admit() == [] and scheduler.step() is None
    with pytest.raises(RuntimeError, match="does not fit"):
        scheduler.make_room()
