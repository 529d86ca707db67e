"""`report/claims.yaml` as strict pydantic models: what was published, where, and which cells can judge it.

A claim is one published sentence or table entry, or a finding of this project. Its kind says how it is judged:

- absolute: a measured value of one configuration (tok/s, GB, ms, KL), on the GPU it was published for;
- ratio, difference: one selection of cells against another, on any GPU, named beside the verdict;
- boolean: something that holds or does not (drift, coherent text, a failing option, an admissible one);
- arithmetic: the source's own numbers against each other, no measurement needed;
- tested: something that a test of this repository asserts, by name;
- statement: something that no cell of a run can judge; it says why, or what could.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from flexroll.errors import FlexrollError
from flexroll.schema.base import Strict
from flexroll.schema.config import AdapterMode, BackendName, Section
from flexroll.schema.load import read_yaml
from flexroll.schema.names import suggest

Topic = Literal[
    "batch_sweep", "grpo", "uneven", "memory", "options", "broke", "torch_versions", "drift", "second_text", "four_bit"
]
CellMetric = Literal["tps", "decode_tps", "memory_gb", "round_s", "start_s"]
DriftMetric = Literal["refresh_ms", "refresh_share", "peft_max_abs_diff", "peft_growth"]
QualityMetric = Literal["kl_times"]
TrainMetric = Literal["train_s", "step_s", "train_memory_gb", "kl", "reward"]
CellFact = Literal["coherent", "fails"]
QualityFact = Literal["admissible"]
DriftFact = Literal["base_identical", "inference_identical", "merged_exact", "peft_drifts"]
TrainFact = Literal["losses_finite", "rewards_expected"]
Statistic = Literal["best", "median", "slowest"]
Direction = Literal["about", "at_least", "at_most", "more", "less", "same"]
Unit = Literal["tok/s", "GB", "ms", "s", "x", "%", ""]
SourceKey = Literal[1, 2, 3]
OWN_SOURCE = 3  # of `sources`: what this project found
VERDICTS = ("reproduced", "within noise", "not reproduced", "contradicted by its own source", "not run")
Verdict = Literal["reproduced", "within noise", "not reproduced", "contradicted by its own source", "not run"]


Item = TypeVar("Item")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Selector(Strict):
    """Which cells a claim is about: every given key must match; a list means any of its values, the first before the
    others where results of several are there."""

    experiment: str | list[str] | None = None
    section: Section | list[Section] | None = None
    backend: BackendName | list[BackendName] | None = None
    adapter: AdapterMode | list[AdapterMode] | None = None
    batch: int | list[int] | None = None
    option: str | list[str] | None = None
    sampling: str | list[str] | None = None
    stack: str | list[str] | None = None

    def matches(self, item: Any) -> bool:
        """True where `item` (a Cell, or anything with a cell's attributes) has every value asked for."""
        given = self.model_dump(exclude_none=True)
        return all(getattr(item, key) in _listed(value) for key, value in given.items())

    def rank(self, item: Any) -> tuple[int, ...]:
        """Where the values of a matching item stand in the lists: of two, the smaller is meant."""
        given = self.model_dump(exclude_none=True)
        return tuple(value.index(getattr(item, key)) for key, value in given.items() if isinstance(value, list))

    def narrowed(self, items: Iterable[Item]) -> list[Item]:
        """Of the items that match those of the smallest rank."""
        found = [item for item in items if self.matches(item)]
        first = min(map(self.rank, found), default=())
        return [item for item in found if self.rank(item) == first]

    @property
    def engine(self) -> Selector:
        """The same of what is scored, whatever its batches and lengths: backend, adapter, option and stack."""
        return Selector(backend=self.backend, adapter=self.adapter, option=self.option, stack=self.stack)

    def __str__(self) -> str:
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{key} {'/'.join(map(str, _listed(value)))}" for key, value in given.items())


class Arithmetic(Strict):
    """A statement checked from the source's own numbers, each under the words that say what it is.

    With a, b the first two numbers: ratio a / b; change a / b - 1; gap 1 - a / b; difference a - b; sum of all;
    equal: the largest relative difference between all, stated as 0; differ: the same, and the statement is wrong where
    it is within the tolerance. direction: whether the computed value must be about, at least or at most the stated one.
    """

    operation: Literal["ratio", "change", "gap", "difference", "sum", "equal", "differ"]
    numbers: dict[str, float] = Field(min_length=2)
    value: float = 0.0
    tolerance: float = Field(0.03, ge=0, description="Relative to the value; equal, differ: absolute.")
    direction: Literal["about", "at_least", "at_most"] = "about"
    note: str = ""

    @model_validator(mode="after")
    def _two_numbers(self) -> Arithmetic:
        if self.operation in ("ratio", "change", "gap", "difference") and len(self.numbers) != 2:
            raise ValueError(f"operation '{self.operation}' takes two numbers")
        return self

    @property
    def compares(self) -> bool:
        """Whether numbers are held against each other, not against a stated value."""
        return self.operation in ("equal", "differ")

    @property
    def computed(self) -> float:
        values = list(self.numbers.values())
        first, second = values[:2]
        if self.compares:
            return max(values) / min(values) - 1
        return {
            "ratio": first / second,
            "change": first / second - 1,
            "gap": 1 - first / second,
            "difference": first - second,
            "sum": sum(values),
        }[self.operation]

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
    """source: a key of `sources`. section: one of its sections. quote: its exact words, cut at `...`, marks of markdown
    left out. gpu: part of the GPU's name it holds for; `any` for any GPU, `none` where no GPU is needed to judge it.
    any_model: it is about no model in particular, so that any run may judge it."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    source: SourceKey
    section: str
    topic: Topic
    quote: str = Field(min_length=1)
    gpu: str
    any_model: bool = False
    note: str = ""
    own_source: Arithmetic | None = Field(None, description="A check that overrides the measurement where it fails.")


class Quantity(ClaimBase):
    """A claim with a number. statistic: of all measured rounds, or the median of the sessions' medians.

    direction: about, at least, at most the value, within the tolerance, which is relative to it; more, less: than the
    value, which is 1 unless given, and the rounds are apart from it; same: 1, within the tolerance or the rounds.
    """

    statistic: Statistic = "best"
    value: float = Field(1.0, gt=0)
    tolerance: float = Field(0.05, ge=0)
    direction: Direction = "about"

    @model_validator(mode="after")
    def _value_fits_direction(self) -> Quantity:
        if self.direction in ("about", "at_least", "at_most") and "value" not in self.model_fields_set:
            raise ValueError(f"direction '{self.direction}' needs a value")
        if self.direction == "same" and self.value != 1:
            raise ValueError("direction 'same' has the value 1")
        return self


class AbsoluteClaim(Quantity):
    """round_s: seconds of a round, from its tok/s. refresh_share: seconds of a refresh over those of a round.
    peft_growth: PEFT's largest difference after the last cycle over that after the first. kl_times: KL to fp32 over
    that of the config's `quality.baseline`, with the interval over the scored prompts."""

    kind: Literal["absolute"]
    metric: CellMetric | DriftMetric | QualityMetric | TrainMetric
    cells: Selector = Selector()
    unit: Unit
    gpu: str = "B200"


class RatioClaim(Quantity):
    """over / under. under_statistic: where it is not `statistic`."""

    kind: Literal["ratio"]
    metric: CellMetric | TrainMetric = "tps"
    over: Selector
    under: Selector
    under_statistic: Statistic | None = None
    unit: Unit = "x"
    gpu: str = "any"


class DifferenceClaim(Quantity):
    """over - under."""

    kind: Literal["difference"]
    metric: CellMetric
    over: Selector
    under: Selector
    unit: Unit
    gpu: str = "any"


class BooleanClaim(ClaimBase):
    """reason: words that the reason of a failure must hold, for metric `fails`.

    coherent: of the cells' samples; of the scored greedy text (`quality`) where no cell has any. admissible: by the
    quality records of the selected backend, adapter, option and stack.
    """

    kind: Literal["boolean"]
    metric: DriftFact | CellFact | QualityFact | TrainFact
    cells: Selector = Selector()
    value: bool = True
    reason: str = ""
    gpu: str = "none"

    @model_validator(mode="after")
    def _reason_of_a_failure(self) -> BooleanClaim:
        if self.reason and not (self.metric == "fails" and self.value):
            raise ValueError("a reason goes with metric 'fails' and value true")
        return self


class ArithmeticClaim(ClaimBase):
    kind: Literal["arithmetic"]
    own_source: Arithmetic
    unit: Unit = "x"
    gpu: str = "none"


class TestedClaim(ClaimBase):
    """tests: `tests/test_x.py::test_y`; it holds where each of them is in the tree."""

    kind: Literal["tested"]
    tests: list[Annotated[str, Field(pattern=r"^tests/test_\w+\.py::test_\w+$")]] = Field(min_length=1)
    gpu: str = "none"


class StatementClaim(ClaimBase):
    """why: why no cell judges it, or what it needs; printed as the reason."""

    kind: Literal["statement"]
    why: str = Field(min_length=1)
    gpu: str = "none"


Claim = Annotated[
    AbsoluteClaim | RatioClaim | DifferenceClaim | BooleanClaim | ArithmeticClaim | TestedClaim | StatementClaim,
    Field(discriminator="kind"),
]


class Published(Strict):
    """A published table entry, printed beside the cells it matches. No verdict hangs on it."""

    source: SourceKey
    cells: Selector
    tps: float | None = None
    memory_gb: float | None = None


class Source(Strict):
    """sections: its headings, without what stands in brackets there."""

    title: str
    about: str
    sections: list[str] = Field(min_length=1)


class ClaimsFile(Strict):
    """gpu, model: what the numbers were measured on. model is compared as a prefix of the run's model name, letters and
    digits only, so that `Qwen3-4B` also covers a run on random weights of that shape."""

    gpu: str
    model: str
    sources: dict[SourceKey, Source]
    published: list[Published] = Field(default_factory=list)
    claims: list[Claim] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_are_unique_and_sections_known(self) -> ClaimsFile:
        seen: set[str] = set()
        for claim in self.claims:
            if claim.id in seen:
                raise ValueError(f"claim id '{claim.id}' is used twice")
            seen.add(claim.id)
            if claim.source not in self.sources:
                raise ValueError(f"claim '{claim.id}': no source {claim.source}")
            sections = self.sources[claim.source].sections
            if claim.section not in sections:
                what = f"claim '{claim.id}': source {claim.source} has no section '{claim.section}'"
                raise ValueError(what + suggest(claim.section, sections))
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
