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


class RowMask:
    """What every mask has: query rows with a slot and a position each; unused rows point at slot 0, position 0.

    slots, positions: int64 [rows] on the device, written in place, so that one compiled kernel serves every step.
    """

    block_mask: flex.BlockMask

    def __init__(self, cache: KVCache, rows: int) -> None:
        self.cache, self.rows = cache, rows
        self.slots = torch.zeros(rows, dtype=torch.int64, device=cache.logical.device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=cache.logical.device)

    def visible(self, row: Any, kv: Any) -> Any:
        """Whether a query row sees physical position kv: its slot owns the page, and the place is not in its future."""
        size = self.cache.pages.page_size
        block = self.cache.logical[self.slots[row], kv // size]
        return (block >= 0) & (block * size + kv % size <= self.positions[row])

    def place(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write slots and positions int64 [n], n <= rows; returns both padded to [rows]."""
        padding = (0, self.rows - len(slots))
        slots, positions = np.pad(slots, padding), np.pad(positions, padding)
        self.slots.copy_(torch.from_numpy(slots))
        self.positions.copy_(torch.from_numpy(positions))
        return slots, positions

    def block_lists(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts int32 [*shape] and page lists int32 [*shape, pages of the pool], all zero.

        As wide as the pool, for flex_attention asks for lists that could name every page.
        """
        device, n_pages = self.cache.logical.device, self.cache.logical.shape[1]
        return (
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros((*shape, n_pages), dtype=torch.int32, device=device),
        )

    def build(self, length: int, mask_mod: Callable[..., Any], *lists: torch.Tensor) -> flex.BlockMask:
        """A BlockMask over the pool for `length` queries, from (count, list) of partial and, given, full pages."""
        size = self.cache.pages.page_size
        return flex.BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=(Q_BLOCK, size),
            mask_mod=mask_mod,
            seq_lengths=(length, self.cache.logical.shape[1] * size),
            compute_q_blocks=False,
        )


class DecodeMask(RowMask):
    """Mask of one decode step of up to `rows` sequences, one query each: a batch of `rows`."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        super().__init__(cache, rows)
        self._partial, self._full = self.block_lists(rows, 1, 1), self.block_lists(rows, 1, 1)
        self.block_mask = self.build(1, lambda b, h, q, kv: self.visible(b, kv), *self._partial, *self._full)

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """slots, positions: int64 [n], n <= rows. Pages visible as a whole need no mask: they go to the full list."""
        pages = self.cache.pages
        slots, positions = self.place(slots, positions)
        n_full = (positions + 1) // pages.page_size
        n_partial = (positions + 1) % pages.page_size != 0
        table = pages.table[slots, : int(n_full.max()) + 1]
        partial = pages.table[slots, np.minimum(n_full, pages.max_blocks - 1)]
        self._partial[0].view(-1).copy_(torch.from_numpy(n_partial))
        self._partial[1][:, 0, 0, 0].copy_(torch.from_numpy(partial))
        self._full[0].view(-1).copy_(torch.from_numpy(n_full))
        self._full[1][:, 0, 0, : table.shape[1]].copy_(torch.from_numpy(table))


class PrefillMask(RowMask):
    """Mask of one prefill step: `rows` queries of any mix of sequences and chunks, in a batch of one."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        super().__init__(cache, rows)
        self._partial = self.block_lists(1, 1, -(-rows // Q_BLOCK))
        self.block_mask = self.build(rows, lambda b, h, q, kv: self.visible(q, kv), *self._partial)

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """slots, positions: int64 [n], n <= rows. A block of queries lists every page any of its rows may see."""
        pages = self.cache.pages
        slots, positions = self.place(slots, positions)
        counts = np.zeros(self._partial[0].shape[2:], dtype=np.int32)
        lists = np.zeros(self._partial[1].shape[2:], dtype=np.int32)
        for block in range(len(counts)):
            rows = slice(block * Q_BLOCK, (block + 1) * Q_BLOCK)
            seen = []
            for slot in np.unique(slots[rows]):
                last = positions[rows][slots[rows] == slot].max()
                seen.append(pages.table[slot, : last // pages.page_size + 1])
            listed = np.concatenate(seen)
            counts[block] = len(listed)
            lists[block, : len(listed)] = listed
        self._partial[0].view(-1).copy_(torch.from_numpy(counts))
        self._partial[1][0, 0].copy_(torch.from_numpy(lists))
