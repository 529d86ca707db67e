"""The command line: thin, and importing late, so that each command loads only what it needs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from flexroll import __version__
from flexroll.cli_generate import generate
from flexroll.cli_grpo import grpo, grpo_questions
from flexroll.cli_tune import autotune, sweep
from flexroll.errors import FlexrollError, one_line

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

app.command()(generate)
app.command()(autotune)
app.command()(sweep)
app.command()(grpo)
app.command()(grpo_questions)

ConfigOption = Annotated[Path, typer.Option("--config", help="The run's configuration (YAML).")]
OutOption = Annotated[Path, typer.Option("--out", help="File to write.")]
OutDirOption = Annotated[Path, typer.Option("--out-dir", help="Folder to write.")]
ModelOption = Annotated[Path, typer.Option("--model", help="model.json, as `flexroll model` writes it.")]
JobOption = Annotated[str, typer.Option("--job", help="Name of the job; `flexroll plan` lists them.")]
WorkOption = Annotated[Path, typer.Option("--work", help="work/RUN: model.json, prompts.json, adapter/, merged/.")]
ResultsOption = Annotated[Path, typer.Option("--results", help="results/RUN.")]
StacksOption = Annotated[str, typer.Option("--stacks", help="Only these stacks, comma-separated.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def entry(
    stack: Annotated[str, typer.Option("--stack", help="Run the command in this stack's environment.")] = "",
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if stack:
        from flexroll.launch import enter_stack, without_stack

        enter_stack(stack, _root(), without_stack(sys.argv[1:]))
    else:
        from flexroll.images.here import check_any

        check_any()


@app.command()
def profile(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 64,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens each has when decoding starts.")] = 370,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights for the folder's config.json.")] = False,
    attention: Annotated[str | None, typer.Option("--attention", help="flex or triton.")] = None,
) -> None:
    """Print where a decode step's time goes, kernel by kernel."""
    from flexroll.profile import as_markdown, profile_decode

    print(as_markdown(profile_decode(model, batch, length, dummy, {"attention": attention})))


@app.command()
def images(
    names: Annotated[list[str] | None, typer.Argument(help="Stacks, or report; default: all.")] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", help="apptainer, podman or docker.")] = None,
    variant: Annotated[str | None, typer.Option("--variant", help="cpu or cuda; default: this machine's.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="Image to start from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build also what is current.")] = False,
) -> None:
    """Build, test and record the container images."""
    from flexroll.images.build import build_images

    build_images(_root(), names or (), runtime, variant, base, force)


@app.command()
def preflight(config: ConfigOption, out: OutOption) -> None:
    """Check that this machine can run the config, and write its facts."""
    from flexroll.bench.preflight import preflight as run

    run(_config(config), out, _root())


@app.command()
def model(config: ConfigOption, out: OutOption) -> None:
    """Fetch, make or check the checkpoint, and write what it is."""
    from flexroll.bench.model import prepare_model

    prepare_model(_config(config), out, _root())


@app.command()
def prompts(config: ConfigOption, model: ModelOption, out: OutOption) -> None:
    """Prepare the prompts as token ids."""
    from flexroll.bench.prompts import prepare_prompts

    prepare_prompts(_config(config), model, out, _root())


@app.command()
def adapter(config: ConfigOption, model: ModelOption, out_dir: OutDirOption) -> None:
    """Write the canonical LoRA adapter."""
    from flexroll.lora.adapter import write_adapter

    wanted = _config(config).adapter
    write_adapter(
        _checkpoint(model),
        out_dir,
        rank=wanted.rank,
        alpha=wanted.alpha,
        targets=wanted.targets,
        b_std=wanted.b_std,
        seed=wanted.seed,
    )


@app.command()
def merge(
    model: ModelOption,
    adapter: Annotated[Path, typer.Option("--adapter", help="Adapter folder.")],
    out_dir: OutDirOption,
) -> None:
    """Write a checkpoint with the adapter merged in."""
    import json

    from flexroll.bench.checkpoint import hash_files
    from flexroll.bench.inputs import MERGED_FILES
    from flexroll.lora.merge import write_merged
    from flexroll.schema.records import write_json

    (out_dir / MERGED_FILES).unlink(missing_ok=True)
    write_merged(_checkpoint(model), adapter, out_dir)
    write_json(out_dir / MERGED_FILES, json.dumps(hash_files(out_dir), indent=1) + "\n")


@app.command()
def quantise(config: ConfigOption, model: ModelOption, out_dir: OutDirOption) -> None:
    """Write the checkpoint in NF4 (4 bits a weight)."""
    from flexroll.bench.lease import device_lease
    from flexroll.bench.quantise import quantise as run
    from flexroll.provenance import device_class, variant

    wanted, device = _config(config), device_class()
    with device_lease(_root(), device):
        run(
            _checkpoint(model),
            out_dir,
            dtype=wanted.model.dtype,
            skip=wanted.four_bit.skip,
            device=variant(device),
        )


@app.command()
def warmup(config: ConfigOption, job: JobOption, work: WorkOption, out: OutOption) -> None:
    """Start a job's engine once and fill the compile caches."""
    from flexroll.bench.inputs import find_job
    from flexroll.bench.job import warmup as run
    from flexroll.launch import require_stack

    wanted = _config(config)
    require_stack(find_job(wanted, job).stack, "warmup")
    run(wanted, job, work=work, out=out, root=_root())


@app.command()
def bench(
    config: ConfigOption,
    job: JobOption,
    work: WorkOption,
    raw: Annotated[Path, typer.Option("--raw", help="results/RUN/raw.")],
    out: OutOption,
) -> None:
    """Measure a job's cells: one record each, then the manifest. A failing cell is a result."""
    from flexroll.bench.inputs import find_job
    from flexroll.bench.job import bench as run
    from flexroll.launch import require_stack

    wanted = _config(config)
    stack = find_job(wanted, job).stack
    require_stack(stack, "bench")
    run(wanted, job, work=work, raw=raw, out=out, root=_root(), stack=stack)


@app.command()
def perplexity(config: ConfigOption, work: WorkOption, results: ResultsOption, out: OutOption) -> None:
    """Score the sample completions under the reference model."""
    from flexroll.bench.perplexity import perplexity as run
    from flexroll.launch import running_stack

    run(_config(config), stack=running_stack() or out.stem, work=work, results=results, out=out, root=_root())


@app.command()
def quality_config(config: ConfigOption, out: OutOption) -> None:
    """Write the config that the scoring's own model and prompts are made from."""
    from flexroll.schema.records import write_json

    write_json(out, _config(config).for_quality().model_dump_json(indent=1) + "\n")  # JSON is YAML


@app.command()
def quality_reference(
    config: ConfigOption,
    work: WorkOption,
    out: OutOption,
    adapter: Annotated[bool, typer.Option("--adapter", help="With the adapter's LoRA layers.")] = False,
) -> None:
    """Write the fp32 model's greedy tokens and distributions, which every configuration is scored against."""
    from flexroll.bench.quality import inputs_folder
    from flexroll.bench.quality_reference import write_reference

    wanted = _config(config)
    write_reference(wanted, work=inputs_folder(wanted, work), adapted=adapter, out=out, root=_root())


@app.command()
def quality(
    config: ConfigOption,
    engine: Annotated[str, typer.Option("--engine", help="STACK-BACKEND-ADAPTER-OPTION.")],
    work: WorkOption,
    out: OutOption,
) -> None:
    """Score an engine configuration against fp32. One that fails is a result."""
    from flexroll.bench.quality import find_target
    from flexroll.bench.quality import quality as run
    from flexroll.launch import require_stack

    wanted = _config(config)
    stack = find_target(wanted, engine).stack
    require_stack(stack, "quality")
    run(wanted, engine, work=work, out=out, root=_root(), stack=stack)


@app.command()
def drift(config: ConfigOption, work: WorkOption, out: OutOption) -> None:
    """Verify that refreshing the merged weights never moves the base; contrast with merge and unmerge."""
    import json

    import torch

    from flexroll.bench.lease import device_lease
    from flexroll.launch import running_stack
    from flexroll.lora.drift import verify
    from flexroll.provenance import device_class, variant
    from flexroll.schema.records import write_json

    wanted, device = _config(config), device_class()
    with device_lease(_root(), device):
        result = verify(
            _checkpoint(work / "model.json"),
            work / "adapter",
            cycles=wanted.drift.cycles,
            noise_std=wanted.drift.noise_std,
            dtype=getattr(torch, wanted.model.dtype),
            device=variant(device),
            seed=wanted.seed,
        )
    write_json(out, json.dumps({**result, "stack": running_stack() or out.stem}, indent=1) + "\n")


@app.command()
def analyse(config: ConfigOption, results: ResultsOption, stacks: StacksOption = "") -> None:
    """Raw records to table.csv and analysis.json."""
    from flexroll.analysis.run import analyse as run

    run(_config(config), results, _root() / "report" / "claims.yaml", stacks=_stacks(stacks))


@app.command()
def report(config: ConfigOption, results: ResultsOption) -> None:
    """analysis.json to results.md, its figures, and results.html."""
    from flexroll.report.page import page
    from flexroll.report.render import render

    wanted, templates = _config(config), _root() / "report"
    print(render(wanted, results, templates))
    print(page(results, templates))


@app.command()
def check(
    results: Annotated[Path, typer.Argument(help="results/RUN.")],
    config: Annotated[Path | None, typer.Option("--config", help="Default: what analysis.json holds.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the findings to this file, too.")] = None,
) -> None:
    """Check a run's folder: whole, traceable, of equal work, plausible. Exit code 1 for an error."""
    from flexroll.check import runner
    from flexroll.provenance import find_root

    root = None
    with contextlib.suppress(FlexrollError):
        root = find_root()
    found = runner.check(results, config, root)
    if json is not None:
        runner.write(found, json)
    runner.show(found)
    raise typer.Exit(found.exit_code)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="results/RUN to compare against.")],
    run_b: Annotated[Path, typer.Argument(help="results/RUN to compare.")],
    metric: Annotated[str, typer.Option("--metric", help="tps, decode_tps or memory.")] = "tps",
    threshold: Annotated[float, typer.Option("--threshold", help="Least size of a regression, a fraction.")] = 0.02,
    across_devices: Annotated[bool, typer.Option("--across-devices", help="Compare different devices, too.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="What B lacks or failed at is exit code 1, too.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the comparison to this file, too.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write its table to this file, too.")] = None,
) -> None:
    """Compare two runs, configuration by configuration. Exit code 1 for a regression."""
    from flexroll import compare as runs

    found = runs.compare(run_a, run_b, metric, threshold, across_devices)
    runs.write(found, json, markdown)
    runs.show(found)
    raise typer.Exit(found.exit_code(strict))


@app.command()
def plan(config: ConfigOption = Path("config.yaml"), stacks: StacksOption = "") -> None:
    """Print the cells, and the hours and gigabytes to expect."""
    from flexroll.bench.plan import make_plan
    from flexroll.bench.plan_grpo import sentence
    from flexroll.bench.plan_table import show

    loaded = _config(config)
    show(loaded, make_plan(loaded, _root(), _stacks(stacks)))
    if told := sentence(loaded, _stacks(stacks)):
        typer.echo(told)


@app.command()
def retry(
    run: str, results: Annotated[Path, typer.Option("--results", help="Folder of all runs.")] = Path("results")
) -> None:
    """Clear failed, unreadable and missing cells of a run, so that the next one measures them again."""
    from flexroll.bench.retry import retry as clear

    cleared = clear(results / run)
    print("\n".join(cleared) if cleared else "nothing to retry: every record is there and did not fail")


def main() -> None:
    """Entry point. A FlexrollError is one line and exit code 2; the unexpected one line, a traceback file and 1."""
    try:
        code = app(standalone_mode=False)
    except FlexrollError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except Exception as error:
        if os.environ.get("FLEXROLL_DEBUG") == "1":
            raise
        if hasattr(error, "format_message"):  # typer's own usage errors
            _fail(f"{' '.join(error.format_message().split())} (see `flexroll --help`)", 2)
        _fail(f"{one_line(error)} (traceback: {_write_traceback()})", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> Any:
    if os.environ.get("FLEXROLL_DEBUG") == "1":
        traceback.print_exc()
    print(f"flexroll: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _write_traceback() -> Path:
    name = f"flexroll-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in (Path.cwd() / ".cache" / "errors", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(traceback.format_exc())
            return folder / name
        except OSError:
            continue
    return Path("not written")


def _root() -> Path:
    from flexroll.provenance import find_root

    return find_root()


def _config(path: Path) -> Any:
    from flexroll.schema.load import load_config

    return load_config(path, _root())


def _stacks(value: str) -> list[str] | None:
    from flexroll.schema.load import known_stacks

    names = [name.strip() for name in value.split(",") if name.strip()]
    known = known_stacks(_root())
    for name in names:
        if name not in known:
            raise FlexrollError(f"--stacks: unknown stack '{name}'; known: {', '.join(known)}")
    return names or None


def _checkpoint(model_json: Path) -> Path:
    from flexroll.bench.task import read_input

    return _root() / read_input(model_json, "model", ("path", "files"))["path"]
