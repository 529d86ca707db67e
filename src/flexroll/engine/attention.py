"""flex_attention over the paged pool: kernel options, compilation, and the two kinds of call, decode and prefill."""

from __future__ import annotations

import importlib.util
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

from flexroll.cpu_isa import remember_checks
from flexroll.engine.decoder_config import DecoderConfig
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import Q_BLOCK, BoundsMask, DecodeMask, PrefillMask
from flexroll.errors import FlexrollError

FLASH = "FLASH"  # the BACKEND that hands flex_attention to flash-attention's CuTe kernels
FLASH_BLOCKS = (256, 128)  # query rows and keys of a block in its lists: two tiles of queries on Blackwell, one of keys
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
    """`options` by their plain names, if the installed torch knows each; its compiler would fail on others far from the
    cause. Torch takes `fwd_NAME` too, for the forward pass alone: there is no other here.

    contiguous: whether a sequence's pages lie one after another for its whole life.

    Raises:
        FlexrollError: naming the key and the torch version, or a key that is given both ways.
    """
    plain = {key.removeprefix("fwd_"): value for key, value in options.items()}
    if len(plain) < len(options):
        twice = next(key for key in plain if f"fwd_{key}" in options and key in options)
        raise FlexrollError(f"{name}: '{twice}' and 'fwd_{twice}' are the same here; give one")
    declared = getattr(flex, "FlexKernelOptions", None)
    known = set(typing.get_type_hints(declared)) | {"SPLIT_KV"} if declared is not None else None
    for key in plain:
        if known is not None and key not in known:
            raise FlexrollError(
                f"{name}: torch {torch.__version__} has no kernel option '{key}'; it has {', '.join(sorted(known))}"
            )
    if plain.get("BLOCKS_ARE_CONTIGUOUS") and not contiguous:
        # Pages from a free list lie anywhere; the flag would read other sequences' keys.
        raise FlexrollError(
            f"{name}: BLOCKS_ARE_CONTIGUOUS needs a sequence's pages to lie one after another for its whole life; "
            "leave it out, or give the engine contiguous=True"
        )
    return plain


def with_block_sizes(options: dict[str, Any], device: torch.device, page_size: int, prefill: bool) -> dict[str, Any]:
    """`options` with block sizes that divide the mask's, unless they name some.

    On a GPU a kernel's key block must divide a page and a prefill kernel's query block the mask's; Inductor's choice
    for 16-bit types is 128 for either.
    """
    if device.type != "cuda" or is_flash(options):  # flash-attention chooses its own tiles
        return options
    added: dict[str, Any] = {}
    if not {"BLOCK_N", "fwd_BLOCK_N"} & set(options):
        added["BLOCK_N"] = min(64, page_size)
    if prefill and not {"BLOCK_M", "fwd_BLOCK_M"} & set(options):
        added["BLOCK_M"] = Q_BLOCK
    return {**options, **added}


def is_flash(options: dict[str, Any]) -> bool:
    """Whether these kernel options ask for flash-attention's CuTe kernels."""
    return options.get("BACKEND") == FLASH


def flash_missing() -> str | None:
    """What BACKEND FLASH lacks in this environment, in one line, or None."""
    if "BACKEND" not in typing.get_type_hints(getattr(flex, "FlexKernelOptions", object)):
        return f"torch {torch.__version__} has no kernel option 'BACKEND', which FLASH needs"
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # no flash_attn at all
        found = False
    return None if found else "BACKEND FLASH needs the package flash-attn-4 (module flash_attn.cute)"


def check_flash(
    kind: str, config: DecoderConfig, dtype: torch.dtype, device: torch.device, page_size: int, compiled: bool
) -> None:
    """Refuse BACKEND FLASH where torch or flash-attention would, far from the cause.

    Grouped queries and lists of partial and full blocks it takes as they are: lists for all heads at once.
    Sources: torch/_inductor/kernel/flex/flex_flash_attention.py (2.11); flash_attn/cute/interface.py and
    block_sparsity.py (flash-attn-4 4.0.0b5 to b36).

    Raises:
        FlexrollError: naming what does not fit.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    for problem, words in (
        (kind != "prefill", "serves prefill alone: keys and values must be of as many sequences as the queries"),
        (not compiled, "needs compiled flex_attention; leave compile on"),
        (major not in (9, 10, 11), "needs a GPU of compute capability 9, 10 or 11 (Hopper, Blackwell)"),
        (dtype not in (torch.bfloat16, torch.float16), "computes in bfloat16 or float16"),
        (config.head_dim > 128 or config.head_dim % 8, "takes a head_dim of at most 128, a multiple of 8"),
        (page_size != FLASH_BLOCKS[1], f"reads keys in blocks of {FLASH_BLOCKS[1]}; give page_size {FLASH_BLOCKS[1]}"),
    ):
        if problem:
            raise FlexrollError(f"{kind}_kernel_options: BACKEND FLASH {words}")
    if (missing := flash_missing()) is not None:
        raise FlexrollError(f"{kind}_kernel_options: {missing}")


def flex_attention_function(
    device: torch.device, compiled: bool, mode: str = "default"
) -> tuple[Callable[..., torch.Tensor], bool]:
    """(flex_attention, whether it is compiled). Where compiling is impossible: a warning, and the eager function.

    mode: torch.compile's. max-autotune brings CUDA graphs of its own: inside the capture of a decode step they fail.
    """
    if compiled:
        problem = compile_problem(device)
        if problem is None:
            if device.type == "cpu":
                remember_checks()
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            # Static shapes: with a symbolic batch the GPU kernel for decoding is silently replaced by a slower one.
            return torch.compile(flex.flex_attention, dynamic=False, fullgraph=True, mode=mode), True
        warnings.warn(f"flex_attention runs eagerly, which is slow: {problem}", stacklevel=2)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return flex.flex_attention, False


class FlexAttention:
    """flex_attention on one cache: the function, compiled or not, and the options of decode and prefill kernels.

    bounds: prefill goes by BoundsMask, not by PrefillMask.
    """

    def __init__(
        self,
        cache: KVCache,
        function: Callable[..., torch.Tensor],
        compiled: bool,
        decode_options: dict[str, Any],
        prefill_options: dict[str, Any],
        bounds: bool = False,
    ) -> None:
        self.cache, self.compiled, self._function = cache, compiled, function
        self._gqa = cache.config.n_heads != cache.config.n_kv_heads
        self._decode_options, self._prefill_options = decode_options or None, prefill_options or None
        if is_flash(prefill_options):
            self.q_block = FLASH_BLOCKS[0]
        else:
            self.q_block = int(prefill_options.get("fwd_BLOCK_M", prefill_options.get("BLOCK_M", Q_BLOCK)))
        self._prefill_mask = BoundsMask if bounds else PrefillMask

    def prefill_mask(self, slots: torch.Tensor, positions: torch.Tensor) -> PrefillMask:
        """The mask of prefill passes over query rows with these slots and positions, int64 [rows], written in place."""
        return self._prefill_mask(self.cache, slots, positions, self.compiled, self.q_block)

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
        # While a whole forward pass is compiled, flex_attention itself, so that it becomes a part of that graph.
        function = flex.flex_attention if self.compiled and torch.compiler.is_compiling() else self._function
        return function(
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            block_mask=block_mask,
            enable_gqa=self._gqa,
            kernel_options=options,
        )
