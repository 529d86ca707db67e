"""Claims that quality records judge: admissible options, KL, and text where no cell of the run has any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

import synthetic
from flexroll.analysis import collect
from flexroll.analysis.claims import Run, judge, judge_all
from flexroll.analysis.model import VerdictRow
from flexroll.analysis.pairs import sessions_by_key
from flexroll.analysis.quality import read_qualities
from flexroll.report import text
from flexroll.schema.cells import Cell
from flexroll.schema.claims import ClaimsFile, load_claims
from flexroll.schema.config import Config
from flexroll.schema.load import load_config
from flexroll.schema.quality import QualityRecord, Target
from flexroll.schema.records import Record

ROOT = Path(__file__).parent.parent
H200 = "NVIDIA H200"
TINY = {"name": "tiny_gsm", "source": "local", "path": "models/tiny-gsm"}
SHAPE = {"name": "Qwen3_4B_shape", "source": "random", "path": "m"}
BASE = {"id": "c", "source": 1, "section": "s", "topic": "broke", "quote": "q", "gpu": "any"}
PAGE32 = {"backend": "flex", "adapter": "none", "option": "page32"}
ADMISSIBLE = {"kind": "boolean", "metric": "admissible", "cells": PAGE32}
COHERENT = {"kind": "boolean", "metric": "coherent", "cells": PAGE32 | {"batch": 8, "experiment": "options"}}
TIMES = {"kind": "absolute", "metric": "kl_times", "cells": PAGE32, "value": 1.1, "tolerance": 0, "unit": "x"}
TIMES |= {"direction": "at_most"}
FILE = "quality/torch2.11-flex-none-page32.json"
BASELINE = "quality/torch2.11-flex-none-default.json"
FAR = {"divergences": [{"prompt": 2, "place": 5, "expected": 1, "got": 2, "gap": 3.0}]}
NAN = {"status": "failed", "reason": "FlexrollError: the model produced logits that are not finite"}
CRASH = {"status": "failed", "reason": "crashed: exit code 7"}


def shape(count: int = 8) -> Config:
    """Drawn weights of the published shape, scored on the embedded model."""
    return synthetic.config(model=SHAPE, quality={"model": TINY, "count": count, "new_tokens": 8})


def verdict(
    tmp_path: Path,
    claim: dict[str, Any],
    *,
    config: Config | None = None,
    device: str = H200,
    cell: dict[str, Any] | None = None,
    **page32: Any,
) -> VerdictRow:
    """cell: changes of flex's page32 cells. page32: of its quality record; None as `status` leaves none."""
    config = config or shape()

    def record(each: Cell) -> Record:
        changes = cell if cell is not None and each.option == "page32" else {}
        return synthetic.record(each, (100, 101, 102), gpu=None if device == "cpu" else device, **changes)

    def score(target: Target):
        if (target.backend, target.adapter, target.option) != ("flex", "none", "page32"):
            return synthetic.quality(target, config, device=device)
        return None if page32.get("status", "") is None else synthetic.quality(target, config, device=device, **page32)

    synthetic.write_run(tmp_path, config, record)
    synthetic.write_quality(tmp_path, config, score)
    rows, _ = collect.collect(config, tmp_path)
    results, qualities = collect.combine(rows, config), read_qualities(config, tmp_path)
    run = Run(config.model.name, config.model.source, results, [], [], {}, qualities)
    source = {1: {"title": "t", "about": "a", "sections": ["s"]}}
    file = ClaimsFile.model_validate({"gpu": "B200", "model": "Qwen3-4B", "sources": source, "claims": [BASE | claim]})
    row = judge(file.claims[0], file, run)
    for name in row.files:
        assert (tmp_path / name).is_file() or row.verdict == "not run"
    return row


@pytest.mark.parametrize(
    ("changes", "value", "expected", "why"),
    [
        ({}, True, "reproduced", "1.05 times"),
        ({}, False, "not reproduced", "1.05 times"),
        (FAR, True, "not reproduced", "prompt 2 at token 5"),
        (FAR, False, "reproduced", "prompt 2 at token 5"),
        ({"kl": 2e-4}, False, "reproduced", "2 times [2, 2]"),
        (NAN, False, "reproduced", "not finite"),
        (CRASH, False, "not run", "not scored: failed: crashed"),
        ({"status": "skipped", "reason": "needs FA4"}, True, "not run", "needs FA4"),
        ({"status": None}, True, "not run", "missing"),
    ],
)
def test_admissible_is_what_its_quality_record_says(tmp_path, changes, value, expected, why):
    row = verdict(tmp_path, ADMISSIBLE | {"value": value}, **changes)
    assert row.verdict == expected and why in row.reason, row
    assert row.files == [FILE] and text.quantity(row.measured, "", "admissible")
    if expected != "not run":
        assert row.device == f"{H200}, tiny_gsm"


def test_of_several_one_that_is_not_admissible_decides_and_one_untold_leaves_it_open(tmp_path):
    both = ADMISSIBLE | {"cells": {"backend": "flex", "adapter": "none"}}
    assert verdict(tmp_path / "a", both).verdict == "reproduced"
    assert verdict(tmp_path / "b", both, **FAR).verdict == "not reproduced"
    assert verdict(tmp_path / "c", both, **CRASH).verdict == "not run"


@pytest.mark.parametrize("claim", [ADMISSIBLE, COHERENT, TIMES])
def test_where_it_says_nothing(tmp_path, claim):
    row = verdict(tmp_path / "cpu", claim, device="cpu")
    assert row.verdict == "not run" and "CPU" in row.reason and row.measured is None
    row = verdict(tmp_path / "b200", claim | {"gpu": "B200"})
    assert row.verdict == "not run" and "published for a B200; scored on NVIDIA H200" in row.reason
    other = claim | {"cells": claim["cells"] | {"option": "tuned"}}
    assert verdict(tmp_path / "none", other).verdict == "not run"
    foreign = synthetic.config(quality={"count": 8, "new_tokens": 8})
    row = verdict(tmp_path / "foreign", claim, config=foreign)
    assert row.verdict == "not run" and "this run's model is tiny_gsm" in row.reason
    assert verdict(tmp_path / "any", claim | {"any_model": True}, config=foreign).verdict == "reproduced"
    assert verdict(tmp_path / "unscored", claim, config=synthetic.config(model=SHAPE)).verdict == "not run"


def test_without_a_gpu_needed_any_device_will_do(tmp_path):
    assert verdict(tmp_path, ADMISSIBLE | {"gpu": "none"}, device="cpu").verdict == "reproduced"


@pytest.mark.parametrize(("told", "expected"), [(True, "reproduced"), (False, "not reproduced")])
def test_drawn_weights_have_no_text_so_the_scored_models_is_judged(tmp_path, told, expected):
    row = verdict(tmp_path, COHERENT, coherent=told, cell={"samples": [synthetic.sample(ok=not told)]})
    assert row.verdict == expected and row.measured is told
    assert "weights are random" in row.reason and "greedy text of tiny_gsm in the quality record" in row.reason
    assert row.files == [FILE] and row.device == f"{H200}, tiny_gsm"


def test_cells_with_text_come_before_the_quality_record(tmp_path):
    real = synthetic.config(model=SHAPE | {"source": "local"}, quality={"model": TINY, "count": 8, "new_tokens": 8})
    row = verdict(tmp_path / "text", COHERENT, config=real, coherent=False)
    assert row.verdict == "reproduced" and FILE not in row.files
    row = verdict(tmp_path / "none", COHERENT, config=real, coherent=False, cell={"samples": []})
    assert row.verdict == "not reproduced" and row.files == [FILE] and "no cell kept a sample" in row.reason


def test_no_text_anywhere_is_not_run(tmp_path):
    row = verdict(tmp_path / "crash", COHERENT, **CRASH)
    assert row.verdict == "not run" and "weights are random" in row.reason and "crashed" in row.reason
    row = verdict(tmp_path / "tokens", COHERENT, coherent=None)
    assert row.verdict == "not run" and row.measured is None


def test_logits_that_are_not_finite_are_broken_text(tmp_path):
    """Where the published engine printed the vocabulary's first token, ours raises."""
    broken = COHERENT | {"value": False}
    failed = {"rounds": [], "samples": []} | NAN
    row = verdict(tmp_path / "cell", broken, cell=failed)
    assert row.verdict == "reproduced" and "not finite" in row.reason and FILE not in row.files
    row = verdict(tmp_path / "record", broken, **NAN)
    assert row.verdict == "reproduced" and "not finite" in row.reason and row.files == [FILE]
    row = verdict(tmp_path / "other", broken, cell=failed | CRASH)
    assert row.verdict == "not reproduced" and row.files == [FILE]


def spread(factor: float) -> dict[str, Any]:
    """KL of 8 sequences, half 0.5 and half 1.5 times the mean, which is `factor` times the baseline's."""
    each = [factor * 1e-4 * (0.5 if i % 2 else 1.5) for i in range(8)]
    return {"kl": sum(each) / 8, "kl_sequences": each}


@pytest.mark.parametrize(("factor", "expected"), [(0.9, "reproduced"), (1.3, "within noise"), (2.5, "not reproduced")])
def test_kl_is_judged_by_its_interval(tmp_path, factor, expected):
    row = verdict(tmp_path, TIMES, **spread(factor))
    assert row.verdict == expected and row.measured == pytest.approx(factor) and row.interval
    assert row.low < row.measured < row.high and row.files == [FILE, BASELINE]


def test_kl_that_cannot_be_judged_says_why(tmp_path):
    row = verdict(tmp_path / "few", TIMES, config=shape(4))
    assert row.verdict == "not run" and "4 scored prompts are too few" in row.reason
    row = verdict(tmp_path / "crash", TIMES, **CRASH)
    assert row.verdict == "not run" and "crashed" in row.reason
    row = verdict(tmp_path / "base", TIMES | {"cells": PAGE32 | {"option": "default"}})
    assert row.verdict == "not run" and "it is the baseline" in row.reason
    row = verdict(tmp_path / "two", TIMES | {"cells": {"backend": "flex", "adapter": "none"}})
    assert row.verdict == "not run" and "must say which" in row.reason


def test_of_a_list_of_stacks_the_first_that_was_run_judges_a_failure(tmp_path):
    """Reported of one release and mended in the next: both in a run do not make it a failure that is none."""
    config = synthetic.config(model=SHAPE)
    cells = {"experiment": "torch_versions", "backend": "flex", "stack": ["torch2.9.1", "torch2.11"]}
    claim = BASE | {"kind": "boolean", "metric": "fails", "reason": "NameError", "cells": cells}

    def record(each: Cell) -> Record:
        failed = {"status": "failed", "reason": "NameError: TRITON_DECODE", "rounds": [], "samples": []}
        return synthetic.record(each, (1, 2, 3), gpu=H200, **(failed if each.stack == "torch2.9.1" else {}))

    synthetic.write_run(tmp_path, config, record)
    results = collect.combine(collect.collect(config, tmp_path)[0], config)
    source = {1: {"title": "t", "about": "a", "sections": ["s"]}}
    file = ClaimsFile.model_validate({"gpu": "B200", "model": "Qwen3-4B", "sources": source, "claims": [claim]})
    old = judge(file.claims[0], file, Run("Qwen3_4B_shape", "random", results, [], []))
    assert old.verdict == "reproduced" and all("2.9.1" in name for name in old.files)
    newer = [r for r in results if r.stack == "torch2.11"]
    assert judge(file.claims[0], file, Run("Qwen3_4B_shape", "random", newer, [], [])).verdict == "not reproduced"


CELLS_FAIL = {
    "compile_walker_tma": "RuntimeError: CUDA error: misaligned address",
    "max_autotune": "RuntimeError: Cannot prepare for replay during capturing stage",
}
RATES = {"eager": 20.0, "four_bit": 60.0, "four_bit_shard": 60.0}
SCORES = {
    "rows_guaranteed_safe": NAN,
    "contiguous_unsafe": FAR,
    "prescale": spread(1.05),
    "transformers_cb four_bit": {"coherent": False},
}
VERDICTS = {
    "h200-options": {
        "broke-rows-safe": ("reproduced", "quality/torch2.11-flex-none-rows_guaranteed_safe.json"),
        "broke-triton-decode": ("not reproduced", "raw/"),
        "broke-compile-tma": ("reproduced", "raw/"),
        "broke-max-autotune": ("reproduced", "raw/"),
        "broke-no-cudagraphs": ("reproduced", "raw/"),
        "finding-triton-decode": ("reproduced", "raw/"),
        "finding-contiguous-unsafe": ("reproduced", "quality/torch2.11-flex-none-contiguous_unsafe.json"),
        "finding-contiguous-exact": ("reproduced", "quality/torch2.11-flex-none-only_contiguous.json"),
        "finding-prescale-rounding": ("reproduced", "quality/torch2.11-flex-none-prescale.json"),
        "finding-tuned-exact": ("reproduced", "quality/torch2.11-flex-none-tuned.json"),
        "coherent-flex": ("reproduced", "quality/torch2.11-flex-none-tuned.json"),
        "needle-flash-text": ("reproduced", "quality/torch2.11-flex-none-flash_prefill.json"),
        "needle-compile": ("reproduced", "raw/"),
        "option-graphs": ("not reproduced", "raw/"),
        "option-warps-step": ("within noise", "raw/"),
    },
    "h200-lora": {
        "four-bit-flex-text": ("reproduced", "quality/torch2.11-flex-unmerged-four_bit.json"),
        "four-bit-cb-text": ("reproduced", "quality/torch2.11-transformers_cb-unmerged-four_bit.json"),
        "four-bit-costs": ("reproduced", "raw/"),
        "four-bit-costs-cb": ("reproduced", "raw/"),
    },
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_preset_judges_the_claims_it_is_there_for(tmp_path, name):
    """Its weights are drawn, so that speed is of its cells and text and exactness of the quality records."""
    config = load_config(ROOT / "workflow" / "presets" / f"{name}.yaml")

    def record(cell: Cell) -> Record:
        rate = RATES.get(cell.option, 100.0)
        if cell.option in CELLS_FAIL:
            failed = {"status": "failed", "reason": CELLS_FAIL[cell.option], "rounds": [], "samples": []}
            return synthetic.record(cell, (rate,), gpu=H200, **failed)
        return synthetic.record(cell, (rate, rate * 1.01, rate * 0.99), gpu=H200)

    def score(target: Target) -> QualityRecord:
        changes = SCORES.get(target.option) or SCORES.get(f"{target.backend} {target.option}", {})
        if isinstance(changes.get("kl_sequences"), list):
            changes = changes | {"kl_sequences": changes["kl_sequences"] * (config.quality.count // 8)}
        return synthetic.quality(target, config, device=H200, **changes)

    synthetic.write_run(tmp_path, config, record)
    synthetic.write_quality(tmp_path, config, score)
    rows, _ = collect.collect(config, tmp_path)
    results, qualities = collect.combine(rows, config), read_qualities(config, tmp_path)
    run = Run(config.model.name, config.model.source, results, [], [], sessions_by_key(rows), qualities)
    file = load_claims(ROOT / "report" / "claims.yaml")
    found = {row.id: row for row in judge_all(file, run)}
    wanted = VERDICTS[name]
    assert {claim: found[claim].verdict for claim in wanted} == {
        claim: verdict for claim, (verdict, _) in wanted.items()
    }
    for claim, (_, raw) in wanted.items():
        assert H200 in found[claim].device, claim  # a cell that failed was on a device too
        assert found[claim].files and found[claim].files[0].startswith(raw), (claim, found[claim].files)
