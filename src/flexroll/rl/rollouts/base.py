"""The protocol of a rollout backend inside a trainer.

TRL asks an object `trainer.vllm_generation` for completions and their log probabilities where `trainer.use_vllm` is
set, and only then corrects for what the engine's probabilities differ from the trainer's. A backend with `hook` stands
in that place (its `sync_weights` and `generate` are what TRL's own VLLMGeneration has); the others are TRL's own paths,
which they set up.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexroll.backends.base import EngineSpec
from flexroll.errors import FlexrollError

if TYPE_CHECKING:
    from flexroll.rl.spec import GrpoSpec

TRL = (1, 15)  # the first whose interface is known to fit
SEED_STRIDE = 1 << 32

Rows = tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]


class Rollout(ABC):
    """One backend in one training process.

    Life: `unavailable(spec)` -> `make_ready(spec)` -> constructor, `load_model()`, `arguments()` -> TRL's trainer is
    made, within `building()` -> `attach(trainer)` -> a rollout a step, within `running()` -> `close()`.

    notes: what was adjusted, in words, for the record.
    """

    hook = False  # whether the object stands in TRL's vllm_generation

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        """One line saying why this backend cannot run the spec here, or None. Loads no model."""
        return None

    @classmethod
    def make_ready(cls, spec: GrpoSpec) -> None:
        """What must come before torch, transformers and TRL are imported: environment variables, other imports."""

    def load_model(self) -> tuple[Any, Any]:
        """(transformers model on the host, PEFT config of the adapter that the trainer puts into it)."""
        return load_model(self.spec), lora_config(self.spec)

    def arguments(self) -> dict[str, Any]:
        """What this backend adds to TRL's GRPOConfig."""
        return {}

    def __init__(self, spec: GrpoSpec) -> None:
        self.spec = spec
        self.trainer: Any = None
        self.notes: list[str] = []

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Around TRL's making of the trainer."""
        yield

    def attach(self, trainer: Any) -> None:
        """Make the engine, whose weights are the trainer's. Called once, when the trainer is complete."""
        self.trainer = trainer

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around each rollout, refresh included."""
        yield

    def sync_weights(self) -> None:
        """Bring the trainer's present adapter to the engine; TRL calls it before the first rollout of each step."""
        raise NotImplementedError("TRL generates with the trained model itself")

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Rows:
        """Completions of prompts that come already repeated, row by row.

        Returns:
            (prompts, completion ids with the stop token, log probabilities [row][token][1], None). The log
            probabilities are those that were sampled from, after temperature and filters, as TRL asks vLLM for
            ("processed_logprobs").
        """
        raise NotImplementedError("TRL generates with the trained model itself")

    def take_faults(self) -> list[str]:
        """What went wrong and was survived since the last call, in words."""
        return []

    @abstractmethod
    def memory(self) -> dict[str, int | None]:
        """{"weights": bytes, of the trainer's model and the engine together, shared tensors once, "kv_reserved":
        bytes of the engine's KV cache}; None where it cannot be told."""

    def base_hash(self) -> str:
        """sha256 of the trainer's frozen parameters: names and bytes, adapter left out; alike for all backends."""
        return frozen_sha256(self.trainer.model)

    def child_pids(self) -> list[int]:
        """Processes of this engine besides the current one, for memory accounting."""
        return []

    def close(self) -> None:
        """Let the engine go; safe to call twice."""


def trl_missing() -> str | None:
    """Why TRL's GRPOTrainer cannot be used in this environment, in one line, or None."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return "GRPO needs TRL, which is not installed here; the torch2.11 stack's lock has it"
    if tuple(int(part) for part in version.split(".")[:2]) < TRL:
        return f"GRPO needs TRL {TRL[0]}.{TRL[1]} or later; this environment has {version}"
    return None


def rollout_seed(seed: int, step: int) -> int:
    """Seed of a step's rollout: a function of both alone, so that a run that was resumed repeats."""
    return (seed * SEED_STRIDE + step) % (1 << 63)


def grouped(prompts: Iterable[list[int]]) -> list[tuple[list[int], int]]:
    """(prompt, times) of runs of equal neighbours: TRL repeats a prompt once a generation."""
    return [(prompt, len(list(run))) for prompt, run in groupby(prompts)]


def load_model(spec: GrpoSpec) -> Any:
    """The checkpoint in the run's dtype, attention sdpa, on the host; the trainer moves it.

    Raises:
        FlexrollError: there is no such checkpoint.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (spec.model / "config.json").is_file():
        raise FlexrollError(f"{spec.model}: not a checkpoint folder (no config.json)")
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        spec.model, dtype=getattr(torch, spec.dtype), attn_implementation="sdpa", local_files_only=True
    )


def lora_config(spec: GrpoSpec) -> Any:
    """PEFT's config of the adapter that is trained: A drawn by PEFT, B zero, both kept in fp32 whatever the base."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.adapter.rank,
        lora_alpha=spec.adapter.alpha,
        target_modules=list(spec.adapter.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def held_bytes(*groups: Iterable[Any]) -> int:
    """Bytes of tensors, each storage counted once."""
    storages = {}
    for tensor in (t for group in groups for t in group):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def frozen_sha256(model: Any) -> str:
    """sha256 over name and raw bytes of every parameter of a PEFT model that is no LoRA layer's, in order of name."""
    import torch

    from flexroll.rl.trainer_weights import plain_name

    frozen = {plain_name(name): p for name, p in model.named_parameters() if ".lora_" not in name}
    digest = hashlib.sha256()
    for name in sorted(frozen):
        digest.update(name.encode())
        digest.update(frozen[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def engine_spec(spec: GrpoSpec, adapter: Path | None = None) -> EngineSpec:
    """The run as an engine's backend describes it: as many sequences at once as a step has completions."""
    completions = spec.grpo.prompts_per_step * spec.grpo.num_generations
    return EngineSpec(
        model=spec.model,
        adapter_mode="none" if adapter is None else "request",
        adapter=adapter,
        merged=None,
        dtype=spec.dtype,
        device=spec.device,
        max_batch=completions,
        max_model_len=spec.max_model_len,
        seed=spec.seed,
        first_batch=completions,
        option=spec.option,
    )
