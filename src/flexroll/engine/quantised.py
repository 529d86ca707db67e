"""Linear weights in NF4 (Dettmers et al., arXiv 2305.14314), packed and unpacked by bitsandbytes.

Two values a byte, and one fp32 scale (absmax) for every 64 of them. Each checkpoint matrix is quantised by itself, as
transformers does it, so that both hold the same bytes; q, k and v, or gate and up, then lie behind one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from flexroll.errors import FlexrollError

BLOCK = 64  # values that share a scale: the library's default, and that of checkpoints on the hub
MARK = ".weight."  # in the names of what a packed checkpoint holds beside each packed matrix


def library() -> ModuleType:
    """bitsandbytes.functional. Raises FlexrollError where the package is missing."""
    try:
        import bitsandbytes.functional
    except ImportError:
        raise FlexrollError("4-bit weights need bitsandbytes, which is not installed here; drop four_bit") from None
    return bitsandbytes.functional


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] in NF4: packed uint8 [rows * columns / 2, 1], absmax fp32 [rows * columns / 64]."""

    rows: int
    columns: int
    packed: torch.Tensor
    absmax: torch.Tensor

    def unpacked(self, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """The matrix [rows, columns]; with `out`, a flat buffer that is large enough, in its first elements."""
        functional = library()
        state = functional.QuantState(
            absmax=self.absmax, shape=(self.rows, self.columns), blocksize=BLOCK, quant_type="nf4", dtype=dtype
        )
        if out is not None:
            out = out[: self.rows * self.columns].view(self.rows, self.columns)
        return functional.dequantize_4bit(self.packed, state, out=out)


def pack(matrix: torch.Tensor) -> Packed:
    """Quantise a matrix [rows, columns] of bf16, fp16 or fp32 where it lies."""
    if matrix.numel() % 2:
        raise FlexrollError(f"a weight of {tuple(matrix.shape)} has an odd number of values and cannot be 4-bit")
    packed, state = library().quantize_4bit(
        matrix.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
    )
    return Packed(*matrix.shape, packed, state.absmax)


class QuantisedWeight:
    """A fused weight [out, in] whose parts are in NF4, or partly so: parts that were left dense stay as they are.

    parts: from top to bottom. Neighbours that are packed become one where their blocks allow it, so that a whole
    fused weight is unpacked by one launch.
    """

    def __init__(self, parts: Sequence[Packed | torch.Tensor]) -> None:
        self.runs: list[Packed | torch.Tensor] = []
        for part in parts:
            last = self.runs[-1] if self.runs else None
            if isinstance(part, Packed) and isinstance(last, Packed) and last.rows * last.columns % BLOCK == 0:
                self.runs[-1] = Packed(
                    last.rows + part.rows,
                    part.columns,
                    torch.cat((last.packed, part.packed)),
                    torch.cat((last.absmax, part.absmax)),
                )
            else:
                self.runs.append(part)
        self.scratch: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        run = self.runs[0]
        return run.columns if isinstance(run, Packed) else run.shape[1]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is held: packed bytes, scales, and the dense parts."""
        return [t for run in self.runs for t in ((run.packed, run.absmax) if isinstance(run, Packed) else (run,))]

    @property
    def scratch_size(self) -> int:
        """Values of the largest run that has to be unpacked."""
        return max((run.rows * run.columns for run in self.runs if isinstance(run, Packed)), default=0)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] @ weight.T + bias -> [n, out], in x's dtype, with the weight unpacked for this one product.

        On a GPU it is unpacked into `scratch`, which all layers share: work on one stream runs in order, and a
        captured graph neither allocates a matrix a layer nor depends on one that was freed.
        """
        outputs, start = [], 0
        for run in self.runs:
            rows = run.rows if isinstance(run, Packed) else len(run)
            weight = run.unpacked(x.dtype, self.scratch) if isinstance(run, Packed) else run
            outputs.append(F.linear(x, weight, None if bias is None else bias[start : start + rows]))
            start += rows
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def quantise(fused: torch.Tensor, rows: Sequence[int]) -> QuantisedWeight:
    """A dense fused weight [out, in] in NF4, part by part; rows: of each part, from top to bottom."""
    return QuantisedWeight([pack(part) for part in fused.split(list(rows))])


def share_scratch(weights: dict[str, QuantisedWeight], dtype: torch.dtype, device: torch.device | str) -> None:
    """Give all of them one buffer to unpack into. On a CPU the library has no kernel that writes to a given one."""
    size = max((weight.scratch_size for weight in weights.values()), default=0)
    if size and torch.device(device).type == "cuda":
        scratch = torch.empty(size, dtype=dtype, device=device)
        for weight in weights.values():
            weight.scratch = scratch


def is_state(name: str) -> bool:
    """Whether a checkpoint tensor of that name says how the packed matrix beside it is scaled."""
    return MARK in name


def from_checkpoint(
    folder: Path, name: str, packed: torch.Tensor, states: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> Packed:
    """A packed matrix as transformers saves it: `name` uint8, and its states by what follows `name` and a dot.

    Scales that are themselves quantised (double quantisation) are unpacked here.

    Raises:
        FlexrollError: a state is missing, another quantisation than NF4 in blocks of 64, or a wrong shape.
    """
    state: Any = None
    try:
        state = library().QuantState.from_dict(dict(states), device=packed.device)
        absmax = state.absmax
        if state.nested:
            absmax = library().dequantize_blockwise(absmax, state.state2) + state.offset
    except (ValueError, KeyError, AssertionError, TypeError):
        raise FlexrollError(f"{folder}: '{name}' lacks its scales; write the checkpoint again") from None
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        raise FlexrollError(
            f"{folder}: '{name}' is {state.quant_type} in blocks of {state.blocksize}; only nf4 of {BLOCK} can be run"
        )
    wrong = state.shape is None or tuple(state.shape) != shape or 2 * packed.numel() != shape[0] * shape[1]
    if wrong or absmax.numel() != -(-shape[0] * shape[1] // BLOCK):
        raise FlexrollError(f"{folder}: '{name}' holds {state.shape}, config.json asks for {shape}")
    return Packed(*shape, packed.reshape(-1, 1), absmax.float())
