"""What a sweep found, as sweep.json holds it. Needs no scipy, so that a stack can write it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flexroll.errors import FlexrollError
from flexroll.tune.grid import Grid
from flexroll.tune.plan import Found, Standing


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(Base):
    """A point of the ranking. stage: the last one it was measured in; tps, gain (over the default, a ratio): there.
    agreement: share of new tokens equal to the default's. reason: why it is out."""

    values: dict[str, Any]
    stage: str = ""
    tps: float | None = None
    gain: float | None = None
    screened: float | None = None
    agreement: float | None = None
    reason: str = ""


class Winner(Base):
    """duel: its rate over the default's, round by round, one after the other in one process; gain: their median; low,
    high: its 95 % interval, None until it is computed and below three rounds."""

    values: dict[str, Any]
    options: dict[str, Any]
    duel: list[float]
    gain: float
    low: float | None = None
    high: float | None = None

    @property
    def faster(self) -> bool:
        return self.low is not None and self.low > 1


class Summary(Base):
    """facts: what was measured on what. not_run: what the budget left out."""

    facts: dict[str, Any]
    rows: dict[str, list[Any]]
    columns: dict[str, list[Any]]
    ranking: list[Row]
    winner: Winner | None
    spent_s: float
    budget_s: float
    not_run: list[str]


def summarise(grid: Grid, found: Found, facts: dict[str, Any], budget_s: float) -> Summary:
    winner = None
    if found.winner is not None:
        winner = Winner(
            values=found.winner.values, options=found.winner.options, duel=found.duel, gain=median(found.duel)
        )
    return Summary(
        facts=facts,
        rows={name: list(values) for name, values in grid.rows.items()},
        columns={name: list(values) for name, values in grid.columns.items()},
        ranking=[_row(s) for s in found.standings],
        winner=winner,
        spent_s=round(found.spent_s, 1),
        budget_s=budget_s,
        not_run=found.notes,
    )


def _row(s: Standing) -> Row:
    return Row(
        values=s.point.values,
        stage=s.stage,
        tps=s.tps,
        gain=s.gain,
        screened=s.screened,
        agreement=s.agreement,
        reason=s.reason,
    )


def read_summary(path: Path) -> Summary:
    """Raises FlexrollError where there is none."""
    try:
        return Summary.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise FlexrollError(f"{path}: missing; `flexroll sweep` writes it when it has measured") from None
    except (OSError, ValidationError):
        raise FlexrollError(f"{path}: not what `flexroll sweep` writes; run that again") from None
