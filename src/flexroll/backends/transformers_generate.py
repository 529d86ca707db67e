"""transformers `model.generate` on one left-padded batch: the plainest engine, and the reference of the others."""

from __future__ import annotations

from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.schema.config import Sampling


class TransformersGenerate(Backend):
    """Adapter modes: none, merged (the merged checkpoint), unmerged (PEFT's LoRA layers, computed at every step)."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.eos = common.eos_ids(spec.model)
        self.model = common.load_model(spec, "sdpa")
        self._cached_tokens = 0

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, ignore_eos: bool, seed: int
    ) -> Generation:
        """Generate for all prompts in one batch; see Backend.generate.

        With ignore_eos no stop token is given at all, so that an EOS is a token like any other and nothing suppresses
        it: vLLM's ignore_eos means the same.
        """
        import torch
        from transformers import GenerationConfig

        common.check_request(self.spec, prompts, new_tokens)
        if not prompts:
            return Generation([])
        ids, mask = common.left_padded(prompts, self.spec.device)
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            eos_token_id=None if ignore_eos or not self.eos else self.eos,
            pad_token_id=0,
            **common.sampling_arguments(sampling),
        )
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        self._cached_tokens = max(self._cached_tokens, out.shape[0] * out.shape[1])
        return Generation(common.finish(out[:, ids.shape[1] :].tolist(), self.eos, new_tokens, ignore_eos))

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: the padded cache of the largest call so far; it grows with the sequence, nothing is reserved."""
        kv = self._cached_tokens * common.kv_token_bytes(self.spec.model, self.spec.dtype)
        return {"weights": common.parameter_bytes(self.model), "kv_reserved": kv or None}

    def close(self) -> None:
        self.model = None
