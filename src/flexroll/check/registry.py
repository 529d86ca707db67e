"""What a check is, and the list of them. To add one, write one function under `@check`; nothing else names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from flexroll.check.submission import Held, Run

GROUPS = ("schema", "completeness", "provenance", "fixed work", "plausibility", "statistics")
Severity = Literal["error", "warning", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """What a check has to say about one subject, in one line; a subject without any passes.

    An error: the run cannot stand as it is. A warning: it can, and a reader must know. Not applicable: why the rule
    could not be tried here, for what was not tried has not passed. where: other than the subject's own name.
    """

    severity: Severity
    message: str
    where: str = ""


def error(message: str, where: str = "") -> Finding:
    return Finding("error", message, where)


def warning(message: str, where: str = "") -> Finding:
    return Finding("warning", message, where)


def not_applicable(message: str, where: str = "") -> Finding:
    return Finding("not applicable", message, where)


@dataclass(frozen=True)
class Over:
    """What a check is tried on, one after the other. what: in a few words; name: of one, as findings give it."""

    what: str
    subjects: Callable[[Run], Iterable[Any]]
    name: Callable[[Any], str] = str


@dataclass(frozen=True)
class Check:
    id: str
    group: str
    over: Over
    judge: Callable[[Run, Any], Iterable[Finding]]

    @property
    def rule(self) -> str:
        """The docstring's first paragraph, in one line."""
        return " ".join((self.judge.__doc__ or "").split("\n\n")[0].split())


CHECKS: dict[str, Check] = {}


def check(group: str, over: Over) -> Callable[[Callable[..., Iterable[Finding]]], Callable[..., Iterable[Finding]]]:
    """Register `judge(run, subject)`, a generator of findings; its name, with dashes, is the check's id.

    Args:
        group: one of GROUPS, under which it is shown.

    Raises:
        ValueError: it has no docstring, another check has its name, or there is no such group.
    """

    def register(judge: Callable[..., Iterable[Finding]]) -> Callable[..., Iterable[Finding]]:
        name = judge.__name__.replace("_", "-")
        if not judge.__doc__:
            raise ValueError(f"check {name}: its docstring is the rule, and it has none")
        if name in CHECKS or group not in GROUPS:
            raise ValueError(f"check {name}: " + ("already there" if name in CHECKS else f"no group '{group}'"))
        CHECKS[name] = Check(name, group, over, judge)
        return judge

    return register


def _file(held: Held) -> str:
    return held.file


def _sets(run: Run) -> list[list[Held]]:
    """Measured cells of one experiment and batch: what a table puts side by side."""
    return list(run.grouped(lambda held: (held.cell.experiment, held.cell.batch)).values())


RUN = Over("run", lambda run: [run], lambda run: "analysis.json")
CELLS = Over("cell of the config", lambda run: run.rows, lambda row: row.file)
RECORDS = Over("readable record", lambda run: run.held, _file)
MEASURED = Over("measured cell", lambda run: run.measured, _file)
COMPARED = Over(
    "measured experiment", _sets, lambda cells: f"experiment {cells[0].cell.experiment}, batch {cells[0].cell.batch}"
)
