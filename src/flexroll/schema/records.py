"""The raw record of a cell, and how it is read and written.

Every file is self-contained: what was asked for, where and with what it ran, every round, and how it ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell

SCHEMA_VERSION = 1
Kind = TypeVar("Kind", bound=BaseModel)
MANIFEST = "job.json"  # beside a job's records, written when each of its cells has one


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Range(Base):
    """What one quantity was over the samples of a round that tell it."""

    median: float
    min: float
    max: float


class Telemetry(Base):
    """The machine while one round ran, from `samples` looks at it (`flexroll.bench.telemetry`).

    None, and then not written: not told here, as every GPU quantity on a CPU. Shares are of the samples that tell.
    """

    samples: int = Field(ge=1, description="1 may be of the moment after a round that ended between two samples.")
    sm_mhz: Range | None = Field(None, description="Clock of the GPU's multiprocessors.")
    sm_max_mhz: float | None = None
    memory_mhz: Range | None = Field(None, description="Clock of the GPU's memory.")
    memory_max_mhz: float | None = None
    power_w: Range | None = Field(None, description="Of the whole card.")
    power_limit_w: float | None = Field(None, description="The limit that is enforced.")
    temperature_c: Range | None = None
    energy_j: float | None = Field(
        None, description="Of the whole card, from the round's begin to its end, interpolated between samples."
    )
    memory_bytes: int | None = Field(None, description="Most in use on the card, by everything.")
    reasons: dict[str, float] | None = Field(
        None, description="Share of samples in which the driver gave this reason for the clock; those it gave at all."
    )
    low_clock_share: float | None = Field(
        None, description="Share of samples with an SM clock far below its maximum on a card that was not idle."
    )
    foreign_processes: int | None = Field(
        None, description="Most processes on the card that are not the job's, of those that the driver shows here."
    )
    foreign_bytes: int | None = Field(None, description="Most memory that those held on the card.")
    other_load_cores: Range | None = Field(
        None, description="Cores' worth of CPU time that others took: the machine's, less that of the job's processes."
    )
    other_load_share: float | None = Field(None, description="Share of samples in which others took much of the CPU.")
    cpu_mhz: Range | None = Field(None, description="Mean of the cores' clocks.")

    @model_serializer(mode="wrap")
    def _told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Round(Base):
    """One rollout of the cell's batch.

    tokens: generated tokens, counted from the returned ids. wall_s: seconds around the whole call, prefill included.
    prefill_s, decode_s: where the backend tells them apart. calls: how often the batch was run, one after the other,
    for the round to be long enough; all counts and times are sums over them. warmup: excluded from every statistic.
    flags: what disturbed the round, in words (`flexroll.bench.telemetry.RULES`); such a round counts like any other.
    """

    index: int
    tokens: int = Field(ge=0)
    wall_s: float = Field(gt=0)
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_tokens: int | None = Field(
        None, description="Tokens of decode steps; where prefill steps sample, without each sequence's first token."
    )
    steps: int | None = Field(None, description="Decode steps, where the backend tells.")
    first_token_s: float | None = Field(
        None, description="Seconds from the round's begin until the first token of any sequence, where told."
    )
    calls: int = Field(1, ge=1)
    warmup: bool = False
    tokens_sha256: str = Field("", description="Hash of the first call's token ids, to see whether rounds repeat.")
    started: float | None = Field(None, description="Unix time of its begin, seconds.")
    notes: dict[str, float] = Field(
        default_factory=dict, description="Counts and seconds of the backend's own, as graph breaks: sums over calls."
    )
    telemetry: Telemetry | None = None
    flags: list[str] = []

    @property
    def tps(self) -> float:
        """Tokens of this round over seconds of this round."""
        return self.tokens / self.wall_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a decode step."""
        return self.decode_s / self.steps if self.decode_s and self.steps else None

    @property
    def decode_tps(self) -> float | None:
        if not self.decode_s or self.decode_tokens is None:
            return None
        return self.decode_tokens / self.decode_s


class Memory(Base):
    """Bytes, in four parts; None where it cannot be told. On a CPU: peak_allocated and device_total are the process
    tree's peak resident set and the machine's memory in use."""

    weights: int | None = None
    kv_reserved: int | None = None
    peak_allocated: int | None = None
    device_total: int | None = None


class Coherence(Base):
    """Cheap signs of broken text. ok is false where any of them is past its threshold; notes say which."""

    ok: bool
    distinct_ratio: float = Field(description="Distinct tokens over tokens.")
    longest_repeat: float = Field(description="Share of the text that one repeating unit of up to 16 tokens covers.")
    nonprintable: float = Field(description="Share of characters that are neither printable nor white space.")
    notes: list[str] = []


class Sample(Base):
    prompt: str
    text: str
    tokens: int
    coherence: Coherence


class Environment(Base):
    """Where a cell ran. packages: name -> version of what matters. image: digest, or 'not containerised'."""

    stack: str
    image: str
    python: str
    platform: str
    cpu: str
    cores: int
    device: str
    device_uuid: str | None = None
    driver: str | None = None
    device_memory_bytes: int | None = None
    packages: dict[str, str]
    lock_sha256: str
    source_sha256: str
    commit: str | None = None
    dirty: bool | None = None
    started: str


class Record(Base):
    """A raw record: results/<run>/raw/<job>/<cell>.json."""

    schema_version: int = SCHEMA_VERSION
    cell: Cell
    status: Literal["ok", "failed", "skipped"]
    reason: str = ""
    note: str = Field("", description="How this backend did the work, where that is not plain (see cells.remark).")
    rounds: list[Round] = []
    memory: Memory = Memory()
    environment: Environment | None = None
    samples: list[Sample] = []
    key: str = Field("", description="Staleness key of the cell when it was measured.")
    prompts_sha256: str = ""
    prompt_tokens: int = Field(0, description="Tokens of the batch's prompts.")
    start_s: float | None = Field(None, description="Seconds to start the engine, shared by the job's cells.")
    start_parts: dict[str, float] = Field(
        default_factory=dict,
        description="Seconds until the engine was ready for this cell: load, compile, capture; where it tells.",
    )
    log: str = ""

    @property
    def measured(self) -> list[Round]:
        return [r for r in self.rounds if not r.warmup]


def write_json(path: Path, text: str) -> None:
    """Write through a temporary file and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def write_record(path: Path, record: Record) -> None:
    write_json(path, record.model_dump_json(indent=1) + "\n")


def read_record(path: Path) -> Record:
    """Read and validate a cell's record; see read_strictly."""
    again = "`flexroll retry` and a new run measure it again"
    return read_strictly(path, Record, "record", again, again)


def read_strictly(path: Path, model: type[Kind], name: str, again: str, missing: str) -> Kind:
    """Read and validate a JSON file of this model.

    Args:
        name: of such a file, in words. again, missing: what mends a bad one, and one that is not there.

    Raises:
        FlexrollError: the file is missing, cut short, or not such a record; the message says what mends it.
    """
    try:
        return model.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; {missing}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{path}: not complete JSON ({error}); {again}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise FlexrollError(f"{path}: not a {name} of this version ({problem}); {again}") from None
