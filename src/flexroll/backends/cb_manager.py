"""Managers and batch processors of transformers' continuous batching, on 5 and on 4.57, whose interfaces differ.

A manager holds the queues and makes requests; a processor holds the paged cache and the scheduler, and prepares and
updates the batches that are stepped.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

from flexroll.backends import cb_support
from flexroll.backends import transformers_common as common
from flexroll.backends.base import EngineSpec
from flexroll.schema.config import Sampling

PREFILL_TOKENS = 2048  # of one step; a paged mask of [tokens, pool] is held in memory for it
PREFILL_TOKENS_4 = 512
JOIN_S = 30  # for a thread to end

Request = tuple[list[int], int]  # prompt, new tokens


@dataclass(frozen=True)
class Setting:
    """What a manager is made for. running: sequences that the pool holds at full length."""

    running: int
    sampling: Sampling
    ignore_eos: bool


@dataclass
class Library:
    """One model under the library's continuous batching. eos: the checkpoint's; old: transformers is 4.57."""

    spec: EngineSpec
    model: Any
    eos: list[int]
    old: bool

    def __post_init__(self) -> None:
        option = self.spec.option
        self.attention = option.get("attention", "paged|sdpa")
        self.block_size = int(option.get("block_size", 32))
        self.cuda_graph = bool(option.get("cuda_graph", False))
        self.threaded = option.get("driver", "manager") != "sync"

    def manager(self, setting: Setting, seed: int) -> Any:
        """A manager that is not running, whose pool will hold setting.running sequences of max_model_len.

        Raises:
            FlexrollError: transformers put another attention in place of the one asked for.
        """
        # One token more than the longest sequence: 4.57 writes the token it drops.
        blocks = setting.running * -(-(self.spec.max_model_len + 1) // self.block_size)
        arguments = {
            "max_new_tokens": self.spec.max_model_len,  # every request has its own
            "pad_token_id": 0,
            **common.sampling_arguments(setting.sampling),
        }
        stop = -1 if setting.ignore_eos or not self.eos else self.eos  # -1 is the library's own word for none
        made = self._manager_4 if self.old else self._manager_5
        manager = made(setting.running, blocks, stop, arguments, seed)
        cb_support.check_attention(self.model, cb_support.attention_key(self.attention, self.old))
        return manager

    def _manager_4(self, running: int, blocks: int, stop: int | list[int], arguments: dict[str, Any], seed: int) -> Any:
        from transformers import GenerationConfig

        # It compares with one id only; several are cut afterwards. It admits no prompt once 80 % of the pool are
        # taken, and gives up when its last block is: hence the room to spare.
        config = GenerationConfig(
            eos_token_id=stop[0] if isinstance(stop, list) and len(stop) == 1 else -1,
            block_size=self.block_size,
            num_blocks=blocks + blocks // 4 + 2,
            max_batch_tokens=max(running + 1, PREFILL_TOKENS_4),
            **arguments,
        )
        return self.model.init_continuous_batching(generation_config=config)

    def _manager_5(self, running: int, blocks: int, stop: int | list[int], arguments: dict[str, Any], seed: int) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(eos_token_id=stop, **arguments),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=self.block_size,
                num_blocks=blocks + 2,
                max_batch_tokens=max(running, min(PREFILL_TOKENS, blocks * self.block_size)),
                max_requests_per_batch=running,
                max_blocks_per_request=cb_support.block_table_blocks(
                    self.attention, self.block_size, self.spec.max_model_len
                ),
                allow_block_sharing=False,
                use_cuda_graph=self.cuda_graph,  # unset it would be on for flash attention
                use_async_batching=None if self.threaded else False,
                safety_margin=0.0,
                seed=seed,
            ),
        )
        if self.cuda_graph:
            manager.warmup()
        return manager

    def processor(self, manager: Any) -> Any:
        """The batch processor with its cache and scheduler, made on this thread; the manager's thread never starts."""
        if not self.old:
            manager.warmup()  # makes the processor, and captures nothing where nothing is to be captured
            return manager.batch_processor
        from transformers.generation.continuous_batching import continuous_api as api

        model, config = self.model, manager.generation_config
        cache = api.PagedAttentionCache(model.config, config, model.device, model.dtype, tp_size=None)
        manager.batch_processor = api.ContinuousBatchProcessor(
            cache,
            model.config,
            config,
            manager.input_queue,
            manager.output_queue,
            manager.stop_event,
            model.device,
            model.dtype,
            api.FIFOScheduler(cache, manager.manual_eviction),
            manager.streaming,
            manager.manual_eviction,
            slice_inputs=manager.slice_inputs,
        )
        return manager.batch_processor

    def step(self, manager: Any, processor: Any) -> None:
        """One forward pass over the prepared batch, and its tokens."""
        if self.old:
            manager._generation_step(processor)
        else:
            processor._generation_step(self.model)

    def outputs(self, manager: Any) -> list[Any]:
        """What lies in the output queue, which is empty afterwards."""
        waiting, taken = manager.output_queue if self.old else manager.output_router.output_queue, []
        while not waiting.empty():
            taken.append(waiting.get_nowait())
        return taken

    def stop(self, manager: Any, unfinished: list[str]) -> None:
        """End the manager's thread, at once even if requests are left (a time limit, an interrupt)."""
        if self.old:
            for name in unfinished:
                manager.cancel_request(name)
            manager.stop(block=True, timeout=JOIN_S)
        else:
            manager.stop(block=True, timeout=JOIN_S, hard_stop=bool(unfinished))
            manager.destroy()


def add(manager: Any, requests: list[Request]) -> list[str]:
    """Queue the requests, all at once: a running thread sees none or all of them, so that its first step, and with it
    a sampled run, repeats. Returns their ids."""
    waiting, manager.input_queue = manager.input_queue, queue.Queue()
    try:
        ids = [manager.add_request(list(prompt), max_new_tokens=new) for prompt, new in requests]
        staged = list(manager.input_queue.queue)
    finally:
        manager.input_queue = waiting
    with waiting.mutex:
        waiting.queue.extend(staged)
    if hasattr(manager, "_has_new_requests"):
        manager._has_new_requests.set()  # again: a thread that woke in between found nothing
    return ids


def kv_bytes(processor: Any) -> int:
    """Bytes of a processor's pool."""
    return sum(cache.nbytes for cache in processor.cache.key_cache + processor.cache.value_cache)


def ended(output: Any) -> bool:
    return output.status.name in ("FINISHED", "FAILED")


def rows(ids: list[str], done: dict[str, Any]) -> list[list[int]]:
    """The tokens of every request, in order.

    Raises:
        RuntimeError: a request failed or was lost; the message counts them and quotes the first error.
    """
    errors = [text for text in (_error(done.get(name)) for name in ids) if text]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(ids)} requests failed: {errors[0]}")
    return [list(done[name].generated_tokens) for name in ids]


def _error(output: Any | None) -> str | None:
    """What went wrong with one request, None where nothing did."""
    if output is None:
        return "the engine lost it"
    if output.error is not None or output.status.name == "FAILED":
        return output.error or "no reason given"
    return None
