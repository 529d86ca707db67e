"""The rollout engine: prompts in, completions out, in the order they came."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from flexroll.engine.attention import (
    FlexAttention,
    check_flash,
    check_kernel_options,
    flex_attention_function,
    is_flash,
    with_block_sizes,
)
from flexroll.engine.decode import DecodeStep
from flexroll.engine.decoder import Decoder
from flexroll.engine.defaults import kernel_options
from flexroll.engine.dummy import random_weights
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.ops import LowRank
from flexroll.engine.options import Options, buckets_for
from flexroll.engine.page_table import ContiguousPageTable, PageTable
from flexroll.engine.pipeline import NotFiniteError, Pipeline
from flexroll.engine.prefill import Prefill
from flexroll.engine.requests import Completion, completion_of, groups_of
from flexroll.engine.sampling import SamplingParams
from flexroll.engine.scheduler import Scheduler
from flexroll.engine.scoring import score
from flexroll.engine.slots import Slots
from flexroll.engine.stats import Clock, Stats
from flexroll.engine.weights import DecoderWeights, load_shard, load_weights
from flexroll.errors import FlexrollError

COMPANY = 16  # see Engine._admit


class Merged(Protocol):
    """What the engine asks of a double copy: its bytes, pristine matrices included, and a fresh merge in place."""

    @property
    def n_bytes(self) -> int: ...

    def refresh(self) -> None: ...


class Engine:
    """Batched generation for one causal language model on flex_attention with a paged KV cache.

    Args:
        weights: parameters; its device and dtype are the engine's.
        low_rank: unmerged LoRA updates by fused name (see lora.unmerged).
        merged: the double copy behind `weights`, if there is one; `refresh()` calls its (see lora.merge).
        max_batch: sequences that run at once; more prompts wait for a slot.
        max_model_len: prompt and generated tokens of one sequence, at most.
        kv_tokens: capacity of the KV pool; default max_batch * max_model_len, at which nothing is ever preempted.
        page_size: tokens a page, a power of two.
        max_prefill_tokens: prompt tokens of one prefill pass, between two decode steps; longer prompts go in chunks.
            Default 8192 on a GPU, 2048 on a CPU, 256 for flex_attention uncompiled, which holds 8 bytes for each head,
            query and position of the pool (96 GiB for 8192 queries, 32 heads and 49,216 positions).
        buckets: batch sizes that decode steps are padded to. Default: powers of two up to max_batch; with attention
            triton, where a bucket costs no compilation, from 8 on four to an octave; on the CPU max_batch alone, where
            a padded row is cheaper than another compilation.
        attention: flex (flex_attention) or triton (the paged kernels). Default triton on a GPU whose model they can
            serve, else flex; flex too with decode_kernel_options or a compile_mode, which it alone heeds, or
            uncompiled. With prefill_kernel_options or prefill_mask "bounds" prefill is flex_attention's whatever decode
            steps run on.
        cuda_graphs: on a GPU, replay each bucket's whole decode step as one CUDA graph.
        compiled: torch.compile flex_attention; where that is impossible a warning says why and it runs eagerly.
        compile_mode: torch.compile's mode for flex_attention: default, max-autotune-no-cudagraphs, or max-autotune,
            whose own CUDA graphs do not fit into those of decode steps.
        compile_forward: torch.compile the whole forward pass of a decode step, flex_attention within it, instead of
            running the fused kernels.
        fused: Triton kernels for all but attention; default on a GPU.
        decode_kernel_options, prefill_kernel_options: flex_attention's kernel_options for the two kinds of step, over
            the defaults for the GPU (see engine.defaults). BACKEND FLASH, for prefill, comes without those defaults and
            asks for page_size 128 and the package flash-attn-4.
        unchecked: hand kernel options to torch as they are, to see what it does: an unknown key fails far from the
            cause, and BLOCKS_ARE_CONTIGUOUS without contiguous pages reads other sequences' keys.
        contiguous: give each slot a run of pages of its own, for BLOCKS_ARE_CONTIGUOUS. The pool then has room for
            max_batch * max_model_len tokens, and samples of one prompt share nothing.
        prefill_mask: how prefill tells which keys a query sees: logical, by each key's page; or bounds, by the first
            and the last physical position of each query, which needs contiguous.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        low_rank: dict[str, list[LowRank]] | None = None,
        merged: Merged | None = None,
        **options: Any,
    ) -> None:
        self.options = o = Options(**options)
        self.config, self.device, self.max_model_len = weights.config, weights.device, o.max_model_len
        self._on_gpu = self.device.type == "cuda"
        if o.attention == "triton" and not self._on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise FlexrollError("attention 'triton' needs a GPU; leave it out, or choose flex")
        self._kernel_options = {
            "decode": self._options_of("decode", o.decode_kernel_options or {}, weights.dtype),
            "prefill": self._options_of("prefill", o.prefill_kernel_options or {}, weights.dtype),
        }
        self.decoder = Decoder(weights, o.max_model_len, low_rank, o.fused)
        self.stats = Stats()
        self._held_back = 0
        self.start_s: dict[str, float] = {}
        self._merged = merged
        self._flex, self.compiled = flex_attention_function(self.device, o.compiled, o.compile_mode)
        self.resize(o.max_batch, o.kv_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        adapter_mode: str = "merged",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        dummy: bool = False,
        four_bit: str | None = None,
        shard: str | Path | None = None,
        **options: Any,
    ) -> Engine:
        """Load a checkpoint folder, and a PEFT LoRA folder merged into a second copy or kept apart ("unmerged").

        dummy: draw random weights for the folder's config.json instead; for speed alone, the text is noise.
        four_bit: the layers' products in NF4 (bitsandbytes), computed in `dtype`: "on_the_fly", quantised as they are
        loaded, or "shard", read from the folder `shard` in the model's place. An adapter must then be unmerged.

        Raises:
            FlexrollError: the checkpoint or the adapter is missing, corrupt, unsupported, or does not fit the other.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        begun = time.perf_counter()
        if four_bit == "shard" and not dummy:
            base = load_shard(shard, dtype, device)
        elif four_bit in (None, "on_the_fly"):
            load = random_weights if dummy else load_weights
            base = load(Path(model), dtype, device, four_bit=four_bit is not None)
        else:
            choice = "on_the_fly, for there is no shard of drawn weights" if dummy else "on_the_fly or shard"
            raise FlexrollError(f"four_bit is '{four_bit}'; choose {choice}")
        attached: dict[str, Any] = {}
        weights = base
        if adapter is not None:
            from flexroll.lora.attach import attach  # late: lora builds on this package

            weights, attached["low_rank"], attached["merged"] = attach(base, Path(adapter), adapter_mode)
        load_s = time.perf_counter() - begun
        engine = cls(weights, **attached, **options)
        engine.start_s["load"] = load_s
        return engine

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
        return self.cache.pages.n_pages * self.options.page_size

    def resize(self, max_batch: int, kv_tokens: int | None = None) -> None:
        """Replace slots, KV pool and captured graphs; the weights stay. Nothing may be running.

        On a GPU this compiles and captures everything that generating will use; `start_s` has the seconds.
        """
        o = self.options
        max_blocks = -(-self.max_model_len // o.page_size)
        n_pages = max_batch * max_blocks if kv_tokens is None else kv_tokens // o.page_size
        if n_pages < 1:
            raise FlexrollError(f"kv_tokens {kv_tokens} is less than one page of {o.page_size} tokens")
        self.max_batch = max_batch
        if hasattr(self, "cache"):
            self._let_go()
        if o.contiguous:
            pages = ContiguousPageTable(max_batch, o.page_size, max_blocks)
        else:
            pages = PageTable(max_batch, n_pages, o.page_size, max_blocks)
        self.cache = KVCache(self.config, pages, self.weights.dtype, self.device)
        self.slots = Slots(max_batch, self.device)
        self.attention = self._choose_attention()
        paged = self.attention == "triton"
        flex = FlexAttention(
            self.cache,
            self._flex,
            self.compiled,
            self._kernel_options["decode"],
            self._kernel_options["prefill"],
            bounds=o.prefill_mask == "bounds",
        )
        self.buckets = buckets_for(max_batch, o.buckets, self._on_gpu, paged)
        # What flex_attention alone heeds keeps prefill on it.
        flex_prefill = not paged or bool(o.prefill_kernel_options) or o.prefill_mask != "logical"
        default = 256 if flex_prefill and not self.compiled else 8192 if self._on_gpu else 2048
        self.max_prefill_tokens = max(1, o.max_prefill_tokens or default)
        self._prefill = Prefill(self.decoder, self.cache, flex if flex_prefill else None, self.max_prefill_tokens)
        forward_mode = o.compile_mode if o.compile_forward and self.compiled else None
        self._steps = {
            bucket: DecodeStep(self.decoder, self.cache, self.slots, bucket, None if paged else flex, forward_mode)
            for bucket in self.buckets
        }
        self._pipeline = Pipeline(self._steps, pages, max_batch, self.device)
        self.start_s |= {"compile": 0.0, "capture": 0.0}
        if self._on_gpu:
            self._get_ready()

    @property
    def released(self) -> bool:
        """Whether there is no KV pool at present, see `release`."""
        return self.cache is None

    def release(self) -> None:
        """Give back the KV pool and the captured graphs, for someone else to use the memory; weights stay.

        Nothing may be running. `resize` makes them anew before the next `generate`; `refresh` works meanwhile.
        """
        self._let_go()

    def _let_go(self) -> None:
        """Drop the old pool and whatever refers to it, graphs included, before the new one is taken."""
        self._steps: dict[int, DecodeStep] = {}
        self._prefill: Any = None
        self._pipeline: Any = None
        self.cache: Any = None
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()  # else the allocator keeps it in pieces of the old sizes

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
        """Continue every prompt; `params.n` completions a prompt, prompt by prompt in input order.

        `progress` sees each completion as it ends. Every prompt is checked before the first is run. Prompts that may
        grow longest start first; those that may grow alike start in input order.

        Raises:
            FlexrollError: the pool is released, an empty prompt, an id outside the vocabulary, a prompt too long for
                max_model_len or for the pool, as many params as prompts expected and another number given, logits that
                are not finite.
        """
        if self.released:
            raise FlexrollError("generate: this engine's KV pool was released; call resize first")
        groups = groups_of(prompts, params, self.config, self.cache.pages, self.max_model_len)
        sequences = [s for group in groups for s in group.sequences]
        scheduler = Scheduler(self.cache.pages, self.max_prefill_tokens)
        # Largest budgets first (LPT scheduling, Graham 1969): a long sequence that starts last runs on alone.
        scheduler.add(
            sorted((g for g in groups if g.sequences[0].finish_reason is None), key=lambda g: -g.sequences[0].budget)
        )
        self.stats = Stats()
        self._pipeline.begin()
        started = time.perf_counter()
        clock = Clock(self.device)
        try:
            while scheduler.busy:
                self._iterate(scheduler, clock)
                for sequence in scheduler.retire():
                    if progress is not None:
                        progress(completion_of(sequence))
        except NotFiniteError:
            self.cache.pool.zero_()  # a NaN left behind would reach whoever gets its page: 0 * NaN is NaN
            raise
        finally:
            scheduler.abort()
            self._pipeline.abandon()
        self.stats.prefill_s = clock.seconds()
        self.stats.decode_s = time.perf_counter() - started - self.stats.prefill_s
        self.stats.first_token_s = (self._pipeline.first_read or started) - started
        self.stats.preemptions = scheduler.preemptions
        return [completion_of(s) for s in sequences]

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log probabilities fp32 [tokens, vocab] at every place of given continuations, a tensor a prompt, on the host.

        They are those of decode steps as `generate` runs them, the given token in place of the sampled one; only the
        CUDA graphs of decode steps stand aside.

        Raises:
            FlexrollError: an empty continuation, other numbers of prompts and continuations, and as in `generate`.
        """
        return score(self, self._steps.values(), prompts, continuations)

    def _iterate(self, scheduler: Scheduler, clock: Clock) -> None:
        """Admit, one prefill pass if there is any, one decode step launched ahead, the oldest in flight read back."""
        self._admit(scheduler)
        chunks = scheduler.prefill_chunks()
        if chunks:
            with clock:
                self._prefill.run(chunks)
            self.stats.prefill_tokens += sum(stop - start for _, start, stop in chunks)
            scheduler.prefilled(chunks)
        batch = scheduler.step()
        if batch is None:
            self._pipeline.drain()
            scheduler.make_room()
            return
        if batch:
            self._pipeline.launch(batch)
            scheduler.launched(batch)
            self.stats.steps += 1
            self.stats.decode_tokens += len(batch)
        self._pipeline.read(wait=not batch and not chunks)

    def _admit(self, scheduler: Scheduler) -> None:
        """Give free slots to waiting sequences, several at a time.

        A short prefill takes nearly as long as one a few times longer, so a freed slot waits for company: for a
        sixteenth of all slots, or for so many decode steps.
        """
        if scheduler.waiting and scheduler.running and self.cache.pages.free_slots:
            company = min(len(scheduler.waiting), -(-self.max_batch // COMPANY))
            if self.cache.pages.free_slots < company and self._held_back < COMPANY:
                self._held_back += 1
                return
        self._held_back = 0
        before = len(scheduler.running)
        copies = scheduler.admit()
        if copies:
            self.cache.copy_pages(copies)
        new = scheduler.running[before:]
        if new:
            slots = [s.slot for s in new]
            self.cache.place(slots)
            self.slots.write(
                slots,
                [s.tokens[-1] for s in new],
                [len(s.tokens) - 1 for s in new],
                [s.params for s in new],
                [s.index for s in new],
                [s.sample for s in new],
            )

    def _options_of(self, kind: str, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Kernel options of one kind of step: those given, checked, over the defaults for the GPU."""
        o = self.options
        if not o.unchecked:
            given = check_kernel_options(given, f"{kind}_kernel_options", o.contiguous)
            if is_flash(given):
                check_flash(kind, self.config, dtype, self.device, o.page_size, o.compiled)
        # Defaults are those of torch's Triton kernels.
        defaults = {} if is_flash(given) else kernel_options(kind, self.device, o.page_size)
        return with_block_sizes(defaults | given, self.device, o.page_size, kind == "prefill")

    def _choose_attention(self) -> str:
        o = self.options
        only_flex = bool(o.decode_kernel_options) or o.compile_mode != "default"  # what flex_attention alone heeds
        plain = not self._on_gpu or not o.compiled or only_flex
        if o.attention == "flex" or (o.attention is None and plain):
            return "flex"
        problem: str | None = "it belongs to the fused kernels, and fused is off"
        if self.decoder.fused:
            from flexroll.engine.kernels.paged_attention import unsupported

            problem = unsupported(self.cache)
        if problem and o.attention == "triton":
            raise FlexrollError(f"attention 'triton' cannot serve here: {problem}; choose flex")
        return "flex" if problem else "triton"

    @torch.inference_mode()
    def _get_ready(self) -> None:
        def timed(name: str, work: Callable[[], Any]) -> None:
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize(self.device)
            self.start_s[name] = time.perf_counter() - begun

        def compile_all() -> None:
            for step in self._steps.values():
                step.warm_up()
            self._prefill.warm_up()

        def capture_all() -> None:
            pool = None
            for bucket in reversed(self.buckets):  # the largest first: the others fit its memory
                pool = self._steps[bucket].capture(pool)
            self._prefill.capture(pool)

        timed("compile", compile_all)
        torch.cuda.empty_cache()  # graphs take memory of their own, none of what compiling has left
        if self.options.cuda_graphs:
            timed("capture", capture_all)
