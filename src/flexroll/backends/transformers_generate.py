"""transformers `model.generate` on left-padded batches: the plainest engine, and the reference of the others."""

from __future__ import annotations

import time

from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation, Scores
from flexroll.schema import architecture
from flexroll.schema.config import Sampling


class TransformersGenerate(Backend):
    """Adapter modes: none, merged (the merged checkpoint), unmerged (PEFT's LoRA layers, computed at every step)."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.eos = architecture.eos_ids(spec.model)
        self.model = common.load_model(spec, "sdpa")
        self.running = spec.max_batch
        self._cached_tokens = 0
        self._first_token: float | None = None

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
        """Generate for all prompts, batch by batch of as many sequences as may run at once; see Backend.generate.

        A batch runs to the longest of its lengths, and every row is cut to its own.

        With ignore_eos no stop token is given at all, so that an EOS is a token like any other and nothing suppresses
        it: vLLM's ignore_eos means the same.
        """
        import torch

        common.check_request(self.spec, prompts, new_tokens)
        torch.manual_seed(seed)
        rows: list[list[int]] = []
        begun, self._first_token = time.perf_counter(), None
        for part, lengths in common.static_batches(prompts, new_tokens, samples, self.running):
            rows += self._batch(part, sampling, lengths, ignore_eos)
        return Generation(rows, first_token_s=self._first_token - begun if self._first_token else None)

    def _note_token(self, *_: object, **__: object) -> bool:
        """Called after each token, as a stopping criterion that never holds."""
        self._first_token = self._first_token or time.perf_counter()
        return False

    def _batch(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: list[int], ignore_eos: bool
    ) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        ids, mask = common.left_padded(prompts, self.spec.device)
        config = GenerationConfig(
            max_new_tokens=max(new_tokens),
            eos_token_id=None if ignore_eos or not self.eos else self.eos,
            pad_token_id=0,
            **common.sampling_arguments(sampling),
        )
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, stopping_criteria=[self._note_token]
            )
        self._cached_tokens = max(self._cached_tokens, out.shape[0] * out.shape[1])
        return common.finish(out[:, ids.shape[1] :].tolist(), self.eos, new_tokens, ignore_eos)

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[Scores]:
        """By one forward pass a prompt, without padding."""
        import torch

        found = []
        with torch.inference_mode():
            for prompt, tokens in zip(prompts, continuations, strict=True):
                ids = torch.tensor([prompt + tokens], device=self.spec.device)
                logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
                found.append(Scores.of(logits.float().log_softmax(-1).cpu(), tokens))
        return found

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: the padded cache of the largest call so far; it grows with the sequence, nothing is reserved."""
        kv = self._cached_tokens * common.kv_token_bytes(self.spec.model, self.spec.dtype)
        return {"weights": common.parameter_bytes(self.model), "kv_reserved": kv or None}

    def close(self) -> None:
        self.model = None
