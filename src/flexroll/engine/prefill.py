"""Prefill: K and V of prompt tokens into the cache, any mix of sequences and chunks in one pass."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from flexroll.engine.attention import FlexAttention
from flexroll.engine.decoder import Decoder, Tokens
from flexroll.engine.kv_cache import KVCache, upload
from flexroll.engine.scheduler import Sequence as Running

Chunk = tuple[Running, int, int]

# Attention has a query block for each sequence's last, incomplete block as well, so it needs more rows than there are
# tokens. flex_attention is compiled for few lengths: blocks without a token cost nothing.
MIN_ROWS, GROWTH = 1024, 4
# So short a pass takes longer to launch than to run: it is a CUDA graph, padded to the next of these, with so many
# query rows a token.
GRAPH_TOKENS = (64, 128, 192, 256, 320, *range(384, 2049, 128))
GRAPH_ROWS = 2


def whole_blocks(n_tokens: int, q_block: int) -> int:
    """Tokens rounded up to whole query blocks."""
    return -(-n_tokens // q_block) * q_block


class Prefill:
    """Prefill passes of up to `max_tokens` tokens on one cache.

    flex: attention by flex_attention; None: by the paged Triton kernel.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, flex: FlexAttention | None, max_tokens: int) -> None:
        self.decoder, self.cache, self.flex = decoder, cache, flex
        if flex is not None:
            self.q_block = flex.q_block
        else:
            from flexroll.engine.kernels.paged_prefill import query_block

            self.q_block = query_block(cache)
        self.lengths = [MIN_ROWS]
        while self.lengths[-1] < 2 * max_tokens:
            self.lengths.append(min(self.lengths[-1] * GROWTH, 2 * self._rows(max_tokens)))
        self._passes: dict[int, _Pass] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Cache tokens [start, stop) of each (sequence, start, stop); on a GPU this returns before it has run."""
        for some in self._fitting(chunks):
            n_tokens = sum(stop - start for _, start, stop in some)
            n_rows = sum(self._rows(stop - start) for _, start, stop in some)
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

    def _rows(self, n_tokens: int) -> int:
        """Query rows that so many tokens of one sequence take: whole query blocks."""
        return whole_blocks(n_tokens, self.q_block)

    def _fitting(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks in passes that the longest length holds."""
        some, rows = [], 0
        for chunk in chunks:
            more = self._rows(chunk[2] - chunk[1])
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
            if self.flex is not None:
                self._passes[length] = _FlexPass(self.decoder, self.cache, self.flex, length)
            else:
                self._passes[length] = _PagedPass(self.decoder, self.cache, self.q_block, length)
        return self._passes[length]


class _Pass(ABC):
    """The inputs of passes whose attention has at most `length` query rows; they have no more tokens than that."""

    def __init__(self, decoder: Decoder, cache: KVCache, length: int) -> None:
        self.decoder, self.cache, self.length = decoder, cache, length
        # Token by token: id, slot, position.
        self._tokens = torch.zeros(3, length, dtype=torch.int64, device=cache.device)

    def stage(self, chunks: Sequence[Chunk]) -> None:
        """Bring the tokens here; all others are padding."""
        tokens = np.zeros((3, self.length), dtype=np.int64)
        n = 0
        for sequence, start, stop in chunks:
            here = slice(n, n + stop - start)
            tokens[0, here] = sequence.tokens[start:stop]
            tokens[1, here] = sequence.slot
            tokens[2, here] = np.arange(start, stop)
            n += stop - start
        self._tokens.copy_(upload(tokens, self.cache.device), non_blocking=True)
        self.stage_attention([(sequence.slot, start, stop) for sequence, start, stop in chunks])

    @abstractmethod
    def stage_attention(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Bring here what attention asks for, from (slot, start, stop) of each chunk."""

    @abstractmethod
    def run(self, n_tokens: int) -> None:
        """One forward pass over the first n_tokens that are staged."""

    def _queries(self, rows: int) -> torch.Tensor:
        config = self.cache.config
        return torch.zeros(rows, config.n_heads, config.head_dim, dtype=self.cache.pool.dtype, device=self.cache.device)


class _FlexPass(_Pass):
    """Attention by flex_attention: a query block for one sequence only, so queries move to rows of their own."""

    def __init__(self, decoder: Decoder, cache: KVCache, flex: FlexAttention, length: int) -> None:
        super().__init__(decoder, cache, length)
        self.flex = flex
        # Of each token its query row; of each query row slot and position.
        self._row_of = torch.zeros(length, dtype=torch.int64, device=cache.device)
        self._rows = torch.zeros(2, length, dtype=torch.int64, device=cache.device)
        self._q = self._queries(length + 1)  # a row more, where tokens that only pad a graph put their queries
        self._mask = flex.prefill_mask(self._rows[0], self._rows[1])

    def stage_attention(self, spans: Sequence[tuple[int, int, int]]) -> None:
        row_of = np.full(self.length, self.length, dtype=np.int64)
        rows = np.full((2, self.length), -1, dtype=np.int64)
        rows[0] = 0
        n = at = 0
        for slot, start, stop in spans:
            count = stop - start
            row_of[n : n + count] = np.arange(at, at + count)
            rows[0, at : at + count] = slot
            rows[1, at : at + count] = np.arange(start, stop)
            n += count
            at += whole_blocks(count, self.flex.q_block)
        self._row_of.copy_(upload(row_of, self.cache.device), non_blocking=True)
        self._rows.copy_(upload(rows, self.cache.device), non_blocking=True)
        self._mask.fill(spans)

    def run(self, n_tokens: int) -> None:
        rows = self._row_of[:n_tokens]
        tokens = Tokens(*self._tokens[:, :n_tokens], self.cache, self._q, rows)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            self.decoder.ops.rope_store(layer, qkv, tokens)
            out = self.flex.prefill(layer, self._q[: self.length], self._mask)
            return out[rows.clamp(max=self.length - 1)]

        self.decoder.forward(tokens, attend, cache_only=True)


class _PagedPass(_Pass):
    """Attention by the paged Triton kernel: queries lie token by token."""

    def __init__(self, decoder: Decoder, cache: KVCache, q_block: int, length: int) -> None:
        super().__init__(decoder, cache, length)
        self.q_block = q_block
        self._runs = torch.zeros(4, length // q_block, dtype=torch.int32, device=cache.device)
        self._n_runs = self._runs.shape[1]
        self._q = self._queries(length)
        # Nobody writes the rows of padding: zeros, for what memory holds may be no number.
        self._out = self._queries(length).flatten(1)

    def stage_attention(self, spans: Sequence[tuple[int, int, int]]) -> None:
        runs = np.zeros(self._runs.shape, dtype=np.int32)
        n = at = 0
        for slot, start, stop in spans:
            begins = np.arange(start, stop, self.q_block)
            here = slice(at, at + len(begins))
            runs[0, here] = n + begins - start
            runs[1, here] = np.minimum(self.q_block, stop - begins)
            runs[2, here] = slot
            runs[3, here] = begins
            n += stop - start
            at += len(begins)
        self._runs.copy_(upload(runs, self.cache.device), non_blocking=True)
        self._n_runs = at or runs.shape[1]  # padding is what a graph is recorded with, to be replayed with more

    def run(self, n_tokens: int) -> None:
        from flexroll.engine.kernels.paged_prefill import prefill_attention

        tokens = Tokens(*self._tokens[:, :n_tokens], self.cache, self._q)
        runs, out = self._runs[:, : self._n_runs], self._out[:n_tokens]

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            self.decoder.ops.rope_store(layer, qkv, tokens)
            prefill_attention(self.decoder.ops, self.cache, layer, self._q, runs, out)
            return out

        self.decoder.forward(tokens, attend, cache_only=True)
