"""A sweep's result for people: the interval of its gain, sweep.md and sweep.svg. Needs scipy and matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexroll.analysis.statistics import estimate
from flexroll.report.figures import sweep as heat_map
from flexroll.report.figures.style import save, style
from flexroll.schema.records import write_json
from flexroll.tune.result import Summary

SHOWN = 10  # rows of the table


def finish(summary: Summary) -> Summary:
    """With the interval of the winner's gain."""
    if summary.winner is None:
        return summary
    found = estimate(summary.winner.duel)
    interval = found.interval if found else None
    ends = {"low": interval.low, "high": interval.high} if interval else {"low": None, "high": None}
    return summary.model_copy(update={"winner": summary.winner.model_copy(update=ends)})


def write(summary: Summary, folder: Path) -> list[Path]:
    """Write the three files; the figure only where something was measured. Returns their paths."""
    paths = [folder / "sweep.json", folder / "sweep.md", folder / "sweep.svg"]
    write_json(paths[0], summary.model_dump_json(indent=1) + "\n")
    with style():
        figure = _figure(summary)
        if figure is None:
            paths.pop().unlink(missing_ok=True)
        else:
            save(figure, paths[2])
    write_json(paths[1], as_markdown(summary, figure is not None))
    return paths


def as_markdown(summary: Summary, figure: bool) -> str:
    """The document: what was asked, the winner, the table's first rows, what cannot run and what was not run."""
    f = summary.facts
    lines = [
        f"# Sweep of {f['kind']} options by whole rollouts",
        "",
        f"{f['device']}, torch {f['torch']}, {f['model']} ({'random weights, ' if f['dummy'] else ''}{f['dtype']}): "
        f"{f['batch']} prompts of {f['prompt_tokens']} tokens, {f['new_tokens']} new ones, greedy, pages of "
        f"{f['page_size']}. Gains are over the engine's defaults, prefill and decoding included.",
        "",
        verdict(summary),
        "",
        "| " + " | ".join([*summary.rows, *summary.columns, "last stage", "tok/s", "gain", "tokens as the default's"]),
        "|---" * (len(summary.rows) + len(summary.columns) + 1) + "|---:" * 3 + "|",
    ]
    lines[-2] += " |"
    for row in [r for r in summary.ranking if r.tps is not None and not r.reason][:SHOWN]:
        values = [_said(row.values[name]) for name in (*summary.rows, *summary.columns)]
        agreement = "-" if row.agreement is None else f"{100 * row.agreement:.1f} %"
        lines.append("| " + " | ".join([*values, row.stage, f"{row.tps:,.0f}", f"{row.gain:.3f}", agreement]) + " |")
    if figure:
        lines += ["", "![tok/s over the default's at every point](sweep.svg)"]
    reasons: dict[str, int] = {}
    for row in summary.ranking:
        if row.reason:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    if reasons:
        lines += [
            "",
            "Out:",
            *(f"- {n} points: {reason}" for reason, n in sorted(reasons.items(), key=lambda r: -r[1])),
        ]
    lines += ["", f"Measuring took {summary.spent_s:.0f} s of {summary.budget_s:.0f}."]
    if summary.not_run:
        lines += ["Not run:", *(f"- {note}" for note in summary.not_run)]
    return "\n".join(lines) + "\n"


def verdict(summary: Summary) -> str:
    """One sentence on the winner."""
    w = summary.winner
    if w is None:
        return "**No winner**: no point was measured against the default to the end."
    gain = f"{w.gain:.3f} times the default's tok/s"
    if w.low is None:
        return f"**Best: {json.dumps(w.options)}**, {gain}; too few rounds for an interval."
    said = "faster" if w.faster else "slower" if w.high is not None and w.high < 1 else "no difference shown"
    return (
        f"**Best: {json.dumps(w.options)}**, {gain}, 95 % interval {w.low:.3f} to {w.high:.3f} over {len(w.duel)} "
        f"paired rounds of one process: {said}."
    )


def _figure(summary: Summary) -> Any:
    names = (*summary.rows, *summary.columns)
    place = {id(row): tuple(row.values[name] for name in names) for row in summary.ranking}
    return heat_map.draw(
        summary.rows,
        summary.columns,
        {place[id(row)]: row.screened for row in summary.ranking if row.screened is not None},
        {place[id(row)] for row in summary.ranking if row.reason},
        tuple(summary.winner.values[name] for name in names) if summary.winner else None,
        f"{summary.facts['kind']} options, {summary.facts['device']}: first rung",
    )


def _said(value: Any) -> str:
    return "auto" if value is None else str(value)
