"""Heat map of a kernel sweep: block sizes down, warps and stages across, tok/s over the default's in short rollouts."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from flexroll.report.figures.style import INK, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 0.36  # inches


def draw(
    rows: dict[str, list[Any]],
    columns: dict[str, list[Any]],
    gains: dict[tuple[Any, ...], float],
    infeasible: set[tuple[Any, ...]],
    winner: tuple[Any, ...] | None,
    title: str,
) -> Figure | None:
    """The map, or None where nothing was measured.

    gains: 1.0 is the default's tok/s; by the values of the axes, rows' first. Infeasible points are hatched, what was
    not measured is left blank, the winner is framed.
    """
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    if not gains:
        return None
    down, across = list(product(*rows.values())), list(product(*columns.values()))
    percent = np.full((len(down), len(across)), np.nan)
    for (i, row), (j, column) in product(enumerate(down), enumerate(across)):
        if row + column in gains:
            percent[i, j] = 100 * (gains[row + column] - 1)
    most = max(1.0, float(np.nanmax(np.abs(percent))))
    figure = Figure(figsize=(3.0 + CELL * 1.5 * len(across), 1.6 + CELL * len(down)), layout="constrained")
    ax = figure.subplots()
    image = ax.imshow(percent, cmap="PuOr_r", norm=TwoSlopeNorm(0, -most, most), aspect="auto")
    for (i, row), (j, column) in product(enumerate(down), enumerate(across)):
        box: dict[str, Any] = {"fill": False, "linewidth": 0}
        if row + column in infeasible:
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, hatch="////", edgecolor=MUTED, **box))
        elif row + column in gains:
            strong = abs(percent[i, j]) > 0.6 * most
            ax.text(j, i, f"{percent[i, j]:+.1f}", ha="center", va="center", fontsize=7, color=PAPER if strong else INK)
        if row + column == winner:
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2))
    ax.set_xticks(range(len(across)), [" ".join(map(_said, c)) for c in across], rotation=90 if len(across) > 6 else 0)
    ax.set_yticks(range(len(down)), [" ".join(map(_said, r)) for r in down])
    ax.set_xlabel(", ".join(columns))
    ax.set_ylabel(", ".join(rows))
    ax.grid(False)
    ax.set_title(title)
    figure.colorbar(image, ax=ax, label="tok/s over the default's, %")
    return figure


def _said(value: Any) -> str:
    return "auto" if value is None else str(value)
