"""TRL's own rollouts with transformers: `model.generate`, and continuous batching with paged attention.

Both run the model that is trained, LoRA layers and all: nothing is refreshed, and no log probabilities come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flexroll.backends import cb_support
from flexroll.rl.rollouts.base import Rollout, held_bytes

if TYPE_CHECKING:
    from flexroll.rl.spec import GrpoSpec

PREFILL_TOKENS = 2048  # of one step at most; a paged sdpa mask of [tokens, pool] is held in memory for it


class TrlGenerate(Rollout):
    """TRL's default: left-padded batches, all prompts at once, until the longest has ended."""

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        return _four_bit(spec)

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: None, for the cache grows with each rollout and goes with it."""
        return {"weights": held_bytes(self.trainer.model.parameters()), "kv_reserved": None}


class ContinuousBatching(Rollout):
    """transformers' continuous batching as TRL calls it, a manager and a pool a rollout.

    The attention is the library's choice: paged flash attention where it is installed, else paged sdpa. The pool holds
    all sequences of a rollout at full length, so that none waits for memory.
    """

    attention: str | None = None  # the library's choice

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        from flexroll.backends.transformers_cb import version

        found = version()
        if found < (5, 8):
            return (
                f"TRL's continuous batching needs transformers 5.8 or later; this environment has {found[0]}.{found[1]}"
            )
        if spec.option.get("compile"):
            return "compile: of the trained model's forward pass, set compile_mode of grpo.backends instead"
        if spec.option.get("driver", "manager") != "manager":
            return f"driver {spec.option['driver']}: TRL drives continuous batching by the library's manager alone"
        if spec.option.get("cuda_graph") and spec.device == "cpu":
            return "cuda_graph needs a GPU"
        return _four_bit(spec)

    def arguments(self) -> dict[str, Any]:
        spec = self.spec
        completions = spec.grpo.prompts_per_step * spec.grpo.num_generations
        block_size = int(spec.option.get("block_size", 32))
        # A token more than the longest sequence.
        blocks = completions * -(-(spec.max_model_len + 1) // block_size)
        settings = {
            "block_size": block_size,
            "num_blocks": blocks + 2,
            "max_batch_tokens": max(completions, min(PREFILL_TOKENS, blocks * block_size)),
            "max_requests_per_batch": completions,
            "safety_margin": 0.0,
        }
        if spec.device == "cpu" or spec.option.get("cuda_graph"):
            settings["use_cuda_graph"] = bool(spec.option.get("cuda_graph"))
        return {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": settings}

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if trainer.args.bf16:
            self.notes.append(
                "TRL rounds the whole model, fp32 adapter included, to bf16 before each continuous batching; left out, "
                "so that the trained adapter stays what it is on the other backends"
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        from transformers.utils import logging

        base, args = self.trainer.model.get_base_model(), self.trainer.args
        before, bf16, verbosity = base.config._attn_implementation, args.bf16, logging.get_verbosity()
        args.bf16 = False  # what it means to TRL in a rollout is in the note
        if verbosity != logging.DEBUG:
            logging.set_verbosity_error()  # it warns of min_p and of its own choices, every time
        try:
            if self.attention is not None:
                base.set_attn_implementation(self.attention)
                cb_support.check_attention(base, self.attention)
            yield
        finally:
            base.set_attn_implementation(before)
            args.bf16 = bf16
            logging.set_verbosity(verbosity)

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: of the pool that each rollout makes and gives back."""
        from flexroll.backends.transformers_common import kv_token_bytes

        settings = self.arguments()["transformers_continuous_batching_config"]
        tokens = (settings["num_blocks"] + 2) * settings["block_size"]  # the library adds two to write waste into
        return {
            "weights": held_bytes(self.trainer.model.parameters()),
            "kv_reserved": tokens * kv_token_bytes(self.spec.model, self.spec.dtype),
        }


class ContinuousBatchingSdpa(ContinuousBatching):
    """The same on paged sdpa, whatever flash attention there is."""

    attention = "paged|sdpa"


def _four_bit(spec: GrpoSpec) -> str | None:
    if spec.option.get("four_bit"):
        return "four_bit: training an adapter on NF4 weights is not among what is compared here; leave it out"
    return None
