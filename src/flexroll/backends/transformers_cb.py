"""transformers' continuous batching with paged attention, on transformers 5 and on 4.57, whose interface differs.

The manager is driven here rather than through `generate_batch`, for three reasons: that function only logs requests
that fail (and on 4.57 waits for them for ever); requests queued before the thread starts make the first step, and so a
sampled run, repeatable; and the KV pool can be asked for its size. A manager lives for one call, as it does there.
"""

from __future__ import annotations

from typing import Any

from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.schema import architecture
from flexroll.schema.config import Sampling

KEYS_4 = {"paged|sdpa": "sdpa_paged", "paged|eager": "eager_paged"}
PREFILL_TOKENS = 2048  # of one step; a paged mask of [tokens, pool] is held in memory for it
PREFILL_TOKENS_4 = 512


def version() -> tuple[int, int]:
    """(major, minor) of the transformers installed; (0, 0) without it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        major, minor = installed("transformers").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


class TransformersCb(Backend):
    """Options: attention (`paged|sdpa` or `paged|eager`), block_size (tokens). Adapter modes: none, merged, unmerged.

    The pool holds the sequences that may run at once, at full max_model_len, so that none of them waits for memory; the
    others wait for a place. transformers 4.57 knows no such limit, and there all run at once. Blocks are never shared
    between prompts, so that a prompt is computed once a sample. min_p: the library warns that it might not be
    supported, but applies it, a row at a time (a test shows it).
    """

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        found = version()
        if found == (0, 0):
            return "transformers is not installed here; the stacks' locks have it"
        name = f"{found[0]}.{found[1]}"
        if found < (4, 57):
            return f"transformers {name} has no continuous batching this project knows; 4.57 and 5 have"
        if found[0] == 4 and spec.device == "cpu":
            return f"continuous batching of transformers {name} sizes itself by a GPU's memory and fails on a CPU"
        return None

    def __init__(self, spec: EngineSpec) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.spec = spec
        self.old = version()[0] == 4
        self.eos = architecture.eos_ids(spec.model)
        attention = spec.option.get("attention", "paged|sdpa")
        self.block_size = int(spec.option.get("block_size", 32))
        self.model = common.load_model(spec, KEYS_4[attention] if self.old else attention)
        self.running = spec.max_batch
        self._kv_bytes: int | None = None

    def prepare(self, running: int) -> None:
        self.running = running

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        new_tokens: list[int],
        ignore_eos: bool,
        seed: int,
        samples: int = 1,
    ) -> Generation:
        """Generate for all prompts at once; see Backend.generate.

        On transformers 4.57 a request takes one step more than it has tokens: its last token is computed and dropped.

        Raises:
            RuntimeError: a request failed or was lost; the message counts them and quotes the first error.
        """
        import torch

        common.check_request(self.spec, prompts, new_tokens)
        if not prompts:
            return Generation([])
        torch.manual_seed(seed)
        prompts, new_tokens = common.repeated(prompts, samples), common.repeated(new_tokens, samples)
        manager = self._manager(sampling, max(new_tokens), ignore_eos, seed, len(prompts))
        done: dict[str, Any] = {}
        ids = [
            manager.add_request(list(prompt), max_new_tokens=new)
            for prompt, new in zip(prompts, new_tokens, strict=True)
        ]
        try:
            manager.start()
            while len(done) < len(ids):
                output = manager.get_result(timeout=1)
                if output is not None and output.status.name in ("FINISHED", "FAILED"):
                    done[output.request_id] = output
                elif output is None and not manager.is_running():
                    break
            processor = manager.batch_processor
            if processor is not None:
                caches = processor.cache.key_cache + processor.cache.value_cache
                self._kv_bytes = sum(cache.numel() * cache.element_size() for cache in caches)
        finally:
            self._stop(manager, [name for name in ids if name not in done])
        errors = [text for text in (_error(done.get(name)) for name in ids) if text]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(ids)} requests failed: {errors[0]}")
        rows = [list(done[name].generated_tokens) for name in ids]
        return Generation(common.finish(rows, self.eos, new_tokens, ignore_eos))

    def _manager(self, sampling: Sampling, new_tokens: int, ignore_eos: bool, seed: int, requests: int) -> Any:
        """A manager that is not running yet, with a KV pool for the sequences that may run at once."""
        from transformers import GenerationConfig

        batch = max(self.running, requests) if self.old else self.running
        # One token more than the longest sequence: 4.57 writes the token it drops.
        blocks = batch * -(-(self.spec.max_model_len + 1) // self.block_size)
        stop = -1 if ignore_eos or not self.eos else self.eos  # -1 is the library's own word for none
        arguments = {"max_new_tokens": new_tokens, "pad_token_id": 0, **common.sampling_arguments(sampling)}
        if self.old:
            # It compares with one id only; several are cut afterwards. It admits no prompt once 80 % of the pool are
            # taken, and gives up when its last block is: hence the room to spare.
            config = GenerationConfig(
                eos_token_id=stop[0] if isinstance(stop, list) and len(stop) == 1 else -1,
                block_size=self.block_size,
                num_blocks=blocks + blocks // 4 + 2,
                max_batch_tokens=max(batch + 1, PREFILL_TOKENS_4),
                **arguments,
            )
            return self.model.init_continuous_batching(generation_config=config)
        from transformers import ContinuousBatchingConfig

        return self.model.init_continuous_batching(
            generation_config=GenerationConfig(eos_token_id=stop, **arguments),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=self.block_size,
                num_blocks=blocks + 2,
                max_batch_tokens=max(batch, PREFILL_TOKENS),
                max_requests_per_batch=batch,
                allow_block_sharing=False,
                safety_margin=0.0,
                seed=seed,
            ),
        )

    def _stop(self, manager: Any, unfinished: list[str]) -> None:
        """End the manager's thread, at once even if requests are left (a time limit, an interrupt)."""
        if self.old:
            for name in unfinished:
                manager.cancel_request(name)
            manager.stop(block=True, timeout=30)
        else:
            manager.stop(block=True, timeout=30, hard_stop=bool(unfinished))
            manager.destroy()

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: the pool of the latest call, None before the first."""
        return {"weights": common.parameter_bytes(self.model), "kv_reserved": self._kv_bytes}

    def close(self) -> None:
        self.model = None


def _error(output: Any | None) -> str | None:
    """What went wrong with one request, None where nothing did."""
    if output is None:
        return "the engine lost it"
    if output.error is not None or output.status.name == "FAILED":
        return output.error or "no reason given"
    return None
