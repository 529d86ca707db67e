"""`report/claims.yaml` as strict pydantic models: what was published, where, and which cells can judge it.

A claim is one published sentence or table entry. Its kind says how it is judged:

- absolute: a measured value of one configuration (tok/s, GB, ms), on the GPU it was published for;
- ratio: one selection of cells over another, on any GPU, named beside the verdict;
- boolean: something that holds or does not (drift, coherent text, a failing option);
- arithmetic: the source's own numbers against each other, no measurement needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from flexroll.errors import FlexrollError
from flexroll.schema.base import Strict
from flexroll.schema.config import Section
from flexroll.schema.load import read_yaml

Topic = Literal["batch_sweep", "grpo", "options", "broke", "torch_versions", "drift", "second_text", "four_bit"]
CellMetric = Literal["tps", "decode_tps", "memory_gb"]
DriftMetric = Literal["refresh_ms", "peft_max_abs_diff"]
DriftFact = Literal["base_identical", "inference_identical", "merged_exact", "peft_drifts"]
CellFact = Literal["coherent", "fails"]
Unit = Literal["tok/s", "GB", "ms", "x", "%", ""]
VERDICTS = ("reproduced", "within noise", "not reproduced", "contradicted by its own source", "not run")
Verdict = Literal["reproduced", "within noise", "not reproduced", "contradicted by its own source", "not run"]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Selector(Strict):
    """Which cells a claim is about: every given key must match; a list means any of its values."""

    experiment: str | list[str] | None = None
    section: Section | list[Section] | None = None
    backend: str | list[str] | None = None
    adapter: str | list[str] | None = None
    batch: int | list[int] | None = None
    option: str | list[str] | None = None
    sampling: str | list[str] | None = None
    stack: str | list[str] | None = None

    def matches(self, item: Any) -> bool:
        """True where `item` (a Cell, or anything with a cell's attributes) has every value asked for."""
        given = self.model_dump(exclude_none=True)
        return all(getattr(item, key) in _listed(value) for key, value in given.items())

    def __str__(self) -> str:
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{key} {'/'.join(map(str, _listed(value)))}" for key, value in given.items())


class Number(Strict):
    """A number of the source with the words that say what it is."""

    label: str
    value: float


class Arithmetic(Strict):
    """A statement checked from the source's own numbers.

    ratio: numbers[0] / numbers[1]; change: that minus 1; equal: the largest relative difference between all numbers,
    stated as 0; differ: the same, and the statement is wrong where it is within the tolerance.
    direction: whether the computed value must be about, at least or at most the stated one.
    """

    operation: Literal["ratio", "change", "equal", "differ"]
    numbers: list[Number] = Field(min_length=2)
    value: float = 0.0
    tolerance: float = Field(0.03, ge=0, description="Relative to the value; equal, differ: absolute.")
    direction: Literal["about", "at_least", "at_most"] = "about"
    note: str = ""

    @model_validator(mode="after")
    def _two_numbers(self) -> Arithmetic:
        if self.operation in ("ratio", "change") and len(self.numbers) != 2:
            raise ValueError(f"operation '{self.operation}' takes two numbers")
        return self

    @property
    def computed(self) -> float:
        values = [number.value for number in self.numbers]
        if self.operation == "ratio":
            return values[0] / values[1]
        if self.operation == "change":
            return values[0] / values[1] - 1
        return max(values) / min(values) - 1

    @property
    def holds(self) -> bool:
        computed = self.computed
        if self.operation == "equal":
            return computed <= self.tolerance
        if self.operation == "differ":
            return computed > self.tolerance
        slack = self.tolerance * abs(self.value)
        if self.direction == "at_least":
            return computed >= self.value - slack
        if self.direction == "at_most":
            return computed <= self.value + slack
        return abs(computed - self.value) <= slack


class ClaimBase(Strict):
    """source: 1 or 2, a key of `sources`. section: heading in the source. quote: its words, shortened with `...`.
    gpu: part of the GPU's name it holds for; `any` for any GPU, `none` where no GPU is needed to judge it."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    source: Literal[1, 2]
    section: str
    topic: Topic
    quote: str = Field(min_length=1)
    gpu: str
    note: str = ""
    own_source: Arithmetic | None = Field(None, description="A check that overrides the measurement where it fails.")


class AbsoluteClaim(ClaimBase):
    kind: Literal["absolute"]
    metric: CellMetric | DriftMetric
    statistic: Literal["best", "median"] = "best"
    cells: Selector = Selector()
    value: float = Field(gt=0)
    tolerance: float = Field(0.05, ge=0)
    direction: Literal["about", "at_least", "at_most"] = "about"
    unit: Unit
    gpu: str = "B200"


class RatioClaim(ClaimBase):
    kind: Literal["ratio"]
    metric: CellMetric = "tps"
    statistic: Literal["best", "median"] = "best"
    over: Selector
    under: Selector
    value: float = Field(gt=0)
    tolerance: float = Field(0.05, ge=0)
    direction: Literal["about", "at_least", "at_most"] = "about"
    unit: Unit = "x"
    gpu: str = "any"


class BooleanClaim(ClaimBase):
    kind: Literal["boolean"]
    metric: DriftFact | CellFact
    cells: Selector = Selector()
    value: bool = True
    gpu: str = "none"


class ArithmeticClaim(ClaimBase):
    kind: Literal["arithmetic"]
    own_source: Arithmetic
    unit: Unit = "x"
    gpu: str = "none"


Claim = Annotated[AbsoluteClaim | RatioClaim | BooleanClaim | ArithmeticClaim, Field(discriminator="kind")]


class Published(Strict):
    """A published table entry, printed beside the cells it matches. No verdict hangs on it."""

    source: Literal[1, 2]
    cells: Selector
    tps: float | None = None
    memory_gb: float | None = None


class Source(Strict):
    title: str
    about: str


class ClaimsFile(Strict):
    """gpu, model: what the numbers were measured on. model is compared as a prefix of the run's model name, letters and
    digits only, so that `Qwen3-4B` also covers a run on random weights of that shape."""

    gpu: str
    model: str
    sources: dict[Literal[1, 2], Source]
    published: list[Published] = Field(default_factory=list)
    claims: list[Claim] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_are_unique(self) -> ClaimsFile:
        seen: set[str] = set()
        for claim in self.claims:
            if claim.id in seen:
                raise ValueError(f"claim id '{claim.id}' is used twice")
            seen.add(claim.id)
        return self

    def about_model(self, name: str) -> bool:
        return same_model(name, self.model)


def same_model(name: str, published: str) -> bool:
    """True where a run's model name begins with the published one, letters and digits only."""
    return _plain(name).startswith(_plain(published))


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def load_claims(path: Path) -> ClaimsFile:
    """Read and validate claims.yaml.

    Raises:
        FlexrollError: missing, not YAML, or the first bad key or value, by claim id where there is one.
    """
    data = read_yaml(path, "claims")
    try:
        return ClaimsFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        loc = list(first["loc"])
        if len(loc) > 1 and loc[0] == "claims" and isinstance(loc[1], int):
            entry = data["claims"][loc[1]]
            loc[1] = entry.get("id", loc[1]) if isinstance(entry, dict) else loc[1]
        where = ".".join(str(part) for part in loc)
        message = first["msg"].removeprefix("Value error, ")
        raise FlexrollError(f"{path}: {where}: {message}" if where else f"{path}: {message}") from None
