"""Prefill: K and V of prompt tokens into the cache, any mix of sequences and chunks in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from flexroll.engine.attention import FlexAttention
from flexroll.engine.decoder import Decoder, Tokens
from flexroll.engine.kv_cache import KVCache, upload
from flexroll.engine.masks import PrefillMask
from flexroll.engine.scheduler import Sequence as Running

Chunk = tuple[Running, int, int]

# Attention has a query block for each sequence's last, incomplete block as well, so it needs more rows than there are
# tokens. It is compiled for few lengths: blocks without a token cost nothing.
MIN_ROWS, GROWTH = 1024, 4
# So short a pass takes longer to launch than to run: it is a CUDA graph, padded to the next of these, with so many
# query rows a token.
GRAPH_TOKENS = (64, 128, 192, 256, 320, *range(384, 2049, 128))
GRAPH_ROWS = 2


class Prefill:
    """Prefill passes of up to `max_tokens` tokens on one cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, flex: FlexAttention, max_tokens: int) -> None:
        self.decoder, self.cache, self.flex = decoder, cache, flex
        self.lengths = [MIN_ROWS]
        while self.lengths[-1] < 2 * max_tokens:
            self.lengths.append(min(self.lengths[-1] * GROWTH, 2 * flex.prefill_rows(max_tokens)))
        self._passes: dict[int, _Pass] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Cache tokens [start, stop) of each (sequence, start, stop); on a GPU this returns before it has run."""
        for some in self._fitting(chunks):
            n_tokens = sum(stop - start for _, start, stop in some)
            n_rows = sum(self.flex.prefill_rows(stop - start) for _, start, stop in some)
            size = next((size for size in self._graphs if size >= n_tokens and GRAPH_ROWS * size >= n_rows), None)
            held = self._pass(n_rows if size is None else GRAPH_ROWS * size)
            held.stage(some)
            if size is None:
                held.run(n_tokens)
            else:
                self._graphs[size].replay()

    def warm_up(self) -> None:
        """Run a pass of every length and of every size to be recorded, on the padding slot.

        Kernels go by the number of tokens too, and none can be compiled while a graph is recorded.
        """
        for length in self.lengths:
            self._pad(length, min(length, 64))
        for size in self._recorded:
            self._pad(GRAPH_ROWS * size, size)

    def capture(self, pool: tuple[int, int] | None) -> None:
        """Record the short passes as CUDA graphs in the given memory pool."""
        for size in reversed(self._recorded):
            graph = torch.cuda.CUDAGraph()
            self._pad(GRAPH_ROWS * size, size, torch.cuda.graph(graph, pool=pool))
            self._graphs[size] = graph
        self._graphs = dict(sorted(self._graphs.items()))

    @property
    def _recorded(self) -> list[int]:
        """Tokens of the passes that are worth a graph and fit the longest attention."""
        return [size for size in GRAPH_TOKENS if GRAPH_ROWS * size <= self.lengths[-1]]

    def _pad(self, rows: int, n_tokens: int, within: contextlib.AbstractContextManager | None = None) -> None:
        """A pass of padding only."""
        held = self._pass(rows)
        held.stage([])
        with within or contextlib.nullcontext():
            held.run(n_tokens)

    def _fitting(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks in passes that the longest length holds."""
        some, rows = [], 0
        for chunk in chunks:
            more = self.flex.prefill_rows(chunk[2] - chunk[1])
            if some and rows + more > self.lengths[-1]:
                yield some
                some, rows = [], 0
            some.append(chunk)
            rows += more
        if some:
            yield some

    def _pass(self, rows: int) -> _Pass:
        """Buffers of the smallest length that holds so many query rows."""
        length = next(x for x in self.lengths if x >= rows)
        if length not in self._passes:
            self._passes[length] = _Pass(self.decoder, self.cache, self.flex, length)
        return self._passes[length]


class _Pass:
    """The inputs of passes whose attention has `length` query rows, and at most as many tokens."""

    def __init__(self, decoder: Decoder, cache: KVCache, flex: FlexAttention, length: int) -> None:
        self.decoder, self.cache, self.flex, self.length = decoder, cache, flex, length
        config, device = cache.config, cache.device
        # Token by token: id, slot, position, query row.
        self._tokens = torch.zeros(4, length, dtype=torch.int64, device=device)
        # Query row by query row: slot, position.
        self._rows = torch.zeros(2, length, dtype=torch.int64, device=device)
        # A row more, where tokens that only pad a graph put their queries.
        self._q = torch.zeros(length + 1, config.n_heads, config.head_dim, dtype=cache.pool.dtype, device=device)
        self._mask = PrefillMask(cache, self._rows[0], self._rows[1], flex.compiled, flex.q_block)

    def stage(self, chunks: Sequence[Chunk]) -> None:
        """Bring the tokens here; all others are padding."""
        tokens = np.zeros((4, self.length), dtype=np.int64)
        tokens[3] = self.length
        rows = np.full((2, self.length), -1, dtype=np.int64)
        rows[0] = 0
        n = at = 0
        for sequence, start, stop in chunks:
            count = stop - start
            here, there = slice(n, n + count), slice(at, at + count)
            tokens[0, here] = sequence.tokens[start:stop]
            tokens[1, here] = rows[0, there] = sequence.slot
            tokens[2, here] = rows[1, there] = np.arange(start, stop)
            tokens[3, here] = np.arange(at, at + count)
            n += count
            at += self.flex.prefill_rows(count)
        self._tokens.copy_(upload(tokens, self.cache.device), non_blocking=True)
        self._rows.copy_(upload(rows, self.cache.device), non_blocking=True)
        self._mask.fill([(s.slot, start, stop) for s, start, stop in chunks])

    def run(self, n_tokens: int) -> None:
        """One forward pass over the first n_tokens that are staged."""
        ids, slots, positions, rows = self._tokens[:, :n_tokens]
        tokens = Tokens(ids, slots, positions, self.cache, self._q, rows)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            self.decoder.ops.rope_store(layer, qkv, tokens)
            out = self.flex.prefill(layer, self._q[: self.length], self._mask)
            return out[rows.clamp(max=self.length - 1)]

        self.decoder.forward(tokens, attend, cache_only=True)
