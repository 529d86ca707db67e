"""Schema and completeness: every file parses, and every cell, job and drift verification has left its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from flexroll.analysis.model import CellRow, DriftRow
from flexroll.check.registry import CELLS, RECORDS, RUN, Finding, Over, check, error, not_applicable, warning
from flexroll.check.submission import Held, Manifest, Run
from flexroll.schema.cells import Cell, Job
from flexroll.schema.records import MANIFEST

SCHEMA, COMPLETENESS = "schema", "completeness"
FOLDERS = ("raw", "drift", "quality", "grpo")
# What the report prints of a cell. The rest of a row may grow with the program.
TOLD = ("status", "n", "tps_median", "tps_best", "decode_tps_median", "memory", "prompts_sha256", "device_uuid")

RAW = Over("raw record", lambda run: run.records)
MANIFESTS = Over("manifest", lambda run: run.manifests)
JOBS = Over("job of the config", lambda run: run.jobs, lambda job: f"raw/{job.name}/{MANIFEST}")
DRIFT = Over("stack whose drift the config verifies", lambda run: run.drift, lambda row: row.file)
ENDED = Over(
    "failed or skipped cell",
    lambda run: [held for held in run.held if held.record.status != "ok"],
    lambda held: held.file,
)


def _files(run: Run) -> list[str]:
    paths = (p for folder in FOLDERS for p in (run.results / folder).rglob("*") if not p.is_dir())
    return sorted(p.relative_to(run.results).as_posix() for p in paths)


def _rows(run: Run) -> list[str]:
    if run.analysis is None:
        return [row.file for row in run.rows]
    return list(dict.fromkeys([row.file for row in (*run.rows, *run.analysis.cells)]))


@check(SCHEMA, RAW)
def record_schema(run: Run, file: str) -> Iterator[Finding]:
    """A raw record is whole and of the strict model: no unknown field, no missing one, none of another type."""
    found = run.records[file]
    if isinstance(found, str):
        yield error(found)


@check(SCHEMA, MANIFESTS)
def manifest_schema(run: Run, file: str) -> Iterator[Finding]:
    """A job.json is whole and of the strict model."""
    found = run.manifests[file]
    if isinstance(found, str):
        yield error(found)


@check(SCHEMA, DRIFT)
def drift_schema(run: Run, row: DriftRow) -> Iterator[Finding]:
    """A drift record is whole and tells what the report reads of it."""
    if row.status == "unreadable":
        yield error(row.reason.removeprefix(f"{row.file}: "))
    elif row.status == "missing":
        yield not_applicable("there is none to read")


@check(SCHEMA, RUN)
def analysis_schema(run: Run, _: Run) -> Iterator[Finding]:
    """analysis.json is whole and of the strict model."""
    if run.analysis_error:
        yield error(run.analysis_error.removeprefix(f"{run.results / 'analysis.json'}: "))
    elif run.analysis is None:
        yield not_applicable("there is none; the config is that of --config")


@check(COMPLETENESS, CELLS)
def cell_recorded(run: Run, row: CellRow) -> Iterator[Finding]:
    """Every cell of the config has a record, and the record is that cell's."""
    if row.status == "missing":
        yield error("no record of this cell")
    elif isinstance(run.records.get(row.file), str):
        yield not_applicable("a record that cannot be read does not tell whose it is")
    elif row.status == "unreadable":
        yield error(row.reason.removeprefix(f"{row.file}: "))


@check(COMPLETENESS, RECORDS)
def settings_as_configured(run: Run, held: Held) -> Iterator[Finding]:
    """A record was measured under the settings that the config asks for."""
    asked, had = _settings(held.cell), _settings(held.record.cell)
    differ = [name for name in asked if name in had and asked[name] != had[name]]  # an option may have been added since
    if differ:
        yield error("; ".join(f"{name} {had[name]}, the config asks for {asked[name]}" for name in differ))


def _settings(cell: Cell) -> dict[str, Any]:
    values = cell.model_dump(mode="json")
    options = values.pop("option_values")
    return values | {f"option {name}": value for name, value in options.items()}


@check(COMPLETENESS, JOBS)
def job_manifest(run: Run, job: Job) -> Iterator[Finding]:
    """Every job has a manifest of exactly its cells, with each record's sha256, status and key."""
    found = run.manifests.get(f"raw/{job.name}/{MANIFEST}")
    if found is None:
        yield error("no manifest: the job did not end, or its records came from elsewhere")
        return
    if isinstance(found, str):
        yield not_applicable("the manifest cannot be read")
        return
    if found.job != job.name:
        yield error(f"is the manifest of job {found.job}")
    wanted = {cell.file for cell in job.cells}
    for name in sorted(found.cells.keys() - wanted):
        yield error(f"lists {name}, which is no cell of this job")
    for name in sorted(wanted - found.cells.keys()):
        yield error(f"does not list {name}")
    for name in sorted(wanted & found.cells.keys()):
        yield from _listed(run, found, f"raw/{job.name}/{name}", name)


def _listed(run: Run, manifest: Manifest, file: str, name: str) -> Iterator[Finding]:
    entry, record = manifest.cells[name], run.records.get(file)
    try:
        digest = hashlib.sha256((run.results / file).read_bytes()).hexdigest()
    except OSError as failure:
        yield error(f"the manifest lists it, and it cannot be read: {failure.strerror}", file)
        return
    if digest != entry.sha256:
        yield error(f"sha256 {digest[:12]}, its manifest has {entry.sha256[:12]}: changed after the job ended", file)
    elif record is not None and not isinstance(record, str):
        for part in ("status", "key"):
            if getattr(record, part) != getattr(entry, part):
                yield error(f"{part} {getattr(record, part)}, its manifest has {getattr(entry, part)}", file)


@check(COMPLETENESS, Over("file in raw/, drift/ and quality/", _files))
def nothing_unlisted(run: Run, file: str) -> Iterator[Finding]:
    """raw/, drift/ and quality/ hold nothing but what the config asks for: what no table shows may be left out."""
    if file not in run.owned:
        yield error("belongs to no cell, job or stack of the config")


@check(COMPLETENESS, ENDED)
def reason_given(run: Run, held: Held) -> Iterator[Finding]:
    """A cell that failed or was skipped says why."""
    if not held.record.reason.strip():
        yield error(f"{held.record.status} without a reason")


@check(COMPLETENESS, DRIFT)
def drift_recorded(run: Run, row: DriftRow) -> Iterator[Finding]:
    """Every stack whose drift the config verifies has its record."""
    if row.status == "missing":
        yield error("no drift record of this stack")


@check(COMPLETENESS, RUN)
def no_stack_left_out(run: Run, _: Run) -> Iterator[Finding]:
    """The run measured every stack of its matrix."""
    left = [stack for stack in run.config.stacks if stack not in run.stacks]
    if left:
        yield warning(f"left out on request: {', '.join(left)}")


@check(COMPLETENESS, Over("cell of the config or of analysis.json", _rows))
def analysis_current(run: Run, file: str) -> Iterator[Finding]:
    """analysis.json, which every table is made from, says what the raw records say now."""
    if run.analysis is None:
        yield not_applicable("there is no analysis.json that can be read")
        return
    now = next((row for row in run.rows if row.file == file), None)
    then = next((row for row in run.analysis.cells if row.file == file), None)
    if now is None or then is None:
        yield error("is in analysis.json but not in the config" if now is None else "is not in analysis.json")
        return
    differ = [name for name in TOLD if not _same(getattr(now, name), getattr(then, name))]
    if differ:
        yield error(f"analysis.json tells another {', '.join(differ)}; run `flexroll analyse` again")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b
