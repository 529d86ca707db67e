"""report/claims.yaml covers both texts by number and fits the matrices.

The texts are not part of the tree: their numbers are, by section and table row, in TEXT below.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

pytest.importorskip("scipy")

from flexroll.analysis import claims as analysis
from flexroll.errors import FlexrollError
from flexroll.report import text
from flexroll.schema.cells import expand
from flexroll.schema.claims import Claim, ClaimsFile, Selector, Topic, load_claims
from flexroll.schema.load import load_config

ROOT = Path(__file__).parent.parent


@cache
def published() -> ClaimsFile:
    return load_claims(ROOT / "report" / "claims.yaml")


def test_the_file_covers_every_source_kind_and_topic() -> None:
    file = published()
    assert {c.source for c in file.claims} == {1, 2, 3}
    kinds = {"absolute", "ratio", "difference", "boolean", "arithmetic", "tested", "statement"}
    assert {c.kind for c in file.claims} == kinds == set(analysis.JUDGES)
    assert {c.topic for c in file.claims} == set(get_args(Topic)) <= set(text.SECTIONS)


# The numbers of both texts: of prose, and of each table's row, under words that its claims quote.
TEXT: dict[tuple[int, str], tuple[str, dict[str, str]]] = {
    (1, "Introduction"): ("30 10", {}),
    (1, "Setup"): ("512 16 0.1 0.97 0.5 5 32", {}),
    (1, "Best config"): ("8 3", {}),
    (1, "Batch-size sweep"): (
        "512",
        {
            " 8 ": "680 1900 35.8 44 156",
            " 16 ": "1626 3698 44.0 44 156",
            " 32 ": "3134 6318 49.6 44 156",
            " 64 ": "5474 10459 52.3 44 156",
            " 128 ": "5565 14996 37.1 81 157",
            " 256 ": "5812 21170 27.5 154 157",
        },
    ),
    (1, "Canonical GRPO workload"): (
        "64 32 100 3 9 50 36",
        {"vLLM (LoRARequest)": "7775 156", "flex": "5785 52 74", "unmerged": "2683 45 35"},
    ),
    (1, "What the default path does now: double-copy rollout"): ("6e-5 8 44 52 3 30 35 1 5 7 2 4", {}),
    (1, "Drift verification"): ("10 32 6 1", {}),
    (1, "Same workload at load_in_4bit=True"): (
        "4 4515 7775 58 1738 5744 30 0.8",
        {"fast_inference": "4515 159", "this PR": "1738 40.6", "transformers CB": "504 124"},
    ),
    (1, "What each option did"): (
        "64 8 4 10",
        {
            "eager": "420",
            "CUDA graphs": "4279",
            "PRESCALE_QK": "4367 2",
            "USE_TMA": "4425 3",
            "BLOCKS_ARE_CONTIGUOUS": "4703 10",
            "num_warps=8 ...": "5474 28",
            "num_stages=3": "5898 38",
        },
    ),
    (1, "What broke correctness and had to be dropped"): ("0", {}),
    (1, "What I tried that did NOT move the needle"): (
        "4 2.11 4617 64 5744 256 128 3 4827 8 36 4425 16 4486 4748 5009",
        {},
    ),
    (1, "Torch version + run-to-run noise"): ("2.9.1 2.11 5616 5660 64 10 4192 60 75", {}),
    (1, "Architecture notes"): ("3 1 2 4 8 16 32", {}),
    (1, "Output coherence"): ("17", {}),
    (1, "What's left on the table"): ("144 8 5 20 28 48", {}),
    (1, "Raw stats"): ("8 16 32 64 128 5 2.9.1 2.11 256 3", {}),
    (2, "Introduction"): ("2024", {}),
    (2, "Numbers"): (
        "32 512 30 1 48 2191 4581 100 2",
        {
            "vLLM (fast_inference)": "4581",
            "CUDA graphs": "1618 2192 35 48",
            "eager": "372 532 8 12",
            "unsloth_fi_false": "641 14",
            "paged+FA4": "422 9.2",
            "sdpa_paged": "434 9.5",
        },
    ),
    (2, "Why this works"): ("1 2 3 4 8 16 32 0", {}),
    (2, "Files"): ("3", {}),
    (2, "CB sync driver side-note"): ("382 400 422 4 10", {}),
    (2, "Next steps"): ("32 64", {}),
    (2, "Phase 2 results"): (
        "2 100 0 0.015 15",
        {
            "vLLM:": "74.4 4.14 158",
            "unsloth_fi_false:": "355 23.95 10.7 17",
            "cb_paged": "466 36 55.6 11.5",
        },
    ),
    (2, "Phase 2 fixes"): ("1 8 64 512", {}),
    (2, "Phase 1 results"): (
        "1 100 1.5 7 2",
        {
            "vLLM+LoRA": "4581 156",
            "unsloth_fi_false+LoRA": "641 15.8 14 7",
            "paged+FA4": "422 9.2",
            "sdpa_paged": "434 9.5",
        },
    ),
    (2, "Phase 1 changes"): ("32", {}),
    (2, "Phase 3"): ("3 2", {}),
    (2, "Phase 4"): ("4 3", {}),
    (2, "Phase 0"): ("0 10 5.80 158.9", {}),
}

# Numbers that claim nothing, by why.
EXEMPT: dict[str, dict[tuple[int, str], str]] = {
    "part of a licence's name": {(1, "Architecture notes"): "3", (2, "Files"): "3"},
    "the workload: batch, prompts, new tokens, LoRA rank, warm-up": {
        (1, "Setup"): "512 16 32",
        (1, "Batch-size sweep"): "512",
        (1, "Canonical GRPO workload"): "64 32",
        (1, "Drift verification"): "32",
        (1, "What each option did"): "64",
        (2, "Numbers"): "32 512",
        (2, "Phase 1 changes"): "32",
        (2, "Phase 0"): "10",
    },
    "sampling parameters": {(1, "Setup"): "0.1 0.97 0.5 5"},
    "the reference itself, 100 %": {
        (1, "Canonical GRPO workload"): "100",
        (2, "Numbers"): "100",
        (2, "Phase 2 results"): "100",
        (2, "Phase 1 results"): "100",
    },
    "a step of a list, or a phase's number": {
        (1, "What the default path does now: double-copy rollout"): "2 4",
        (2, "Why this works"): "3",
        (2, "Phase 2 results"): "2",
        (2, "Phase 1 results"): "2",
        (2, "Phase 3"): "3",
        (2, "Phase 4"): "4",
        (2, "Phase 0"): "0",
    },
    "sizes that graphs are captured for": {
        (1, "Architecture notes"): "1 2 4 8 16 32",
        (2, "Why this works"): "1 2 4 8 16 32",
    },
    "flags of a command, reserved slots, which GPU": {
        (1, "Drift verification"): "6 1",
        (1, "What broke correctness and had to be dropped"): "0",
        (2, "Phase 2 fixes"): "1",
    },
    "how much is run or skipped before measuring": {(2, "Phase 3"): "2", (2, "Phase 4"): "3"},
    "names of raw files and what they were run with": {(1, "Raw stats"): "8 16 32 64 128 5 2.9.1 2.11 256 3"},
    "plans": {(2, "Next steps"): "32 64"},
    "a year": {(2, "Introduction"): "2024"},
}
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(?!\d+B\b)\d+(?:\.\d+)*(?:e-?\d+)?")


def quoted(claim: Claim) -> set[float]:
    return {float(n) for n in NUMBER.findall(claim.quote) if n.count(".") < 2}


def stated(claim: Claim) -> set[float]:
    """The claim's own number, as a text may print it: plain, in percent, or as a gain in percent."""
    value = None
    if "value" in claim.model_fields_set and not isinstance(claim.value, bool):
        value = claim.value
    elif claim.kind == "arithmetic" and not claim.own_source.compares:
        value = claim.own_source.value
    if value is None:
        return set()
    if claim.kind == "ratio" and claim.unit == "x":
        return {value, round((value - 1) * 100, 9)}
    return {value, round(value * 100, 9)} if claim.unit == "%" else {value}


def held(claim: Claim) -> set[float]:
    """Every number of a claim: quoted, stated, or one that its text is checked by."""
    return quoted(claim) | stated(claim) | set(claim.own_source.numbers.values() if claim.own_source else [])


def exempt(place: tuple[int, str]) -> list[str]:
    return [number for own in EXEMPT.values() for number in own.get(place, "").split()]


def test_the_texts_sections_are_those_of_the_file() -> None:
    for number in (1, 2):
        assert published().sources[number].sections == [section for source, section in TEXT if source == number]
    assert {place for own in EXEMPT.values() for place in own} <= set(TEXT)


@pytest.mark.parametrize("place", TEXT, ids=lambda place: f"{place[0]} {place[1]}")
def test_every_number_of_the_texts_is_claimed_or_exempt(place: tuple[int, str]) -> None:
    prose, rows = TEXT[place]
    own = [c for c in published().claims if (c.source, c.section) == place]
    found = set().union(*(held(c) for c in own)) if own else set()
    words = " ".join(c.quote for c in own)
    unclaimed = {n for n in prose.split() if not (n in words if n.count(".") > 1 else float(n) in found)}
    assert unclaimed == set(exempt(place))
    for label, numbers in rows.items():
        of_row = Counter(n for c in own if label in f"{c.quote} " for n in stated(c))
        assert not Counter(map(float, numbers.split())) - of_row, label  # a claim for each, equal ones too


def test_a_number_left_out_would_be_seen() -> None:
    """The check above can fail: without a claim, its number is not found."""
    own = [c for c in published().claims if (c.source, c.section) == (1, "What each option did")]
    assert any(28 in stated(c) for c in own if "num_warps=8 ..." in c.quote)
    assert not any(28 in held(c) for c in own if c.id != "option-warps")


PHRASES = {
    1: [
        "asymmetric at bf16",
        "bit-identical",
        "deterministic",
        "no re-capture needed",
        "same tensor storage",
        "well under 1 %",
        "can't merge into 4-bit",
        "gibberish",
        "garbage tokens",
        "on every backend",
        "barely moves",
        "safe in our setup",
        "biggest win",
        "!!!!!!",
        "NameError",
        "misaligned address",
        "during capturing stage",
        "negligible throughput delta",
        "indexes by kv_idx",
        "output is coherent",
        "worse than the hand-tuned",
        "same as eager walker",
        "neither beats 8",
        "picks 128 for our shape",
        "within noise",
        "clock throttling",
        "coherent math solutions",
        "main remaining penalty",
        "gap",
    ],
    2: [
        "target is met",
        "pure graph replay",
        "closes the gap",
        "valid logical positions",
        "cudaErrorIllegalAddress",
        "close to threaded CB",
        "timed out",
        "losses finite",
        "expected early-GRPO range",
        "KL trajectories",
        "less memory than vLLM",
        "divisibility check",
        "falls back to plain SDPA",
        "512 correct tokens",
        "hangs during first-step capture",
        "faster than CB",
        "1/7th the peak memory",
        "Greedy sampling only",
        "zero-init",
    ],
}


@pytest.mark.parametrize(("source", "phrase"), [(source, p) for source, own in PHRASES.items() for p in own])
def test_statements_without_a_number_are_claimed(source: int, phrase: str) -> None:
    assert any(phrase in claim.quote for claim in published().claims if claim.source == source)


def test_the_number_judged_is_the_one_quoted() -> None:
    file = published()
    left = {c.id for c in file.claims if c.source != 3 and stated(c) and not stated(c) & quoted(c)}
    # A ratio that the text leaves to its reader, two statements in words, the middle of a range.
    assert left == {"option-graphs", "option-tma-step", "four-bit-worse-for-flex", "grpo-rollout"}


@pytest.mark.parametrize(
    "claim",
    [
        "sweep-flex-64",
        "grpo-flex",
        "option-contiguous",
        "option-best-config",
        "option-baseline",
        "left-gap",
        "second-vllm",
        "second-unsloth",
        "second-cb",
        "second-cb-fa4",
        "second-memory",
        "second-grpo-share",
        "second-grpo-share-cb",
        "second-round-one",
    ],
)
def test_known_contradictions_are_found(claim: str) -> None:
    found = next(c for c in published().claims if c.id == claim)
    assert found.own_source is not None and not found.own_source.holds


def test_the_contradictions_are_the_known_ones_and_findings_hold() -> None:
    wrong = [c for c in published().claims if c.own_source and not c.own_source.holds]
    assert len(wrong) == 14 and {c.source for c in wrong} == {1, 2}


def test_published_rates_agree_with_the_claims() -> None:
    """A number that is both a claim and a published table entry is the same number, and every table row is an entry."""
    file = published()
    cells = expand(load_config(ROOT / "config.yaml"))
    for metric in ("tps", "memory_gb"):
        compared = 0
        for claim in file.claims:
            if claim.kind != "absolute" or claim.metric != metric or claim.statistic != "best":
                continue
            for cell in (c for c in cells if claim.cells.matches(c)):
                entry = next(p for p in file.published if p.cells.matches(cell))
                assert math.isclose(getattr(entry, metric), claim.value), claim.id
                compared += 1
            if TEXT[claim.source, claim.section][1]:
                assert any(p.source == claim.source and getattr(p, metric) == claim.value for p in file.published)
        assert compared > 10


def selectors(file: ClaimsFile) -> list[tuple[str, Selector]]:
    found = [(f"published {i}", p.cells) for i, p in enumerate(file.published)]
    for claim in file.claims:
        found += [(claim.id, s) for name in ("cells", "over", "under") if (s := getattr(claim, name, None))]
    return found


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def test_selectors_fit_the_matrices() -> None:
    """A selector that names an experiment means exactly one configuration an option, of config.yaml where the
    experiment is there and of a preset otherwise; none names an unknown experiment, option, sampling or stack."""
    presets = sorted((ROOT / "workflow" / "presets").glob("*.yaml"))
    default, *others = [load_config(path) for path in (ROOT / "config.yaml", *presets)]
    file = published()
    options = {"default", *(name for config in (default, *others) for name in config.options)}
    for name, selector in selectors(file):
        assert set(listed(selector.option)) <= options, name
        assert set(listed(selector.sampling)) <= set(default.samplings), name
        assert set(listed(selector.stack)) <= set(default.stacks), name
        for experiment in listed(selector.experiment):
            configs = [default] if experiment in default.experiments else others
            sizes = Counter()
            for config, option in product(configs, listed(selector.option) or [None]):
                one = selector.model_copy(update={"experiment": experiment, "option": option})
                sizes[len({(c.engine, c.file) for c in expand(config) if one.matches(c)})] += 1
            assert sizes.keys() - {0} == {1}, (name, experiment, sizes)


def test_every_named_test_is_in_the_tree() -> None:
    named = [test for claim in published().claims if claim.kind == "tested" for test in claim.tests]
    assert len(named) > 10
    for test in named:
        file, function = test.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), test


def test_ids_are_unique_and_quotes_short() -> None:
    file = published()
    assert len({c.id for c in file.claims}) == len(file.claims)
    for claim in file.claims:
        assert claim.quote.strip() == claim.quote and 2 < len(claim.quote) < 230, claim.id
        assert not {"None", "nan"} & set(claim.quote.split()), claim.id


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"colour": 1}, "sweep-vllm-64.absolute.colour"),
        ({"unit": "furlong"}, "sweep-vllm-64.absolute.unit"),
        ({"id": "sweep-flex-64"}, "used twice"),
    ],
)
def test_a_bad_claim_is_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    data = yaml.safe_load((ROOT / "report" / "claims.yaml").read_text())
    next(c for c in data["claims"] if c["id"] == "sweep-vllm-64").update(edit)
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(FlexrollError, match=message) as caught:
        load_claims(tmp_path / "claims.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "a: [", "- 1", ""])
def test_a_bad_file_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "claims.yaml").write_text(content)
    with pytest.raises(FlexrollError) as caught:
        load_claims(tmp_path / "claims.yaml")
    assert "claims.yaml" in str(caught.value) and "\n" not in str(caught.value)
