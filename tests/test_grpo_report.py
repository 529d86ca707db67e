"""GRPO in analysis, report, claims and check: on records of chosen trajectories, whose verdicts are known."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from hypothesis import given
from hypothesis import strategies as st

import grpo_runs
import synthetic
from flexroll.analysis import run, train_claims
from flexroll.analysis.equivalence import equivalence
from flexroll.analysis.grpo_runs import PARTS, in_range
from flexroll.analysis.model import Analysis, GrpoRow, VerdictRow
from flexroll.analysis.run import analyse
from flexroll.bench.plan_grpo import sentence
from flexroll.check import runner
from flexroll.check.registry import CHECKS
from flexroll.report import grpo, grpo_sentences
from flexroll.report.figures import grpo as figures
from flexroll.report.page import page
from flexroll.report.render import render
from flexroll.rl.run import _gpu_of_seed
from flexroll.schema.claims import load_claims
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import GrpoRecord, GrpoTarget, RewardOf

REPORT = Path(__file__).parent.parent / "report"
Make = Callable[[GrpoTarget], GrpoRecord | None]
VALUES = st.dictionaries(st.integers(0, 9), st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=6)
QWEN = {"name": "Qwen3_4B_Base", "source": "local", "path": "m"}


@pytest.fixture(autouse=True, scope="module")
def claims_read_once():
    """Reading all claims takes as long as the rest of an analysis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_claims", cache(run.load_claims))
        yield


def build(results: Path, config: Config | None = None, make: Make | None = None, **record: Any) -> Analysis:
    config = config or grpo_runs.config()
    grpo_runs.write(results, config, make or (lambda target: grpo_runs.record(target, config, **record)))
    return analyse(config, results, REPORT / "claims.yaml")


def row(analysis: Analysis, backend: str, pool: str = "kept") -> GrpoRow:
    return next(row for row in analysis.grpo if row.backend == backend and row.pool == pool)


def changed(config: Config, backend: str, **changes: Any) -> Make:
    """All runs plain but those of a backend."""
    return lambda t: grpo_runs.record(t, config, **(changes if t.backend == backend else {}))


# Equivalence.


@given(VALUES, VALUES, st.floats(1e-6, 1))
def test_swapping_the_sides_negates_the_difference_alone(own: dict[int, float], other: dict[int, float], band: float):
    one, back = equivalence(own, other, band), equivalence(other, own, band)
    assert (one.verdict, one.n, one.paired, one.reason) == (back.verdict, back.n, back.paired, back.reason)
    assert one.difference == pytest.approx(-back.difference, abs=1e-12)
    if one.low is not None:
        assert (one.low, one.high) == (pytest.approx(-back.high, abs=1e-12), pytest.approx(-back.low, abs=1e-12))
        assert one.low <= one.difference <= one.high


@given(VALUES, VALUES, st.floats(1e-6, 1), st.floats(1, 10))
def test_a_wider_band_never_makes_what_was_equivalent_another(own, other, band: float, times: float):
    order = {"different": 0, "cannot be told": 1, "equivalent": 2}
    narrow, wide = equivalence(own, other, band), equivalence(own, other, band * times)
    if narrow.low is not None:
        assert order[narrow.verdict] <= order[wide.verdict]


def test_the_interval_by_hand():
    """Differences 0.01, 0.02, 0.03: mean 0.02, standard error 0.01 / sqrt 3, t(0.95, 2) = 2.920."""
    found = equivalence({0: 1.01, 1: 1.02, 2: 1.03}, {0: 1.0, 1: 1.0, 2: 1.0}, 0.05)
    half = 2.919986 * 0.01 / math.sqrt(3)
    assert (found.difference, found.low, found.high) == pytest.approx((0.02, 0.02 - half, 0.02 + half), abs=1e-6)
    assert found.verdict == "equivalent" and found.paired and found.n == 3
    assert equivalence({0: 1.01, 1: 1.02, 2: 1.03}, {0: 1.0, 1: 1.0, 2: 1.0}, 0.001).verdict == "different"
    doubt = equivalence({0: 1.01, 1: 1.02, 2: 1.03}, {0: 1.0, 1: 1.0, 2: 1.0}, 0.02)
    assert doubt.verdict == "cannot be told" and "3 seeds" in doubt.reason


def test_one_seed_gives_no_interval():
    found = equivalence({0: 0.5}, {0: 0.5, 1: 0.6}, 0.1)
    assert (
        found.verdict == "cannot be told" and found.low is None and found.difference == 0 and "one seed" in found.reason
    )
    assert equivalence({}, {0: 1.0}, 0.1).difference is None


def test_other_seeds_are_not_paired():
    found = equivalence({0: 0.5, 1: 0.52}, {5: 0.51, 6: 0.5, 7: 0.52}, 1.0)
    assert not found.paired and found.n == 2 and found.verdict == "equivalent"


def test_more_seeds_narrow_the_interval_and_find_the_truth():
    """Of runs that are alike, and whose seeds differ by far more than the runs of one seed do."""
    rng, widths, verdicts = random.Random(0), [], []
    for seeds in (2, 3, 6, 12):
        found = []
        for _ in range(200):
            shared = [rng.gauss(0.5, 1) for _ in range(seeds)]
            own, other = ({i: s + rng.gauss(0, 0.01) for i, s in enumerate(shared)} for _ in range(2))
            found.append(equivalence(own, other, 0.02))
        widths.append(sum(one.high - one.low for one in found))
        verdicts.append(sum(one.verdict == "equivalent" for one in found))
    assert widths == sorted(widths, reverse=True) and verdicts == sorted(verdicts)
    assert verdicts[-1] > 190


def test_what_differs_by_the_band_is_called_equivalent_once_in_twenty():
    """The size of the test: at the band's edge, 5 % of 2000 sets of four seeds, within the sampling error of that."""
    rng, hits = random.Random(1), 0
    for _ in range(2000):
        own = {i: 0.1 + rng.gauss(0, 0.01) for i in range(4)}
        hits += equivalence(own, dict.fromkeys(range(4), 0.0), 0.1).verdict == "equivalent"
    assert 70 <= hits <= 135


# Rows.


def test_every_form_has_a_row(tmp_path: Path):
    analysis = build(tmp_path)
    assert [(r.backend, r.pool, r.status) for r in analysis.grpo] == [
        ("flex", "kept", "ok"),
        ("flex", "released", "ok"),
        ("vllm", "kept", "ok"),
        ("transformers_cb", "kept", "ok"),
        ("unsloth", "kept", "skipped"),
        ("trl", "kept", "ok"),
    ]
    assert row(analysis, "trl").reference and row(analysis, "vllm").baseline
    assert sum(r.reference for r in analysis.grpo) == sum(r.baseline for r in analysis.grpo) == 1


def test_numbers_are_of_the_measured_steps(tmp_path: Path):
    """The first three steps take four times as long."""
    config = grpo_runs.config()
    analysis = build(tmp_path, config)
    flex = row(analysis, "flex")
    assert flex.step_s == pytest.approx(1.0, rel=0.05) and flex.train_s == pytest.approx(17, rel=0.05)
    assert set(flex.seconds) == set(PARTS)
    for one in flex.ok:
        assert sum(one.seconds.values()) == pytest.approx(sum(one.wall_s[3:]) / 5)
        assert one.tps == pytest.approx(sum(one.tokens[3:]) / (0.55 * sum(one.wall_s[3:])))
    assert flex.kl == pytest.approx(0.01 + 0.001 * 6, abs=0.003)
    assert flex.kl_spread > 0 and flex.reward_spread > 0


def test_speed_over_vllm_is_by_seed_else_by_step(tmp_path: Path):
    analysis = build(tmp_path)
    kept, released = row(analysis, "flex").speed, row(analysis, "flex", "released").speed
    assert kept.over == "seeds" and kept.n == 3 and kept.low < 1.25 < kept.high
    assert released.over == "steps" and released.n == 5 and released.low < 1.25 < released.high
    assert row(analysis, "flex").memory.ratio == pytest.approx(1 / 6)
    assert row(analysis, "vllm").speed is None


def test_other_devices_are_not_set_against_each_other(tmp_path: Path):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, changed(config, "flex", gpu="NVIDIA H200"))
    assert row(analysis, "flex").speed is None and row(analysis, "trl").speed is not None


def test_only_runs_on_one_card_are_set_against_each_other(tmp_path: Path):
    """Seed by seed: cards of one model differ."""
    config = grpo_runs.config()

    def on(cards: dict[str, str]) -> GrpoRow:
        def make(target: GrpoTarget) -> GrpoRecord:
            card = cards.get(f"{target.backend}{target.seed}", f"GPU-{target.seed}")
            return grpo_runs.record(
                target, config, gpu="NVIDIA H200", environment=synthetic.environment(target.stack, "NVIDIA H200", card)
            )

        return row(build(tmp_path, config, make), "flex")

    assert (on({}).speed.n, on({}).speed.over) == (3, "seeds")
    moved = on({"flex2": "GPU-9"}).speed
    assert moved.over == "steps" and moved.n == 10
    assert on({f"flex{seed}": "GPU-9" for seed in range(3)}).speed is None


def test_a_seed_stays_on_the_card_of_its_first_run(tmp_path: Path):
    config = grpo_runs.config()

    def make(target: GrpoTarget) -> GrpoRecord | None:
        if target.backend == "vllm":
            return None
        card = synthetic.environment(target.stack, "NVIDIA H200", f"GPU-{target.seed}")
        return grpo_runs.record(target, config, environment=card)

    targets = grpo_runs.write(tmp_path, config, make)
    folder = (tmp_path / targets[0].file).parent
    assert {seed: _gpu_of_seed(folder, seed) for seed in (0, 1, 2, 3)} == {0: "GPU-0", 1: "GPU-1", 2: "GPU-2", 3: None}
    for path in folder.glob("*-seed1.json"):
        path.write_text("{")
    assert _gpu_of_seed(folder, 1) is None


def test_what_trains_alike_passes_the_gate(tmp_path: Path):
    analysis = build(tmp_path)
    assert [row(analysis, name).gate for name in ("flex", "vllm", "transformers_cb", "trl")] == [True] * 4
    assert row(analysis, "trl").kl_test is None and "the reference" in row(analysis, "trl").why
    assert row(analysis, "flex", "released").gate is None and "one seed" in row(analysis, "flex", "released").why
    assert row(analysis, "unsloth").gate is None and "needs a CUDA GPU" in row(analysis, "unsloth").why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kl": 0.006}, "another KL than trl's"),
        ({"reward": -0.45}, "another reward than trl's"),
        ({"samples": [synthetic.sample(ok=False)]}, "broken text (seed 0, 1, 2)"),
    ],
)
def test_what_trains_otherwise_fails_it(tmp_path: Path, changes: dict[str, Any], why: str):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, changed(config, "flex", **changes))
    assert row(analysis, "flex").gate is False and why in row(analysis, "flex").why
    assert row(analysis, "vllm").gate is True


def edited(config: Config, backend: str, seed: int, **changes: Any) -> Make:
    """One step of one run changed."""

    def make(target: GrpoTarget) -> GrpoRecord:
        made = grpo_runs.record(target, config)
        if (target.backend, target.seed) == (backend, seed):
            made.steps[5] = made.steps[5].model_copy(update=changes)
        return made

    return make


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": None}, "a loss that is not finite (seed 1)"),
        ({"reward": 2.5}, "rewards outside of their range (seed 1)"),
        ({"rewards": {"exact": RewardOf(mean=-0.5, std=0)}}, "rewards outside of their range (seed 1)"),
    ],
)
def test_one_bad_step_fails_it(tmp_path: Path, changes: dict[str, Any], why: str):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, edited(config, "vllm", 1, **changes))
    assert row(analysis, "vllm").gate is False and why in row(analysis, "vllm").why


def test_the_range_follows_the_weights():
    asked = grpo_runs.config(grpo=grpo_runs.GRPO | {"reward_weights": [1.0, -0.5]}).grpo
    for reward, good in ((-0.5, True), (-0.6, False), (1.0, True), (1.1, False)):
        assert in_range([grpo_runs.step(1, 1.0, 0.0, reward, rewards={})], asked) is good
    assert in_range([], asked) is None


def test_a_base_that_changed_is_told(tmp_path: Path):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, edited(config, "flex", 0, base_sha256="0" * 64))
    assert row(analysis, "flex").runs[0].base_identical is False
    assert any("CHANGED" in said and "flex" in said for said in grpo_sentences.says(analysis))
    assert "**no**" in str(grpo.learning_table(analysis))


def test_a_shorter_run_is_compared_over_the_steps_it_has(tmp_path: Path):
    """KL grows with the steps: over all of its own, the longer run would seem another."""
    uses = [{"backend": "trl"}, {"backend": "flex", "steps": 5}]
    config = grpo_runs.config(grpo=grpo_runs.GRPO | {"steps": 20, "backends": uses})
    flex = row(build(tmp_path, config, noise=1e-5), "flex")
    assert flex.kl_test.verdict == "equivalent" and abs(flex.kl_test.difference) < 1e-3


def test_without_kl_the_reward_decides(tmp_path: Path):
    flex = row(build(tmp_path, grpo_runs.config(grpo=grpo_runs.GRPO | {"beta": 0.0})), "flex")
    assert flex.kl is None and flex.kl_test is None and flex.gate is True and "reward equivalent" in flex.why


def test_random_weights_are_not_judged_by_their_text(tmp_path: Path):
    model = {"name": "m", "source": "random", "path": "models/qwen3-4b-shape"}
    config = grpo_runs.config(model=model)
    flex = row(build(tmp_path, config, samples=[synthetic.sample(ok=False)]), "flex")
    assert flex.gate is True and "text not judged" in flex.why


def test_without_the_reference_nothing_is_called_alike(tmp_path: Path):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, changed(config, "trl", status="failed", reason="out of memory", steps=[]))
    flex = row(analysis, "flex")
    assert flex.gate is None and "no run of the reference trl" in flex.why and "out of memory" in flex.why


@pytest.mark.parametrize("wrong", ["missing", "cut", "other"])
def test_a_bad_file_is_a_row_with_its_reason(tmp_path: Path, wrong: str):
    config = grpo_runs.config()
    build(tmp_path, config)
    path = tmp_path / "grpo/torch2.11-flex-default-seed1.json"
    if wrong == "missing":
        path.unlink()
    elif wrong == "cut":
        path.write_text(path.read_text()[:500])
    else:
        path.write_text((tmp_path / "grpo/torch2.11-vllm-default-seed1.json").read_text())
    (tmp_path / "grpo/torch2.11-flex-gone-seed0.json").write_text("{}")
    analysis = analyse(config, tmp_path, REPORT / "claims.yaml")
    flex = row(analysis, "flex")
    assert flex.status == "ok" and len(flex.ok) == 2 and "1 of 3 seeds" in flex.reason and "\n" not in flex.reason
    assert analysis.unlisted == ["grpo/torch2.11-flex-gone-seed0.json"]


# The documents.


def documents(results: Path, config: Config) -> tuple[str, str]:
    render(config, results, REPORT)
    page(results, REPORT)
    return (results / "results.md").read_text(), (results / "results.html").read_text()


def test_the_section_says_what_the_rows_say(tmp_path: Path):
    config = grpo_runs.config()
    notes = ["per_device_train_batch_size: 8 to 4"]
    analysis = build(tmp_path, config, changed(config, "transformers_cb", kl=0.006, notes=notes))
    text, html = documents(tmp_path, config)
    section = text[text.index(f"## {grpo.TITLE}") : text.index("## Options")]
    assert "| Unsloth | 0 of 3 |" in section and "**skipped**" in section and "needs a CUDA GPU" in section
    assert "transformers CB, compiled (default) does not: another KL than trl's." in section
    assert "Of 6 forms of rollout, 3 pass the coherence gate" in section
    assert "transformers CB, compiled (default): per_device_train_batch_size: 8 to 4." in section
    assert "figures/grpo_curves.svg" in section and "figures/grpo_steps.svg" in section and "| 3, 1, 0 |" in section
    assert 'id="grpo-training-on-each-rollout-backend"' in html and "figure-grpo_curves" in html
    assert "13 of 16 GRPO runs ended well." in text and "cells in this run" not in text
    opening = text[: text.index("## Claims")]
    assert re.search(
        r"A GRPO step with flex takes [\d.]+ s, 1\.2\d* \(.*\) times the speed of vLLM's, with [\d.]+ .*its memory",
        opening,
    )
    assert "A GRPO step with flex, pool released takes" in opening
    assert [e.cells for e in analysis.environments] == [0]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    analyse(config, tmp_path, REPORT / "claims.yaml")
    documents(tmp_path, config)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_run_without_any_result_still_has_its_document(tmp_path: Path):
    config = grpo_runs.config()
    analysis = build(tmp_path, config, lambda target: None)
    assert {r.status for r in analysis.grpo} == {"missing"}
    text, _ = documents(tmp_path, config)
    assert "No training run has a result" in text and "**missing**" in text and "grpo_curves.svg" not in text


def test_a_run_without_grpo_has_no_such_section(tmp_path: Path):
    config = synthetic.config()
    synthetic.write_run(tmp_path, config, synthetic.record)
    analyse(config, tmp_path, REPORT / "claims.yaml")
    text, html = documents(tmp_path, config)
    assert grpo.TITLE not in text and grpo.TITLE not in html and "grpo_steps" not in html


def test_curves_hold_the_steps_that_all_seeds_have(tmp_path: Path):
    config = grpo_runs.config()

    def make(target: GrpoTarget) -> GrpoRecord:
        made = grpo_runs.record(target, config)
        if (target.backend, target.seed) == ("flex", 2):
            made.steps[4] = made.steps[4].model_copy(update={"kl": None})
        return made

    analysis = build(tmp_path, config, make)
    found = figures.points(row(analysis, "flex"), "kl")
    assert [step for step, *_ in found] == list(range(1, 9))
    curves = [one.kl for one in row(analysis, "flex").ok]
    told = [curve[4] for curve in curves if curve[4] is not None]
    assert len(told) == 2 and found[4] == (5, pytest.approx(sum(told) / 2), min(told), max(told))
    looks = figures.styles(analysis.grpo)
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == len(looks) == 6


def test_the_plan_counts_the_runs():
    assert sentence(grpo_runs.config()).startswith("GRPO: 16 runs of 8 steps; about ")
    assert sentence(synthetic.config()) == ""


# Claims.


def verdicts(results: Path, gpu: str | None, model: dict[str, Any] = QWEN, **grpo: Any) -> dict[str, VerdictRow]:
    config = grpo_runs.config(model=model, grpo=grpo_runs.GRPO | grpo)
    return {v.id: v for v in build(results, config, gpu=gpu).verdicts}


def test_published_training_is_judged_on_its_gpu(tmp_path: Path):
    found = verdicts(tmp_path, "NVIDIA B200", steps=10)
    step = found["phase2-step-vllm"]
    assert step.verdict == "not reproduced" and step.measured == pytest.approx(1.25, rel=0.05)
    assert step.low <= step.measured <= step.high and len(step.files) == 3 and step.device == "NVIDIA B200"
    assert found["phase2-train-vllm"].verdict == "not reproduced"
    assert found["phase2-memory-vllm"].measured == pytest.approx(120)
    assert found["phase2-step-cb"].measured == pytest.approx(3.0, rel=0.05)  # of paged sdpa, where that was run
    assert (found["phase2-losses"].verdict, found["phase2-losses"].measured) == ("reproduced", True)
    assert found["phase2-rewards"].verdict == "reproduced"
    assert found["phase2-kl"].measured == pytest.approx(0.02, abs=0.002)
    assert found["phase2-kl"].verdict == "not reproduced"
    share = found["second-grpo-share"]  # the source's own numbers decide, ours stand beside them
    assert share.verdict == "contradicted by its own source" and share.measured == pytest.approx(0.5, rel=0.05)
    assert found["second-grpo-memory"].measured == pytest.approx(6) and found["second-grpo-memory"].verdict


def test_absolute_claims_need_the_gpu_and_ratios_any(tmp_path: Path):
    found = verdicts(tmp_path, "NVIDIA H200")
    assert found["phase2-step-vllm"].verdict == "not run" and "H200" in found["phase2-step-vllm"].reason
    assert found["phase2-step-vllm"].measured == pytest.approx(1.25, rel=0.05)
    assert (
        found["second-grpo-memory"].verdict == "not reproduced" and found["second-grpo-memory"].device == "NVIDIA H200"
    )
    assert found["phase2-kl"].verdict == "not reproduced"


def test_a_total_of_other_steps_is_no_total(tmp_path: Path):
    found = verdicts(tmp_path, "NVIDIA B200")
    assert found["phase2-train-vllm"].verdict == "not run" and "8 steps" in found["phase2-train-vllm"].reason
    assert found["phase2-step-vllm"].verdict == "not reproduced"


def test_a_claim_of_three_backends_is_not_judged_by_two(tmp_path: Path):
    found = verdicts(tmp_path, None)
    assert found["phase2-losses"].verdict == "not run" and "Unsloth" in found["phase2-losses"].reason
    assert found["phase2-losses"].published is None


def test_claims_on_a_cpu_another_model_or_noise_are_not_run(tmp_path: Path):
    backends = [use for use in grpo_runs.GRPO["backends"] if use["backend"] != "unsloth"]
    on_cpu = verdicts(tmp_path / "cpu", None, backends=backends)
    assert "CPU" in on_cpu["phase2-step-vllm"].reason and on_cpu["phase2-step-vllm"].verdict == "not run"
    tiny = verdicts(tmp_path / "tiny", "NVIDIA B200", model=synthetic.CONFIG["model"])
    assert "tiny_gsm" in tiny["phase2-step-vllm"].reason and "tiny_gsm" in tiny["phase2-losses"].reason
    noise = verdicts(tmp_path / "noise", "NVIDIA B200", model=QWEN | {"source": "random"}, steps=10)
    assert noise["phase2-kl"].verdict == noise["phase2-rewards"].verdict == "not run"
    assert noise["phase2-losses"].verdict == "reproduced" and noise["phase2-step-vllm"].verdict == "not reproduced"


def test_paged_sdpa_stands_for_the_published_continuous_batching(tmp_path: Path):
    uses = [{"backend": "transformers_cb"}, {"backend": "transformers_cb_sdpa"}]
    found = verdicts(tmp_path, "NVIDIA B200", backends=uses, reference="transformers_cb")
    assert all("transformers_cb_sdpa" in file for file in found["phase2-step-cb"].files)


def test_published_numbers_stand_beside_ours(tmp_path: Path):
    config = grpo_runs.config(model=QWEN)
    table = grpo.published_table(build(tmp_path, config, gpu="NVIDIA H200"))
    first = table.rows[0]
    assert first["Ours"] == "vLLM (colocated)" and first["On"] == "NVIDIA H200"
    assert first["Median step, s: published"] == "4.14" and first["Median step, s: ours"] == "1.25"
    assert first["Train, s: published"] == "74.4" and first["Peak memory, GB: ours"] == "120"
    assert len(table.rows) == 4  # three of phase 2, one of phase 0
    other = build(tmp_path / "other")
    assert other.published_training == [] and grpo.published_table(other).rows == []


def test_every_claim_of_training_names_a_backend_that_trains():
    for one in train_claims.published_training(load_claims(REPORT / "claims.yaml")):
        assert one.backends and one.metric in train_claims.VALUE


# Check.


def check(results: Path) -> dict[str, list[str]]:
    report = runner.check(results)
    return {f.check: [f.message] for f in report.findings if f.severity == "error" and f.check.startswith("grpo")}


FAULTS: list[tuple[str, Callable[[GrpoRecord], Any]]] = [
    ("grpo-times", lambda r: r.steps.__setitem__(4, r.steps[4].model_copy(update={"rollout_s": 99.0}))),
    ("grpo-times", lambda r: setattr(r, "train_s", 1.0)),
    ("grpo-base-unchanged", lambda r: r.steps.__setitem__(4, r.steps[4].model_copy(update={"base_sha256": "0" * 64}))),
    ("grpo-learning", lambda r: r.steps.__setitem__(4, r.steps[4].model_copy(update={"loss": None}))),
    ("grpo-learning", lambda r: r.steps.__setitem__(4, r.steps[4].model_copy(update={"kl": -0.1}))),
    ("grpo-tokens", lambda r: r.steps.__setitem__(4, r.steps[4].model_copy(update={"tokens": 10**6}))),
    ("grpo-recorded", lambda r: r.steps.pop()),
    ("grpo-recorded", lambda r: (setattr(r, "status", "failed"), setattr(r, "reason", " "))),
    ("grpo-as-configured", lambda r: r.settings.__setitem__("learning_rate", 0.1)),
    ("grpo-as-configured", lambda r: setattr(r, "dtype", "float32")),
    ("grpo-provenance", lambda r: setattr(r, "key", "")),
    ("grpo-provenance", lambda r: setattr(r.environment, "lock_sha256", "1" * 64)),
]


@pytest.mark.parametrize(("name", "spoil"), FAULTS)
def test_check_finds_the_fault(tmp_path: Path, name: str, spoil: Callable[[GrpoRecord], Any]):
    config = grpo_runs.config()

    def make(target: GrpoTarget) -> GrpoRecord:
        made = grpo_runs.record(target, config)
        if (target.backend, target.seed) == ("flex", 1):
            spoil(made)
        return made

    build(tmp_path / "good", config)
    assert check(tmp_path / "good") == {}
    build(tmp_path / "bad", config, make)
    assert set(check(tmp_path / "bad")) == {name}


def test_check_finds_files_that_are_missing_or_changed(tmp_path: Path):
    build(tmp_path)
    path = tmp_path / "grpo/torch2.11-flex-default-seed1.json"
    record = GrpoRecord.model_validate_json(path.read_text())
    record.steps[6] = record.steps[6].model_copy(update={"wall_s": 1.5})
    path.write_text(record.model_dump_json())
    assert "grpo-analysed" in check(tmp_path)
    path.unlink()
    assert {"grpo-recorded", "grpo-analysed"} <= set(check(tmp_path))
    path.write_text("{")
    assert "grpo-schema" in check(tmp_path)


def test_every_check_of_grpo_has_a_planted_fault():
    planted = {name for name, _ in FAULTS} | {"grpo-schema", "grpo-analysed"}
    assert planted == {name for name in CHECKS if name.startswith("grpo-")}
