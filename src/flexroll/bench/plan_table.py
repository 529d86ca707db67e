"""`flexroll plan`'s table, on a terminal or as plain text."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from flexroll.bench.plan import Plan
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import Job
from flexroll.schema.config import Config

# Steps that take time, in the table's last lines.
TOLD = ("quantise", "autotune", "warmup", "bench", "quality_quantise", "quality_reference", "quality", "drift", "grpo")


def show(config: Config, plan: Plan, console: Console | None = None) -> None:
    """Print one line an engine configuration (all its sessions), then the totals."""
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if plan.jobs:
        console.print(_table(config, plan))
        hours = f"{plan.hours:.1f} hours" if plan.hours >= 1 else f"{plan.hours * 60:.0f} minutes"
        console.print(f"{len(plan.cells)} cells in {len(plan.jobs)} jobs; about {hours}, warm-up and scoring included.")
    parts = [f"{count} {rule}" for rule, count in plan.steps.items() if rule in TOLD]
    console.print(f"{sum(plan.steps.values())} steps of the workflow, among them {', '.join(parts)}.")
    shards = f", NF4 shard {_gb(plan.shard_gb)}" if plan.shard_gb else ""
    console.print(
        f"Download: {_gb(plan.download_gb)} of weights. Disk: {_gb(plan.disk_gb)} (copies{shards}, missing stacks)."
    )
    if plan.jobs:
        console.print(f"Device memory: {_gb(plan.device_gb)} (weights, and KV of the largest batch at max_model_len).")


def _table(config: Config, plan: Plan) -> Table:
    table = Table(title=f"{config.run}: {config.title or config.model.name}", title_justify="left")
    for name in ("stack", "backend", "adapter", "option", "experiments", "batches"):
        table.add_column(name, overflow="fold")
    for name in ("sessions", "cells", "minutes"):
        table.add_column(name, justify="right")
    engines: dict[str, list[Job]] = {}
    for job in plan.jobs:
        engines.setdefault(job.engine, []).append(job)
    for group in engines.values():
        cells = [cell for job in group for cell in job.cells]
        minutes = sum(plan.job_hours[job.name] for job in group) * 60
        table.add_row(
            cells[0].stack,
            BACKENDS[cells[0].backend].label,
            cells[0].adapter,
            cells[0].option,
            ", ".join(dict.fromkeys(c.experiment for c in cells)),
            ", ".join(str(b) for b in sorted({c.batch for c in cells})),
            str(len(group)),
            str(len(cells)),
            f"{minutes:.1f}",
        )
    return table


def _gb(value: float | None) -> str:
    if value is None:
        return "unknown until the checkpoint is here"
    return f"{value:.2f} GB" if value < 10 else f"{value:.0f} GB"
