"""The rollout engine: prompts in, completions out, in the order they came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from flexroll.engine.attention import (
    Q_BLOCK,
    DecodeMask,
    PrefillMask,
    check_kernel_options,
    flex_attention_function,
    with_block_sizes,
)
from flexroll.engine.decoder import Decoder, LowRank
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.page_table import PageTable
from flexroll.engine.sampling import SamplingParams, sample
from flexroll.engine.scheduler import Scheduler
from flexroll.engine.scheduler import Sequence as Running
from flexroll.engine.weights import DecoderWeights, load_weights
from flexroll.errors import FlexrollError


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    token_ids: generated ids, the stop token included. finish_reason: stop | length.
    """

    index: int
    token_ids: list[int]
    finish_reason: str


@dataclass
class Stats:
    """Of the last `generate`: seconds and tokens of its prefill and decode steps. On a GPU each step is waited for."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


class Merged(Protocol):
    """What the engine asks of a double copy: its bytes, pristine matrices included, and a fresh merge in place."""

    @property
    def n_bytes(self) -> int: ...

    def refresh(self) -> None: ...


class Engine:
    """Batched generation for one causal language model on flex_attention with a paged KV cache.

    Args:
        weights: parameters; its device and dtype are the engine's.
        max_batch: sequences that run at once; more prompts wait for a slot.
        max_model_len: prompt and generated tokens of one sequence, at most.
        kv_tokens: capacity of the KV pool; default max_batch * max_model_len, at which nothing is ever preempted.
        page_size: tokens a page, a power of two.
        max_prefill_tokens: prompt tokens of one prefill step; longer prompts are prefilled in chunks.
        buckets: batch sizes that decode steps are padded to, each compiled once; default: powers of two up to
            max_batch, on the CPU max_batch alone, where a padded row is cheaper than another compilation.
        compiled: torch.compile flex_attention; where that is impossible a warning says why and it runs eagerly.
        decode_kernel_options, prefill_kernel_options: flex_attention's kernel_options for the two kinds of step.
        low_rank: unmerged LoRA updates by fused name (see lora.unmerged).
        merged: the double copy behind `weights`, if there is one; `refresh()` calls its (see lora.merge).
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        max_batch: int = 64,
        max_model_len: int = 2048,
        kv_tokens: int | None = None,
        page_size: int = 64,
        max_prefill_tokens: int = 2048,
        buckets: Sequence[int] | None = None,
        compiled: bool = True,
        decode_kernel_options: dict[str, Any] | None = None,
        prefill_kernel_options: dict[str, Any] | None = None,
        low_rank: dict[str, list[LowRank]] | None = None,
        merged: Merged | None = None,
    ) -> None:
        if max_batch < 1 or max_model_len < 2:
            raise FlexrollError("max_batch must be at least 1 and max_model_len at least 2")
        self.config, self.device, self.max_model_len = weights.config, weights.device, max_model_len
        self.page_size, self.max_prefill_tokens = page_size, max(1, max_prefill_tokens)
        self.decoder = Decoder(weights, max_model_len, low_rank)
        self.stats = Stats()
        self._buckets = buckets
        self._merged = merged
        given = {"decode": decode_kernel_options or {}, "prefill": prefill_kernel_options or {}}
        self._options = {
            kind: with_block_sizes(check_kernel_options(options, f"{kind}_kernel_options"), self.device, page_size)
            for kind, options in given.items()
        }
        self._flex, self.compiled = flex_attention_function(self.device, compiled)
        self.resize(max_batch, kv_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        adapter_mode: str = "merged",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Engine:
        """Load a checkpoint folder, and a PEFT LoRA folder merged into a second copy or kept apart ("unmerged").

        Raises:
            FlexrollError: the checkpoint or the adapter is missing, corrupt, unsupported, or does not fit the other.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        base = load_weights(Path(model), dtype, device)
        if adapter is None:
            return cls(base, **options)
        from flexroll.lora.attach import attach  # late: lora builds on this package

        weights, low_rank, merged = attach(base, Path(adapter), adapter_mode)
        return cls(weights, low_rank=low_rank, merged=merged, **options)

    @property
    def weights(self) -> DecoderWeights:
        return self.decoder.weights

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters: those that run, pristine matrices beside a merged copy, unmerged updates."""
        updates = (u for group in self.decoder.low_rank.values() for u in group)
        extra = sum(t.numel() * t.element_size() for u in updates for t in (u.a, u.b))
        return (self._merged.n_bytes if self._merged is not None else self.weights.n_bytes) + extra

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds, the padding page not counted."""
        return self.cache.pages.n_pages * self.page_size

    def resize(self, max_batch: int, kv_tokens: int | None = None) -> None:
        """Replace slots and KV pool; the weights stay. Nothing may be running."""
        max_blocks = -(-self.max_model_len // self.page_size)
        n_pages = max_batch * max_blocks if kv_tokens is None else kv_tokens // self.page_size
        if n_pages < 1:
            raise FlexrollError(f"kv_tokens {kv_tokens} is less than one page of {self.page_size} tokens")
        self.max_batch = max_batch
        self.buckets = _buckets(max_batch, self._buckets, self.device)
        self._decode_masks: dict[int, DecodeMask] = {}
        self._prefill_masks: dict[int, PrefillMask] = {}
        self.cache: Any = None  # let the old pool go before the new one is taken
        pages = PageTable(max_batch, n_pages, self.page_size, max_blocks)
        self.cache = KVCache(self.config, pages, self.weights.dtype, self.device)

    def refresh(self) -> None:
        """Merge the adapter afresh into the inference copy, in place. An error where no merged adapter is attached."""
        if self._merged is None:
            raise FlexrollError("refresh: this engine has no merged adapter")
        self._merged.refresh()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt; one Completion a prompt, in input order. `progress` sees each as it ends.

        Every prompt is checked before the first is run.

        Raises:
            FlexrollError: an empty prompt, an id outside the vocabulary, a prompt too long for max_model_len or for
                the pool, or as many params as prompts expected and another number given.
        """
        sequences = self._sequences(prompts, params)
        scheduler = Scheduler(self.cache.pages)
        scheduler.add(s for s in sequences if s.finish_reason is None)
        self.stats = Stats()
        try:
            while scheduler.busy:
                self._step(scheduler)
                for sequence in scheduler.retire():
                    if progress is not None:
                        progress(_completion(sequence))
        finally:
            scheduler.abort()
        self.stats.preemptions = scheduler.preemptions
        return [_completion(s) for s in sequences]

    def _sequences(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Running]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise FlexrollError(
                f"{len(prompts)} prompts but {len(params)} sampling parameters; give one each, or one for all"
            )
        sequences = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            tokens = [int(t) for t in prompt]
            self._check_prompt(index, tokens, p)
            stop = set(p.stop_token_ids) | (set() if p.ignore_eos else set(self.config.eos_ids))
            sequence = Running(index, len(tokens), tokens, p, frozenset(stop), self.max_model_len)
            if p.max_new_tokens == 0:
                sequence.finish_reason = "length"
            sequences.append(sequence)
        return sequences

    def _check_prompt(self, index: int, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise FlexrollError(f"prompt {index} is empty; give it at least one token")
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise FlexrollError(f"prompt {index} holds a token id outside the vocabulary of {self.config.vocab_size}")
        if len(tokens) >= self.max_model_len:
            raise FlexrollError(
                f"prompt {index} has {len(tokens)} tokens; max_model_len {self.max_model_len} allows "
                f"{self.max_model_len - 1} and one new token"
            )
        # The last generated token is never attended to and needs no place; admission asks for one place to spare.
        longest = min(len(tokens) + max(params.max_new_tokens, 1) - 1, self.max_model_len - 1)
        if self.cache.pages.blocks_for(longest + 1) > self.cache.pages.n_pages:
            raise FlexrollError(
                f"prompt {index} may grow to {longest} tokens, which can never fit the KV pool of {self.kv_tokens}; "
                "raise kv_tokens or lower max_new_tokens"
            )

    def _step(self, scheduler: Scheduler) -> None:
        """One forward pass: of prompt chunks while there are any, else one token for every running sequence."""
        scheduler.admit()
        started = time.perf_counter()
        chunks = scheduler.prefill_chunks(self.max_prefill_tokens)
        if chunks:
            self._prefill(chunks)
            self.stats.prefill_s += time.perf_counter() - started
        else:
            self._decode(scheduler.decodable())
            self.stats.decode_s += time.perf_counter() - started
        self.stats.steps += 1

    def _prefill(self, chunks: list[tuple[Running, int, int]]) -> None:
        slots = np.concatenate([np.full(stop - start, s.slot, dtype=np.int64) for s, start, stop in chunks])
        positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for _, start, stop in chunks])
        ids = np.concatenate([np.asarray(s.tokens[start:stop], dtype=np.int64) for s, start, stop in chunks])
        length = max(Q_BLOCK, 1 << (len(ids) - 1).bit_length())
        mask = self._prefill_masks.get(length)
        if mask is None:
            mask = self._prefill_masks[length] = PrefillMask(self.cache, length)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            out = self._attention(layer, q.transpose(0, 1).unsqueeze(0), mask, self._options["prefill"])
            return out[0].transpose(0, 1).flatten(1)

        hidden = self._forward(mask, length, ids, slots, positions, attend)
        self.stats.prefill_tokens += len(ids)
        ends = np.cumsum([stop - start for _, start, stop in chunks]) - 1
        finished = []
        for (sequence, _, stop), end in zip(chunks, ends, strict=True):
            sequence.n_cached = stop
            if stop == len(sequence.tokens):
                sequence.prefilling = False
                finished.append((sequence, int(end)))
        if finished:
            self._sample([s for s, _ in finished], hidden[[end for _, end in finished]])

    def _decode(self, sequences: list[Running]) -> None:
        slots = np.array([s.slot for s in sequences], dtype=np.int64)
        positions = np.array([s.n_cached for s in sequences], dtype=np.int64)
        ids = np.array([s.tokens[-1] for s in sequences], dtype=np.int64)
        length = next(b for b in self.buckets if b >= len(ids))
        mask = self._decode_masks.get(length)
        if mask is None:
            mask = self._decode_masks[length] = DecodeMask(self.cache, length)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return self._attention(layer, q.unsqueeze(2), mask, self._options["decode"]).flatten(1)

        hidden = self._forward(mask, length, ids, slots, positions, attend)
        self.stats.decode_tokens += len(ids)
        for sequence in sequences:
            sequence.n_cached += 1
        self._sample(sequences, hidden[: len(ids)])

    def _forward(
        self, mask: Any, length: int, ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, attend: Any
    ) -> torch.Tensor:
        """Pad to the bucket's length with slot 0, position 0, and run the decoder; hidden states [length, hidden]."""
        self.cache.sync()
        mask.fill(slots, positions)
        padding = length - len(ids)
        addresses = np.pad(self.cache.addresses(slots, positions), (0, padding))
        return self.decoder.forward(
            torch.from_numpy(np.pad(ids, (0, padding))).to(self.device),
            mask.positions,
            torch.from_numpy(addresses).to(self.device),
            self.cache,
            attend,
        )

    def _attention(self, layer: int, q: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor:
        return self._flex(
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            block_mask=mask.block_mask,
            enable_gqa=self.config.n_heads != self.config.n_kv_heads,
            kernel_options=options or None,
        )

    def _sample(self, sequences: list[Running], hidden: torch.Tensor) -> None:
        logits = self.decoder.logits(hidden)
        tokens = sample(
            logits, [s.params for s in sequences], [s.index for s in sequences], [len(s.tokens) for s in sequences]
        )
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)


def _buckets(max_batch: int, given: Sequence[int] | None, device: torch.device) -> list[int]:
    """Ascending batch sizes, the last one max_batch."""
    if given is None:
        given = [] if device.type == "cpu" else [1 << n for n in range(max_batch.bit_length())]
    if any(b < 1 for b in given):
        raise FlexrollError("buckets must be at least 1")
    return sorted({b for b in given if b < max_batch} | {max_batch})


def _completion(sequence: Running) -> Completion:
    return Completion(sequence.index, sequence.generated, sequence.finish_reason or "length")
