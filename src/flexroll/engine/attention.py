"""flex_attention over the paged pool: kernel options, compilation, and the two kinds of call, decode and prefill."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import Q_BLOCK, DecodeMask, PrefillMask
from flexroll.errors import FlexrollError

RECOMPILE_LIMIT = 256  # one static variant a bucket and pool size; dynamo's default of 8 would fail beyond it


def compile_problem(device: torch.device) -> str | None:
    """Why torch.compile cannot build kernels on this machine, in one line, or None."""
    compilers = (
        (os.environ.get("CXX"), "g++", "clang++") if device.type == "cpu" else (os.environ.get("CC"), "gcc", "clang")
    )
    if not any(c and shutil.which(c) for c in compilers):
        return f"no {'C++' if device.type == 'cpu' else 'C'} compiler found; install g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"Python.h not found; install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    if device.type == "cpu" and not torch.cpu._is_avx2_supported():
        return "flex_attention compiles on a CPU with AVX2 only"
    return None


def check_kernel_options(options: dict[str, Any], name: str, contiguous: bool) -> dict[str, Any]:
    """Return `options` if the installed torch knows every key; its compiler would fail on others far from the cause.

    contiguous: whether a sequence's pages lie one after another for its whole life.

    Raises:
        FlexrollError: naming the key and the torch version.
    """
    declared = getattr(flex, "FlexKernelOptions", None)
    known = set(typing.get_type_hints(declared)) | {"SPLIT_KV"} if declared is not None else None
    for key in options:
        if known is not None and key not in known:
            raise FlexrollError(
                f"{name}: torch {torch.__version__} has no kernel option '{key}'; it has {', '.join(sorted(known))}"
            )
    if options.get("BLOCKS_ARE_CONTIGUOUS") and not contiguous:
        # Pages from a free list lie anywhere; the flag would read other sequences' keys.
        raise FlexrollError(
            f"{name}: BLOCKS_ARE_CONTIGUOUS needs a sequence's pages to lie one after another for its whole life; "
            "leave it out, or give the engine contiguous=True"
        )
    return dict(options)


def with_block_sizes(options: dict[str, Any], device: torch.device, page_size: int, prefill: bool) -> dict[str, Any]:
    """`options` with block sizes that divide the mask's, unless they name some.

    On a GPU a kernel's key block must divide a page and a prefill kernel's query block the mask's; Inductor's choice
    for 16-bit types is 128 for either.
    """
    if device.type != "cuda":
        return options
    added: dict[str, Any] = {}
    if not {"BLOCK_N", "fwd_BLOCK_N"} & set(options):
        added["BLOCK_N"] = min(64, page_size)
    if prefill and not {"BLOCK_M", "fwd_BLOCK_M"} & set(options):
        added["BLOCK_M"] = Q_BLOCK
    return {**options, **added}


def flex_attention_function(device: torch.device, compiled: bool) -> tuple[Callable[..., torch.Tensor], bool]:
    """(flex_attention, whether it is compiled). Where compiling is impossible: a warning, and the eager function."""
    if compiled:
        problem = compile_problem(device)
        if problem is None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            # Static shapes: with a symbolic batch the GPU kernel for decoding is silently replaced by a slower one.
            return torch.compile(flex.flex_attention, dynamic=False, fullgraph=True), True
        warnings.warn(f"flex_attention runs eagerly, which is slow: {problem}", stacklevel=2)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return flex.flex_attention, False


class FlexAttention:
    """flex_attention on one cache: the function, compiled or not, and the options of decode and prefill kernels."""

    def __init__(
        self,
        cache: KVCache,
        function: Callable[..., torch.Tensor],
        compiled: bool,
        decode_options: dict[str, Any],
        prefill_options: dict[str, Any],
    ) -> None:
        self.cache, self.compiled, self._function = cache, compiled, function
        self._gqa = cache.config.n_heads != cache.config.n_kv_heads
        self._decode_options, self._prefill_options = decode_options or None, prefill_options or None
        self.q_block = int(prefill_options.get("fwd_BLOCK_M", prefill_options.get("BLOCK_M", Q_BLOCK)))

    def decode(self, layer: int, q: torch.Tensor, mask: DecodeMask) -> torch.Tensor:
        """q [rows, heads, head_dim], a sequence a row -> [rows, heads * head_dim]."""
        return self._call(layer, q.unsqueeze(2), mask.block_mask, self._decode_options).flatten(1)

    def prefill(self, layer: int, q: torch.Tensor, mask: PrefillMask) -> torch.Tensor:
        """q [rows, heads, head_dim], any mix of sequences -> [rows, heads * head_dim]."""
        out = self._call(layer, q.transpose(0, 1).unsqueeze(0), mask.block_mask, self._prefill_options)
        return out[0].transpose(0, 1).flatten(1)

    def _call(
        self, layer: int, q: torch.Tensor, block_mask: flex.BlockMask, options: dict[str, Any] | None
    ) -> torch.Tensor:
        return self._function(
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            block_mask=block_mask,
            enable_gqa=self._gqa,
            kernel_options=options,
        )
