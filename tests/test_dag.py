"""What a config expands to, and what a change makes run again: dry runs on copies of the tree, nothing is executed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

snakemake_cli = pytest.importorskip("snakemake.cli")

import psutil
import yaml

import synthetic
from flexroll import provenance
from flexroll.bench.steps import workflow_steps
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import Cell, expand, jobs, measuring_order
from flexroll.schema.grpo_records import grpo_targets
from flexroll.schema.load import load_config
from flexroll.schema.quality import targets
from flexroll.schema.records import Record
from tree_copy import copy_tree

NATIVE = ("--workflow-profile", "profiles/native")
FOLDERS = ("adapter", "merged", "figures")


def snakemake(tree: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, output) of `snakemake ARGUMENTS` in `tree`; in a fork, as importing Snakemake outlasts a dry run."""
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code: object = 1
            try:
                os.chdir(tree)
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
                sys.argv = ["snakemake", *arguments]
                code = snakemake_cli.main(list(arguments))
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else int(code is not None))
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def planned(tree: Path, *arguments: str) -> dict[str, set[str]]:
    """{rule: values of its wildcard} of the jobs that a dry run lists."""
    arguments = arguments or ("--config", "preset=demo")
    if "--workflow-profile" not in arguments:
        arguments = (*NATIVE, *arguments)
    code, output = snakemake(tree, "-n", *arguments)
    assert code == 0, output
    found: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=(?:rule|localrule) )", output):
        rule = re.match(r"(?:rule|localrule) (\w+):", block)
        if rule and rule.group(1) != "all":
            wildcard = re.search(r"^    wildcards: \w+=(\S+)$", block, re.M)
            found.setdefault(rule.group(1), set()).add(wildcard.group(1) if wildcard else "")
    return found


def edit(path: Path, text: str) -> None:
    assert path.exists(), path
    path.write_text(path.read_text() + text)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A copy of the tree without results."""
    return copy_tree(root, tmp_path_factory.mktemp("fresh") / "tree")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, fresh: Path) -> Path:
    """A copy in which the demo is over: every output exists, with Snakemake's own record of it."""
    tree = tmp_path_factory.mktemp("finished") / "tree"
    shutil.copytree(fresh, tree)
    return finish(tree)


def finish(tree: Path) -> Path:
    """Make every output of the demo, with Snakemake's own record of it."""
    _, listing = snakemake(tree, "-n", *NATIVE, "--config", "preset=demo")
    for line in re.findall(r"^    output: (.+)$", listing, re.M):
        for name in line.split(", "):
            path = tree / name
            if path.name in FOLDERS:
                path.mkdir(parents=True)
                path = path / "content"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x\n")
    code, output = snakemake(tree, *NATIVE, "--touch", "--forceall", "--cores", "4", "--config", "preset=demo")
    assert code == 0, output
    assert planned(tree) == {}
    return tree


@pytest.fixture
def tree(tmp_path: Path, finished: Path) -> Path:
    """The finished tree, to change."""
    return Path(shutil.copytree(finished, tmp_path / "tree"))


def demo_jobs(tree: Path) -> dict[str, str]:
    """{job: backend} of the demo."""
    return {job.name: job.backend for job in jobs(expand(load_config(tree / "workflow/presets/demo.yaml")))}


def test_default_config_expands_to_its_jobs(fresh: Path) -> None:
    wanted = {job.name for job in jobs(expand(load_config(fresh / "config.yaml")))}
    plan = planned(fresh, "--quiet", "progress")
    assert plan["bench"] == wanted
    assert plan["drift"] == {"torch2.11", "torch2.9.1"}
    for rule in ("preflight", "model", "prompts", "adapter", "merge", "warmup", "perplexity", "analyse", "report"):
        assert rule in plan


def test_jobs_are_started_block_by_block_after_what_they_wait_for(fresh: Path) -> None:
    """By Snakemake's priorities. A job whose inputs came late would leave its block."""
    _, listing = snakemake(fresh, "-n", *NATIVE, "--configfile", "config.yaml")
    priority = {"bench": {}, "grpo": {}, "others": {}}
    for block in re.split(r"^\[.*\]$\n", listing, flags=re.M):
        rule = re.match(r"(?:rule|localrule) (\w+):", block)
        number, name = (re.search(rf"^    {key}(\S+)$", block, re.M) for key in ("priority: ", r"wildcards: \w+="))
        if rule and number:
            kind = rule[1] if rule[1] in priority else "others"
            priority[kind][name[1] if name else rule[1]] = int(number[1])
    wanted = measuring_order(jobs(expand(load_config(fresh / "config.yaml"))), 0)
    assert sorted(priority["bench"], key=priority["bench"].get, reverse=True) == [job.name for job in wanted]
    assert {"preflight", "model", "prompts", "adapter", "merge", "torch2.11-flex-none-default"} <= set(
        priority["others"]
    )
    assert min(priority["others"].values()) > max(priority["bench"].values())
    assert min(priority["bench"].values()) > max(priority["grpo"].values())


def test_preset_replaces_the_default_config(fresh: Path) -> None:
    plan = planned(fresh)
    assert plan["bench"] == set(demo_jobs(fresh))
    assert plan == planned(fresh, "--configfile", "workflow/presets/demo.yaml")


def test_merged_checkpoint_only_where_a_backend_needs_it(fresh: Path) -> None:
    assert "merge" not in planned(fresh, "--config", "preset=smoke")
    assert "warmup" not in planned(fresh, "--config", "preset=smoke")  # its only flex job is eager


def test_stacks_restrict_the_matrix(fresh: Path) -> None:
    plan = planned(fresh, "--config", "preset=demo", "stacks=torch2.9.1")
    assert plan["bench"] and all(job.startswith("torch2.9.1-") for job in plan["bench"])
    assert plan["drift"] == {"torch2.9.1"}


def test_template_reruns_the_report_only(tree: Path) -> None:
    edit(tree / "report/results.md.j2", "\n{# a change #}\n")
    assert set(planned(tree)) == {"report"}


def test_claims_rerun_analysis_and_report(tree: Path) -> None:
    edit(tree / "report/claims.yaml", "\n# a change\n")
    assert set(planned(tree)) == {"analyse", "report"}


def test_statistics_rerun_analysis_and_report(tree: Path) -> None:
    edit(tree / "src/flexroll/analysis/run.py", "\nCHANGED = 1\n")
    plan = planned(tree)
    assert {"analyse", "report"} <= set(plan) and "bench" not in plan


def test_engine_reruns_what_uses_it(tree: Path) -> None:
    engine = [
        path
        for name, path in provenance.imported_modules("flexroll.backends.flex", src=tree / "src").items()
        if name.startswith("flexroll.engine.")
    ]
    edit(max(engine), "\nCHANGED = 1\n")
    plan = planned(tree)
    assert plan["bench"] == {job for job, backend in demo_jobs(tree).items() if backend == "flex"}
    assert not {"model", "prompts", "adapter", "merge", "preflight"} & set(plan)


def test_merging_reruns_what_reads_the_merged_checkpoint(tree: Path) -> None:
    edit(tree / "src/flexroll/lora/merge.py", "\nCHANGED = 1\n")
    plan = planned(tree)
    assert plan["merge"] and "adapter" not in plan and "prompts" not in plan
    merged = {job for job, backend in demo_jobs(tree).items() if "-merged-" in job or backend == "flex"}
    assert plan["bench"] == merged


def test_one_backend_reruns_what_imports_it(tree: Path) -> None:
    edit(tree / "src/flexroll/backends/vllm.py", "\nCHANGED = 1\n")
    users = {
        backend
        for backend in BACKENDS
        if "flexroll.backends.vllm" in provenance.imported_modules(f"flexroll.backends.{backend}", src=tree / "src")
    }
    assert "flex" not in users and "transformers_generate" not in users
    plan = planned(tree)
    assert plan["bench"] == {job for job, backend in demo_jobs(tree).items() if backend in users}
    assert "drift" not in plan


def test_comments_and_docstrings_rerun_nothing(tree: Path) -> None:
    for path in (tree / "src/flexroll").rglob("*.py"):
        text = path.read_text()
        text = re.sub(r'\A"""', '"""Changed words. ', text)
        path.write_text(text + "\n\n# a comment\n")
    assert planned(tree) == {}


@pytest.mark.parametrize("files", [("cpu.lock", "cuda.lock"), ("Containerfile",)])
def test_a_lock_or_containerfile_reruns_its_stack_only(tree: Path, files: tuple[str, ...]) -> None:
    for file in files:
        edit(tree / "containers/torch2.9.1" / file, "# a change\n")
    plan = planned(tree)
    assert plan["bench"] == {job for job in demo_jobs(tree) if job.startswith("torch2.9.1-")}
    assert plan["drift"] == {"torch2.9.1"}


def test_another_torch_version_is_another_folder(tree: Path) -> None:
    """The new stack's jobs are to run, and nothing that was measured on another."""
    shutil.copytree(tree / "containers/torch2.11", tree / "containers/torch2.12")
    preset = tree / "workflow/presets/demo.yaml"
    text = preset.read_text()
    assert text.count("stacks: [torch2.9.1, torch2.11]") == 1
    preset.write_text(text.replace("stacks: [torch2.9.1, torch2.11]", "stacks: [torch2.9.1, torch2.11, torch2.12]"))
    plan = planned(tree)
    assert plan["bench"] == {
        "torch2.12-flex-merged-default-s1",
        "torch2.12-transformers_generate-none-default-s1",
    }


def test_profile_and_config_path_rerun_no_benchmark(tree: Path) -> None:
    for profile in sorted(path.name for path in (tree / "profiles").iterdir()):
        assert planned(tree, "--workflow-profile", f"profiles/{profile}", "--config", "preset=demo") == {}
    shutil.copy(tree / "workflow/presets/demo.yaml", tree / "mine.yaml")
    assert planned(tree, "--configfile", "mine.yaml") == {}


def test_a_new_batch_reruns_the_jobs_that_get_it(tree: Path) -> None:
    path = tree / "workflow/presets/demo.yaml"
    text = path.read_text()
    assert "options: [default, eager]}" in text
    path.write_text(text.replace("options: [default, eager]}", "options: [default, eager], batches: [4, 8]}"))
    plan = planned(tree)
    assert plan["bench"] == {f"torch2.11-flex-none-{option}-s1" for option in ("default", "eager")}
    assert not {"model", "prompts", "adapter", "preflight"} & set(plan)


def test_other_stack_of_inputs_reruns_nothing(tree: Path) -> None:
    """The stack that prepares the inputs follows `stacks=`; what it prepared stays."""
    plan = planned(tree, "--config", "preset=demo", "stacks=torch2.9.1")
    assert set(plan) <= {"analyse", "report"}


def test_lost_manifest_reruns_its_job(tree: Path) -> None:
    job = "torch2.11-flex-none-eager-s1"
    (tree / f"results/demo/raw/{job}/job.json").unlink()
    plan = planned(tree)
    assert plan["bench"] == {job}
    assert set(plan) == {"bench", "perplexity", "analyse", "report"}


def test_published_run_is_the_target_of_no_benchmark(tree: Path) -> None:
    """A fresh clone of a published run: results, but neither work/ nor Snakemake's records."""
    (tree / "results/demo/PUBLISHED").touch()
    shutil.rmtree(tree / "work")
    shutil.rmtree(tree / ".snakemake")
    edit(tree / "src/flexroll/backends/flex.py", "\nCHANGED = 1\n")
    edit(tree / "report/results.md.j2", "\n{# a change #}\n")
    assert set(planned(tree)) <= {"analyse", "report"}


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        (["--config", "preset=demo"], ("flex: {compile", "flex: {compil"), "did you mean 'compile'"),
        (["--config", "preset=demo"], ("stacks: [torch2.11]", "stacks: [torch2.12]"), "unknown stack 'torch2.12'"),
        (["--config", "preset=demo", "stacks=torch1"], None, "this config uses torch2.11, torch2.9.1"),
        (["--config", "preset=demo", "rounds=3"], None, "only preset= and stacks= are taken"),
        (["--configfile", "config.yaml", "--config", "preset=demo"], None, "give one config"),
    ],
)
def test_errors_are_one_line(tree: Path, arguments: list[str], change: tuple[str, str] | None, message: str) -> None:
    if change:
        path = tree / "workflow/presets/demo.yaml"
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change))
    code, output = snakemake(tree, "-n", *arguments)
    assert code != 0
    assert len([line for line in output.splitlines() if message in line]) == 1, output
    assert "Traceback" not in output


def test_lint(fresh: Path) -> None:
    code, output = snakemake(fresh, "--lint")
    assert code == 0, output


@pytest.mark.skipif(provenance.device_class() != "cpu", reason="this machine has a GPU")
def test_unfit_machine_is_named_before_anything_runs(fresh: Path) -> None:
    code, output = snakemake(fresh, *NATIVE, "--cores", "1")
    assert code != 0
    assert "make demo" in output
    assert not (fresh / "work/b200/model.json").exists()


def test_statistics_rerun_no_more_than_the_report(tree: Path) -> None:
    edit(tree / "src/flexroll/analysis/statistics.py", "\nCHANGED = 1\n")
    assert set(planned(tree)) == {"analyse", "report"}


def test_sentences_rerun_the_report_only(tree: Path) -> None:
    edit(tree / "src/flexroll/report/sentences.py", "\nCHANGED = 1\n")
    assert set(planned(tree)) == {"report"}


def test_code_that_stands_beside_the_measurement_reruns_nothing(tree: Path) -> None:
    """What watches the machine, holds the device, tells the progress and follows the worker is in another process."""
    for name in ("telemetry", "lease", "progress", "supervisor", "plan", "retry"):
        edit(tree / f"src/flexroll/bench/{name}.py", "\nCHANGED = 1\n")
    assert planned(tree) == {}


def test_an_options_value_reruns_the_cells_that_have_it(tree: Path) -> None:
    change_demo(tree, "attention: paged|eager", "attention: paged|sdpa")
    plan = planned(tree)
    assert plan["bench"] == {"torch2.11-transformers_cb-none-cb_eager-s1"}
    assert set(plan) == {"bench", "perplexity", "analyse", "report"}


LABORATORY = ("--config", "preset=laboratory")


@pytest.mark.parametrize("name", ["laboratory", "h200-options", "h200-lora", "grpo"])
def test_the_plan_counts_the_steps_that_snakemake_does(fresh: Path, name: str) -> None:
    code, output = snakemake(fresh, "-n", *NATIVE, "--config", f"preset={name}")
    assert code == 0, output
    stats = re.search(r"^Job stats:\n.*\n-.*\n((?:\w+ +\d+\n)+)", output, re.M)
    assert stats, output
    counted = {rule: int(count) for rule, count in (line.split() for line in stats.group(1).splitlines())}
    steps = workflow_steps(load_config(fresh / f"workflow/presets/{name}.yaml", fresh), None, on_gpu=False)
    assert sum(steps.values()) == counted.pop("total")
    assert steps == counted


def planned_on(tree: Path, gpus: int, preset: str) -> str:
    """What Snakemake would do with that many GPUs and eight cores."""
    common = tree / "workflow/rules/common.smk"
    common.write_text(common.read_text().replace("DEVICE = provenance.device_class()", 'DEVICE = "NVIDIA H200"'))
    given = ("--cores", "8", "--resources", f"gpu={gpus}", "--config", f"preset={preset}")
    code, output = snakemake(tree, "-n", *NATIVE, *given)
    assert code == 0, output
    return output


@pytest.mark.parametrize(("gpus", "threads"), [(1, 8), (2, 4)])
def test_with_several_gpus_a_session_keeps_to_one_of_them(fresh: Path, tmp_path: Path, gpus: int, threads: int) -> None:
    """Each job asks for its session alone, of which one runs at a time, and for its share of the cores."""
    tree = Path(shutil.copytree(fresh, tmp_path / "tree"))
    preset = tree / "workflow/presets/h200-options.yaml"
    preset.write_text(preset.read_text().replace("repeats: {sessions: 1", "repeats: {sessions: 3"))
    benches = re.findall(r"^rule bench:\n((?: .*\n)+)", planned_on(tree, gpus, "h200-options"), re.M)
    assert len(benches) == workflow_steps(load_config(preset, tree), None, on_gpu=True)["bench"]
    assert {session for told in benches for session in re.findall(r"-s(\d)/job\.json", told)} == {"1", "2", "3"}
    for told in benches:
        session = re.search(r"-s(\d)/job\.json", told)
        assert session and f"session{session[1]}=1" in told
        assert sum(f"session{n}=1" in told for n in (1, 2, 3)) == 1
        assert f"threads: {threads}\n" in told


@pytest.mark.parametrize(("gpus", "threads"), [(1, 8), (2, 4)])
def test_four_scorings_share_a_gpu(fresh: Path, tmp_path: Path, gpus: int, threads: int) -> None:
    """But for vLLM's, which claims memory as if it were alone."""
    tree = Path(shutil.copytree(fresh, tmp_path / "tree"))
    scored = re.findall(r"^rule quality:\n((?: .*\n)+)", planned_on(tree, gpus, "h200-lora"), re.M)
    assert len(scored) == len(targets(load_config(tree / "workflow/presets/h200-lora.yaml")))
    alone = ["-vllm-" in told for told in scored]
    assert any(alone) and not all(alone)
    for told, apart in zip(scored, alone, strict=True):
        shown = re.search(r"threads: (\d+)", told)  # one is not shown
        assert int(shown[1] if shown else 1) == (threads if apart else threads // 4)
        assert f"gpu={int(apart)}" in told


def test_with_several_gpus_a_seed_keeps_to_one_of_them(fresh: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(fresh, tmp_path / "tree"))
    output = planned_on(tree, 2, "h200-grpo")
    runs = re.findall(r"^rule grpo:\n((?: .*\n)+)", output, re.M)
    wanted = grpo_targets(load_config(tree / "workflow/presets/h200-grpo.yaml"))
    assert len(runs) == len(wanted)
    for told in runs:
        seed = re.search(r"-seed(\d)\.json", told)
        assert seed and [f"seed{n}=1" in told for n in (0, 1)] == [n == int(seed[1]) for n in (0, 1)]
        assert "threads: 4\n" in told
    told = re.findall(r"wildcards: training=(\S+)\n +priority: (\d+)", "".join(runs))
    started = [name for name, _ in sorted(told, key=lambda one: -int(one[1]))]
    assert started == [target.name for target in sorted(wanted, key=lambda target: target.seed)]


def test_a_run_fills_compile_caches_first_where_its_config_says_so(fresh: Path) -> None:
    preset = fresh / "workflow/presets/laboratory.yaml"
    assert "fill_caches: false" in preset.read_text()
    assert "warmup" not in planned(fresh, *LABORATORY)
    assert planned(fresh, "--configfile", "config.yaml")["warmup"]


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory, fresh: Path) -> Path:
    """The finished demo with one job that replays what was autotuned, and scoring."""
    tree = Path(shutil.copytree(fresh, tmp_path_factory.mktemp("replaying") / "tree"))
    preset = tree / "workflow/presets/demo.yaml"
    preset.write_text(
        preset.read_text().replace("- {backend: flex}", "- {backend: flex, options: [default, again]}", 1)
    )
    change_demo(tree, "options:\n  eager:", "options:\n  again: {flex: {replay: plain}}\n  eager:")
    edit(preset, "\nquality: {count: 4, new_tokens: 8}\n")
    return finish(tree)


def test_what_replays_waits_for_the_autotuning(replaying: Path, tmp_path: Path) -> None:
    found = planned(replaying, "--config", "preset=demo", "--forceall")
    assert len(found["autotune"]) == 1
    tree = Path(shutil.copytree(replaying, tmp_path / "tree"))
    edit(tree / "src/flexroll/tune/inductor_log.py", "\nCHANGED = 1\n")
    # What it finds decides: the rule alone is stale, and whatever reads its file comes after it.
    plan = planned(tree, "--config", "preset=demo")
    assert "autotune" in plan
    assert plan["bench"] == {"torch2.11-flex-none-again-s1"}
    assert plan["quality"] == {"torch2.11-flex-none-again"}
    assert set(plan) == {"autotune", "bench", "quality", "perplexity", "analyse", "report"}


def test_words_and_limits_rerun_no_benchmark(tree: Path) -> None:
    change_demo(tree, "title: Batch sweep, greedy", "title: Another title")
    change_demo(tree, "eager: {note: flex_attention", "eager: {note: words about flex_attention")
    change_demo(tree, "cell_s: 120", "cell_s: 240")
    assert set(planned(tree)) == {"analyse", "report"}


def test_another_session_is_measured_beside_the_first(tree: Path) -> None:
    before = demo_jobs(tree)
    change_demo(tree, "sessions: 1", "sessions: 2")
    plan = planned(tree)
    assert plan["bench"] == {job.removesuffix("1") + "2" for job in before}
    assert not {"model", "prompts", "adapter", "merge", "preflight", "warmup", "drift"} & set(plan)


def change_demo(tree: Path, old: str, new: str) -> None:
    preset = tree / "workflow/presets/demo.yaml"
    assert preset.read_text().count(old) == 1, old
    preset.write_text(preset.read_text().replace(old, new))


@pytest.mark.slow
def test_the_dag_does_not_depend_on_hash_order(fresh: Path, finished: Path) -> None:
    """Jobs, their files and priorities are the same under any PYTHONHASHSEED, and so is what makes them stale."""

    def dry_run(tree: Path, seed: str) -> str:
        command = [sys.executable, "-m", "snakemake", "-n", *NATIVE, "--config", "preset=demo"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def listing(seed: str) -> list[list[str]]:
        """Of each job its lines, in an order of their own; lists of files and reasons in another."""
        blocks = re.findall(r"^(?:local)?rule \w+:\n(?: {4}.*\n)+", dry_run(fresh, seed), re.M)
        lines = (re.sub(r"^ *jobid: .*\n", "", block, flags=re.M).splitlines() for block in blocks)
        return sorted(sorted(", ".join(sorted(re.split(r"[,;:] ", line.strip()))) for line in own) for own in lines)

    first = listing("0")
    assert len(first) > len(demo_jobs(fresh))
    assert listing("1") == first == listing("4242")
    assert "Nothing to be done" in dry_run(finished, "4242")


@pytest.fixture(scope="module")
def all_scored(tmp_path_factory: pytest.TempPathFactory, fresh: Path) -> Path:
    """The finished demo with scoring, on prompts of its own."""
    tree = Path(shutil.copytree(fresh, tmp_path_factory.mktemp("scored") / "tree"))
    prompts = "prompts: {source: file, path: models/tiny-gsm/gsm_test.json, field: q, max_tokens: 200}"
    edit(tree / "workflow/presets/demo.yaml", f"\nquality: {{count: 4, new_tokens: 8, limit: 1.1, {prompts}}}\n")
    return finish(tree)


@pytest.fixture
def scored(tmp_path: Path, all_scored: Path) -> Path:
    return Path(shutil.copytree(all_scored, tmp_path / "tree"))


def scored_names(tree: Path) -> set[str]:
    return {target.name for target in targets(load_config(tree / "workflow/presets/demo.yaml"))}


def test_every_engine_configuration_is_scored_on_inputs_of_its_own(fresh: Path, all_scored: Path) -> None:
    tree = all_scored
    cells = expand(load_config(tree / "workflow/presets/demo.yaml"))
    assert scored_names(tree) == {f"{c.stack}-{c.backend}-{c.adapter}-{c.option}" for c in cells}
    there = {
        path.relative_to(tree / "work/demo/quality").as_posix() for path in (tree / "work/demo").rglob("quality/*")
    }
    assert there == {
        *("config.yaml", "model.json", "prompts.json", "adapter", "merged"),
        *("reference-none.safetensors", "reference-adapter.safetensors"),
    }
    assert not {"quality", "quality_reference", "quality_config"} & set(planned(fresh))


def test_an_engine_scores_anew_what_it_measures_anew(scored: Path) -> None:
    edit(scored / "src/flexroll/backends/flex.py", "\nCHANGED = 1\n")
    plan = planned(scored)
    assert plan["quality"] == {name for name in scored_names(scored) if "-flex-" in name}
    assert not {"quality_reference", "quality_model", "quality_prompts"} & set(plan)


def test_the_scoring_code_reruns_no_benchmark(scored: Path) -> None:
    edit(scored / "src/flexroll/bench/quality_worker.py", "\nCHANGED = 1\n")
    plan = planned(scored)
    assert plan["quality"] == scored_names(scored) and set(plan) == {"quality", "analyse", "report"}


def test_what_stands_beside_the_scoring_reruns_none_of_it(scored: Path) -> None:
    """Limits and names of the judgement, words, and the code that only starts a process or reads its record."""
    change_demo(scored, "limit: 1.1", "limit: 1.2, near_tie: 0.1, baseline: eager")
    change_demo(scored, "title: Batch sweep, greedy", "title: Another title")
    edit(scored / "src/flexroll/bench/quality.py", "\nCHANGED = 1\n")
    edit(scored / "src/flexroll/analysis/quality.py", "\nCHANGED = 1\n")
    assert set(planned(scored)) == {"analyse", "report"}


def test_a_lock_or_an_options_value_scores_what_has_it(scored: Path) -> None:
    change_demo(scored, "attention: paged|eager", "attention: paged|sdpa")
    edit(scored / "containers/torch2.9.1/cpu.lock", "# a change\n")
    wanted = {name for name in scored_names(scored) if name.startswith("torch2.9.1-") or "cb_eager" in name}
    assert planned(scored)["quality"] == wanted


def test_other_work_scores_everything_anew(scored: Path) -> None:
    change_demo(scored, "quality: {count: 4", "quality: {count: 5")
    plan = planned(scored)
    assert plan["quality"] == scored_names(scored) and plan["quality_reference"] == {"none", "adapter"}
    assert "quality_prompts" in plan and "bench" not in plan


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fresh: Path) -> Path:
    """The finished demo with two seeds of GRPO on three rollout backends."""
    tree = Path(shutil.copytree(fresh, tmp_path_factory.mktemp("trained") / "tree"))
    uses = "[{backend: flex}, {backend: trl, stack: torch2.9.1}, {backend: vllm}]"
    preset = tree / "workflow/presets/demo.yaml"
    asked = f"rewards: [format], seeds: [0, 1], reference: trl, sampling: equivalence, backends: {uses}"
    edit(preset, f"\ngrpo: {{{asked}}}\n")
    return finish(tree)


def trained_again(tmp_path: Path, trained: Path, change: Callable[[Path], None]) -> dict[str, set[str]]:
    tree = Path(shutil.copytree(trained, tmp_path / "tree"))
    change(tree)
    return planned(tree)


def trainings(tree: Path) -> set[str]:
    return {target.name for target in grpo_targets(load_config(tree / "workflow/presets/demo.yaml"))}


def test_one_job_trains_one_run(fresh: Path, trained: Path) -> None:
    assert len(trainings(trained)) == 6
    there = {path.stem for path in (trained / "results/demo/grpo").iterdir()}
    assert there == trainings(trained) and (trained / "work/demo/grpo/questions.json").exists()
    assert not {"grpo", "grpo_questions"} & set(planned(fresh))


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("src/flexroll/rl/rollouts/flex.py", "-flex-"),
        ("src/flexroll/rl/trainer.py", ""),
        ("containers/torch2.9.1/cpu.lock", "torch2.9.1-"),
    ],
)
def test_what_a_run_is_made_of_trains_it_anew(tmp_path: Path, trained: Path, file: str, wanted: str) -> None:
    change = "# a change\n" if file.endswith(".lock") else "\nCHANGED = 1\n"
    plan = trained_again(tmp_path, trained, lambda tree: edit(tree / file, change))
    assert plan["grpo"] == {name for name in trainings(trained) if wanted in name}
    assert {"analyse", "report"} <= set(plan) and ("bench" in plan) == (file.endswith(".lock"))


def test_what_judges_a_run_trains_none(tmp_path: Path, trained: Path) -> None:
    def change(tree: Path) -> None:
        change_demo(tree, "reference: trl", "reference: flex, kl_band: 0.5, reward_band: 0.5")
        edit(tree / "src/flexroll/analysis/grpo.py", "\nCHANGED = 1\n")

    assert set(trained_again(tmp_path, trained, change)) == {"analyse", "report"}


def test_other_settings_train_everything_and_another_seed_one_more(tmp_path: Path, trained: Path) -> None:
    plan = trained_again(tmp_path, trained, lambda tree: change_demo(tree, "seeds: [0, 1]", "seeds: [0, 1, 2]"))
    assert {name[-5:] for name in plan["grpo"]} <= {"seed2", "seed0", "seed1"} and "bench" not in plan
    assert {name for name in plan["grpo"] if name.endswith("seed2")} and "grpo_questions" not in plan


def test_a_run_that_only_trains(fresh: Path) -> None:
    plan = planned(fresh, "--config", "preset=grpo")
    assert set(plan) == {"preflight", "model", "grpo_questions", "grpo", "analyse", "report"}
    config = load_config(fresh / "workflow/presets/grpo.yaml")
    assert plan["grpo"] == {target.name for target in grpo_targets(config)}


def test_published_trainings_stay(tmp_path: Path, trained: Path) -> None:
    def change(tree: Path) -> None:
        (tree / "results/demo/PUBLISHED").touch()
        shutil.rmtree(tree / "work")
        edit(tree / "src/flexroll/rl/trainer.py", "\nCHANGED = 1\n")

    assert set(trained_again(tmp_path, trained, change)) <= {"analyse", "report"}


def test_published_scores_stay(scored: Path) -> None:
    (scored / "results/demo/PUBLISHED").touch()
    shutil.rmtree(scored / "work")
    shutil.rmtree(scored / ".snakemake")
    edit(scored / "src/flexroll/backends/flex.py", "\nCHANGED = 1\n")
    assert set(planned(scored)) <= {"analyse", "report"}


# The rules that make the document, for real, on the synthetic run: a published one, of which nothing else is made.


SMALL = [sys.executable, "-m", "snakemake", *NATIVE, "--nolock", "--cores", "1", "--configfile", "small.yaml"]


def small_run(tree: Path, make: Callable[[Cell], Record | None] = synthetic.record, **changes: Any) -> Path:
    """Make `tree` a copy of the code with a measured run and nothing of its document; returns results/<run>."""
    config = synthetic.config(**changes)
    (tree / "small.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    results = tree / "results" / config.run
    synthetic.write_run(results, config, make)
    synthetic.write_manifests(results, config)
    (results / "PUBLISHED").touch()
    return results


def made(results: Path) -> dict[str, bytes]:
    """What the two rules wrote."""
    folders = ("raw", "logs")
    files = [
        path for path in results.rglob("*") if path.is_file() and path.relative_to(results).parts[0] not in folders
    ]
    found = {path.relative_to(results).as_posix(): path.read_bytes() for path in files}
    assert {"table.csv", "analysis.json", "results.md", "figures/throughput.svg"} <= set(found)
    return found


def some_of_everything(cell: Cell) -> Record | None:
    if cell.backend == "transformers_cb" and cell.batch == 8:
        return synthetic.record(cell, status="failed", reason="out of memory", rounds=[], samples=[])
    return synthetic.skipped(cell) if cell.backend == "unsloth" else synthetic.record(cell)


def run_small(tree: Path) -> str:
    done = subprocess.run(SMALL, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, fresh: Path) -> Path:
    """A measured run with a failed and a skipped cell, one that is gone and one cut in half."""
    tree = tmp_path_factory.mktemp("damaged") / "tree"
    shutil.copytree(fresh, tree)
    results = small_run(tree, some_of_everything)
    cut, gone = sorted(results.glob("raw/*flex-none-default-s1/sweep-*.json"))[:2]
    cut.write_text(cut.read_text()[: cut.stat().st_size // 2])
    gone.unlink()
    return tree


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, damaged: Path) -> Path:
    """The document of the damaged run, made in one go; returns results/<run>."""
    tree = tmp_path_factory.mktemp("undisturbed") / "tree"
    shutil.copytree(damaged, tree)
    run_small(tree)
    return tree / "results/synthetic"


@pytest.mark.slow
def test_damaged_and_failed_cells_are_rows_of_the_document(undisturbed: Path) -> None:
    rows = json.loads((undisturbed / "analysis.json").read_text())["cells"]
    count = Counter(row["status"] for row in rows)
    assert count == {"ok": len(rows) - 4, "failed": 1, "skipped": 1, "missing": 1, "unreadable": 1}
    document = (undisturbed / "results.md").read_text()
    for words in ("not complete JSON", "out of memory", "needs a GPU", "no record"):
        assert re.search(rf"^\|.*{words}.*\|$", document, re.M), words
    assert "1 failed, 1 skipped, 1 missing, 1 unreadable" in document


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "sign"), [("analyse", "logs/rules/analyse.log"), ("report", "figures/*.svg")])
def test_killed_report_is_made_again(tmp_path: Path, damaged: Path, undisturbed: Path, rule: str, sign: str) -> None:
    """kill -9 of Snakemake and all it started, while a rule begins or writes; then the same command."""
    tree = Path(shutil.copytree(damaged, tmp_path / "tree"))
    results = tree / "results/synthetic"
    first = subprocess.Popen(SMALL, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (list(results.glob(sign)) and runs(first, rule)):
            assert first.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        for process in family(first):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        first.wait()
    assert not (results / "results.md").exists()
    run_small(tree)
    assert made(results) == made(undisturbed)


def family(first: subprocess.Popen) -> list[psutil.Process]:
    """The process and all it started."""
    process = psutil.Process(first.pid)
    return [process, *process.children(recursive=True)]


def runs(first: subprocess.Popen, command: str) -> bool:
    """Whether `flexroll COMMAND` is among what the process started."""
    with contextlib.suppress(psutil.Error):  # one ended meanwhile
        return any(command in process.cmdline() for process in family(first)[1:])
    return False


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 0], ids=["one", "none"])
def test_a_run_of_one_row_and_of_none(tmp_path: Path, fresh: Path, rows: int) -> None:
    tree = Path(shutil.copytree(fresh, tmp_path / "tree"))
    only = {"title": "Only", "section": "batch_sweep", "batches": [2], "new_tokens": 8, "stacks": ["torch2.11"]}
    results = small_run(
        tree,
        synthetic.record if rows else lambda cell: None,
        drift={"cycles": 3, "stacks": []},
        experiments={"only": only | {"backends": [{"backend": "flex"}]}},
    )
    run_small(tree)
    document = (results / "results.md").read_text()
    assert f"1 cell in this run: 1 {'ok' if rows else 'missing'}." in document
    assert (results / "table.csv").read_text().count("\n") == 2
