"""Merging every module of an adapter in one launch: out = round(fp32(base) + scale * B @ A), at memory speed.

A grouped launch, as grouped matrix products have it: a table on the device holds pointers and sizes of every module,
one program makes one tile of one of them. A tile's product, sum and rounding stay in registers, so the weights are read
once and written once and nothing of their size is allocated; hundreds of launches from Python become one.

Importing this module needs Triton. Under `TRITON_INTERPRET=1` the kernel runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from flexroll.errors import FlexrollError

PRECISIONS = ("ieee", "bf16x6")
# Warps a program has, by the way it makes the product: as few registers a thread as let several programs share a core.
WARPS = {"ieee": 8, "bf16x6": 4, "exact": 8}
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# int64 values a module takes in the table; the kernel reads them in this order (see _row).
FIELDS = tl.constexpr(11)
# Triton's interpreter truncates where a GPU rounds to bfloat16, and multiplies the bits of bfloat16 operands.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@dataclass(frozen=True)
class Module:
    """base, out: [rows, cols] of one dtype; a: [rank, cols]; b: [rows, rank]. Each row is contiguous."""

    base: torch.Tensor
    out: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Modules that one compiled kernel serves. rows: [n_modules, FIELDS] int64; owner: module of each tile, int32."""

    rows: torch.Tensor
    owner: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    rank: int
    aligned: bool


@dataclass(frozen=True)
class MergeTable:
    """What a launch needs. It holds addresses, not tensors: build it anew when any tensor moves or changes shape."""

    groups: tuple[Group, ...]
    scale: float
    tile: tuple[int, int]


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can merge weights of `dtype` on `device`: a GPU, or any device under Triton's interpreter."""
    return dtype in DTYPES and (device.type == "cuda" or INTERPRETED.value)


def readable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The adapter's matrix itself where the kernel can read it in place, else a copy that it can read."""
    if tensor.dtype in DTYPES and tensor.stride(-1) == 1 and tensor.device == device:
        return tensor
    return tensor.to(device, tensor.dtype if tensor.dtype in DTYPES else torch.float32).contiguous()


def build_table(modules: Sequence[Module], scale: float, tile: tuple[int, int] = (64, 128)) -> MergeTable:
    """Table for one launch over `modules`. tile: rows and columns a program makes, powers of two, at least 16.

    Modules that share dtypes and rank form a group; a launch runs one kernel a group, so mostly one.

    Raises:
        FlexrollError: shapes that do not fit, or weights that the kernel cannot address.
    """
    grouped: dict[tuple, list[Module]] = {}
    for m in modules:
        _check(m)
        grouped.setdefault((m.base.dtype, m.a.dtype, m.b.dtype, m.b.shape[1]), []).append(m)
    groups = []
    for (*dtypes, rank), members in grouped.items():
        rows, owner, first = [], [], 0
        for index, m in enumerate(members):
            rows.append(_row(m, first))
            n_tiles = triton.cdiv(m.out.shape[0], tile[0]) * triton.cdiv(m.out.shape[1], tile[1])
            owner.append(torch.full((n_tiles,), index, dtype=torch.int32))
            first += n_tiles
        device = members[0].out.device
        groups.append(
            Group(
                rows=torch.tensor(rows, dtype=torch.int64).to(device),
                owner=torch.cat(owner).to(device),
                dtypes=tuple(dtypes),
                rank=rank,
                aligned=all(map(_aligned, members)),
            )
        )
    return MergeTable(tuple(groups), float(scale), tile)


def launch(table: MergeTable, precision: str = "bf16x6", num_warps: int | None = None) -> None:
    """Merge every module of the table, on the current stream; returns before the GPU has finished.

    precision: how B @ A is made where A or B is wider than 16 bits; no way uses tf32.
        ieee: fp32 products and sums on the ordinary cores, with the guarantees of a plain fp32 matrix product.
        bf16x6: on tensor cores. Each operand is split into three bfloat16 parts, which hold all 24 bits of an fp32
            number, and the six largest of the nine part products are summed in fp32, small ones first; the three left
            out are below 2^-24 of |b| |a|, so the error is that of an fp32 sum (Henry et al., arXiv 1904.06376).
    Where A and B are both bfloat16, or both fp16, their products are exact in fp32 and are summed in fp32 on tensor
    cores, whatever `precision` says.

    Raises:
        FlexrollError: unknown precision.
    """
    if precision not in PRECISIONS:
        raise FlexrollError(f"unknown precision '{precision}' of the merge; there are {' and '.join(PRECISIONS)}")
    for group in table.groups:
        weight, a, b = group.dtypes
        way = "exact" if a == b and a.itemsize == 2 else precision
        widest = 16 if way == "ieee" else 32  # a longer chunk of fp32 operands would not stay in registers
        with torch.cuda.device(group.rows.device) if group.rows.is_cuda else nullcontext():
            _merge_kernel[(group.owner.numel(),)](
                group.rows,
                group.owner,
                table.scale,
                WEIGHT=DTYPES[weight],
                A_TYPE=DTYPES[a],
                B_TYPE=DTYPES[b],
                RANK=group.rank,
                CHUNK=min(max(triton.next_power_of_2(group.rank), 16), widest),
                ROWS=table.tile[0],
                COLS=table.tile[1],
                WAY=way,
                ALIGNED=group.aligned,
                num_warps=num_warps or WARPS[way],
            )


def _check(m: Module) -> None:
    rows, cols = m.out.shape
    if m.base.shape != m.out.shape or m.b.shape[0] != rows or m.a.shape != (m.b.shape[1], cols):
        raise FlexrollError(
            f"a weight of {rows} x {cols} cannot take an update by B {tuple(m.b.shape)} and A {tuple(m.a.shape)}"
        )
    if m.base.dtype != m.out.dtype or m.base.dtype not in DTYPES:
        raise FlexrollError(f"weights of {m.base.dtype} cannot be merged into {m.out.dtype} by the kernel")
    if any(t.stride(-1) != 1 or t.device != m.out.device for t in (m.base, m.out, m.a, m.b)):
        raise FlexrollError("the merge kernel needs contiguous rows, all on one device")


def _row(m: Module, first_tile: int) -> list[int]:
    pointers = [t.data_ptr() for t in (m.base, m.out, m.a, m.b)]
    strides = [t.stride(0) for t in (m.base, m.out, m.a, m.b)]
    return [*pointers, *strides, *m.out.shape, first_tile]


def _aligned(m: Module) -> bool:
    """Whether every row of every operand starts at 16 bytes, so that a thread can move 16 bytes at a time."""
    tensors = (m.base, m.out, m.a, m.b)
    return m.out.shape[1] % 8 == 0 and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in tensors)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """fp32 -> dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def _split(x):
    """Three bfloat16 numbers whose sum is x (fp32), largest first; exact but for underflow."""
    high = _rounded(x, tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = _rounded(rest, tl.bfloat16)
    return high, middle, _rounded(rest - middle.to(tl.float32), tl.bfloat16)


@triton.jit
def _dot(b, a, acc):
    """acc + b @ a of 16-bit operands: exact products, sums in fp32."""
    if INTERPRETED:
        b, a = b.to(tl.float32), a.to(tl.float32)
    return tl.dot(b, a, acc, input_precision="ieee")


@triton.jit
def _field(row, index: tl.constexpr, divisor: tl.constexpr):
    return tl.multiple_of(tl.load(row + index), divisor)


@triton.jit
def _load_b(b, stride, row, n_rows, start: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    k = start + tl.arange(0, CHUNK)
    mask = (row < n_rows)[:, None] & (k < RANK)[None, :]
    return tl.load(b + row[:, None] * stride + k[None, :], mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_a(a, stride, col, n_cols, start: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    k = start + tl.arange(0, CHUNK)
    mask = (k < RANK)[:, None] & (col < n_cols)[None, :]
    return tl.load(a + k[:, None] * stride + col[None, :], mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _merge_kernel(
    table,
    owner,
    scale,
    WEIGHT: tl.constexpr,
    A_TYPE: tl.constexpr,
    B_TYPE: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WAY: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    tile = tl.program_id(0)
    fields = table + tl.load(owner + tile) * FIELDS
    BYTES: tl.constexpr = 16 if ALIGNED else 1
    STEP: tl.constexpr = 8 if ALIGNED else 1
    # On the pointers: a hint on the integers that become pointers is lost, and with it the 16-byte accesses.
    base = tl.multiple_of(tl.load(fields).to(tl.pointer_type(WEIGHT)), BYTES)
    out = tl.multiple_of(tl.load(fields + 1).to(tl.pointer_type(WEIGHT)), BYTES)
    a = tl.multiple_of(tl.load(fields + 2).to(tl.pointer_type(A_TYPE)), BYTES)
    b = tl.multiple_of(tl.load(fields + 3).to(tl.pointer_type(B_TYPE)), BYTES)
    base_stride, out_stride = _field(fields, 4, STEP), _field(fields, 5, STEP)
    a_stride, b_stride = _field(fields, 6, STEP), _field(fields, 7, STEP)
    n_rows, n_cols = tl.load(fields + 8).to(tl.int32), _field(fields, 9, STEP).to(tl.int32)
    # Neighbouring programs make neighbouring tiles of a row; A and B of a module stay in the L2 cache meanwhile.
    tile -= tl.load(fields + 10).to(tl.int32)
    across = tl.cdiv(n_cols, COLS)
    top, left = (tile // across) * ROWS, (tile % across) * COLS
    y, x = tl.arange(0, ROWS), tl.arange(0, COLS)
    row, col = top + y, left + x
    inside = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    # One 64-bit offset a tile: matrices may have over 2^31 bytes, tiles have not.
    base += top.to(tl.int64) * base_stride + left
    out += top.to(tl.int64) * out_stride + left
    base_stride, out_stride = base_stride.to(tl.int32), out_stride.to(tl.int32)
    # Asked for first: the product is made while the weights are on their way.
    weight = tl.load(
        base + y[:, None] * base_stride + x[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )

    acc = tl.zeros((ROWS, COLS), tl.float32)
    if WAY == "bf16x6":
        for k in tl.static_range(0, RANK, CHUNK):  # what the second loop adds is larger, so it comes last
            b_high, b_middle, b_low = _split(_load_b(b, b_stride, row, n_rows, k, RANK, CHUNK).to(tl.float32))
            a_high, a_middle, a_low = _split(_load_a(a, a_stride, col, n_cols, k, RANK, CHUNK).to(tl.float32))
            acc = _dot(b_low, a_high, acc)
            acc = _dot(b_high, a_low, acc)
            acc = _dot(b_middle, a_middle, acc)
            acc = _dot(b_middle, a_high, acc)
            acc = _dot(b_high, a_middle, acc)
    for k in tl.static_range(0, RANK, CHUNK):
        b_part = _load_b(b, b_stride, row, n_rows, k, RANK, CHUNK)
        a_part = _load_a(a, a_stride, col, n_cols, k, RANK, CHUNK)
        if WAY == "ieee":
            acc = tl.dot(b_part.to(tl.float32), a_part.to(tl.float32), acc, input_precision="ieee")
        elif WAY == "bf16x6":
            b_part, a_part = b_part.to(tl.float32), a_part.to(tl.float32)
            acc = _dot(_rounded(b_part, tl.bfloat16), _rounded(a_part, tl.bfloat16), acc)
        else:
            acc = _dot(b_part, a_part, acc)
    merged = _rounded(weight.to(tl.float32) + scale * acc, WEIGHT)
    tl.store(out + y[:, None] * out_stride + x[None, :], merged, mask=inside, eviction_policy="evict_first")
