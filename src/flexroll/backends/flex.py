"""The flex engine as a backend: merged (double copy), unmerged, or without an adapter."""

from __future__ import annotations

from typing import Any

import torch

from flexroll.backends import flex_support
from flexroll.backends.base import Backend, EngineSpec, Generation, Scores
from flexroll.engine.attention import flash_missing, is_flash
from flexroll.engine.engine import Engine
from flexroll.engine.sampling import SamplingParams
from flexroll.schema.config import Sampling
from flexroll.tune.replay import replay_options

# Values of an option that the engine takes by the same name.
AS_NAMED = (
    "attention",
    "buckets",
    "compile_forward",
    "compile_mode",
    "contiguous",
    "cuda_graphs",
    "four_bit",
    "fused",
    "kv_tokens",
    "max_prefill_tokens",
    "page_size",
    "prefill_kernel_options",
    "prefill_mask",
    "unchecked",
)


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of Engine.from_pretrained. What the option leaves open is left to the engine."""
    option = spec.option
    given = {name: option.get(name) for name in AS_NAMED} | {
        "compiled": option.get("compile"),
        "decode_kernel_options": _decode_kernel_options(spec),
        "dummy": spec.dummy or None,
        "shard": spec.shard,
    }
    return {
        "adapter": spec.adapter if spec.adapter_mode != "none" else None,
        "adapter_mode": spec.adapter_mode,
        "dtype": getattr(torch, spec.dtype),
        "device": spec.device,
        "max_batch": spec.first_batch,  # each cell brings its own, see prepare
        "max_model_len": spec.max_model_len,
        **{name: value for name, value in given.items() if value is not None},
    }


def _decode_kernel_options(spec: EngineSpec) -> dict[str, Any] | None:
    """Those of the option, over the autotuned ones where it replays them."""
    given = spec.option.get("decode_kernel_options")
    return replay_options(spec.replay) | (given or {}) if spec.option.get("replay") else given


class FlexBackend(Backend):
    """One engine a process; its slots and KV pool are resized to each cell's running sequences."""

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        """What would change nothing here, or could not run: a measurement of it would be one of something else."""
        if (problem := flex_support.problem(spec)) is not None:
            return problem
        option = spec.option
        if is_flash(option.get("prefill_kernel_options") or {}) and not option.get("unchecked"):
            return flash_missing()
        return None

    def __init__(self, spec: EngineSpec) -> None:
        self.kv_tokens: int | None = spec.option.get("kv_tokens")
        self.running = spec.first_batch
        self.engine = Engine.from_pretrained(spec.model, **engine_arguments(spec))

    def prepare(self, running: int) -> None:
        if running != self.running:  # a resize captures every graph anew
            self.engine.resize(running, self.kv_tokens)
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
        params = [
            SamplingParams(
                n=samples,
                max_new_tokens=new,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=seed,
                ignore_eos=ignore_eos,
            )
            for new in new_tokens
        ]
        completions = self.engine.generate(prompts, params)
        stats = self.engine.stats
        return Generation(
            [c.token_ids for c in completions],
            stats.prefill_s,
            stats.decode_s,
            stats.decode_tokens,
            stats.steps,
            stats.first_token_s,
        )

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[Scores]:
        """By decode steps; see Engine.score."""
        return [
            Scores.of(full, tokens)
            for full, tokens in zip(self.engine.score(prompts, continuations), continuations, strict=True)
        ]

    def memory(self) -> dict[str, int | None]:
        """Weights in use: the inference copy and, where an adapter is merged, the pristine matrices beside it."""
        return {"weights": self.engine.weights_bytes, "kv_reserved": self.engine.cache.n_bytes}

    def start_parts(self) -> dict[str, float]:
        return dict(self.engine.start_s)
