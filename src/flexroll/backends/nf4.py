"""transformers models in NF4 by bitsandbytes: how they are quantised, computed and put together.

torch and transformers are imported inside the functions, as in transformers_common.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError


def nf4_config(dtype: str, skip: list[str]) -> Any:
    """transformers' quantisation config: NF4, computed in `dtype`, scales in fp32; modules of these names stay dense.

    No double quantisation: it saves 0.37 bits a weight (arXiv 2305.14314, section 3) and costs a kernel a product.
    """
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        bnb_4bit_use_double_quant=False,
        llm_int8_skip_modules=skip,
    )


def compute_in(model: Any, dtype: str) -> None:
    """Have every 4-bit product computed in `dtype`, whatever the checkpoint says.

    On a CPU with AVX512-BF16 the library computes in bf16 whatever it is asked for, and rounds the scales to bf16; in
    fp32 that path is closed.
    """
    import torch

    for module in model.modules():
        if hasattr(module, "compute_dtype") and hasattr(module, "quant_state"):
            module.compute_dtype, module.compute_type_is_set = getattr(torch, dtype), True
            if dtype == "float32" and hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False


def tie_head(model: Any, checkpoint: Path) -> None:
    """A shard of a model with a tied head ships none: make sure that the head is the embeddings, and no noise."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not model.config.tie_word_embeddings or head.weight is embeddings.weight:
        return
    model.tie_weights()
    if head.weight is not embeddings.weight:
        raise FlexrollError(f"{checkpoint}: its head is not tied to its embeddings; write it with `flexroll quantise`")
