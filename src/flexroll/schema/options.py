"""Named sets of engine options: a part for each backend that has any."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, PositiveInt, field_validator, model_validator

from flexroll.schema.base import Strict

# bitsandbytes NF4: quantised as it is loaded, or read from a checkpoint that `flexroll quantise` wrote, in which the
# modules of config.four_bit.skip are left as they were. A LoRA adapter stays a wrapper: nothing merges into NF4.
FourBit = Literal["on_the_fly", "shard"]
FOUR_BIT = "NF4 weights (bitsandbytes), compute in the model's dtype: quantised while loading, or read from a shard."

LOAD = "auto: the checkpoint's files, or weights drawn on the device where model.weights is drawn; dummy: drawn always."


class FlexOptions(Strict):
    """Options of the flex engine. Kernel options are passed to the attention kernels as they are."""

    attention: Literal["flex", "triton"] | None = Field(None, description="Default: the engine's for the device.")
    page_size: int = Field(64, description="Tokens a KV page; a power of two from 16 to 256.")
    compile: bool = Field(True, description="False: eager flex_attention, the seed's first row.")
    compile_mode: Literal["default", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="torch.compile's mode for flex_attention."
    )
    compile_forward: bool = Field(
        False, description="torch.compile over a decode step's whole forward pass; without the fused kernels."
    )
    fused: bool | None = Field(None, description="Triton kernels for all but attention; default: on a GPU.")
    contiguous: bool = Field(False, description="A run of pages for every slot, as BLOCKS_ARE_CONTIGUOUS needs.")
    prefill_mask: Literal["logical", "bounds"] = Field(
        "logical",
        description="bounds: a first and a last physical position a query, nothing looked up by key position; needs "
        "contiguous.",
    )
    unchecked: bool = Field(
        False, description="Kernel options go to torch unchecked: to measure what a wrong or unsafe one does."
    )
    replay: Literal["plain", "tma"] | None = Field(
        None, description="Decode kernel options that Inductor's autotuning logged as best, without or with USE_TMA."
    )
    four_bit: FourBit | None = Field(None, description=FOUR_BIT)
    cuda_graphs: bool = Field(True, description="Decode steps as captured graphs; on a CPU there are none.")
    buckets: list[PositiveInt] | None = Field(
        None, description="Batch sizes that decode steps are padded to; default: the engine's."
    )
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


class TransformersGenerateOptions(Strict):
    four_bit: FourBit | None = Field(None, description=FOUR_BIT)


class TransformersCbOptions(Strict):
    """Options of transformers' continuous batching. Paged flash attention needs a GPU and its library."""

    attention: Literal[
        "paged|sdpa", "paged|eager", "paged|flash_attention_2", "paged|flash_attention_3", "paged|flash_attention_4"
    ] = "paged|sdpa"
    block_size: int = Field(32, ge=1)
    driver: Literal["manager", "persistent", "sync"] = Field(
        "manager",
        description="manager: the library's thread, a manager a call; persistent: one manager for all calls; sync: "
        "cache and processor stepped on the main thread, without a thread.",
    )
    cuda_graph: bool = Field(False, description="The library's CUDA graphs of steps; a GPU only.")
    compile: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] | None = Field(
        None, description="torch.compile of model.forward in this mode; graph breaks and recompiles are counted."
    )
    four_bit: FourBit | None = Field(None, description=FOUR_BIT)


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
    four_bit: FourBit | None = Field(None, description=FOUR_BIT)


class Option(Strict):
    """A named set of engine options. A backend reads its own part; the others are the backends' defaults."""

    note: str = ""
    flex: FlexOptions = FlexOptions()
    transformers_generate: TransformersGenerateOptions = TransformersGenerateOptions()
    transformers_cb: TransformersCbOptions = TransformersCbOptions()
    vllm: VllmOptions = VllmOptions()
    unsloth: UnslothOptions = UnslothOptions()

    def over(self, defaults: Option) -> Option:
        """This option, with `defaults` wherever it has no value but the field's own default."""
        parts = {}
        for name in type(self).model_fields:
            own = getattr(self, name)
            if isinstance(own, BaseModel):
                plain = type(own)()
                given = {key: value for key, value in own if value != getattr(plain, key)}
                parts[name] = getattr(defaults, name).model_copy(update=given)
        return self.model_copy(update=parts)

    def for_backend(self, backend: str) -> dict[str, Any]:
        """The option's values as the backend reads them; {} for a backend without options."""
        part = getattr(self, backend, None)
        return part.model_dump() if isinstance(part, BaseModel) else {}
