"""Tables of the drift verification: the engine's refresh beside PEFT's merge and unmerge."""

from __future__ import annotations

from flexroll.analysis.model import DriftRow
from flexroll.report import text
from flexroll.report.text import NONE, Table, cell

YES = {True: "yes", False: "**no**", None: NONE}


def verification_table(drift: list[DriftRow], existing: set[str]) -> Table:
    """One row a stack: what the refresh kept and made."""
    rows = []
    for d in drift:
        if d.status == "ok":
            wrong = "" if d.weights_checked is None else f" ({d.merged_wrong or 0:,} of {d.weights_checked:,} wrong)"
            hashes = [f"`{(value or '')[:12]}`" for value in (d.base_sha256_before, d.base_sha256_after)]
            rows.append(
                {
                    "Stack": d.stack,
                    "Model": cell(f"{d.model}, {d.dtype}, {d.device}"),
                    "Cycles": str(d.cycles),
                    "Base identical": YES[d.base_identical],
                    "Base sha256 before, after": " ".join(hashes),
                    "Inference copy identical": YES[d.inference_identical],
                    "Merged weights exact": YES[d.merged_exact] + wrong,
                    "Refresh, ms (median)": text.significant(d.refresh_ms_median),
                    "torch, PEFT": f"{d.torch_version or NONE}, {d.peft_version or NONE}",
                    "Raw": text.links([d.file], existing),
                }
            )
    return Table(rows, frozenset(rows[0]) - {"Cycles", "Refresh, ms (median)"} if rows else frozenset()).without_empty()


def cycles_table(drift: list[DriftRow]) -> Table:
    """Per cycle, what a refresh does to the base weights, and what PEFT's merge and unmerge do."""
    measured = [d for d in drift if d.status == "ok" and d.peft]
    rows = []
    for number in sorted({c.cycle for d in measured for c in d.peft}):
        row = {"Cycle": str(number)}
        for d in measured:
            c = next((c for c in d.peft if c.cycle == number), None)
            row[f"{d.stack}: flex, base changed"] = "0" if d.base_identical else "**changed**"
            row[f"{d.stack}: PEFT, largest change"] = text.significant(c.max_abs_diff) if c else NONE
            row[f"{d.stack}: PEFT, weights changed"] = text.percent(c.share_changed, 2) if c else NONE
        rows.append(row)
    return Table(rows)
