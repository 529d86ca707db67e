"""A run of five hundred cells with known truth, from raw records to the document, checked as a reader would check it.

`python tests/test_rebuild.py --time DIR` builds that run in DIR and prints how long analyse and report take.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

for name in ("jinja2", "matplotlib", "pandas"):
    pytest.importorskip(name)

import yaml

import synthetic
from flexroll.analysis import collect
from flexroll.analysis.model import Analysis, Pair, Result
from flexroll.analysis.pairs import make_pairs
from flexroll.analysis.run import analyse
from flexroll.report.render import render
from flexroll.report.text import series_label
from flexroll.schema.cells import Cell
from flexroll.schema.config import Config
from flexroll.schema.records import Record, Telemetry

REPORT = Path(__file__).parent.parent / "report"
SESSIONS = 5
BEGIN = 1_767_225_600.0  # 2026-01-01 00:00 UTC

# The truth. Everything but the options is told as a ratio to vLLM at the same work.
OVER_VLLM = {
    "greedy": {8: 1.3, 16: 1.0, 32: 0.8},
    "equivalence": {8: 1.5, 16: 1.2, 32: 1.0},
}
OTHERS = {"transformers_generate": 0.1, "transformers_cb": 0.2}
LORA = {("flex", "merged"): 1.2, ("flex", "unmerged"): 0.6, ("vllm", "merged"): 1.0, ("vllm", "request"): 0.6}
GAIN = {"up6": 1.06, "up4": 1.04, "down5": 0.95, "null1": 1.0, "null2": 1.0, "null3": 1.0, "null4": 1.0}
SETS = {"up6": {"page_size": 32}, "up4": {"page_size": 64}, "down5": {"compile": False}}
LATER_STACK = {("flex", "none"): 1.05, ("flex", "merged"): 1.0, ("transformers_generate", "none"): 0.93}


def truth(c: Any) -> float:
    """tok/s of a cell or configuration, over that of vLLM at batch 8."""
    if c.adapter != "none" and c.section == "grpo":
        over_vllm = LORA[c.backend, c.adapter]
    elif c.backend == "flex":
        over_vllm = OVER_VLLM[c.sampling].get(c.batch, 1.1)
    else:
        over_vllm = OTHERS.get(c.backend, 1.0)
    later = LATER_STACK[c.backend, c.adapter] if c.section == "torch_versions" and c.stack == "torch2.11" else 1.0
    return over_vllm * later * GAIN.get(c.option, 1.0) * (c.batch / 8) ** 0.8 * (0.9 if c.sampling != "greedy" else 1.0)


def config() -> Config:
    """A hundred configurations, five sessions each."""
    base = {"new_tokens": 64, "stacks": ["torch2.11"]}
    generate = {"backend": "transformers_generate"}
    pair = [{"backend": "flex"}, {"backend": "vllm"}]
    experiments = {
        "sweep": {
            "title": "Batch sweep, greedy",
            "section": "batch_sweep",
            "batches": [8, 16, 32],
            "backends": [
                *pair,
                generate,
                {"backend": "transformers_cb", "batches": [8, 32]},
                {"backend": "unsloth", "batches": [8]},
            ],
        },
        "sweep_sampled": {
            "title": "Batch sweep, sampling",
            "section": "batch_sweep",
            "batches": [8, 16, 32],
            "sampling": "equivalence",
            "backends": [*pair, generate | {"sampling": "greedy", "batches": [8]}],
        },
        "lora": {
            "title": "GRPO workload",
            "section": "grpo",
            "batches": [8, 16],
            "backends": [
                {"backend": "flex", "adapters": ["merged", "unmerged"]},
                {"backend": "vllm", "adapters": ["request", "merged"]},
            ],
        },
        "memory": {
            "title": "Memory at batch 16",
            "section": "memory",
            "batches": [16],
            "backends": [{"backend": "flex"}, {"backend": "vllm", "options": ["default", "equal_kv"]}],
        },
        "options": {
            "title": "Options of the flex engine",
            "section": "options",
            "batches": [4, 8, 16, 32],
            "backends": [
                {"backend": "flex", "options": ["default", *GAIN]},
                {"backend": "flex", "options": ["default", *GAIN], "sampling": "equivalence"},
            ],
        },
        "torch_versions": {
            "title": "torch 2.9.1 and 2.11",
            "section": "torch_versions",
            "batches": [8],
            "stacks": ["torch2.9.1", "torch2.11"],
            "backends": [{"backend": "flex", "adapters": ["none", "merged"]}, generate],
        },
    }
    return synthetic.config(
        run="rebuild",
        title="a rebuilt run",
        prompts=synthetic.CONFIG["prompts"] | {"count": 32},
        repeats={"sessions": SESSIONS, "rounds": 5},
        options={name: {"flex": SETS.get(name, {})} for name in GAIN} | {"equal_kv": {"vllm": {"equal_kv": True}}},
        experiments={name: base | own for name, own in experiments.items()},
    )


def looks(cell: Cell, index: int) -> Telemetry | None:
    """Somebody watched the sweeps, the GRPO workload and one option; some rounds there were disturbed."""
    if cell.experiment == "sweep" and cell.backend == "flex" and cell.batch == 32 and index == 2:
        return synthetic.looks(1700, reasons={"sw_power_cap": 0.4})
    if cell.experiment == "lora" and cell.backend == "vllm" and cell.session == 4 and index in (1, 5):
        return synthetic.looks(foreign_processes=1)
    if cell.experiment == "options":
        low = (
            cell.option == "up6" and cell.batch == 8 and cell.sampling == "greedy" and cell.session == 3 and index == 4
        )
        return synthetic.looks(1400, low_clock_share=0.8) if low else None
    return synthetic.looks() if cell.experiment in ("sweep", "sweep_sampled", "lora") else None


def make(seed: int) -> synthetic.Truth:
    """Sessions 0.6 % apart and 3 % with all that ran beside them; the third on another card of the same model."""
    return synthetic.Truth(
        ratio=truth,
        between=0.006,
        within=0.003,
        block=0.03,
        telemetry=looks,
        uuid=lambda cell: "GPU-2" if cell.session == 3 else "GPU-1",
        seed=seed,
    )


def record(cell: Cell, seed: int = 1) -> Record | None:
    """What each cell left behind: most a record, some a failure, one nothing."""
    failed = {"rounds": [], "samples": [], "status": "failed"}
    if cell.backend == "unsloth":
        return synthetic.skipped(cell, "Unsloth has no wheel for this Python")
    if cell.backend == "transformers_cb" and cell.batch == 32:
        return synthetic.record(cell, gpu="NVIDIA H200", reason="out of memory", **failed)
    if cell.option == "up4" and cell.batch == 32 and cell.sampling == "equivalence":
        return synthetic.record(cell, gpu="NVIDIA H200", reason="out of resource: shared memory", **failed)
    if cell.experiment == "sweep" and cell.backend == "transformers_generate" and cell.batch == 16:
        if cell.session == 4:
            return synthetic.record(cell, gpu="NVIDIA H200", reason="timeout: longer than 1800 s", **failed)
        if cell.session == 2:
            return None
    wide = cell.backend == "vllm" and cell.option == "default"
    made = make(seed).record(cell, memory_gb=120 if wide else 8 + cell.batch / 8)
    made.memory.kv_reserved = 10**11 if wide else cell.batch * 10**8
    for r in made.rounds:
        r.started = BEGIN + 86400 * cell.session + 60 * r.index
        if r.flags:
            r.wall_s *= 1.15  # a disturbed round is slower, and the median of five does not care
            r.decode_s *= 1.15
    return made


def build(folder: Path) -> list[Cell]:
    """Write the run: records, drift verification, one record cut in half."""
    cells = synthetic.write_run(folder, config(), record)
    for stack in ("torch2.11", "torch2.9.1"):
        synthetic.write_drift(folder, stack)
    cut = next(c for c in cells if c.backend == "transformers_generate" and c.batch == 8 and c.session == 5)
    path = folder / "raw" / cut.path
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    return cells


def ratio(batch: int, over: str = "flex", **keys: Any) -> dict[str, Any]:
    """A claim about a backend of the sweep over vLLM, by medians."""
    under = {"experiment": "sweep", "backend": "vllm", "batch": batch}
    return {"kind": "ratio", "over": under | {"backend": over}, "under": under, "statistic": "median"} | keys


def gain(option: str) -> dict[str, Any]:
    default = {"section": "options", "batch": 16, "sampling": "greedy", "option": "default"}
    sides = {"over": default | {"option": option}, "under": default, "statistic": "median", "topic": "options"}
    return {"kind": "ratio", "value": GAIN[option], "tolerance": 0.02} | sides


def absolute(metric: str, value: float, **keys: Any) -> dict[str, Any]:
    """A claim about vLLM at batch 8."""
    cells = {"experiment": "sweep", "backend": "vllm", "batch": 8}
    unit = {"tps": "tok/s", "memory_gb": "GB"}[metric]
    return {"kind": "absolute", "metric": metric, "cells": cells, "value": value, "unit": unit, "gpu": "H200"} | keys


def fact(metric: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "boolean", "metric": metric} | keys


CB_32 = {"backend": "transformers_cb", "batch": 32}
SUM = {"operation": "sum", "numbers": {"one": 1, "two": 2}, "value": 4}
# id: (verdict, words of its reason, the claim)
JUDGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gain-8": ("reproduced", "", ratio(8, value=1.3)),
    "gain-8-best": ("reproduced", "", ratio(8, value=1.3, statistic="best")),
    "gain-8-doubled": ("not reproduced", "below", ratio(8, value=2.6)),
    "more-8": ("reproduced", "", ratio(8, direction="more")),
    "less-8": ("not reproduced", "above the published value, and the 95 % interval", ratio(8, direction="less")),
    "more-16": ("within noise", "the interval of the ratio holds the value", ratio(16, direction="more")),
    "less-16": ("within noise", "the interval of the ratio holds the value", ratio(16, direction="less")),
    "more-alike": ("within noise", "the interval of the ratio holds the value", gain("null1") | {"direction": "more"}),
    "same-16": ("reproduced", "", ratio(16, direction="same", tolerance=0.02)),
    "same-32": ("not reproduced", "", ratio(32, direction="same", tolerance=0.02)),
    "loss-32": ("reproduced", "", ratio(32, direction="at_most", value=0.8)),
    "more-32": ("not reproduced", "below", ratio(32, direction="more")),
    "at-least-32": ("not reproduced", "below", ratio(32, direction="at_least", value=1, tolerance=0.1)),
    "rate-8": ("reproduced", "", absolute("tps", 1000)),
    "memory-8": ("reproduced", "", absolute("memory_gb", 120)),
    "other-card": ("not run", "published for a B200; measured on NVIDIA H200", absolute("tps", 1000, gpu="B200")),
    "no-cell": ("not run", "the matrix has no cell", ratio(64, value=1.3)),
    "failed-cell": ("not run", "failed: out of memory", ratio(32, "transformers_cb", value=0.2)),
    "fails": ("reproduced", "", fact("fails", cells=CB_32, reason="memory", topic="broke")),
    "fails-so": ("not reproduced", "it fails, but otherwise", fact("fails", cells=CB_32, reason="NaN")),
    "coherent": ("reproduced", "", fact("coherent", cells={"experiment": "sweep"})),
    "base": ("reproduced", "", fact("base_identical", topic="drift")),
    "wrong-sum": ("contradicted by its own source", "one: 1; two: 2", {"kind": "arithmetic", "own_source": SUM}),
    **{f"option-{name}": ("reproduced", "", gain(name)) for name, value in GAIN.items() if value != 1},
}


def write_claims(path: Path) -> None:
    shared = {"source": 1, "section": "Truth", "topic": "batch_sweep"}
    vllm = {"experiment": "sweep", "backend": "vllm", "batch": 8}
    values = {
        "gpu": "H200",
        "model": "tiny-gsm",
        "sources": {1: {"title": "what was planted", "about": "the truth of this file", "sections": ["Truth"]}},
        "published": [{"source": 1, "cells": vllm, "tps": 1000, "memory_gb": 120}],
        "claims": [shared | {"id": name, "quote": name} | claim for name, (_, _, claim) in JUDGED.items()],
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))


@dataclass(frozen=True)
class Rebuilt:
    """The run, its analysis as analysis.json holds it, and its document."""

    folder: Path
    cells: list[Cell]
    analysis: Analysis
    document: str

    def part(self, title: str) -> str:
        """What stands under a heading that begins so, down to the next of its level."""
        found = re.search(rf"^(##+) {re.escape(title)}.*\n((?s:.*?))(?=^##[ #]|\Z)", self.document, re.M)
        assert found, title
        body = found[2]
        if found[1] == "##":
            body = re.search(rf"^## {re.escape(title)}.*\n((?s:.*?))(?=^## |\Z)", self.document, re.M)[1]
        return body


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Rebuilt:
    folder = tmp_path_factory.mktemp("rebuild")
    write_claims(folder / "claims.yaml")
    cells = build(folder)
    analyse(config(), folder, folder / "claims.yaml")
    document = render(config(), folder, REPORT).read_text()
    analysis = Analysis.model_validate_json((folder / "analysis.json").read_text())
    return Rebuilt(folder, cells, analysis, document)


def rows(part: str) -> list[dict[str, str]]:
    """The first table of a part, a row a dict."""
    lines = re.search(r"(?:^\|.*\n)+", part, re.M)[0].splitlines()
    header, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    return [dict(zip(header, line, strict=True)) for line in body]


def number(text: str) -> float:
    """The first number of a cell or sentence; dashes of a range are no minus."""
    return float(re.search(r"(?:(?<![\d.])[-+])?\d+(?:\.\d+)?", text)[0])


def printed(value: float, digits: int = 3) -> float:
    """As the document rounds it."""
    return float(f"{value:.{digits}g}")


def expected(ratio: float) -> str:
    return "no difference shown" if abs(ratio - 1) < 1e-9 else "faster" if ratio > 1 else "slower"


def planted(pair: Pair) -> float:
    return truth(pair.over) / truth(pair.under)


def verdicts(told: str, batches: list[int]) -> dict[int, str]:
    """`faster at 8 and 16, slower at 32` by batch; one verdict without a batch is that of all."""
    if " at " not in told:
        return dict.fromkeys(batches, told)
    found = re.findall(r"([a-z ]+?) at ((?:\d+(?:, (?=\d)| and )?)+)", told)
    return {int(b): verdict.strip() for verdict, listed in found for b in re.findall(r"\d+", listed)}


def test_every_cell_is_accounted_for(run: Rebuilt) -> None:
    assert len(run.cells) == len(run.analysis.cells) == 500 and len(run.analysis.results) == 100
    count = Counter(row.status for row in run.analysis.cells)
    assert count == {"ok": 482, "failed": 11, "skipped": 5, "missing": 1, "unreadable": 1}
    told = ", ".join(f"{count[name]} {name}" for name in ("ok", "failed", "skipped", "missing", "unreadable"))
    assert f"500 cells in this run: {told}." in run.document
    broke = [re.sub(r"\[.*?\)", "", "|".join(row.values())) for row in rows(run.part("What broke"))]
    for words in (
        "unreadable|transformers generate|default|torch2.11|`sweep` 8|the file: not complete JSON",
        "missing|transformers generate|default|torch2.11|`sweep` 16|no record",
        "failed|transformers generate|default|torch2.11|`sweep` 16|timeout",
        "failed|transformers CB|default|torch2.11|`sweep` 32|out of memory",
        "skipped|Unsloth|default|torch2.11|`sweep` 8|Unsloth has no wheel",
        "failed|flex|up4|torch2.11|`options` 32|out of resource",
    ):
        assert [line for line in broke if line.startswith(words)], (words, broke)
    measured = {row["Cell"] for row in rows(run.part("Raw stats"))}
    assert len(measured) == count["ok"]


def test_planted_effects_and_nulls(run: Rebuilt) -> None:
    """Of every effect the right verdict; of the nulls one in twenty may look like one."""
    wrong = Counter()
    for pair in run.analysis.pairs:
        verdict = expected(planted(pair))
        wrong[verdict] += pair.comparison.verdict != verdict
    count = Counter(expected(planted(pair)) for pair in run.analysis.pairs)
    assert count == {"faster": 23, "slower": 17, "no difference shown": 39}
    assert wrong["faster"] == wrong["slower"] == 0 and wrong["no difference shown"] <= 5


def test_what_did_not_run_is_not_compared(run: Rebuilt) -> None:
    """Sessions that are not there narrow a comparison, and a configuration without any is in none."""
    compared = {(p.over.experiment, p.over.backend, p.over.batch): p.comparison for p in run.analysis.pairs}
    assert (("sweep", "transformers_cb", 32)) not in compared and (("sweep", "unsloth", 8)) not in compared
    assert compared["sweep", "transformers_generate", 8].sessions == [1, 2, 3, 4]
    assert compared["sweep", "transformers_generate", 16].sessions == [1, 3, 5]
    assert compared["sweep", "flex", 16].sessions == [1, 2, 3, 4, 5]
    assert compared["sweep", "flex", 32].flagged == 5 and compared["sweep", "flex", 16].flagged == 0


def test_coverage_and_false_alarms_over_seeds(tmp_path: Path) -> None:
    """790 intervals of ratios hold the truth in 95 of 100 cases, and as many of the 390 nulls show no difference."""
    held, quiet, missed = [], [], []
    matrix = config()
    for seed in range(1, 11):
        folder = tmp_path / str(seed)
        synthetic.write_run(folder, matrix, lambda cell, seed=seed: record(cell, seed))
        cells, _ = collect.collect(matrix, folder)
        for pair in make_pairs(collect.combine(cells, matrix), cells, {}):
            true, found = planted(pair), pair.comparison
            held.append(found.low <= true <= found.high)
            if expected(true) == "no difference shown":
                quiet.append(found.verdict == expected(true))
            else:
                missed.append(found.verdict != expected(true))
    assert (len(held), len(quiet)) == (790, 390)
    assert 0.93 <= sum(held) / len(held) <= 0.97 and 0.93 <= sum(quiet) / len(quiet) <= 0.98
    assert sum(missed) == 0


def test_intervals_of_rates_hold_the_truth(tmp_path: Path) -> None:
    """Without what a session does to all at once, which would move all hundred intervals together."""
    calm = replace(make(1), block=0, telemetry=None)
    synthetic.write_run(tmp_path, config(), calm.record)
    results = collect.combine(collect.collect(config(), tmp_path)[0], config())
    for name, factor in (("tps", 1.0), ("decode_tps", calm.decode)):
        prefix = name.removesuffix("tps")
        held = [
            getattr(r, f"{prefix}tps_low") <= 1000 * factor * truth(r) <= getattr(r, f"{prefix}tps_high")
            for r in results
        ]
        assert len(held) == 100 and 91 <= sum(held) <= 99


def test_claims_get_the_planted_verdicts(run: Rebuilt) -> None:
    found = {row.id: row for row in run.analysis.verdicts}
    assert {name: row.verdict for name, row in found.items()} == {
        name: verdict for name, (verdict, *_) in JUDGED.items()
    }
    for name, (verdict, words, _) in JUDGED.items():
        assert words in found[name].reason, (name, found[name].reason)
        assert re.search(rf"^\| `{name}`: .*\| \*{{0,2}}{verdict}\*{{0,2}} \|", run.document, re.M), name
    for name, row in found.items():  # ratios of five sessions come with their interval
        if row.kind == "ratio" and row.verdict != "not run":
            assert row.interval and row.low <= row.measured <= row.high, name


def test_counts_of_claims_agree_with_the_tables(run: Rebuilt) -> None:
    counted = Counter()
    for row in rows(run.part("Claims")):
        counted += Counter({name: int(value) for name, value in list(row.items())[1:] if value != "–"})
    assert counted == Counter(verdict for verdict, *_ in JUDGED.values())
    told = re.search(r"Of (\d+) published claims: (.+?)\.", run.document)
    assert int(told[1]) == len(JUDGED)
    assert {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", told[2])} == dict(counted)


@pytest.mark.parametrize("experiment", ["sweep", "sweep_sampled", "lora"])
def test_sentences_of_a_sweep_agree_with_its_table(run: Rebuilt, experiment: str) -> None:
    title = config().experiments[experiment].title
    part = run.part(f"{title} (`{experiment}`)")
    table, prose = rows(part), part[part.rindex("|\n") :]
    pairs = [p for p in run.analysis.pairs if p.kind == "vllm" and p.over.experiment == experiment]
    sentences = re.findall(
        r"(\w[^.:|]*?) reaches ([\d.]+?)(?: to ([\d.]+))? times the tok/s of ([^.:|]+?) at batch(?:es)? "
        r"(\d+)(?: to (\d+))?(?:, (\w+) against (\w+))?: ([^.]+)\.",
        prose,
    )
    told = 0
    for over, low, high, under, first, last, mine, theirs, judged in sentences:
        own = [p for p in pairs if (label(p.over), label(p.under)) == (over, under)]
        own.sort(key=lambda p: p.over.batch)
        told += len(own)
        batches = [p.over.batch for p in own]
        assert (int(first), int(last or first)) == (batches[0], batches[-1])
        ratios = [p.comparison.ratio for p in own]
        # Four digits near 1, three elsewhere.
        assert float(low) == pytest.approx(min(ratios), rel=6e-3)
        assert float(high or low) == pytest.approx(max(ratios), rel=6e-3)
        assert verdicts(judged, batches) == {p.over.batch: p.comparison.verdict for p in own}
        assert {(p.over.sampling, p.under.sampling) for p in own if p.across} == ({(mine, theirs)} if mine else set())
        for row in table:  # the table's column is about the first of vLLM's forms
            if row["Backend"] == over and row["% of vLLM"] != "–" and under in ("vLLM", "vLLM + LoRARequest"):
                found = next(p.comparison for p in own if p.over.batch == int(row["Batch"]))
                cell = re.fullmatch(r"(\d+) % \(([\d.]+)–([\d.]+) %\)", row["% of vLLM"])
                assert [float(x) for x in cell.groups()] == [
                    round(100 * found.ratio),
                    printed(100 * found.low),
                    printed(100 * found.high),
                ]
    assert told == len(pairs) > 0, prose


def label(c: Any) -> str:
    return series_label(c.backend, c.adapter)


def test_tables_hold_what_was_measured(run: Rebuilt) -> None:
    """Rates, intervals and best rounds of the sweeps and of the options, against analysis.json."""
    checked = 0
    for part, experiment in (
        ("Batch sweep, greedy (`sweep`)", "sweep"),
        ("GRPO workload (`lora`)", "lora"),
        ("Options", "options"),
    ):
        own = {(label(r), r.batch, r.sampling, r.option): r for r in run.analysis.results if r.experiment == experiment}
        for row in rows(run.part(part)):
            option = row.get("Option", "default").strip("`")
            result: Result = own[row.get("Backend", "flex"), int(row["Batch"]), row.get("Sampling", "greedy"), option]
            if result.status != "ok":
                assert row["tok/s, median"] == result.status
                continue
            low, high = (float(end) for end in row["95 % interval"].split("–"))
            assert (low, high) == (rate(result.tps_low), rate(result.tps_high))
            assert float(row["tok/s, median"]) == rate(result.tps) and low <= rate(result.tps) <= high
            assert float(row["tok/s, best"]) == rate(result.tps_best) >= rate(result.tps)
            checked += 1
    assert checked == 10 + 8 + 63


def rate(value: float) -> float:
    return round(value) if value >= 100 else printed(value)


def test_sentences_about_options_agree_with_the_table(run: Rebuilt) -> None:
    part = run.part("Options")
    compared = [row for row in rows(part) if row["Verdict"] != "–"]
    told = re.search(r"^Of (\d+) options compared: (.+)\.$", part, re.M)
    assert int(told[1]) == len(compared)
    check_counted(told[2], Counter(row["Verdict"] for row in compared))
    settings = Counter((r["Option"], r["Verdict"]) for r in compared if r["Verdict"] in ("faster", "slower"))
    assert len(re.findall("`", told[2])) == 2 * len(settings)
    for (option, verdict), count in settings.items():
        gains = [r["Gain"] for r in compared if (r["Option"], r["Verdict"]) == (option, verdict)]
        if count == 1:
            assert f"{option} {gains[0]}" in told[2]
        else:
            ends = sorted((g.partition(" (")[0] for g in gains), key=lambda g: number(g.removesuffix(" %")))
            assert f"{option} {ends[0]} to {ends[-1]} in {count} settings" in told[2]
    for row in compared:
        gained, low, high = (float(x) for x in re.findall(r"[-+][\d.]+", row["Gain"]))
        assert low <= gained <= high
        judged = "faster" if low > 0 else "slower" if high < 0 else "no difference shown"
        assert row["Verdict"] == judged or 0 in (low, high)  # an end that is printed as 0 may lie on either side


def check_counted(told: str, count: Counter) -> None:
    """`15 faster (...); 4 slower (...); 29 no difference shown`."""
    plain = re.sub(r" \([^;]*\)(?=;|$)", "", told)
    assert {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", plain)} == dict(count), told


def test_sentences_about_stacks_agree_with_the_table(run: Rebuilt) -> None:
    part = run.part("Torch versions")
    table = rows(part)
    assert [row["Verdict"] for row in table] == ["faster", "no difference shown", "slower"]
    told = re.search(r"^Of (\d+) configurations compared: (.+)\.$", part, re.M)
    assert int(told[1]) == len(table)
    check_counted(told[2], Counter(row["Verdict"] for row in table))
    for row in table:
        if row["Verdict"] != "no difference shown":
            assert f"{row['Backend']} (`torch_versions`) {row['torch2.11 over torch2.9.1']}" in told[2]


def test_the_best_option_is_the_best_of_its_setting(run: Rebuilt) -> None:
    table = rows(run.part("Options"))
    told = re.findall(
        r"^\*\*flex, batch (\d+), (\w+), torch2.11\*\*: fastest is `(\w+)`: (\d+) tok/s at the median of (\d+) rounds "
        r"in (\d+) sessions. Against `default`: (.+?), (\w+). Next at the median is `(\w+)`, ([\d.]+) % behind.",
        run.part("Best config"),
        re.M,
    )
    assert len(told) == 8
    for batch, sampling, option, tps, n, sessions, gained, verdict, second, behind in told:
        own = [row for row in table if (row["Batch"], row["Sampling"]) == (batch, sampling)]
        ranked = sorted((row for row in own if row["Gain"] != "–"), key=lambda row: -number(row["tok/s, median"]))
        assert (f"`{option}`", tps, gained, verdict) == tuple(
            ranked[0][name] for name in ("Option", "tok/s, median", "Gain", "Verdict")
        )
        assert (n, sessions) == ("25", "5") and f"`{second}`" == ranked[1]["Option"]
        gap = 100 * (1 - number(ranked[1]["tok/s, median"]) / number(tps))
        assert float(behind) == pytest.approx(gap, abs=0.2)  # the table's rates are rounded


def test_the_summary_agrees_with_the_tables(run: Rebuilt) -> None:
    told = re.findall(
        r"At batch (\d+) \((.+?)\) (flex.*?) generates (\d+) tok/s \((\w+)\), (.+?)\.(?= [A-Z])", run.document
    )
    assert [(batch, section) for batch, section, *_ in told] == [
        ("32", "batch sweep"),
        ("16", "GRPO workload with LoRA"),
    ]
    for (batch, _, backend, tps, sampling, shares), part in zip(
        told, ("Batch sweep, sampling", "GRPO workload ("), strict=True
    ):
        row = next(r for r in rows(run.part(part)) if (r["Batch"], r["Backend"]) == (batch, backend))
        assert tps == row["tok/s, median"] and row.get("Sampling", "greedy") == sampling
        assert shares.startswith(f"{row['% of vLLM']} of vLLM")


def test_sentences_about_memory_agree_with_the_table(run: Rebuilt) -> None:
    part = run.part("Memory: ")
    used = {(row["Backend"], row["Option"]): number(row["In use, GB"]) for row in rows(part)}
    told = re.search(r"^flex has ([\d.]+) GB in use at its most: (.+)\.$", part, re.M)
    assert float(told[1]) == used["flex", "`default`"]
    shares = re.findall(r"([\d.]+) of vLLM \((`\w+`)\)", told[2])
    assert {option: float(share) for share, option in shares} == {
        option: printed(used["flex", "`default`"] / gb) for (name, option), gb in used.items() if name == "vLLM"
    }


def flagged(run: Rebuilt) -> Iterator[tuple[Cell, int, list[str]]]:
    """(cell, measured round from 1, flags) of what was planted."""
    for cell in run.cells:
        done = record(cell)
        for index, r in enumerate(done.measured if done else [], 1):
            if r.flags:
                yield cell, index, r.flags


def test_flagged_rounds_are_counted_and_named(run: Rebuilt) -> None:
    disturbed = list(flagged(run))
    assert Counter(cell.experiment for cell, *_ in disturbed) == {"sweep": 5, "lora": 8, "options": 1}
    named = {row["Cell"].split("]")[0][1:]: row["Flagged"] for row in rows(run.part("Raw stats"))}
    for cell in run.cells:
        own = [(index, flags) for other, index, flags in disturbed if other == cell]
        told = "; ".join(f"{index}: {', '.join(flags)}" for index, flags in own)
        assert named.get(cell.path.removesuffix(".json"), "–") == (told or "–")
    for experiment in ("sweep", "lora"):
        part = run.part(f"{config().experiments[experiment].title} (`{experiment}`)")
        count, of, why = re.search(r"(\d+) measured rounds of (\d+) are flagged, and counted: (.+?)\.\s", part).groups()
        own = [flags for cell, _, flags in disturbed if cell.experiment == experiment]
        assert int(count) == len(own) and why.split("; ") == sorted({flag for flags in own for flag in flags})
        table = rows(part)
        assert int(count) == sum(int(row["Flagged"]) for row in table if row["Flagged"] != "–")
        assert int(of) == sum(int(row["Rounds"].split()[0]) for row in table if row["Rounds"] != "–")


def test_a_disturbed_round_does_not_move_the_median(run: Rebuilt) -> None:
    """Its flagged rounds are 15 % slower; they are in the spread and not in the estimate."""
    pair = next(
        p for p in run.analysis.pairs if (p.over.experiment, p.over.backend, p.over.batch) == ("sweep", "flex", 32)
    )
    assert pair.comparison.low < 0.8 < pair.comparison.high and pair.comparison.high - pair.comparison.low < 0.05
    spread = [row.spread for row in run.analysis.cells if row.rounds_flagged and row.experiment == "sweep"]
    assert len(spread) == 5 and min(spread) > 0.1


def test_every_link_resolves(run: Rebuilt) -> None:
    targets = set(re.findall(r"\]\(([^)\s]+)\)", run.document))
    files = {target for target in targets if not target.startswith("#")}
    assert len(files) > 480 and all((run.folder / target).is_file() for target in files)
    anchors = {
        "#" + re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.+)$", run.document, re.M)
    }
    assert {target for target in targets if target.startswith("#")} <= anchors
    # Whatever has a number is a link; of what failed alike in many sessions the first ones are.
    assert {row.file for row in run.analysis.cells if row.status == "ok"} <= files
    for result in run.analysis.results:
        assert files & set(result.files), result


def test_nothing_is_printed_that_is_no_value(run: Rebuilt) -> None:
    assert not re.findall(
        r"^.*\b(?:nan|NaN|None|inf|NaT|null)\b.*$", re.sub(r"(?s)```json.*?```", "", run.document), re.M
    )
    for block in re.findall(r"(?:^\|.*\n)+", run.document, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block
    table = (run.folder / "table.csv").read_text()
    assert table.count("\n") == 501 and not re.search(r"\b(nan|None|inf)\b", table)


def test_a_run_without_a_cell(tmp_path: Path) -> None:
    """A stack that only verifies drift has none."""
    matrix = config().model_copy(update={"experiments": {"sweep": config().experiments["sweep"]}})
    analysis = analyse(matrix, tmp_path, REPORT / "claims.yaml", stacks=["torch2.9.1"])
    assert analysis.cells == [] and "0 cells in this run" in render(matrix, tmp_path, REPORT).read_text()


def test_the_same_bytes_again(run: Rebuilt, tmp_path: Path) -> None:
    write_claims(tmp_path / "claims.yaml")
    build(tmp_path)
    analyse(config(), tmp_path, tmp_path / "claims.yaml")
    for name in ("table.csv", "analysis.json"):
        assert (tmp_path / name).read_bytes() == (run.folder / name).read_bytes()
    assert render(config(), tmp_path, REPORT).read_text() == run.document


def main() -> None:
    parser = argparse.ArgumentParser(description="How long analyse and report take on the run of this file.")
    parser.add_argument("--time", type=Path, metavar="DIR", required=True, help="Folder to build the run in.")
    folder = parser.parse_args().time
    cells = build(folder)
    begun = time.perf_counter()
    analyse(config(), folder, REPORT / "claims.yaml")
    analysed = time.perf_counter()
    render(config(), folder, REPORT)
    done = time.perf_counter()
    print(f"{len(cells)} cells: analyse {analysed - begun:.2f} s, report {done - analysed:.2f} s")


if __name__ == "__main__":
    main()
