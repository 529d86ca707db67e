"""The matrix: a config expands to cells, cells group into jobs.

A cell is one measurement: experiment x backend x adapter x batch x option x sampling x stack x session, one JSON file.
A job is one process: all cells that share an engine configuration and a session, so that an engine starts once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product
from typing import Literal

from pydantic import BaseModel, ConfigDict

from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.config import AdapterMode, BackendName, Config, Experiment, Sampling, Section
from flexroll.schema.lengths import Lengths, lengths


class Cell(BaseModel):
    """One measurement of the matrix, complete: a record needs nothing else to say what was asked for.

    batch: sequences of a round, prompts times samples. slots: how many of them run at once; None: all. variant: what
    sets its engine apart from others of the same option, a part of the job's name.
    """

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
    new_tokens: int | Lengths
    ignore_eos: bool
    samples: int = 1
    slots: int | None = None
    max_model_len: int
    rounds: int
    warmup_rounds: int
    warmup_prompts: int
    vary_prompts: bool = False
    min_round_s: float = 0
    seed: int
    weights: Literal["written", "drawn"] = "written"
    variant: str = ""

    @property
    def prompts(self) -> int:
        """Prompts of a round."""
        return self.batch // self.samples

    @property
    def running(self) -> int:
        """Sequences that run at once."""
        return min(self.slots or self.batch, self.batch)

    def lengths(self, prompts: int) -> list[int]:
        """New tokens of each of the first `prompts` prompts; all samples of a prompt have its length."""
        return lengths(self.new_tokens, prompts)

    @property
    def engine_adapter(self) -> AdapterMode:
        """The adapter mode of the engine that runs it.

        Merging changes values and no shape, so where weights are drawn a backend that reads merged weights from files
        runs the base's: it has none to read, and any values do for speed.
        """
        unread = self.weights == "drawn" and self.adapter == "merged" and self.backend != "flex"
        return "none" if unread else self.adapter

    @property
    def dummy(self) -> bool:
        """Whether the engine draws its weights instead of reading them."""
        return self.weights == "drawn" or self.option_values.get("load_format") == "dummy"

    @property
    def job(self) -> str:
        """Name of the job that measures this cell: the engine configuration and the session."""
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.stack}-{self.backend}-{self.engine_adapter}-{self.option}{variant}-s{self.session}"

    @property
    def engine(self) -> str:
        """Name of the engine configuration: the job without its session."""
        return self.job.rsplit("-s", 1)[0]

    @property
    def file(self) -> str:
        """File name of the record inside the job's folder."""
        adapter = "" if self.adapter == self.engine_adapter else f"{self.adapter}-"
        return f"{self.experiment}-{adapter}{self.sampling}-b{self.batch}.json"

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
        return self.cells[0].engine_adapter

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
                range(1, (experiment.sessions or config.repeats.sessions) + 1),
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
                    samples=experiment.samples,
                    slots=experiment.slots,
                    max_model_len=config.length_of(experiment),
                    rounds=experiment.rounds or config.repeats.rounds,
                    warmup_rounds=config.repeats.warmup_rounds,
                    min_round_s=config.repeats.min_round_s,
                    vary_prompts=experiment.vary_prompts,
                    warmup_prompts=experiment.warmup_prompts or batch // experiment.samples,
                    seed=config.seed,
                    weights=config.model.weights,
                    variant=_variant(experiment, use.backend),
                )
                cells.setdefault(cell.path, cell)
    return list(cells.values())


def _variant(experiment: Experiment, backend: str) -> str:
    """An engine of its own for a max_model_len of its own, and for slots where the engine cannot change them."""
    parts = [f"len{experiment.max_model_len}"] if experiment.max_model_len else []
    if experiment.slots and not BACKENDS[backend].resizes:
        parts.append(f"slots{experiment.slots}")
    return "-".join(parts)


def remark(cell: Cell) -> str:
    """What a reader must know about how this backend did the cell's work, or ''."""
    remarks = []
    if cell.dummy:
        remarks.append("weights drawn on the device, not read: the text is noise")
    if cell.adapter != cell.engine_adapter:
        remarks.append("the base's weights in place of merged ones: other values, the same shapes and the same work")
    if cell.samples > 1 and cell.backend.startswith(("transformers", "unsloth")):
        remarks.append("a prompt is computed once a sample")
    if isinstance(cell.new_tokens, Lengths) and BACKENDS[cell.backend].static_batch:
        remarks.append("every sequence runs to the longest of its batch and is cut, and only what was asked for counts")
    if cell.running < cell.batch and BACKENDS[cell.backend].static_batch:
        remarks.append(f"batches of {cell.running}, each begun when the one before has ended")
    return "; ".join(remarks)


def jobs(cells: Iterable[Cell]) -> list[Job]:
    """Group cells into jobs, in order of first mention; inside a job small batches first, large ones may fail."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.job, []).append(cell)
    return [Job(name=name, cells=sorted(group, key=lambda c: c.batch)) for name, group in grouped.items()]


def measuring_order(jobs: Iterable[Job], seed: int) -> list[Job]:
    """The jobs session by session, those of a session in a random order that the seed fixes.

    One session of every configuration is a block: it sees one state of the machine, and ratios pair within it. In a
    fixed order what changes with time would look like a difference (Abedi and Brecht, ICPE 2017).
    """
    shuffled = sorted(jobs, key=lambda job: job.name)
    random.Random(seed).shuffle(shuffled)
    return sorted(shuffled, key=lambda job: job.session)
