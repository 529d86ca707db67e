"""A run's folder as the checks see it: everything read once, and what could not be read with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexroll.analysis.collect import IDENTITY, collect
from flexroll.analysis.drift import read_drift
from flexroll.analysis.grpo import read_grpos
from flexroll.analysis.model import Analysis, CellRow, DriftRow, GrpoRow, QualityRow
from flexroll.analysis.quality import read_qualities
from flexroll.analysis.run import read_analysis
from flexroll.errors import FlexrollError, one_line
from flexroll.schema import architecture
from flexroll.schema.cells import Cell, Job, expand, jobs
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import GrpoRecord, GrpoTarget, grpo_targets, read_grpo
from flexroll.schema.load import load_config, parse_config
from flexroll.schema.quality import QualityRecord, Target, read_quality, targets
from flexroll.schema.records import MANIFEST, Record, read_record

Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", Record, QualityRecord, GrpoRecord)


class ManifestCell(BaseModel):
    model_config = ConfigDict(extra="forbid")

    status: Literal["ok", "failed", "skipped"]
    key: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """A job's job.json, as `flexroll bench` writes it when every cell has its record."""

    model_config = ConfigDict(extra="forbid")

    job: str
    cells: dict[str, ManifestCell]


@dataclass(frozen=True)
class Held:
    """A cell of the config and its record. file: relative to the run's folder."""

    file: str
    cell: Cell
    record: Record


@dataclass
class Run:
    """results/<run>. records, manifests, qualities, trained: by file relative to it; the reason in one line where one
    cannot be read.

    analysis: None where there is none, or where it cannot be read and analysis_error says why. stacks: those that the
    run was to measure. architecture: the model's config.json, None where it is not here or no known decoder's.
    """

    results: Path
    config: Config
    stacks: list[str]
    analysis: Analysis | None
    analysis_error: str
    records: dict[str, Record | str] = field(default_factory=dict)
    manifests: dict[str, Manifest | str] = field(default_factory=dict)
    qualities: dict[str, QualityRecord | str] = field(default_factory=dict)
    trained: dict[str, GrpoRecord | str] = field(default_factory=dict)
    architecture: dict[str, Any] | None = None

    @cached_property
    def cells(self) -> list[Cell]:
        return expand(self.config, self.stacks)

    @cached_property
    def jobs(self) -> list[Job]:
        return jobs(self.cells)

    @cached_property
    def owned(self) -> set[str]:
        """Files that the config asks for, of stacks left out as well: they may be of an earlier run."""
        cells = expand(self.config)
        manifests = {f"raw/{job.name}/{MANIFEST}" for job in jobs(cells)}
        return (
            {f"raw/{cell.path}" for cell in cells}
            | manifests
            | {f"drift/{s}.json" for s in self.config.drift.stacks}
            | {target.file for target in (*targets(self.config), *grpo_targets(self.config))}
        )

    @cached_property
    def targets(self) -> list[Target]:
        """Engine configurations that the config scores."""
        return targets(self.config, self.stacks)

    @cached_property
    def quality(self) -> list[QualityRow]:
        """Of each of them, as `flexroll analyse` would read them now."""
        return read_qualities(self.config, self.results, self.stacks)

    @cached_property
    def trainings(self) -> list[GrpoTarget]:
        """GRPO runs that the config asks for."""
        return grpo_targets(self.config, self.stacks)

    @cached_property
    def grpo(self) -> list[GrpoRow]:
        """Of each form of them, as `flexroll analyse` would read them now."""
        return read_grpos(self.config, self.results, self.stacks)[0]

    @cached_property
    def rows(self) -> list[CellRow]:
        """Of every cell, as `flexroll analyse` would read them now."""
        return collect(self.config, self.results, self.stacks)[0]

    @cached_property
    def drift(self) -> list[DriftRow]:
        return read_drift(self.config, self.results, self.stacks)

    @cached_property
    def held(self) -> list[Held]:
        """Cells with a readable record that is their own."""
        found = []
        for cell in self.cells:
            record = self.records.get(f"raw/{cell.path}")
            if isinstance(record, Record) and all(
                getattr(record.cell, name) == getattr(cell, name) for name in (*IDENTITY, "session")
            ):
                found.append(Held(f"raw/{cell.path}", cell, record))
        return found

    @cached_property
    def measured(self) -> list[Held]:
        return [held for held in self.held if held.record.status == "ok"]

    def grouped(self, key: Callable[[Held], Key]) -> dict[Key, list[Held]]:
        """Measured cells by `key`, in order."""
        found: dict[Key, list[Held]] = {}
        for held in self.measured:
            found.setdefault(key(held), []).append(held)
        return found


def load(results: Path, config: Path | None = None, root: Path | None = None) -> Run:
    """Read results/<run>.

    Args:
        config: what the run was to measure; default: what analysis.json holds, with the stacks that it was told of.
        root: the project's tree, for the model's config.json; None: checks that need it do not apply.

    Raises:
        FlexrollError: there is no such folder, or neither an analysis.json that can be read nor a config.
    """
    results = Path(results)
    if not results.is_dir():
        there = sorted(p.parent.name for p in results.parent.glob("*/raw"))
        raise FlexrollError(f"{results}: no such folder of results; there are: {', '.join(there) or 'none'}")
    analysis, problem = None, ""
    try:
        analysis = read_analysis(results)
    except (FlexrollError, OSError) as failure:
        problem = "" if not (results / "analysis.json").exists() else one_line(failure)
        if config is None:
            raise FlexrollError(f"{one_line(failure)}, or give --config") from None
    wanted = load_config(config) if config is not None else parse_config(analysis.config, str(results))  # type: ignore
    run = Run(
        results=results,
        config=wanted,
        stacks=analysis.stacks if analysis is not None and config is None else wanted.stacks,
        analysis=analysis,
        analysis_error=problem,
        architecture=None if root is None else _architecture(wanted, root),
    )
    for path in sorted(results.glob("raw/*/*.json")):
        file = path.relative_to(results).as_posix()
        if path.name == MANIFEST:
            run.manifests[file] = _manifest(path)
        else:
            run.records[file] = _read(path, read_record)
    for path in sorted(results.glob("quality/*.json")):
        run.qualities[path.relative_to(results).as_posix()] = _read(path, read_quality)
    for path in sorted(results.glob("grpo/*.json")):
        run.trained[path.relative_to(results).as_posix()] = _read(path, read_grpo)
    return run


def _read(path: Path, read: Callable[[Path], Kept]) -> Kept | str:
    """The record, or in one line why it cannot be read."""
    try:
        return read(path)
    except FlexrollError as failure:
        return " ".join(str(failure).replace(f"{path}: ", "").split())
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"


def _manifest(path: Path) -> Manifest | str:
    try:
        return Manifest.model_validate(json.loads(path.read_text()))
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"
    except ValidationError as failure:
        first = failure.errors()[0]
        return f"not a manifest ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except ValueError as failure:
        return f"not complete JSON ({failure})"


def _architecture(config: Config, root: Path) -> dict[str, Any] | None:
    model = config.model
    return architecture.read_shape(
        root / (model.path if model.path and model.source != "hub" else f"models/{model.name}")
    )
