"""`flexroll bench` and `flexroll warmup`: one job, from its inputs to one record a cell and a manifest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal

from flexroll.bench.availability import cannot_run, note_skip
from flexroll.bench.console import say
from flexroll.bench.environment import describe
from flexroll.bench.inputs import Inputs, find_job, read_inputs
from flexroll.bench.isolate import worker_env
from flexroll.bench.lease import device_lease, first_gpu
from flexroll.bench.process import Stopped
from flexroll.bench.progress import Progress
from flexroll.bench.supervisor import CellResult, Supervisor
from flexroll.bench.task import Task, engine_spec
from flexroll.errors import FlexrollError
from flexroll.images.here import bill_of_materials
from flexroll.provenance import cell_key, device_class, variant
from flexroll.schema.cells import Cell, Job, remark
from flexroll.schema.config import Config
from flexroll.schema.records import MANIFEST, Record, Round, read_record, write_json, write_record


def bench(
    config: Config, name: str, *, work: Path, raw: Path, out: Path, root: Path, stack: str, backend: str | None = None
) -> None:
    """Measure every cell of a job that has no good record yet, and write the manifest.

    A record that is ok and has the cell's key is kept, so that an interrupted job goes on where it stopped. A failing
    cell is a result: the call succeeds when each cell has a record.

    Args:
        raw: results/<run>/raw. out: the manifest. stack: this interpreter's stack.
        backend: another backend class than the job's, as `file.py:Class`; for tests.
    Raises:
        FlexrollError: unknown job, or an input is missing. Stopped: on SIGTERM or SIGINT.
    """
    job = find_job(config, name)
    inputs = read_inputs(work, job, root)
    device = device_class()
    keys = {cell.file: cell_key(root, cell, device, inputs.hashes) for cell in job.cells}
    folder = raw / job.name
    log = raw.parent / "logs" / f"{job.name}.log"
    with device_lease(root, device, _gpu_of_session(raw, job.session)):
        cells = [c for c in job.cells if not is_measured(folder / c.file, keys[c.file])]
        kept = len(job.cells) - len(cells)
        say(f"{job.name}: {len(cells)} cells to measure" + (f", {kept} kept" if kept else ""))
        environment = describe(root, stack, job.backend)
        progress = Progress(config, raw, cells, device != "cpu")
        _keep_bill(root, raw.parent / "sbom")

        def report(index: int, result: CellResult) -> None:
            cell = cells[index]
            record = Record(
                cell=cell,
                status=result.status,  # type: ignore[arg-type]
                reason=result.reason,
                note=remark(cell),
                rounds=result.rounds,
                memory=result.memory,
                environment=environment,
                samples=result.samples,
                key=keys[cell.file],
                prompts_sha256=inputs.prompts_sha256,
                prompt_tokens=result.prompt_tokens,
                start_s=result.start_s,
                start_parts=result.start_parts,
                log=f"logs/{log.name}",
            )
            write_record(folder / cell.file, record)
            progress.cell_done(cell, record.status == "ok")
            say(f"  {cell.file}: {_outcome(record)}; {progress.summary()}")

        def watch(index: int, done: Round) -> None:
            progress.round(cells[index], done)

        env = worker_env(root, job.stack, device)
        _run("bench", config, job, cells, inputs, work, log, env, report, backend, watch)
    write_manifest(folder, job, keys, out)


def warmup(config: Config, name: str, *, work: Path, out: Path, root: Path, backend: str | None = None) -> None:
    """Start a job's engine and run each of its cells briefly, so that compilers fill their caches.

    Writes {engine, status, reason, seconds}. A failure is written down, not raised: the measurement meets it again.
    """
    job = find_job(config, name)
    inputs = read_inputs(work, job, root)
    device = device_class()
    results: list[CellResult] = []
    begun = time.monotonic()
    with device_lease(root, device):
        log = out.with_suffix(".log")
        env = worker_env(root, job.stack, device)
        _run(
            "warmup", config, job, job.cells, inputs, work, log, env, lambda _, result: results.append(result), backend
        )
    bad = next((r for r in results if r.status != "ok"), None)
    summary = {
        "engine": job.engine,
        "status": bad.status if bad else "ok",
        "reason": bad.reason if bad else "",
        "seconds": round(time.monotonic() - begun, 1),
    }
    write_json(out, json.dumps(summary, indent=1) + "\n")
    say(f"warm-up of {job.engine}: {summary['status']} {summary['reason']}".rstrip())


def _gpu_of_session(raw: Path, session: int) -> str | None:
    """UUID of the GPU on which the session's first cells were measured; ratios pair within a session on one card."""
    cells = (path for path in sorted(raw.glob(f"*-s{session}/*.json")) if path.name != MANIFEST)
    return first_gpu(cells, read_record)


def _keep_bill(root: Path, folder: Path) -> None:
    """Put the image's bill of materials beside the results: the image may be gone before they are."""
    bill = bill_of_materials(root)
    if bill is not None:
        write_json(folder / bill.name, bill.read_text())


def is_measured(path: Path, key: str) -> bool:
    """Whether a good record of this very cell is there."""
    try:
        record = read_record(path)
    except FlexrollError:
        return False
    return record.status == "ok" and record.key == key


def write_manifest(folder: Path, job: Job, keys: dict[str, str], out: Path) -> None:
    """{job, cells: {file: {status, key, sha256}}}, written last: it says that every cell has its record."""
    cells = {}
    for cell in job.cells:
        path = folder / cell.file
        record = read_record(path)
        cells[cell.file] = {
            "status": record.status,
            "key": keys[cell.file],
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    write_json(out, json.dumps({"job": job.name, "cells": cells}, indent=1) + "\n")


def _run(
    mode: Literal["bench", "warmup"],
    config: Config,
    job: Job,
    cells: list[Cell],
    inputs: Inputs,
    work: Path,
    log: Path,
    env: dict[str, str],
    report: Callable[[int, CellResult], None],
    backend: str | None,
    watch: Callable[[int, Round], None] = lambda index, done: None,
) -> None:
    """Run `cells` of a job under a supervisor, or report why none can run; the engine is sized for all of its cells."""
    if not cells:
        return
    device = variant(device_class())
    spec = engine_spec(job, cells[0], device, inputs.model, inputs.adapter, inputs.merged, inputs.shard, inputs.replay)
    task = Task(mode=mode, backend=backend or job.backend, spec=spec, cells=cells, prompts=inputs.prompts)
    if (reason := cannot_run(task.backend, spec)) is not None:
        note_skip(log, reason)
        for index in range(len(cells)):
            report(index, CellResult(status="skipped", reason=reason))
        return
    supervisor = Supervisor(task, work / "jobs" / f"{mode}-{job.name}.json", log, config.limits, env, report, watch)
    try:
        supervisor.run()
    except Stopped:
        say(f"{job.name}: stopped; what was measured is kept, the same command goes on from there")
        raise


def _outcome(record: Record) -> str:
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    speeds = [r.tps for r in record.measured]
    return f"ok, {median(speeds):.1f} tok/s (median of {len(speeds)} rounds)"
