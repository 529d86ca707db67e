"""Run every check on a run's folder; what came of it, for a person and as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexroll.check import (  # noqa: F401  they register their checks
    files,
    grpo,
    noise,
    plausibility,
    provenance,
    quality,
    work,
)
from flexroll.check.registry import CHECKS, GROUPS, Check, Finding, Severity, error
from flexroll.check.submission import Run, load
from flexroll.errors import FlexrollError, one_line
from flexroll.schema.records import write_json

SHOWN: dict[Severity, str] = {"error": "error", "warning": "warning", "not applicable": "n/a"}


class FindingRow(BaseModel):
    """where: a file relative to the run's folder, or a cell, session or stack."""

    check: str
    severity: Severity
    where: str
    message: str


class CheckRow(BaseModel):
    """How many subjects of a check came to what; each counts once, by the worst that was found of it. outcome: that of
    the check, which has not passed where nothing was there to be tried."""

    id: str
    group: str
    rule: str
    outcome: Literal["pass", "warning", "error", "not applicable"]
    passed: int
    warnings: int
    errors: int
    not_applicable: int


class Report(BaseModel):
    """passed: no check found an error."""

    schema_version: int = 1
    run: str
    results: str
    passed: bool
    checks: list[CheckRow]
    findings: list[FindingRow]

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1


def check(results: Path, config: Path | None = None, root: Path | None = None) -> Report:
    """Try every check on results/<run>; see `submission.load` for arguments and what it raises."""
    return judge(load(results, config, root))


def judge(run: Run) -> Report:
    checks: list[CheckRow] = []
    findings: list[FindingRow] = []
    for each in sorted(CHECKS.values(), key=lambda each: GROUPS.index(each.group)):
        row, found = _try(each, run)
        checks.append(row)
        findings += found
    passed = not any(row.errors for row in checks)
    return Report(run=run.config.run, results=str(run.results), passed=passed, checks=checks, findings=findings)


def _try(check: Check, run: Run) -> tuple[CheckRow, list[FindingRow]]:
    counts: Counter[str] = Counter()
    rows: list[FindingRow] = []
    for subject in check.over.subjects(run):
        found = _judge(check, run, subject)
        severities = {finding.severity for finding in found}
        counts[next((s for s in SHOWN if s in severities), "passed")] += 1
        name = check.over.name(subject)
        rows += [
            FindingRow(check=check.id, severity=f.severity, where=f.where or name, message=" ".join(f.message.split()))
            for f in found
        ]
    if not counts:
        message = f"there is no {check.over.what}"
        rows.append(FindingRow(check=check.id, severity="not applicable", where=run.config.run, message=message))
        counts["not applicable"] += 0
    outcome = next((s for s in ("error", "warning") if counts[s]), "pass" if counts["passed"] else "not applicable")
    row = CheckRow(
        id=check.id,
        group=check.group,
        rule=check.rule,
        outcome=outcome,  # type: ignore[arg-type]
        passed=counts["passed"],
        warnings=counts["warning"],
        errors=counts["error"],
        not_applicable=counts["not applicable"],
    )
    return row, rows


def _judge(check: Check, run: Run, subject: Any) -> list[Finding]:
    """A record may hold any value that its type allows; one on which a check breaks down has not passed it."""
    try:
        return list(check.judge(run, subject))
    except Exception as failure:
        return [error(f"holds values that cannot be judged ({one_line(failure)})")]


def show(report: Report, console: Console | None = None) -> None:
    """Print the checks with their counts, then a line a finding; the same reason why a check does not apply, once."""
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(title=f"{report.run}: {report.results}", title_justify="left")
    table.add_column("group")
    table.add_column("check")
    for name in ("pass", "warning", "error", "n/a"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    group = ""
    for row in report.checks:
        counts = (row.passed, row.warnings, row.errors, row.not_applicable)
        colour = {"pass": "green", "warning": "yellow", "error": "red"}.get(row.outcome, "dim")
        outcome = f"[{colour}]{row.outcome}[/{colour}]"
        table.add_row("" if row.group == group else row.group, row.id, *(str(n or "") for n in counts), outcome)
        group = row.group
    console.print(table)
    for severity in SHOWN:
        for line in _lines([f for f in report.findings if f.severity == severity]):
            console.print(escape(line), soft_wrap=True)
    console.print(_summary(report), soft_wrap=True)


def _lines(findings: list[FindingRow]) -> list[str]:
    alike: dict[tuple[str, str], list[FindingRow]] = {}
    for f in findings:
        key = (f.check, f.message if f.severity != "error" else f"{f.where}: {f.message}")
        alike.setdefault(key, []).append(f)
    lines = []
    for (name, _), group in alike.items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"{SHOWN[group[0].severity]:<8} {name}  {group[0].where}{more}: {group[0].message}")
    return lines


def _summary(report: Report) -> str:
    counts = Counter(row.outcome for row in report.checks)
    words = [f"{counts[outcome]} {outcome}" for outcome in ("pass", "warning", "error", "not applicable")]
    return f"{report.run}: {len(report.checks)} checks: {', '.join(words)}"


def write(report: Report, path: Path) -> None:
    """Raises FlexrollError where the file cannot be written."""
    try:
        write_json(path, report.model_dump_json(indent=1) + "\n")
    except OSError as failure:
        raise FlexrollError(f"{path}: cannot be written: {failure.strerror or failure}") from None
