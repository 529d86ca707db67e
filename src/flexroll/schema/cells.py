"""The matrix: a config expands to cells, cells group into jobs.

A cell is one measurement: experiment x backend x adapter x batch x option x sampling x stack x session, one JSON file.
A job is one process: all cells that share an engine configuration and a session, so that an engine starts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from pydantic import BaseModel, ConfigDict

from flexroll.schema.config import AdapterMode, BackendName, Config, Sampling, Section


class Cell(BaseModel):
    """One measurement of the matrix, complete: a record needs nothing else to say what was asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    section: Section
    backend: BackendName
    adapter: AdapterMode
    batch: int
    option: str
    option_values: dict
    sampling: str
    sampling_values: Sampling
    stack: str
    session: int
    model: str
    dtype: str
    new_tokens: int
    ignore_eos: bool
    max_model_len: int
    rounds: int
    warmup_rounds: int
    warmup_prompts: int
    seed: int

    @property
    def job(self) -> str:
        """Name of the job that measures this cell: the engine configuration and the session."""
        return f"{self.stack}-{self.backend}-{self.adapter}-{self.option}-s{self.session}"

    @property
    def engine(self) -> str:
        """Name of the engine configuration: the job without its session."""
        return self.job.rsplit("-s", 1)[0]

    @property
    def file(self) -> str:
        """File name of the record inside the job's folder."""
        return f"{self.experiment}-{self.sampling}-b{self.batch}.json"

    @property
    def path(self) -> str:
        """Path of the record under results/<run>/raw/."""
        return f"{self.job}/{self.file}"


class Job(BaseModel):
    """The cells of one engine configuration and session, largest batch last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    cells: list[Cell]

    @property
    def stack(self) -> str:
        return self.cells[0].stack

    @property
    def backend(self) -> str:
        return self.cells[0].backend

    @property
    def adapter(self) -> str:
        return self.cells[0].adapter

    @property
    def session(self) -> int:
        return self.cells[0].session

    @property
    def engine(self) -> str:
        return self.cells[0].engine


def expand(config: Config, stacks: Iterable[str] | None = None) -> list[Cell]:
    """Every cell of a config in document order; `stacks` restricts the matrix to those stacks.

    The same combination named twice in one experiment is one cell.
    """
    wanted = None if stacks is None else set(stacks)
    cells: dict[str, Cell] = {}
    for name, experiment in config.experiments.items():
        for use in experiment.backends:
            sampling = use.sampling or experiment.sampling
            axes = product(
                [s for s in use.stacks or experiment.stacks if wanted is None or s in wanted],
                use.options,
                use.adapters,
                use.batches or experiment.batches,
                range(1, config.repeats.sessions + 1),
            )
            for stack, option, adapter, batch, session in axes:
                cell = Cell(
                    experiment=name,
                    section=experiment.section,
                    backend=use.backend,
                    adapter=adapter,
                    batch=batch,
                    option=option,
                    option_values=config.option(option).for_backend(use.backend),
                    sampling=sampling,
                    sampling_values=config.samplings[sampling],
                    stack=stack,
                    session=session,
                    model=config.model.name,
                    dtype=config.model.dtype,
                    new_tokens=experiment.new_tokens,
                    ignore_eos=experiment.ignore_eos,
                    max_model_len=config.max_model_len,
                    rounds=experiment.rounds or config.repeats.rounds,
                    warmup_rounds=config.repeats.warmup_rounds,
                    warmup_prompts=experiment.warmup_prompts or batch,
                    seed=config.seed,
                )
                cells.setdefault(cell.path, cell)
    return list(cells.values())


def jobs(cells: Iterable[Cell]) -> list[Job]:
    """Group cells into jobs, in order of first mention; inside a job small batches first, large ones may fail."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.job, []).append(cell)
    return [Job(name=name, cells=sorted(group, key=lambda c: c.batch)) for name, group in grouped.items()]
