"""One decode step of one bucket, from the page lookup to the sampled tokens: on a GPU a single CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from flexroll.engine.attention import FlexAttention
from flexroll.engine.decoder import Decoder, Tokens
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import DecodeMask
from flexroll.engine.sampling import sample
from flexroll.engine.slots import Rows, Slots, advance, prepare

if TYPE_CHECKING:
    from flexroll.engine.kernels.paged_attention import PagedAttention

Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class DecodeStep:
    """A decode step of `rows` sequences. Write `rows.staged`, `launch()`, read `rows.out`.

    flex: attention by flex_attention; None: by the paged Triton kernel.
    forward_mode: torch.compile's mode for the forward pass through all layers to the logits, which then is one graph
    with flex_attention in it; None: not compiled. Only for the torch operations, with compiled flex_attention.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        slots: Slots,
        n_rows: int,
        flex: FlexAttention | None,
        forward_mode: str | None = None,
    ) -> None:
        self.decoder, self.cache, self.slots, self.flex = decoder, cache, slots, flex
        self.rows = Rows(n_rows, cache.device)
        self.mask: DecodeMask | None = None
        self.paged: PagedAttention | None = None
        if flex is not None:
            self.mask = DecodeMask(cache, self.rows.slots, self.rows.positions, flex.compiled)
        else:
            from flexroll.engine.kernels.paged_attention import PagedAttention

            self.paged = PagedAttention(cache, n_rows)
        config = cache.config
        q = torch.zeros(n_rows, config.n_heads, config.head_dim, dtype=cache.pool.dtype, device=cache.device)
        self._tokens = Tokens(self.rows.ids, self.rows.slots, self.rows.positions, cache, q)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._choose: Choose | None = None
        self._logits = self._forward
        if forward_mode is not None:  # graph breaks are left to happen: what they cost belongs to the option
            self._logits = torch.compile(self._forward, dynamic=False, mode=forward_mode)

    def launch(self) -> None:
        """Run the step on what `rows.staged` says; on a GPU this returns before it has run."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def warm_up(self) -> None:
        """Compile every kernel. All rows are the padding slot's, so no page of a sequence is touched."""
        self.rows.staged.zero_()
        self._run()

    def capture(self, pool: tuple[int, int] | None) -> tuple[int, int]:
        """Record the step as a CUDA graph, in the memory pool of the graphs before it; returns the pool."""
        graph = torch.cuda.CUDAGraph()
        self.rows.staged.zero_()
        with torch.cuda.graph(graph, pool=pool):
            self._run()
        self._graph = graph
        return graph.pool()

    @contextlib.contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Within, `choose` picks the tokens from logits [rows, vocab], as `sampling.sample` returns them, and the step
        runs without its graph, in which sampling is recorded."""
        kept = self._choose, self._graph
        self._choose, self._graph = choose, None
        try:
            yield
        finally:
            self._choose, self._graph = kept

    def _attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if self.flex is None:
            return self.paged(self.decoder.ops, layer, qkv, self.rows.slots, self.rows.positions)
        self.decoder.ops.rope_store(layer, qkv, self._tokens)
        return self.flex.decode(layer, self._tokens.q, self.mask)

    def _forward(self) -> torch.Tensor:
        """Logits [rows, vocab] of the rows' tokens; their K and V to the cache."""
        return self.decoder.logits(self.decoder.forward(self._tokens, self._attend))

    def _run(self) -> None:
        fused = self.decoder.fused
        prepare(self.rows, self.slots, self.cache, self.mask, fused)
        logits = self._logits()
        if self._choose is not None:
            tokens, logprobs = self._choose(logits)
        else:
            # A token's noise belongs to the place it will have: one past the position that was just computed.
            tokens, logprobs = sample(logits, self.rows.columns, self.rows.positions + 1)
        advance(self.rows, self.slots, tokens, logprobs, fused)
