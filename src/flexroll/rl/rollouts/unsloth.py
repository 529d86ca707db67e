"""Unsloth's own way: FastLanguageModel, and TRL's trainer as Unsloth rewrites it when it is imported. CUDA only.

Written against the documented interface of unsloth 2026.10 (https://docs.unsloth.ai, reinforcement learning guide):
`import unsloth` before transformers and trl, `FastLanguageModel.from_pretrained`, `get_peft_model`, then GRPOTrainer
with the model it gives. Option fast_inference puts vLLM inside, which is Unsloth's own, with its own LoRA loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.rl.rollouts.base import Rollout, engine_spec, held_bytes

if TYPE_CHECKING:
    from flexroll.rl.spec import GrpoSpec


class UnslothRollout(Rollout):
    """Nothing is refreshed: what generates is the trained model, or vLLM that Unsloth gives the adapter."""

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        from flexroll.backends.unsloth import Unsloth

        if spec.option.get("four_bit"):
            return "four_bit: training an adapter on NF4 weights is not among what is compared here; leave it out"
        return Unsloth.unavailable(engine_spec(spec))

    @classmethod
    def make_ready(cls, spec: GrpoSpec) -> None:
        import unsloth  # noqa: F401 (it rewrites what is imported after it)

    def load_model(self) -> tuple[Any, Any]:
        """(model with Unsloth's LoRA layers, None: the trainer adds no adapter)."""
        import torch
        from unsloth import FastLanguageModel

        spec = self.spec
        model, _ = FastLanguageModel.from_pretrained(
            model_name=str(spec.model),
            max_seq_length=spec.max_model_len,
            dtype=getattr(torch, spec.dtype),
            load_in_4bit=False,
            fast_inference=self.fast,
            max_lora_rank=spec.adapter.rank,
            random_state=spec.seed,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=spec.adapter.rank,
            lora_alpha=spec.adapter.alpha,
            target_modules=list(spec.adapter.targets),
            lora_dropout=0.0,
            bias="none",
            use_gradient_checkpointing="unsloth" if spec.grpo.gradient_checkpointing else False,
            random_state=spec.seed,
        )
        return model, None

    @property
    def fast(self) -> bool:
        return bool(self.spec.option.get("fast_inference", False))

    def arguments(self) -> dict[str, Any]:
        return {"use_vllm": True} if self.fast else {}

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: None, for Unsloth does not tell it."""
        return {"weights": held_bytes(self.trainer.model.parameters()), "kv_reserved": None}
