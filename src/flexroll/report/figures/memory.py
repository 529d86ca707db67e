"""Memory in use against batch: of the device, or of the process on a CPU, where the rest of the machine is not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexroll.analysis.model import Analysis, Result
from flexroll.report.figures import batch
from flexroll.report.figures.batch import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(analysis: Analysis) -> Figure | None:
    on_gpu = any(r.on_gpu for r in analysis.results)
    part = "device_total" if on_gpu else "peak_allocated"
    label = "GPU memory in use, GB" if on_gpu else "Peak resident memory, GB"

    def point(result: Result) -> Point | None:
        used = getattr(result.memory, part)
        return Point(result.batch, used / 1e9) if used else None

    return batch.draw(batch.panels(analysis, point), label, batch.rate_scale)
