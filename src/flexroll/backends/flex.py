"""The flex engine as a backend: merged (double copy), unmerged, or without an adapter."""

from __future__ import annotations

import torch

from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.engine.engine import Engine
from flexroll.engine.sampling import SamplingParams
from flexroll.schema.config import Sampling


class FlexBackend(Backend):
    """One engine a process; its slots and KV pool are resized to each cell's batch."""

    def __init__(self, spec: EngineSpec) -> None:
        option = spec.option
        self.engine = Engine.from_pretrained(
            spec.model,
            adapter=spec.adapter if spec.adapter_mode != "none" else None,
            adapter_mode=spec.adapter_mode,
            dtype=getattr(torch, spec.dtype),
            device=spec.device,
            max_batch=1,
            max_model_len=spec.max_model_len,
            page_size=option.get("page_size", 64),
            max_prefill_tokens=option.get("max_prefill_tokens", 2048),
            compiled=option.get("compile", True),
            decode_kernel_options=option.get("decode_kernel_options"),
            prefill_kernel_options=option.get("prefill_kernel_options"),
        )

    def prepare(self, batch: int) -> None:
        self.engine.resize(batch)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, ignore_eos: bool, seed: int
    ) -> Generation:
        params = SamplingParams(
            max_new_tokens=new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        completions = self.engine.generate(prompts, params)
        stats = self.engine.stats
        return Generation([c.token_ids for c in completions], prefill_s=stats.prefill_s, decode_s=stats.decode_s)

    def memory(self) -> dict[str, int | None]:
        """Weights in use: the inference copy and, where an adapter is merged, the pristine matrices beside it."""
        return {"weights": self.engine.weights_bytes, "kv_reserved": self.engine.cache.n_bytes}
