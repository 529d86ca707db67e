"""Unsloth's FastLanguageModel, with its own kernels or (option fast_inference) with vLLM inside. CUDA only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.errors import FlexrollError
from flexroll.schema import architecture
from flexroll.schema.config import Sampling


def plain_key(name: str) -> str:
    """A LoRA tensor's name without what wraps it: PEFT's `base_model.model.` and the adapter's name, `.default`.

    `base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight` and the same without `.default` (as PEFT
    writes files) both become `model.layers.0.self_attn.q_proj.lora_A.weight`.
    """
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def copy_adapter(model: Any, adapter: Path) -> int:
    """Copy the tensors of a PEFT folder into a model's LoRA parameters, matched by plain_key. Returns how many.

    Raises:
        FlexrollError: the two do not have the same tensors of the same shapes.
    """
    import torch
    from safetensors.torch import load_file

    stored = {plain_key(name): tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    slots = {plain_key(name): p for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    odd = sorted(stored.keys() ^ slots.keys())
    odd += sorted(name for name in stored.keys() & slots.keys() if stored[name].shape != slots[name].shape)
    if odd:
        raise FlexrollError(f"{adapter} does not fit this base ({len(odd)} tensors differ, as {odd[0]}); write it anew")
    with torch.no_grad():
        for name, tensor in stored.items():
            slots[name].copy_(tensor)
    return len(stored)


class Unsloth(Backend):
    """Options: fast_inference (vLLM inside), four_bit. Adapter modes: none, unmerged."""

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        if spec.device != "cuda":
            return "Unsloth needs a CUDA GPU"
        if find_spec("unsloth") is None:
            return "Unsloth is not installed here; the torch2.11 stack's cuda.lock has it"
        return None

    def __init__(self, spec: EngineSpec) -> None:
        checkpoint, adapter = common.checkpoint_of(spec), common.adapter_of(spec)
        config = common.read_json(adapter / "adapter_config.json") if adapter is not None else {}
        import torch
        from unsloth import FastLanguageModel  # before any import of transformers, which it rewrites

        self.spec = spec
        self.eos = architecture.eos_ids(checkpoint)
        self.fast = bool(spec.option.get("fast_inference", False))
        self.request: Any = None
        self.running = spec.max_batch
        self._cached_tokens = 0
        self.model, _ = FastLanguageModel.from_pretrained(
            model_name=str(checkpoint),
            max_seq_length=spec.max_model_len,
            dtype=getattr(torch, spec.dtype),
            # A shard says so itself; quantised on the fly, Unsloth brings its own NF4 settings.
            load_in_4bit=spec.option.get("four_bit") is not None,
            fast_inference=self.fast,
            max_lora_rank=config.get("r", 16),
            random_state=spec.seed,
        )
        if adapter is not None:
            self.model = FastLanguageModel.get_peft_model(
                self.model,
                r=config["r"],
                lora_alpha=config["lora_alpha"],
                target_modules=list(config["target_modules"]),
                lora_dropout=0.0,
                bias="none",
                use_gradient_checkpointing=False,
                random_state=spec.seed,
            )
            copy_adapter(self.model, adapter)
            if self.fast:
                self.request = self.model.load_lora(str(adapter))
        FastLanguageModel.for_inference(self.model)

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
        """Generate as many sequences at once as may run, batch by batch; see Backend.generate.

        A batch runs to the longest of its lengths, and every row is cut to its own. With fast_inference vLLM's own seed
        applies.
        """
        import torch

        common.check_request(self.spec, prompts, new_tokens)
        torch.manual_seed(seed)
        run = self._with_vllm if self.fast else self._with_kernels
        rows: list[list[int]] = []
        for part, lengths in common.static_batches(prompts, new_tokens, samples, self.running):
            rows += common.finish(run(part, sampling, lengths, ignore_eos), self.eos, lengths, ignore_eos)
        return Generation(rows)

    def _with_kernels(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: list[int], ignore_eos: bool
    ) -> list[list[int]]:
        from transformers import GenerationConfig

        ids, mask = common.left_padded(prompts, self.spec.device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(new_tokens),
                eos_token_id=None if ignore_eos or not self.eos else self.eos,
                **common.sampling_arguments(sampling),
            ),
            pad_token_id=0,  # it would take EOS
        )
        self._cached_tokens = max(self._cached_tokens, out.shape[0] * out.shape[1])
        return out[:, ids.shape[1] :].tolist()

    def _with_vllm(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: list[int], ignore_eos: bool
    ) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        from flexroll.backends.vllm import rows_in_order, sampling_arguments

        outputs = self.model.fast_generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [SamplingParams(**sampling_arguments(sampling, new, ignore_eos, self.eos)) for new in new_tokens],
            lora_request=self.request,
            use_tqdm=False,
        )
        return rows_in_order(outputs, prompts, self.eos, new_tokens, ignore_eos)

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: as transformers generate, the largest call's cache; with fast_inference it cannot be told."""
        kv = self._cached_tokens * common.kv_token_bytes(self.spec.model, self.spec.dtype)
        return {"weights": common.parameter_bytes(self.model), "kv_reserved": kv or None}

    def close(self) -> None:
        self.model = None
