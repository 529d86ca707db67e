"""flex_attention over the paged pool: block masks with static shapes, one a bucket, filled in place at every step.

A mask function sees physical positions; `cache.logical` turns them into logical ones, so where a page lies never
changes the result. The block lists only say which pages need a look: the mask function alone is right as well, which
eager flex_attention, ignoring block lists, relies on.
"""

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

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex

from flexroll.engine.kv_cache import KVCache
from flexroll.errors import FlexrollError

Q_BLOCK = 128  # query rows a block list speaks for; flex_attention's own default
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


def check_kernel_options(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return `options` if the installed torch knows every key; its compiler would fail on others far from the cause.

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
    return dict(options)


def with_block_sizes(options: dict[str, Any], device: torch.device, page_size: int) -> dict[str, Any]:
    """`options` with a BLOCK_N that divides a page, unless they name one.

    On a GPU a kernel's key block must divide the mask's, which is a page; Inductor's choice for 16-bit types is 128.
    """
    if device.type != "cuda" or {"BLOCK_N", "fwd_BLOCK_N"} & set(options):
        return options
    return {**options, "BLOCK_N": min(64, page_size)}


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


class DecodeMask:
    """Mask of one decode step of up to `batch` sequences, one query each; rows that are not used point at slot 0."""

    def __init__(self, cache: KVCache, batch: int) -> None:
        device, n_pages = cache.logical.device, cache.logical.shape[1]
        self.batch, self.cache = batch, cache
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        # As wide as the pool: flex_attention asks for block lists that could name every page.
        self._lists = [torch.zeros(batch, 1, 1, n_pages, dtype=torch.int32, device=device) for _ in range(2)]
        self._counts = [torch.zeros(batch, 1, 1, dtype=torch.int32, device=device) for _ in range(2)]
        slots, positions, logical, size = self.slots, self.positions, cache.logical, cache.pages.page_size

        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            block = logical[slots[b], kv // size]
            return (block >= 0) & (block * size + kv % size <= positions[b])

        self.block_mask = flex.BlockMask.from_kv_blocks(
            self._counts[0],
            self._lists[0],
            self._counts[1],
            self._lists[1],
            BLOCK_SIZE=(Q_BLOCK, size),
            mask_mod=visible,
            seq_lengths=(1, n_pages * size),
            compute_q_blocks=False,
        )

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """slots, positions: int64 [n], n <= batch. Pages visible as a whole need no mask: they go to the full list."""
        n, pages = len(slots), self.cache.pages
        padded_slots = np.zeros(self.batch, dtype=np.int64)
        padded_positions = np.zeros(self.batch, dtype=np.int64)
        padded_slots[:n], padded_positions[:n] = slots, positions
        n_full = (padded_positions + 1) // pages.page_size
        n_partial = ((padded_positions + 1) % pages.page_size != 0).astype(np.int64)
        width = int(n_full.max()) + 1
        table = pages.table[padded_slots, : min(width, pages.max_blocks)]
        partial = pages.table[padded_slots, np.minimum(n_full, pages.max_blocks - 1)]
        self.slots.copy_(torch.from_numpy(padded_slots))
        self.positions.copy_(torch.from_numpy(padded_positions))
        self._counts[0].view(-1).copy_(torch.from_numpy(n_partial))
        self._lists[0][:, 0, 0, 0].copy_(torch.from_numpy(partial))
        self._counts[1].view(-1).copy_(torch.from_numpy(n_full))
        self._lists[1][:, 0, 0, : table.shape[1]].copy_(torch.from_numpy(table))


class PrefillMask:
    """Mask of one prefill step: `length` query rows of any mix of sequences and chunks; unused rows point at slot 0."""

    def __init__(self, cache: KVCache, length: int) -> None:
        device, n_pages = cache.logical.device, cache.logical.shape[1]
        self.length, self.cache = length, cache
        self.slots = torch.zeros(length, dtype=torch.int64, device=device)
        self.positions = torch.zeros(length, dtype=torch.int64, device=device)
        n_blocks = -(-length // Q_BLOCK)
        self._list = torch.zeros(1, 1, n_blocks, n_pages, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, 1, n_blocks, dtype=torch.int32, device=device)
        slots, positions, logical, size = self.slots, self.positions, cache.logical, cache.pages.page_size

        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            block = logical[slots[q], kv // size]
            return (block >= 0) & (block * size + kv % size <= positions[q])

        self.block_mask = flex.BlockMask.from_kv_blocks(
            self._count,
            self._list,
            BLOCK_SIZE=(Q_BLOCK, size),
            mask_mod=visible,
            seq_lengths=(length, n_pages * size),
            compute_q_blocks=False,
        )

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """slots, positions: int64 [n], n <= length. A block of queries lists every page any of its rows may see."""
        n, pages = len(slots), self.cache.pages
        padded_slots = np.zeros(self.length, dtype=np.int64)
        padded_positions = np.zeros(self.length, dtype=np.int64)
        padded_slots[:n], padded_positions[:n] = slots, positions
        lists = np.zeros(self._list.shape[2:], dtype=np.int32)
        counts = np.zeros(lists.shape[0], dtype=np.int32)
        for row in range(lists.shape[0]):
            rows = slice(row * Q_BLOCK, (row + 1) * Q_BLOCK)
            seen = []
            for slot in np.unique(padded_slots[rows]):
                last = padded_positions[rows][padded_slots[rows] == slot].max()
                seen.append(pages.table[slot, : last // pages.page_size + 1])
            listed = np.concatenate(seen)
            counts[row] = len(listed)
            lists[row, : len(listed)] = listed
        self.slots.copy_(torch.from_numpy(padded_slots))
        self.positions.copy_(torch.from_numpy(padded_positions))
        self._count.view(-1).copy_(torch.from_numpy(counts))
        self._list[0, 0].copy_(torch.from_numpy(lists))
