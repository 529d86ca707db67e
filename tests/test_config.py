"""The config: presets are valid, the schema is in step, and every mistake ends in one line that says what to do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("snakemake")

from flexroll.errors import FlexrollError
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import expand, jobs, measuring_order, remark
from flexroll.schema.config import AdapterMode, BackendName, Config
from flexroll.schema.export import config_schema
from flexroll.schema.grpo_records import grpo_targets
from flexroll.schema.lengths import Lengths
from flexroll.schema.load import known_stacks, load_config, parse_config

PRESETS = (
    "demo",
    "smoke",
    "laboratory",
    "grpo",
    "grpo-curve",
    "h200-engine",
    "h200-options",
    "h200-options-rest",
    "h200-lora",
    "h200-grpo",
    "h200-grpo-curves",
)
CONFIGS = ["config.yaml", *(f"workflow/presets/{name}.yaml" for name in PRESETS)]


def minimal(**changes: Any) -> dict[str, Any]:
    """The smallest valid config, with some of its top-level keys replaced."""
    return {
        "run": "x",
        "model": {"name": "m", "path": "models/m"},
        "prompts": {"path": "p.json", "count": 8},
        "drift": {"stacks": ["torch2.11"]},
        "experiments": {"one": experiment()},
        **changes,
    }


def experiment(**changes: Any) -> dict[str, Any]:
    base = {"title": "t", "section": "grpo", "batches": [2], "stacks": ["torch2.11"], "backends": [{"backend": "flex"}]}
    return {**base, **changes}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_the_tree_are_valid(root: Path, name: str) -> None:
    config = load_config(root / name, root)
    cells = expand(config)
    trained = grpo_targets(config)
    assert len({cell.path for cell in cells}) == len(cells) and len({t.name for t in trained}) == len(trained)
    assert cells or trained
    assert sum(len(job.cells) for job in jobs(cells)) == len(cells)
    for job in jobs(cells):
        engines = {(c.stack, c.backend, c.engine_adapter, c.option, c.variant, c.session) for c in job.cells}
        assert len(engines) == len({c.dummy for c in job.cells}) == 1
        assert [cell.batch for cell in job.cells] == sorted(cell.batch for cell in job.cells)


def test_every_preset_is_tested(root: Path) -> None:
    assert {f"workflow/presets/{path.name}" for path in (root / "workflow/presets").iterdir()} <= set(CONFIGS)


def test_schema_file_is_in_step(root: Path) -> None:
    assert (root / "workflow/config.schema.json").read_text() == config_schema(), "run `make schema`"


@pytest.mark.parametrize("name", CONFIGS)
def test_schema_accepts_the_configs(root: Path, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(load_config(root / name).model_dump(mode="json"), json.loads(config_schema()))


def test_default_config_is_the_published_matrix(root: Path) -> None:
    config = load_config(root / "config.yaml", root)
    cells = expand(config)
    assert config.requires.gpu == "B200" and config.samplings["equivalence"].min_p == 0.5

    def batches(experiment: str, backend: str, adapter: str) -> set[int]:
        return {c.batch for c in cells if (c.experiment, c.backend, c.adapter) == (experiment, backend, adapter)}

    sweep = {8, 16, 32, 64, 128, 256}
    for name in ("batch_sweep_sampled", "batch_sweep_greedy", "batch_sweep_seed_pairing"):
        assert batches(name, "flex", "none") == batches(name, "vllm", "none") == sweep
    assert batches("grpo_sampled", "flex", "merged") == batches("grpo_sampled", "vllm", "request") == sweep
    pairing = {c.backend: c.sampling for c in cells if c.experiment == "batch_sweep_seed_pairing"}
    assert pairing == {"flex": "greedy", "vllm": "equivalence"}
    second = [c for c in cells if c.experiment.startswith("second_text")]
    assert {c.backend for c in second} == set(BACKENDS)
    assert {(c.batch, c.new_tokens, c.warmup_prompts) for c in second} == {(32, 512, 16)}
    assert {c.stack for c in cells if c.experiment == "torch_versions"} == {"torch2.9.1", "torch2.11"}
    # Continuous batching of transformers ignores min_p: sampled cells of it would not be like for like.
    assert all(c.sampling_values.min_p == 0 for c in cells if c.backend == "transformers_cb")


def test_every_named_option_is_of_use(root: Path) -> None:
    """workflow/options.yaml holds nothing that no config of the tree asks for."""
    shared = yaml.safe_load((root / "workflow/options.yaml").read_text())
    named = {c.option for name in CONFIGS for c in expand(load_config(root / name))}
    assert shared.keys() <= named


def test_a_config_takes_the_options_it_names_from_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("a: {note: A}\nb: {flex: {page_size: 32}}\nc: {note: C}\n")
    data = minimal(
        options_file="more.yaml",
        options={"a": {"note": "own"}},
        experiments={"one": experiment(backends=[{"backend": "flex", "options": ["a", "b"]}])},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    config = load_config(tmp_path / "config.yaml")
    assert set(config.options) == {"a", "b"} and config.options["a"].note == "own"
    assert config.option("b").flex.page_size == 32
    again = Config.model_validate(config.model_dump(mode="json"))  # as analysis.json keeps it
    assert expand(again) == expand(config)
    (tmp_path / "more.yaml").write_text("a: {flx: {}}\nb: {}\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data | {"options": {}}))
    with pytest.raises(FlexrollError, match=r"unknown key 'options\.a\.flx'"):
        load_config(tmp_path / "config.yaml")
    for content in (None, "[1]", "a: ["):
        (tmp_path / "more.yaml").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "more.yaml").write_text(content)
        with pytest.raises(FlexrollError, match=r"more\.yaml") as caught:
            load_config(tmp_path / "config.yaml")
        assert "\n" not in str(caught.value)


def test_every_option_starts_from_the_defaults() -> None:
    config = parse_config(
        minimal(
            defaults={"flex": {"buckets": [2], "page_size": 32}},
            options={"a": {"flex": {"page_size": 16}}, "b": {"vllm": {"enforce_eager": True}}},
            experiments={"one": experiment(backends=[{"backend": "flex", "options": ["default", "a", "b"]}])},
        )
    )
    found = {c.option: c.option_values for c in expand(config)}
    assert {name: (v["buckets"], v["page_size"]) for name, v in found.items()} == {
        "default": ([2], 32),
        "a": ([2], 16),
        "b": ([2], 32),
    }
    assert expand(Config.model_validate(config.model_dump(mode="json"))) == expand(config)


def test_the_baseline_of_an_experiment_is_one_of_its_options() -> None:
    use = [{"backend": "flex", "options": ["default", "prescale"]}]
    options = {"prescale": {"flex": {"page_size": 16}}, "other": {}}
    config = parse_config(
        minimal(options=options, experiments={"one": experiment(backends=use, baseline="prescale")}),
    )
    assert config.experiments["one"].baseline == "prescale"
    with pytest.raises(FlexrollError, match=r"experiments\.one\.baseline: unknown option of the experiment 'other'"):
        parse_config(minimal(options=options, experiments={"one": experiment(backends=use, baseline="other")}))


def test_an_experiment_may_have_sessions_of_its_own() -> None:
    config = parse_config(
        minimal(
            repeats={"sessions": 3},
            experiments={"one": experiment(), "two": experiment(sessions=1), "three": experiment(sessions=4)},
        )
    )
    counts = Counter(c.experiment for c in expand(config))
    assert counts == {"one": 3, "two": 1, "three": 4}


def test_demo_covers_backends_stacks_and_options(root: Path) -> None:
    cells = expand(load_config(root / "workflow/presets/demo.yaml", root))
    assert {cell.backend for cell in cells} == set(BACKENDS)
    assert {cell.stack for cell in cells} == set(known_stacks(root))
    assert len(jobs(cells)) <= 18  # a process costs ten seconds and more, and the demo is to end in minutes
    assert {cell.batch for cell in cells} == {2, 4, 8}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (minimal(runn="y"), "unknown key 'runn'; did you mean 'run'"),
        (minimal(options={"a": {"flex": {"page_sise": 64}}}), "did you mean 'page_size'"),
        (minimal(options={"a": {"flex": {"page_size": 48}}}), "page_size must be 16, 32, 64, 128 or 256"),
        (minimal(experiments={"one": experiment(backends=[{"backend": "flx"}])}), "did you mean 'flex'"),
        (
            minimal(experiments={"one": experiment(backends=[{"backend": "vllm", "adapters": ["unmerged"]}])}),
            "backend 'vllm' has no adapter mode 'unmerged'; it has none, merged, request",
        ),
        (
            minimal(experiments={"one": experiment(backends=[{"backend": "flex", "options": ["fast"]}])}),
            "experiments.one: unknown option 'fast'",
        ),
        (minimal(experiments={"one": experiment(sampling="gredy")}), "did you mean 'greedy'"),
        (minimal(experiments={"one": experiment(batches=[16])}), "batch 16 needs prompts.count of at least 16"),
        (minimal(experiments={"one": experiment(batches=[0])}), "greater than 0"),
        (minimal(experiments={"one": experiment(new_tokens=4096)}), "leaves no room for a prompt"),
        (minimal(experiments={"a-b": experiment()}), "'a-b' cannot be part of a file name"),
        (minimal(model={"name": "m", "source": "hub", "repo": "a/b"}), "needs repo and revision"),
        (minimal(adapter={"targets": ["qproj"]}), "unknown target 'qproj'"),
        (minimal(repeats={"fill_caches": False, "warmup_rounds": 0}), "fill_caches: false needs a warm-up round"),
        ({"run": "x"}, "Field required"),
    ],
)
def test_mistakes_are_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexrollError) as caught:
        parse_config(data, "config")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such config file"),
        ("run: [", "not valid YAML"),
        ("- a\n", "expected a mapping"),
        (yaml.safe_dump(minimal(drift={"stacks": ["torch2.10"]})), "unknown stack 'torch2.10'; did you mean 'torch2.1"),
    ],
)
def test_bad_files_are_one_line(root: Path, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FlexrollError, match=message.replace("'", ".")) as caught:
        load_config(path, root)
    assert "\n" not in str(caught.value)


def test_the_same_combination_twice_is_one_cell() -> None:
    twice = experiment(backends=[{"backend": "flex"}, {"backend": "flex", "batches": [2, 4]}])
    assert [cell.batch for cell in expand(parse_config(minimal(experiments={"one": twice})))] == [2, 4]


def test_stacks_restrict_and_sessions_repeat() -> None:
    config = parse_config(
        minimal(experiments={"one": experiment(stacks=["torch2.9.1", "torch2.11"])}, repeats={"sessions": 2})
    )
    assert len(expand(config)) == 4
    assert [job.name for job in jobs(expand(config, ["torch2.9.1"]))] == [
        "torch2.9.1-flex-none-default-s1",
        "torch2.9.1-flex-none-default-s2",
    ]


def test_names_in_the_config_are_those_of_the_catalogue() -> None:
    assert set(get_args(BackendName)) == set(BACKENDS)
    assert set(get_args(AdapterMode)) == {mode for facts in BACKENDS.values() for mode in facts.adapters}


def test_h200_engine_starts_few_engines_and_covers_each_workload(root: Path) -> None:
    config = load_config(root / "workflow/presets/h200-engine.yaml", root)
    cells = expand(config)
    started = [job.backend for job in jobs(cells)]
    assert (started.count("vllm"), started.count("flex")) == (4, 3)
    assert {cell.section for cell in cells} == {"batch_sweep", "grpo", "group", "uneven", "memory"}
    for section in ("batch_sweep", "grpo", "group", "uneven", "memory"):
        assert {c.backend for c in cells if c.section == section} == {"flex", "vllm"}
    for job in jobs(cells):  # vLLM runs as many sequences at once as its engine was started for
        if job.backend == "vllm":
            assert {c.slots for c in job.cells} == {None} or {c.running for c in job.cells} == {64}
    assert config.prompts.lengths[1] + 512 <= 720 and config.prompts.lengths[1] + 1024 <= 1232


GROUP = {"batches": [6], "samples": 3, "sampling": "hot"}
HOT = {"samplings": {"greedy": {}, "hot": {"temperature": 1}}}
DRAWN = {"model": {"name": "m", "source": "random", "weights": "drawn", "path": "models/m"}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (minimal(experiments={"one": experiment(**GROUP | {"batches": [4]})}, **HOT), "batch 4 is not a multiple of"),
        (minimal(experiments={"one": experiment(**GROUP | {"sampling": "greedy"})}, **HOT), "are all alike"),
        (minimal(experiments={"one": experiment(new_tokens=0)}), "experiments.one.new_tokens: Input should be greater"),
        (minimal(experiments={"one": experiment(new_tokens={"min": 4, "mex": 8})}), "did you mean 'max'"),
        (minimal(experiments={"one": experiment(new_tokens={"min": 9, "max": 8})}), "min 9 is more than max 8"),
        (
            minimal(experiments={"one": experiment(new_tokens={"min": 1, "max": 8}, ignore_eos=False)}),
            "new_tokens drawn from a range needs ignore_eos",
        ),
        (
            minimal(experiments={"one": experiment(new_tokens={"min": 1, "max": 64}, max_model_len=64)}),
            "new_tokens 64 leaves no room for a prompt in max_model_len 64",
        ),
        (minimal(model={"name": "m", "path": "x", "weights": "drawn"}), "weights 'drawn' needs source 'random'"),
        (minimal(**DRAWN), "set drift.stacks: []"),
        (
            minimal(experiments={"one": experiment(backends=[{"backend": "unsloth"}])}, **DRAWN, drift={"stacks": []}),
            "backend 'unsloth' cannot draw weights",
        ),
        (
            minimal(options={"a": {"vllm": {"equal_kv": True, "gpu_memory_utilization": 0.5}}}),
            "gpu_memory_utilization and equal_kv both size the KV cache",
        ),
        (
            minimal(options={"a": {"vllm": {"equal_kv": True, "kv_cache_memory_bytes": 5}}}),
            "kv_cache_memory_bytes and equal_kv both size the KV cache",
        ),
    ],
)
def test_workloads_that_cannot_be_are_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexrollError) as caught:
        parse_config(data, "config")
    assert message in str(caught.value) and "\n" not in str(caught.value) and "<" not in str(caught.value)


def test_a_group_has_fewer_prompts_than_sequences() -> None:
    config = parse_config(minimal(experiments={"one": experiment(**GROUP | {"batches": [24]})}, **HOT))
    (cell,) = expand(config)
    assert (cell.prompts, cell.samples, cell.running, cell.warmup_prompts) == (8, 3, 24, 8)


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2**32), st.integers(1, 100))
def test_lengths_are_within_their_bounds_and_go_on_with_the_same_list(low: int, more: int, seed: int, n: int) -> None:
    drawn = Lengths(min=low, max=low + more, seed=seed)
    assert all(low <= length <= low + more for length in drawn.draw(n))
    assert drawn.draw(n + 7)[:n] == drawn.draw(n)


def test_lengths_spread_log_uniformly() -> None:
    drawn = Lengths(min=16, max=1024).draw(4000)
    assert min(drawn) == 16 and max(drawn) > 1000
    assert 0.47 < sum(length < 128 for length in drawn) / 4000 < 0.53  # 128 lies half way on a log scale
    assert Lengths(min=16, max=1024, seed=1).draw(8) != drawn[:8]


def test_engines_are_apart_by_length_and_by_slots_where_they_cannot_change_them() -> None:
    both = [{"backend": "flex"}, {"backend": "vllm"}]
    config = parse_config(
        minimal(
            experiments={
                "one": experiment(backends=both),
                "two": experiment(backends=both, batches=[4], slots=2, max_model_len=4096),
                "three": experiment(backends=both, batches=[8], slots=4),
            }
        )
    )
    assert [job.name.removeprefix("torch2.11-") for job in jobs(expand(config))] == [
        "flex-none-default-s1",
        "vllm-none-default-s1",
        "flex-none-default-len4096-s1",
        "vllm-none-default-len4096-slots2-s1",
        "vllm-none-default-slots4-s1",
    ]
    assert all(job.name == f"{job.engine}-s1" for job in jobs(expand(config)))


def test_merged_weights_that_are_drawn_run_on_the_base_and_say_so() -> None:
    uses = [{"backend": "vllm", "adapters": ["none", "merged", "request"]}, {"backend": "flex", "adapters": ["merged"]}]
    cells = expand(parse_config(minimal(experiments={"one": experiment(backends=uses)}, **DRAWN, drift={"stacks": []})))
    assert [(cell.adapter, cell.engine_adapter) for cell in cells] == [
        ("none", "none"),
        ("merged", "none"),
        ("request", "request"),
        ("merged", "merged"),
    ]
    assert len({cell.path for cell in cells}) == 4 and cells[0].job == cells[1].job
    assert [job.adapter for job in jobs(cells)] == ["none", "request", "merged"]
    assert "in place of merged ones" in remark(cells[1]) and "merged" not in remark(cells[0]) + remark(cells[3])
    assert all("weights drawn" in remark(cell) for cell in cells)


def test_remarks_are_made_only_where_work_differs() -> None:
    uneven = {"batches": [4], "new_tokens": {"min": 2, "max": 8}, "slots": 2, "samples": 2, "sampling": "hot"}
    uses = [{"backend": name} for name in ("transformers_generate", "transformers_cb", "flex")]
    config = parse_config(minimal(experiments={"one": experiment(backends=uses, **uneven)}, **HOT))
    static, continuous, flex = map(remark, expand(config))
    assert "runs to the longest" in static and "batches of 2" in static and "once a sample" in static
    assert continuous == "a prompt is computed once a sample" and flex == ""
    plain = parse_config(minimal(experiments={"one": experiment(backends=uses)}))
    assert {remark(cell) for cell in expand(plain)} == {""}


def test_sessions_are_blocks_in_a_random_order_of_their_own() -> None:
    """Every configuration once a session, session after session; the seed alone decides, not the matrix's order."""
    backends = [{"backend": b} for b in ("flex", "vllm", "transformers_generate")]
    data = minimal(repeats={"sessions": 4, "rounds": 1}, experiments={"one": experiment(backends=backends)})
    every = jobs(expand(parse_config(data)))
    ordered = measuring_order(every, seed=3)
    blocks = [[job.engine for job in ordered if job.session == session] for session in (1, 2, 3, 4)]
    assert [job.session for job in ordered] == sorted(job.session for job in every)
    assert all(sorted(block) == sorted({job.engine for job in every}) for block in blocks)
    assert measuring_order(reversed(every), seed=3) == ordered
    orders = {tuple(job.engine for job in measuring_order(every, seed)[:3]) for seed in range(60)}
    assert len(orders) == 6 and len({tuple(block) for block in blocks}) > 1
