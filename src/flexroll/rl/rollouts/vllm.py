"""vLLM inside the trainer's process.

On a GPU it is TRL's own colocated mode: TRL merges the adapter into the trained model, hands vLLM every weight and
unmerges, which in bf16 does not give back the base (the hashes tell). On a CPU TRL's mode starts and then fails, for
vLLM's CPU kernels repack the weights that TRL would overwrite; there vLLM serves the adapter as a LoRARequest, written
to files at each refresh.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexroll.backends import transformers_common as common
from flexroll.backends.base import EngineSpec
from flexroll.errors import FlexrollError
from flexroll.rl.rollouts.base import Rollout, Rows, engine_spec, held_bytes

if TYPE_CHECKING:
    from flexroll.rl.spec import GrpoSpec


class VllmRollout(Rollout):
    """log probabilities come back from either form, after temperature and filters."""

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        from flexroll.backends.vllm import Vllm

        if spec.option.get("load_format") == "dummy":
            return "load_format dummy: a trainer reads its weights from files"
        return Vllm.unavailable(engine_spec(spec))

    @classmethod
    def make_ready(cls, spec: GrpoSpec) -> None:
        from flexroll.backends.vllm import environment

        os.environ.update(environment(engine_spec(spec)))

    def __init__(self, spec: GrpoSpec) -> None:
        super().__init__(spec)
        self.hook = spec.device == "cpu"
        self.llm: Any = None
        self._loaded = 0

    @property
    def adapter(self) -> Path:
        """Folder that the present adapter is written to, for a LoRARequest."""
        return self.spec.folder / "vllm-adapter"

    def arguments(self) -> dict[str, Any]:
        if self.hook:
            return {}
        arguments = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": self.spec.max_model_len,
        }
        share = self.spec.option.get("gpu_memory_utilization")
        return arguments if share is None else arguments | {"vllm_gpu_memory_utilization": share}

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """TRL passes vLLM a fixed list of arguments: what the option says beyond it is put into that call."""
        if self.hook:
            yield
            return
        from trl.generation import vllm_generation

        more, plain = self.more_arguments(), vllm_generation.LLM
        vllm_generation.LLM = lambda **given: plain(**given | more)
        try:
            yield
        finally:
            vllm_generation.LLM = plain

    def more_arguments(self) -> dict[str, Any]:
        """Of vllm.LLM in TRL's colocated mode. Prefix caching stays as TRL has it: on, and emptied at each refresh."""
        from flexroll.backends.vllm import kv_bytes

        option = self.spec.option
        more = {
            "dtype": self.spec.dtype,
            "kv_cache_memory_bytes": kv_bytes(engine_spec(self.spec)),
            "max_num_batched_tokens": option.get("max_num_batched_tokens"),
            "enforce_eager": option.get("enforce_eager") or None,
        }
        return {name: value for name, value in more.items() if value is not None}

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if not self.hook:
            self.llm = trainer.vllm_generation.llm
            return
        from vllm import LLM

        from flexroll.backends.vllm import engine_arguments

        self._write_adapter()
        arguments = engine_arguments(self._engine_spec)
        # TRL's choice too: the log probabilities of what is sampled from, not of the bare model.
        self.llm = LLM(**arguments, logprobs_mode="processed_logprobs")
        self.notes.append(
            "TRL's colocated vLLM needs a GPU; here vLLM serves the adapter as a LoRARequest in the same process"
        )

    @property
    def _engine_spec(self) -> EngineSpec:
        return engine_spec(self.spec, self.adapter)

    def _write_adapter(self) -> None:
        """Anew each time: vLLM reads a request's folder when it first meets the request's number."""
        shutil.rmtree(self.adapter, ignore_errors=True)
        self.trainer.model.save_pretrained(self.adapter, selected_adapters=["default"], save_embedding_layers=False)
        self._loaded += 1

    def sync_weights(self) -> None:
        self._write_adapter()
        self.llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Rows:
        """See Rollout.generate; a request a row, as TRL's colocated mode asks for. The noise is torch's generator's.

        Raises:
            FlexrollError: a prompt leaves no room for a completion.
            RuntimeError: vLLM lost a request.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        from flexroll.backends.vllm import rows_in_order, sampling_arguments

        eos, new_tokens = list(self.trainer.eos_token_ids), self.spec.grpo.max_completion_length
        lengths = [new_tokens] * len(prompts)
        common.check_request(self._engine_spec, prompts, lengths)
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
            SamplingParams(**sampling_arguments(self.spec.sampling, new_tokens, False, eos), logprobs=0),
            lora_request=LoRARequest(f"step{self._loaded}", self._loaded, str(self.adapter.resolve())),
            use_tqdm=False,
        )
        rows = rows_in_order(outputs, prompts, eos, lengths, ignore_eos=False)
        logprobs = [
            [[place[token].logprob] for token, place in zip(row, output.outputs[0].logprobs, strict=False)]
            for row, output in zip(rows, outputs, strict=True)
        ]
        if any(len(row) != len(told) for row, told in zip(rows, logprobs, strict=True)):
            raise FlexrollError("vLLM told fewer log probabilities than tokens; the rollout cannot be corrected for")
        return prompts, rows, logprobs, None

    def memory(self) -> dict[str, int | None]:
        """weights: vLLM's are counted in the checkpoint's files. kv_reserved: vLLM's blocks."""
        folder, dtype = self.spec.model, self.spec.dtype
        tied = bool(common.read_json(folder / "config.json").get("tie_word_embeddings"))
        weights = held_bytes(self.trainer.model.parameters())
        weights += common.file_parameters(folder, tied) * common.DTYPE_BYTES[dtype]
        cache = self.llm.llm_engine.vllm_config.cache_config if self.llm is not None else None
        kv = None
        if cache is not None and cache.num_gpu_blocks and cache.block_size:
            kv = cache.num_gpu_blocks * cache.block_size * common.kv_token_bytes(folder, dtype)
        return {"weights": weights, "kv_reserved": kv}

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.adapter, ignore_errors=True)
