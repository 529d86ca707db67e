"""What a sweep varies: points of a grid, each a set of engine arguments. Imports no torch.

- prefill: BLOCK_M 16, 32, 64, 128; BLOCK_N 32, 64, 128; num_stages 1, 3, 4, 5; num_warps 2, 4, 8. These 144 are the
  forward grid of attention-gym's flex_grid_sweep.py, which is Inductor's exhaustive search space.
- decode: BLOCK_N 32, 64, 128; SPLIT_KV as torch chooses, 1, 2, 4; PRESCALE_QK; num_stages 1, 2, 3; num_warps 2, 4, 8:
  216 points.
- engine: page_size and max_prefill_tokens, which a CPU has as well.

A kernel reads keys in whole parts of a page: with pages of 64 tokens, a third of either kernel grid cannot run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from flexroll.errors import FlexrollError

Kind = Literal["prefill", "decode", "engine"]
Axes = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Grid:
    """rows, columns: the axes down and across in the heat map; all of them together span the grid."""

    kind: Kind
    rows: Axes
    columns: Axes

    @property
    def axes(self) -> Axes:
        return self.rows | self.columns

    def points(self) -> list[Point]:
        return [Point(self.kind, dict(zip(self.axes, v, strict=True))) for v in product(*self.axes.values())]

    def only(self, kept: Mapping[str, Sequence[str]]) -> Grid:
        """The part of it with these values of these axes, as text. Raises FlexrollError for an unknown one."""
        axes = {}
        for name, texts in kept.items():
            if name not in self.axes:
                raise FlexrollError(f"--only {name}: the {self.kind} grid has {', '.join(self.axes)}")
            known = {str(value): value for value in self.axes[name]}
            for text in texts:
                if text not in known:
                    raise FlexrollError(f"--only {name}={text}: the grid has {', '.join(known)}")
            axes[name] = tuple(known[text] for text in texts)
        return Grid(
            self.kind,
            *({name: axes.get(name, values) for name, values in a.items()} for a in (self.rows, self.columns)),
        )


@dataclass(frozen=True)
class Point:
    """values: one of each axis; None leaves it to torch or the engine. {} is the default, which others are held to."""

    kind: Kind
    values: dict[str, Any] = field(hash=False)

    @property
    def id(self) -> str:
        return json.dumps(self.values) if self.values else "default"

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if value is not None}

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of Engine besides those that all points share."""
        if self.kind == "engine" or not self.options:
            return self.options
        return {f"{self.kind}_kernel_options": self.options}

    def misfit(self, page_size: int) -> str | None:
        """Why it cannot run with pages of so many tokens, known without trying."""
        block = self.options.get("BLOCK_N", 1)
        return f"BLOCK_N {block} does not divide a page of {page_size} tokens" if page_size % block else None


GRIDS = {
    "prefill": Grid(
        "prefill",
        {"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (32, 64, 128)},
        {"num_warps": (2, 4, 8), "num_stages": (1, 3, 4, 5)},
    ),
    "decode": Grid(
        "decode",
        {"BLOCK_N": (32, 64, 128), "SPLIT_KV": (None, 1, 2, 4), "PRESCALE_QK": (False, True)},
        {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    ),
    "engine": Grid("engine", {"page_size": (16, 32, 64, 128)}, {"max_prefill_tokens": (512, 1024, 2048, 4096, 8192)}),
}
