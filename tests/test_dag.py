"""What a config expands to, and what a change makes run again: dry runs on copies of the tree, nothing is executed."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

snakemake_cli = pytest.importorskip("snakemake.cli")

from flexroll import provenance
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import expand, jobs, measuring_order
from flexroll.schema.load import load_config
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
    for rule in ("preflight", "model", "prompts", "adapter", "merge", "warmup", "analyse", "report"):
        assert rule in plan


def test_jobs_are_started_block_by_block_after_what_they_wait_for(fresh: Path) -> None:
    """By Snakemake's priorities. A job whose inputs came late would leave its block."""
    _, listing = snakemake(fresh, "-n", *NATIVE, "--config", "preset=demo")
    priority = {"bench": {}, "others": {}}
    for block in re.split(r"^\[.*\]$\n", listing, flags=re.M):
        rule = re.match(r"(?:rule|localrule) (\w+):", block)
        number, name = (re.search(rf"^    {key}(\S+)$", block, re.M) for key in ("priority: ", r"wildcards: \w+="))
        if rule and number:
            kind = "bench" if rule[1] == "bench" else "others"
            priority[kind][name[1] if name else rule[1]] = int(number[1])
    wanted = measuring_order(jobs(expand(load_config(fresh / "workflow/presets/demo.yaml"))), 0)
    assert sorted(priority["bench"], key=priority["bench"].get, reverse=True) == [job.name for job in wanted]
    assert {"preflight", "model", "prompts", "adapter", "merge", "torch2.11-flex-none-default"} <= set(
        priority["others"]
    )
    assert min(priority["others"].values()) > max(priority["bench"].values())


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
    assert set(plan) == {"bench", "analyse", "report"}


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
