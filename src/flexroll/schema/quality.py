"""Which engine configurations of a matrix are scored, and the record of how exact one of them is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flexroll.schema.cells import Cell, Job, expand
from flexroll.schema.config import AdapterMode, Config, Sampling
from flexroll.schema.records import Base, Coherence, Environment, read_strictly

FOLDER = "quality"  # of records, under results/<run>; of what they are made from, under work/<run>


class Target(BaseModel):
    """One engine configuration, whatever its batches, lengths and sessions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stack: str
    backend: str
    adapter: AdapterMode
    option: str
    option_values: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.stack}-{self.backend}-{self.adapter}-{self.option}"

    @property
    def file(self) -> str:
        """Path of its record relative to results/<run>."""
        return f"{FOLDER}/{self.name}.json"

    @property
    def reference(self) -> Literal["none", "adapter"]:
        """Which fp32 model it is held against: with the adapter's LoRA layers or without."""
        return "none" if self.adapter == "none" else "adapter"


def targets(config: Config, stacks: Iterable[str] | None = None) -> list[Target]:
    """What a run scores, in document order; [] where the config asks for no scoring. stacks: only these."""
    if config.quality is None:
        return []
    found = (target_of(cell) for cell in expand(config, stacks))
    return list({target.name: target for target in found}.values())


def target_of(cell: Cell) -> Target:
    """The configuration that runs a cell. Weights that are drawn are another checkpoint's here, so that a merged
    adapter is merged."""
    return Target(
        stack=cell.stack,
        backend=cell.backend,
        adapter=cell.adapter,
        option=cell.option,
        option_values=cell.option_values,
    )


def job_of(target: Target, config: Config) -> Job:
    """A job whose one cell is the scoring: what it reads and how large its engine is follow from that.

    config: the run's own, or Config.for_quality's.
    """
    assert config.quality is not None
    cell = Cell(
        experiment=FOLDER,
        section="options",
        backend=target.backend,  # type: ignore[arg-type]
        adapter=target.adapter,
        batch=config.quality.count,
        option=target.option,
        option_values=target.option_values,
        sampling="greedy",
        sampling_values=Sampling(),
        stack=target.stack,
        session=1,
        model=config.model.name,
        dtype=config.model.dtype,
        new_tokens=config.quality.new_tokens,
        slots=config.quality.slots,
        ignore_eos=True,
        max_model_len=config.max_model_len,
        rounds=1,
        warmup_rounds=0,
        warmup_prompts=config.quality.count,
        seed=config.seed,
    )
    return Job(name=target.name, cells=[cell])


class Divergence(Base):
    """Where a sequence's greedy tokens leave the fp32 model's, of which the first place alone tells anything.

    place: index among its new tokens. gap: by how many nats the fp32 model prefers its own token there.
    """

    prompt: int
    place: int
    expected: int
    got: int
    gap: float


class QualityRecord(Base):
    """results/<run>/quality/<stack>-<backend>-<adapter>-<option>.json: one configuration against fp32.

    All numbers are None unless status is ok. kl, logprob_rms, top1_agreement are of the given tokens of the reference's
    greedy continuations (teacher forcing), the rest of a free greedy run. KL a token is heavy-tailed, and tokens of one
    sequence are not independent: kl_sequences is what an interval of kl is made from.
    """

    schema_version: int = 1
    stack: str
    backend: str
    adapter: AdapterMode
    option: str
    option_values: dict[str, Any]
    model: str
    dtype: str
    status: Literal["ok", "failed", "skipped"]
    reason: str = ""
    key: str = Field("", description="Staleness key when it was scored.")
    device: str = Field("", description="Class of device.")
    prompts: int = Field(0, description="Prompts of the greedy run.")
    tokens: int = Field(0, description="Places scored, and tokens of the greedy run.")
    unscored: str = Field("", description="Why there is no teacher forcing, where there is none.")
    kl: float | None = Field(
        None, description="Mean KL(fp32 || it), nats a token; None where it tells no whole distribution."
    )
    kl_sequences: list[float] = Field(
        default_factory=list,
        description="The same of each prompt's continuation, in order of the prompts; never empty where kl is told.",
    )
    sequence_tokens: list[int] = Field(
        default_factory=list, description="Tokens of each continuation: kl is the mean of kl_sequences, so weighted."
    )
    logprob_rms: float | None = Field(
        None, description="Root mean square difference of the given tokens' log probabilities, nats."
    )
    top1_agreement: float | None = Field(None, description="Share of places with the fp32 model's most likely token.")
    diverged: int | None = Field(None, description="Sequences whose greedy tokens leave the fp32 model's.")
    divergences: list[Divergence] = Field(default_factory=list)
    near_tie: float | None = Field(None, description="quality.near_tie, by which near_ties was counted.")
    near_ties: int | None = Field(None, description="First divergences with a gap of at most near_tie.")
    coherent: bool | None = Field(None, description="Of the greedy run's text; None without a tokenizer.")
    coherence: list[Coherence] = Field(default_factory=list, description="Of those sequences that are not coherent.")
    environment: Environment | None = None
    prompts_sha256: str = ""
    reference_sha256: str = Field("", description="Hash of the reference's prompts and tokens.")
    seconds: float | None = Field(None, description="Of the whole process.")
    log: str = ""

    @model_validator(mode="after")
    def _kl_has_its_sequences(self) -> QualityRecord:
        lengths = {len(self.kl_sequences), len(self.sequence_tokens)}
        if self.status == "ok" and self.kl is not None and lengths != {self.prompts}:
            raise ValueError(f"a KL needs kl_sequences and sequence_tokens of all its {self.prompts} prompts")
        return self

    def is_of(self, target: Target) -> bool:
        return all(getattr(self, name) == getattr(target, name) for name in ("stack", "backend", "adapter", "option"))


def read_quality(path: Path) -> QualityRecord:
    """Read and validate one; see records.read_strictly."""
    return read_strictly(path, QualityRecord, "quality record", "remove it and run again", "run the pipeline again")
