"""Named sets of engine options: a part for each backend that has any."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from flexroll.schema.base import Strict

LOAD = "auto: the checkpoint's files, or weights drawn on the device where model.weights is drawn; dummy: drawn always."


class FlexOptions(Strict):
    """Options of the flex engine. Kernel options are passed to the attention kernels as they are."""

    attention: Literal["flex", "triton"] | None = Field(None, description="Default: the engine's for the device.")
    page_size: int = Field(64, description="Tokens a KV page; a power of two from 16 to 256.")
    compile: bool = Field(True, description="False: eager flex_attention, the seed's first row.")
    cuda_graphs: bool = Field(True, description="Decode steps as captured graphs; on a CPU there are none.")
    max_prefill_tokens: int | None = Field(
        None, ge=64, description="Most prompt tokens one prefill step takes; default: the engine's."
    )
    kv_tokens: int | None = Field(
        None, ge=1, description="Tokens the KV pool holds; default: every running sequence at max_model_len."
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description=LOAD)
    decode_kernel_options: dict[str, bool | int | str] = Field(default_factory=dict)
    prefill_kernel_options: dict[str, bool | int | str] = Field(default_factory=dict)

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in (16, 32, 64, 128, 256):
            raise ValueError("page_size must be 16, 32, 64, 128 or 256")
        return value


class TransformersCbOptions(Strict):
    attention: Literal["paged|sdpa", "paged|eager"] = "paged|sdpa"
    block_size: int = Field(32, ge=1)


class VllmOptions(Strict):
    """Options of vLLM. One of gpu_memory_utilization, kv_cache_memory_bytes and equal_kv sizes its KV cache."""

    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="KV cache in bytes.")
    equal_kv: bool = Field(False, description="As many bytes of KV as the flex engine's default pool for the same job.")
    gpu_memory_utilization: float | None = Field(
        default_factory=lambda given: None if given.get("kv_cache_memory_bytes") or given.get("equal_kv") else 0.8,
        gt=0,
        le=1,
        description="Share of the GPU's memory; default 0.8, none where the KV cache has a size of its own.",
    )
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens of one step; default: vLLM's.")
    flashinfer_sampler: bool | None = Field(None, description="VLLM_USE_FLASHINFER_SAMPLER; default: vLLM's choice.")
    load_format: Literal["auto", "dummy"] = Field("auto", description=LOAD)
    enforce_eager: bool = False
    enable_prefix_caching: bool = Field(False, description="What is cached is forgotten before every round.")
    cpu_kv_gib: int = Field(1, ge=1, description="KV cache on a machine without a GPU, GiB.")

    @model_validator(mode="after")
    def _one_size(self) -> VllmOptions:
        sizes = ("gpu_memory_utilization", "kv_cache_memory_bytes", "equal_kv")
        given = [name for name in sizes if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both size the KV cache; give one")
        return self


class UnslothOptions(Strict):
    fast_inference: bool = False
    load_in_4bit: bool = False


class Option(Strict):
    """A named set of engine options. A backend reads its own part; the others are the backends' defaults."""

    note: str = ""
    flex: FlexOptions = FlexOptions()
    transformers_cb: TransformersCbOptions = TransformersCbOptions()
    vllm: VllmOptions = VllmOptions()
    unsloth: UnslothOptions = UnslothOptions()

    def for_backend(self, backend: str) -> dict[str, Any]:
        """The option's values as the backend reads them; {} for a backend without options."""
        part = getattr(self, backend, None)
        return part.model_dump() if isinstance(part, BaseModel) else {}
