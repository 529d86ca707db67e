"""How far a run is: cells done and left, an estimate of the time, the current cell and its running tok/s."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from flexroll.bench.console import say
from flexroll.bench.plan import cell_seconds, start_seconds
from flexroll.schema.cells import Cell, expand, jobs
from flexroll.schema.config import Config
from flexroll.schema.records import Round

EVERY_S = 5.0
STACKS = "FLEXROLL_STACKS"  # the workflow's: cells of others are not waited for


class Progress:
    """Of one job inside its run. The estimate is the plan's, scaled by how long this job's cells took against it.

    Args:
        raw: results/<run>/raw; a cell with a file there is done, unless it is one of `cells`.
        cells: what this job has left to measure.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        config: Config,
        raw: Path,
        cells: list[Cell],
        on_gpu: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stacks = os.environ.get(STACKS)
        every = expand(config, stacks.split(",") if stacks else None)
        mine = {cell.path for cell in cells}
        left = [cell for cell in every if cell.path in mine or not (raw / cell.path).exists()]
        self.total, self.left = len(every), {cell.path: cell_seconds(cell, on_gpu) for cell in left}
        others = [job for job in jobs(left) if job.cells[0].path not in mine]
        self.starts = sum(start_seconds(job.backend, on_gpu) for job in others)
        self.clock, self.last = clock, clock() - EVERY_S
        self.begun = self.cell_begun = clock()
        self.took = self.expected = 0.0

    def round(self, cell: Cell, done: Round) -> None:
        """A round of this cell has ended; says so, at most every few seconds."""
        if self.clock() - self.last < EVERY_S:
            return
        self.last = self.clock()
        kind = "warm-up round" if done.warmup else f"round {done.index - cell.warmup_rounds + 1} of {cell.rounds}"
        say(f"  {self.summary()}; now {cell.experiment}, batch {cell.batch}: {kind}, {done.tps:.0f} tok/s")

    def cell_done(self, cell: Cell, measured: bool) -> None:
        """Its record is written. measured: it took the time that it should."""
        expected, now = self.left.pop(cell.path, 0.0), self.clock()
        if measured:
            self.took, self.expected = self.took + now - self.cell_begun, self.expected + expected
        self.cell_begun = now

    def summary(self) -> str:
        """`12 of 33 cells done, about 6 min left`."""
        return f"{self.total - len(self.left)} of {self.total} cells done, about {_duration(self.seconds_left)} left"

    @property
    def seconds_left(self) -> float:
        scale = self.took / self.expected if self.expected else 1.0
        spent = self.clock() - self.cell_begun
        return self.starts + max(0.0, sum(self.left.values()) * scale - spent)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
