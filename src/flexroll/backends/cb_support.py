"""What transformers' continuous batching can do here: which versions, attention, CUDA graphs and compile modes."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from flexroll.backends.base import EngineSpec
from flexroll.errors import FlexrollError

# Our names, which are those of transformers 5, in the words of 4.57.
KEYS_4 = {
    "paged|sdpa": "sdpa_paged",
    "paged|eager": "eager_paged",
    "paged|flash_attention_2": "paged_attention",
}
# Distributions that hold a flash attention. Where one is missing transformers 5 would take a kernel from the hub.
PACKAGES = {
    "paged|flash_attention_2": "flash-attn",
    "paged|flash_attention_3": "flash-attn-3",
    "paged|flash_attention_4": "flash-attn-4",
}


def problem(spec: EngineSpec, found: tuple[int, int]) -> str | None:
    """Why the spec's option cannot run here, in one line, or None.

    found: (major, minor) of the transformers installed; (0, 0) without it.
    """
    if found == (0, 0):
        return "transformers is not installed here; the stacks' locks have it"
    name = f"{found[0]}.{found[1]}"
    if found < (4, 57):
        return f"transformers {name} has no continuous batching this project knows; 4.57 and 5 have"
    if found[0] == 4 and spec.device == "cpu":
        return f"continuous batching of transformers {name} sizes itself by a GPU's memory and fails on a CPU"
    return _attention_problem(spec, found) or _graph_problem(spec, found)


def _attention_problem(spec: EngineSpec, found: tuple[int, int]) -> str | None:
    attention = spec.option.get("attention", "paged|sdpa")
    package = PACKAGES.get(attention)
    if package is None:
        return None
    if spec.device == "cpu":
        return f"{attention} needs a GPU"
    if found[0] == 4 and attention not in KEYS_4:
        return f"continuous batching of transformers {found[0]}.{found[1]} knows FlashAttention 2 only, not {attention}"
    if spec.dtype == "float32":
        return f"{attention} needs bfloat16; it has no float32"
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{attention} needs the package {package}, which is not installed here"
    return None


def _graph_problem(spec: EngineSpec, found: tuple[int, int]) -> str | None:
    mode, threaded = spec.option.get("compile"), spec.option.get("driver", "manager") != "sync"
    if spec.option.get("cuda_graph"):
        if spec.device == "cpu":
            return "cuda_graph needs a GPU"
        if found[0] == 4:
            return f"continuous batching of transformers {found[0]}.{found[1]} has no CUDA graphs; that of 5 has"
        if mode == "reduce-overhead":
            return "reduce-overhead captures CUDA graphs of its own; leave cuda_graph off"
    if mode == "reduce-overhead":
        if spec.device == "cpu":
            return "compile mode reduce-overhead needs a GPU, for it replays CUDA graphs"
        if threaded:
            # torch._inductor.cudagraph_trees keeps them thread-local; another thread ends in a bare AssertionError.
            return "compile mode reduce-overhead ties its CUDA graphs to one thread; it needs driver: sync"
    return None


def attention_key(attention: str, old: bool) -> str:
    """The name that the transformers installed has for an attention. old: it is 4.57."""
    return KEYS_4[attention] if old else attention


def check_attention(model: Any, key: str) -> None:
    """Make sure that the model runs the attention it was asked for; transformers may put another in, silently.

    Raises:
        FlexrollError: it does not.
    """
    used = model.config._attn_implementation
    if used != key:
        raise FlexrollError(f"asked for attention {key}, but transformers runs {used}; install what {key} needs")


def block_table_blocks(attention: str, block_size: int, max_model_len: int) -> int:
    """Blocks a sequence for the library's decode path of flash attention, 0 for without: FlashAttention 2 and 3 have
    it, and 2 reads blocks of multiples of 256 tokens only."""
    if attention == "paged|flash_attention_3" or (attention == "paged|flash_attention_2" and block_size % 256 == 0):
        return -(-(max_model_len + 1) // block_size)
    return 0
