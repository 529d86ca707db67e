"""The document: complete, honest about what is missing, links that resolve, the same bytes every time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

for name in ("jinja2", "matplotlib", "pandas"):
    pytest.importorskip(name)

import report_runs
import synthetic
from flexroll.analysis.model import QualityRow
from flexroll.analysis.quality import read_qualities
from flexroll.analysis.run import analyse, read_analysis
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.report.page import page
from flexroll.report.render import render
from flexroll.schema.cells import Cell
from flexroll.schema.config import Config
from flexroll.schema.quality import QualityRecord, Target
from flexroll.schema.records import Record

REPORT = Path(__file__).parent.parent / "report"
SECTIONS = [
    "Claims",
    "Set-up",
    "Best config",
    "Batch sweep",
    "GRPO workload with LoRA",
    "Options",
    "What broke",
    "Torch versions",
    "Drift verification",
    "Sample completions",
    "Raw stats",
]


def mixed(cell: Cell) -> Record | None:
    """Some of everything: a missing, a failed and a skipped cell, two speeds, one text that closes a code block."""
    if cell.backend == "unsloth":
        return synthetic.skipped(cell, "needs a CUDA GPU")
    if cell.backend == "transformers_cb" and cell.batch == 8:
        return None
    if cell.backend == "flex" and cell.adapter == "unmerged":
        return synthetic.record(cell, status="failed", reason="timeout: a | b\nc", rounds=[], samples=[])
    rate = 100.0 * cell.batch * (2 if cell.backend == "vllm" else 1)
    rates = [rate, rate * 1.1, rate * 1.05]
    return synthetic.record(cell, rates, samples=[synthetic.sample(ok=cell.batch > 2, text="x\n```\n| y | <b>")])


def build(results: Path, make=mixed, drift: bool = True, stacks: list[str] | None = None) -> str:
    config = synthetic.config()
    synthetic.write_run(results, config, make)
    if drift:
        synthetic.write_drift(results, "torch2.11")
    analyse(config, results, REPORT / "claims.yaml", stacks)
    return render(config, results, REPORT).read_text()


def sections(document: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", document, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def links(document: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)]+)\)", document) if not target.startswith("#")]


def check(document: str, results: Path) -> None:
    found = sections(document)
    assert list(found) == SECTIONS
    for name, body in found.items():
        parts = [part.strip() for part in re.split(r"^### .+$", body, flags=re.M)]
        assert any(parts) and all(parts[1:]), f"{name}: {body}"
    for target in links(document):
        assert (results / target).is_file(), target
    anchors = {"#" + re.sub(r"[^a-z0-9 -]", "", name.lower()).replace(" ", "-") for name in found}
    assert set(re.findall(r"\]\((#[^)]+)\)", document)) <= anchors
    for line in document.splitlines():
        assert "None" not in line and "nan" not in line.split(), line


def tables(document: str) -> list[list[str]]:
    """Blocks of consecutive table lines outside code."""
    plain = re.sub(r"^(`{3,})text\n.*?^\1$", "", document, flags=re.M | re.S)
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", plain, flags=re.M)]


def test_a_mixed_run(tmp_path: Path) -> None:
    document = build(tmp_path)
    check(document, tmp_path)
    found = sections(document)
    assert "17 cells" in document or re.search(
        r"\d+ cells in this run: \d+ ok, 1 failed, 1 skipped, 1 missing", document
    )
    assert "needs a CUDA GPU" in found["What broke"] and "timeout: a \\| b c" in found["What broke"]
    assert "no record" in found["What broke"]
    assert "page_size=32" in found["Options"] and "50 %" in found["Batch sweep"]
    assert "torch2.11 over torch2.9.1" in found["Torch versions"]
    assert "bit-identical" in document and "Not verified on torch2.9.1" in found["Drift verification"]
    assert "broken (one unit repeats)" in found["Sample completions"]
    assert "````text" in found["Sample completions"]  # the text's own fence cannot close the block
    for name in ("throughput", "memory", "drift"):
        assert (tmp_path / "figures" / f"{name}.svg").read_text().startswith("<?xml")


def test_tables_are_rectangular(tmp_path: Path) -> None:
    blocks = tables(build(tmp_path))
    assert len(blocks) > 10
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block}
        assert len(widths) == 1 and len(block) > 2, block


@pytest.mark.parametrize("make", [lambda cell: None, lambda cell: synthetic.skipped(cell)], ids=["missing", "skipped"])
def test_nothing_ran(tmp_path: Path, make) -> None:
    document = build(tmp_path, make, drift=False)
    check(document, tmp_path)
    found = sections(document)
    assert "[what broke](#what-broke)" in found["Sample completions"]
    assert "Not verified on torch2.11" in found["Drift verification"]
    assert "No round was measured" in found["Raw stats"]
    assert not list(tmp_path.glob("figures/*.svg"))


def test_no_record_at_all_and_one_stack(tmp_path: Path) -> None:
    document = build(tmp_path, stacks=["torch2.9.1"])
    check(document, tmp_path)
    assert "left out: torch2.11" in sections(document)["Torch versions"]


def test_same_bytes_every_time(tmp_path: Path) -> None:
    def everything(folder: Path) -> dict[str, bytes]:
        build(folder)
        files = [folder / "results.md", *folder.glob("figures/*.svg")]
        return {f.name: f.read_bytes() for f in files}

    first = everything(tmp_path / "a")
    assert everything(tmp_path / "a") == first
    assert everything(tmp_path / "b") == first and len(first) == 4


def test_a_figure_without_data_goes(tmp_path: Path) -> None:
    build(tmp_path)
    build(tmp_path, synthetic.skipped)
    assert not (tmp_path / "figures" / "throughput.svg").exists()


def test_random_weights_get_no_coherence_verdict(tmp_path: Path) -> None:
    config = synthetic.config(model={"name": "noise", "source": "random", "path": "m"})
    synthetic.write_run(tmp_path, config, lambda c: synthetic.record(c, samples=[synthetic.sample(ok=False)]))
    analyse(config, tmp_path, REPORT / "claims.yaml")
    found = sections(render(config, tmp_path, REPORT).read_text())
    assert "broken" not in found["Options"] and "broken" not in found["Best config"]


def test_broken_text_is_never_the_best_config(tmp_path: Path) -> None:
    def make(cell: Cell) -> Record:
        fast = cell.option == "page32"
        return synthetic.record(cell, (500, 510) if fast else (100, 110), samples=[synthetic.sample(ok=not fast)])

    found = sections(build(tmp_path, make))["Best config"]
    assert "fastest is `default`" in found and "broken text: `page32`" in found


def test_published_numbers_stand_beside_their_model_only(tmp_path: Path) -> None:
    assert "Published B200: tok/s" not in build(tmp_path)
    experiment = synthetic.CONFIG["experiments"]["sweep"] | {"batches": [8], "sampling": "equivalence"}
    config = synthetic.config(
        model={"name": "Qwen3_4B_Base", "source": "local", "path": "m"},
        experiments={"batch_sweep_sampled": experiment},
        run="other",
    )
    synthetic.write_run(tmp_path / "q", config, lambda c: synthetic.record(c, gpu="NVIDIA H200"))
    analyse(config, tmp_path / "q", REPORT / "claims.yaml")
    found = sections(render(config, tmp_path / "q", REPORT).read_text())["Batch sweep"]
    assert "Published B200: tok/s" in found and re.search(r"\| vLLM .*\| 1900 \| 156 \|", found)


def test_vllm_is_compared_at_the_same_sampling_first(tmp_path: Path) -> None:
    backends = [
        {"backend": "vllm"},
        {"backend": "vllm", "sampling": "equivalence"},
        {"backend": "flex", "sampling": "equivalence"},
        {"backend": "transformers_generate"},
    ]
    experiment = synthetic.CONFIG["experiments"]["sweep"] | {"batches": [8], "backends": backends}
    config = synthetic.config(experiments={"both": experiment})
    speed = {("vllm", "greedy"): 200, ("vllm", "equivalence"): 100, ("flex", "equivalence"): 50}

    def make(cell: Cell) -> Record:
        return synthetic.record(cell, [speed.get((cell.backend, cell.sampling), 20)])

    synthetic.write_run(tmp_path, config, make)
    analyse(config, tmp_path, REPORT / "claims.yaml")
    found = sections(render(config, tmp_path, REPORT).read_text())["Batch sweep"]
    assert re.search(r"\| flex .*\| 50 % \|", found) and re.search(r"\| transformers generate .*\| 10 % \|", found)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    config = synthetic.config()
    with pytest.raises(FlexrollError, match="flexroll analyse"):
        render(config, tmp_path, REPORT)
    build(tmp_path)
    with pytest.raises(FlexrollError, match="of run 'synthetic'"):
        render(synthetic.config(run="other"), tmp_path, REPORT)
    with pytest.raises(FlexrollError, match="no such template"):
        render(config, tmp_path, tmp_path)
    (tmp_path / "results.md.j2").write_text("ok\n{{ nonsense }}\n")
    with pytest.raises(FlexrollError, match="nonsense"):
        render(config, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (None, "–"),
        (0, "0"),
        (5474.4, "5474"),
        (12.345, "12.3"),
        (0.01234, "0.0123"),
        (6e-5, "6.00e-05"),
        (99.97, "100"),
    ],
)
def test_significant(value: float | None, printed: str) -> None:
    assert text.significant(value) in (printed, f"{printed}.0")


def test_cells_and_fences_are_safe() -> None:
    assert text.cell("a|b\n<c>") == "a\\|b &lt;c>"
    assert text.fence("a```b").startswith("````text\n")
    assert text.listed(["a", "b", "c"]) == "a, b and c"


WORKLOADS = {
    "group": {"section": "group", "batches": [16], "samples": 8, "sampling": "equivalence"},
    "uneven": {"section": "uneven", "batches": [12], "slots": 4, "new_tokens": {"min": 8, "max": 64}},
    "memory": {"section": "memory", "batches": [8]},
}


def workloads(name: str = "m", **model: str):
    base = {"new_tokens": 64, "stacks": ["torch2.11"]}
    backends = {
        "group": [{"backend": "flex"}, {"backend": "vllm"}, {"backend": "transformers_cb"}],
        "uneven": [{"backend": "flex"}, {"backend": "vllm"}],
        "memory": [{"backend": "flex"}, {"backend": "vllm", "options": ["default", "equal_kv"]}],
    }
    if model:  # transformers cannot draw weights
        backends["group"].pop()
    return synthetic.config(
        model={"name": name, "source": "random", "path": "models/m", **model},
        options={"equal_kv": {"vllm": {"equal_kv": True}}},
        drift={"stacks": []},
        experiments={
            key: {"title": f"The {key}", "backends": backends[key], **base, **own} for key, own in WORKLOADS.items()
        },
    )


def test_group_uneven_and_memory(tmp_path: Path) -> None:
    config = workloads()

    def make(cell: Cell) -> Record:
        wide = cell.backend == "vllm" and cell.option == "default"
        return synthetic.record(
            cell, [200 if cell.backend == "flex" else 100], memory_gb=117 if wide else 9, gpu="H200"
        )

    synthetic.write_run(tmp_path, config, make)
    analyse(config, tmp_path, REPORT / "claims.yaml")
    document = render(config, tmp_path, REPORT).read_text()
    found = sections(document)
    assert list(found) == [*SECTIONS[:5], "Group sampling", "Uneven lengths", "Memory", *SECTIONS[5:]]
    for block in tables(document):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1, block
    assert re.search(r"\| 16 \(2 × 8\) \| flex \|.*\| 200 % \|", found["Group sampling"])
    assert re.search(r"\| 12 \(4 at once\) \| flex \|.*\| 200 % \|", found["Uneven lengths"])
    assert re.search(r"\| vLLM \| `default` \| 80 % of the device \|.*\| 117 \|", found["Memory"])
    # 9 GB in use less 1 GB of weights and 0.1 GB of KV
    assert re.search(r"\| vLLM \| `equal_kv` \| that of flex \| 1.00 \| 0.1 \| 7.90 \|", found["Memory"])
    assert re.search(r"\| flex \| `default` \| what runs at once \|", found["Memory"])
    assert "8–64, log-uniform, seed 0" in found["Set-up"] and "transformers CB: a prompt is computed" in found["Set-up"]
    assert "At batch 12 (uneven lengths) flex generates 200 tok/s" in document
    table = (tmp_path / "table.csv").read_text()
    assert "8 to 64" in table and "{" not in table


def test_drawn_weights_are_said_to_be_drawn(tmp_path: Path) -> None:
    config = workloads(weights="drawn")
    synthetic.write_run(tmp_path, config, synthetic.record)
    analyse(config, tmp_path, REPORT / "claims.yaml")
    setup = sections(render(config, tmp_path, REPORT).read_text())["Set-up"]
    assert "weights drawn on the device by each engine" in setup
    assert "- flex and vLLM: weights drawn on the device, not read: the text is noise." in setup


def test_records_from_before_groups_and_slots_are_read(tmp_path: Path) -> None:
    config = synthetic.config()
    cells = synthetic.write_run(tmp_path, config, synthetic.record)
    for cell in cells:
        path = tmp_path / "raw" / cell.path
        data = json.loads(path.read_text())
        for name in ("samples", "slots", "weights", "variant"):
            del data["cell"][name]
        del data["note"], data["start_parts"]
        path.write_text(json.dumps(data))
    rows = analyse(config, tmp_path, REPORT / "claims.yaml").cells
    assert {(row.status, row.note, row.samples) for row in rows} == {("ok", "", 1)}


SCORED = {"count": 8, "new_tokens": 8}
# Means 1.3e-4 and 1e-4: 1.3 times as much in all, now more and now less in a sequence.
SPREAD = [5e-5, 9e-5, 9e-5, 1e-4, 1e-4, 1.1e-4, 2e-4, 3e-4]
HIGHER = [1.25e-4, 1.3e-4, 1.35e-4, 1.2e-4] * 2

FOUR_BIT = {"flex": {"four_bit": "on_the_fly"}}


def write_scores(results: Path, config: Config, changes: dict) -> None:
    def make(target: Target) -> QualityRecord | None:
        change = changes.get(target.name.removeprefix(f"{target.stack}-").replace("-", "_"), {})
        return None if change is None else synthetic.quality(target, config, **change)

    synthetic.write_quality(results, config, make)


def rows(results: Path, **changes: dict) -> dict[tuple[str, str, str], QualityRow]:
    """Rows of the first stack with some records changed, by backend, adapter and option."""
    config = synthetic.config(quality=SCORED)
    write_scores(results, config, changes)
    return {(q.backend, q.adapter, q.option): q for q in read_qualities(config, results, ["torch2.11"])}


def scored(results: Path, **changes: dict) -> tuple[str, Path]:
    """A document with quality records; changes: of single ones, by backend-adapter-option."""
    config = synthetic.config(quality=SCORED)
    faster = {"page32": 2.0}
    synthetic.write_run(
        results, config, lambda c: synthetic.record(c, [100.0 * c.batch * faster.get(c.option, 1.0)] * 3)
    )
    for stack in config.drift.stacks:
        synthetic.write_drift(results, stack)
    write_scores(results, config, changes)
    analyse(config, results, REPORT / "claims.yaml")
    document = render(config, results, REPORT).read_text()
    return document, page(results, REPORT)


def test_correctness_stands_after_options_and_only_where_it_was_asked_for(tmp_path):
    document, html = scored(tmp_path / "asked")
    found = sections(document)
    assert list(found) == [*SECTIONS[:6], "Correctness", *SECTIONS[6:]]
    body = found["Correctness"]
    assert "[1](quality/torch2.11-flex-none-page32.json)" in body and "1.05" in body
    told = read_analysis(tmp_path / "asked").quality
    counts = [sum(q.admissible is verdict for q in told) for verdict in (True, None)]
    assert (
        f"Of {len(told)} engine configurations {counts[0]} are admissible and of {counts[1]} it cannot be told." in body
    )
    for target in links(document):
        assert (tmp_path / "asked" / target).is_file(), target
    assert (
        'id="correctness"' in html.read_text() and 'href="quality/torch2.11-flex-none-page32.json"' in html.read_text()
    )
    plain = build(tmp_path / "plain")
    assert "Correctness" not in plain
    assert not [name for name, body in sections(plain).items() if "dmissible" in body and name != "Claims"]
    assert 'id="correctness"' not in page(tmp_path / "plain", REPORT).read_text()


@pytest.mark.parametrize(("baseline", "base"), [(None, "default"), ("page128", "page128"), ("eager", "default")])
def test_gains_are_told_over_the_baseline_of_the_experiment(tmp_path, baseline, base):
    """Where it has no result, over `default`."""
    experiments = report_runs.config().model_dump(mode="json", exclude_unset=True)["experiments"]
    config = report_runs.config(experiments=experiments | {"options": experiments["options"] | {"baseline": baseline}})

    def record(cell):
        if cell.option == "eager":
            return synthetic.record(cell, status="failed", reason="no g++", rounds=[], samples=[])
        return synthetic.record(cell, (100.0 * report_runs.GAIN.get(cell.option, 1.0),) * 3)

    synthetic.write_run(tmp_path, config, record)
    analyse(config, tmp_path, REPORT / "claims.yaml")
    document = render(config, tmp_path, REPORT).read_text()
    rows = {
        cells[1].strip(" `"): cells
        for line in sections(document)["Options"].splitlines()
        if (cells := line.split("|"))[0] == "" and len(cells) > 5
    }
    place = next(n for n, cell in enumerate(rows["Option"]) if cell.strip() == "Gain")
    told = {name: row[place].strip() for name, row in rows.items() if name in ("default", *report_runs.GAIN)}
    gains = {name: report_runs.GAIN.get(name, 1.0) for name in ("default", "page32", "page128")}
    for name, gain in gains.items():
        assert told[name].startswith("baseline" if name == base else f"{(gain / gains[base] - 1) * 100:+.1f} %")
    assert told["eager"] == "–"


def test_an_option_that_is_not_admissible_gains_nothing(tmp_path):
    document, _ = scored(tmp_path / "good")
    best = sections(document)["Best config"]
    assert "fastest is `page32`" in best
    document, html = scored(tmp_path / "bad", flex_none_page32={"kl": 1.11e-4})
    found = sections(document)
    assert "fastest is `default`" in found["Best config"]
    assert "Left out as not admissible: `page32`." in found["Best config"]
    row = next(line for line in found["Options"].splitlines() if line.startswith("| `page32`"))
    assert "**no**" in row
    assert "Not counted, for it is not admissible: `page32` +100.0 %." in found["Options"]
    assert (
        "`page32` of flex" in found["Correctness"]
        and "1.11 times [1.11, 1.11] the baseline's over 8 sequences, more than 1.1" in found["Correctness"]
    )
    assert "Left out as not admissible" in html.read_text()


@pytest.mark.parametrize(
    ("change", "admissible", "why"),
    [
        ({"kl": 1.1e-4}, True, "1.1 times [1.1, 1.1] the baseline's over 8 sequences"),
        ({"kl": 1.2e-4}, False, "1.2 times [1.2, 1.2] the baseline's over 8 sequences, more than 1.1"),
        ({"kl": 1.275e-4, "kl_sequences": HIGHER}, False, "1.28 times ["),
        ({"kl": 1.3e-4, "kl_sequences": SPREAD}, None, "cannot be told: its KL is 1.3 times ["),
        ({"kl": 1.1e-4, "kl_sequences": [8.8e-4, *[0.0] * 7]}, True, "1.1 times ["),
        ({"reference_sha256": "a" * 64}, None, "scored on other continuations"),
        (
            {"divergences": [{"prompt": 2, "place": 5, "expected": 1, "got": 2, "gap": 0.21}]},
            False,
            "prompt 2 at token 5",
        ),
        ({"divergences": [{"prompt": 2, "place": 5, "expected": 1, "got": 2, "gap": 0.2}]}, True, "near-tie"),
        ({"divergences": [], "diverged": 0}, True, "no sequence leaves"),
        ({"kl": None, "unscored": "cannot be scored"}, None, "cannot be scored, so KL cannot be told"),
        ({"status": "failed", "reason": "timeout"}, None, "not scored: failed: timeout"),
        ({"status": "failed", "reason": "logits that are not finite"}, False, "logits that are not finite"),
        ({"status": "skipped", "reason": "needs a GPU"}, None, "not scored: skipped: needs a GPU"),
        (None, None, "missing"),
        ({"option": "default"}, None, "holds another configuration"),
    ],
)
def test_what_makes_an_option_admissible(tmp_path, change, admissible, why):
    found = rows(tmp_path, flex_none_page32=change)
    row = found["flex", "none", "page32"]
    assert row.admissible is admissible and why in row.why
    assert found["flex", "none", "default"].admissible is True
    assert found["transformers_cb", "none", "default"].admissible is None


def test_rounding_in_fp32_is_no_difference(tmp_path):
    """KL of two fp32 engines is what rounding makes of 0: its multiples say nothing."""
    exact = {"kl": 2e-9, "divergences": [], "diverged": 0}
    row = rows(tmp_path, flex_none_default=exact, flex_none_page32=exact | {"kl": 9e-8})["flex", "none", "page32"]
    assert row.admissible and "rounding in fp32" in row.why


def test_without_a_baseline_nothing_is_told(tmp_path):
    row = rows(tmp_path, flex_none_default={"status": "failed", "reason": "out of memory"})["flex", "none", "page32"]
    assert row.admissible is None and "`default` has no KL" in row.why


def test_a_backend_without_the_baseline_option_is_held_against_its_default(tmp_path):
    """`quality.baseline` is one name for all backends, and only some have such an option."""
    config = synthetic.config(quality=SCORED | {"baseline": "page32"})
    write_scores(tmp_path, config, {})
    found = {(q.backend, q.adapter, q.option): q for q in read_qualities(config, tmp_path, ["torch2.11"])}
    assert found["flex", "none", "page32"].baseline and not found["flex", "none", "default"].baseline
    others = [q for q in found.values() if q.backend != "flex"]
    assert others and all(q.baseline == (q.option == "default") for q in others)
    assert found["flex", "merged", "default"].baseline and found["flex", "merged", "default"].admissible is True


def test_nf4_weights_are_measured_and_judged_by_nobodys_rounding(tmp_path):
    config = synthetic.config(quality=SCORED, options=synthetic.CONFIG["options"] | {"page32": FOUR_BIT})
    write_scores(tmp_path, config, {"flex_none_page32": {"kl": 5e-3}})
    found = {(q.backend, q.adapter, q.option): q for q in read_qualities(config, tmp_path, ["torch2.11"])}
    row = found["flex", "none", "page32"]
    assert row.admissible is None and row.times == pytest.approx(50) and "another model" in row.why


def laboratory(results: Path) -> tuple[str, str]:
    """A run with forms of an adapter, 4-bit weights and options that were tried; (document, page)."""
    base = {"batches": [8], "new_tokens": 8, "stacks": ["torch2.11"]}
    config = synthetic.config(
        quality=SCORED,
        options=synthetic.CONFIG["options"] | {"nf4": FOUR_BIT},
        experiments={
            "forms": base
            | {
                "title": "Forms",
                "section": "lora",
                "backends": [{"backend": "flex", "adapters": ["none", "merged", "unmerged"]}],
            },
            "packed": base
            | {
                "title": "Packed",
                "section": "four_bit",
                "backends": [{"backend": "flex", "adapters": ["unmerged"], "options": ["default", "nf4"]}],
            },
            "tried": base
            | {
                "title": "Tried",
                "section": "tried",
                "backends": [{"backend": "flex", "options": ["default", "page32"]}],
            },
        },
    )
    speed = {"none": 100.0, "merged": 98.0, "unmerged": 50.0}
    synthetic.write_run(results, config, lambda c: synthetic.record(c, [speed[c.adapter]] * 3))
    for stack in config.drift.stacks:
        synthetic.write_drift(results, stack)
    write_scores(results, config, {})
    analyse(config, results, REPORT / "claims.yaml")
    return render(config, results, REPORT).read_text(), page(results, REPORT).read_text()


def test_forms_of_an_adapter_stand_beside_each_other(tmp_path):
    document, html = laboratory(tmp_path)
    found = sections(document)
    merged, unmerged = (
        next(line for line in found["LoRA forms"].splitlines() if line.startswith(f"| flex + LoRA {form}"))
        for form in ("merged", "unmerged")
    )
    assert "98 %" in merged and "50 %" in unmerged and "quality/torch2.11-flex-merged-default.json" in merged
    refresh = read_analysis(tmp_path).drift[0].refresh_ms_median
    assert f"| {refresh:.3g} |" in merged and f"| {refresh:.3g} |" not in unmerged  # nothing else is ever refreshed
    assert "flex + LoRA merged 98 % and flex + LoRA unmerged 50 %" in found["LoRA forms"]
    assert "`nf4`" in found["4-bit"]
    assert "What did not move the needle" in found["Options"]
    assert "| `page32` | page_size=32 |" in found["Options"]
    for anchor in ("lora-forms", "4-bit", "what-did-not-move-the-needle"):
        assert f'id="{anchor}"' in html


def test_sections_of_the_laboratory_are_absent_where_nothing_asks_for_them(tmp_path):
    document = build(tmp_path)
    assert not {"LoRA forms", "4-bit"} & set(sections(document)) and "move the needle\n" not in document
