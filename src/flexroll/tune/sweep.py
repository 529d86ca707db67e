"""`flexroll sweep`: from a grid to sweep.json, sweep.md and a heat map, and to the engine's defaults."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexroll.bench.console import say
from flexroll.bench.isolate import worker_env
from flexroll.bench.lease import device_lease
from flexroll.bench.process import stop_signals
from flexroll.errors import FlexrollError
from flexroll.launch import running_stack
from flexroll.provenance import device_class, hash_json, source_hash, variant
from flexroll.schema.options import FlexOptions
from flexroll.schema.records import write_json
from flexroll.tune.defaults_file import FILE, Entry, write_default
from flexroll.tune.evaluator import WorkerEvaluator
from flexroll.tune.grid import GRIDS, Grid, Kind
from flexroll.tune.halving import Sweep
from flexroll.tune.journal import Journal
from flexroll.tune.plan import LEAST_ROUNDS, Plan
from flexroll.tune.result import Summary, read_summary, summarise

PAGE_SIZE: int = FlexOptions.model_fields["page_size"].default
# Prompt and new tokens where none are given: a rollout of what the options are for.
LENGTHS: dict[str, tuple[int, int]] = {"prefill": (512, 16), "decode": (128, 128), "engine": (128, 64)}


@dataclass(frozen=True)
class Request:
    """What is asked of `flexroll sweep`. only: axis -> the values to keep, as text. compiled: see Engine."""

    model: Path
    kind: Kind
    out: Path
    dummy: bool = False
    batch: int = 64
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rounds: int = 15
    budget_s: float = 3600.0
    page_size: int = PAGE_SIZE
    dtype: str = "bfloat16"
    seed: int = 0
    compiled: bool = True
    only: dict[str, list[str]] | None = None


def sweep(request: Request, root: Path, stack: str | None) -> Summary:
    """Measure, or go on measuring, and write what was found. stack: whose interpreter measures; None: this one.

    Raises:
        FlexrollError: the request does not fit the machine, the folder holds another sweep, or the default itself
        cannot be measured. Stopped: on SIGTERM or SIGINT; the same command goes on from there.
    """
    device = device_class()
    grid = GRIDS[request.kind].only(request.only or {})
    _check(request, device)
    python = _python(root, stack)
    prompt_tokens, new_tokens = (
        given or usual
        for given, usual in zip((request.prompt_tokens, request.new_tokens), LENGTHS[request.kind], strict=True)
    )
    plan = Plan(new_tokens, request.rounds, request.budget_s, seed=request.seed)
    setup = {
        "model": str(request.model.resolve()),
        "dtype": request.dtype,
        "dummy": request.dummy,
        "device": variant(device),
        "batch": request.batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "page_size": request.page_size,
        "compiled": request.compiled,
        "seed": request.seed,
        "reference": str((request.out / "reference.json").resolve()),
    }
    with device_lease(root, device), stop_signals():
        env = worker_env(root, stack or running_stack() or "here", device)
        evaluator = WorkerEvaluator(python, setup, request.out, env)
        try:
            facts = _facts(request, setup, plan, grid, evaluator.start())
            key = hash_json({"facts": facts, "code": source_hash("flexroll.tune.sweep_worker")})
            journal = Journal(request.out / "sweep.jsonl", key, facts)
            if journal.records:
                say(f"going on from {len(journal.records)} measurements in {journal.path}")
            found = Sweep(grid.points(), evaluator, journal, plan, request.page_size, say).run()
        finally:
            evaluator.close()
    summary = summarise(grid, found, facts, request.budget_s)
    write_json(request.out / "sweep.json", summary.model_dump_json(indent=1) + "\n")
    return summary


def report(out: Path, write_defaults: bool) -> None:
    """Interval, document and figure of what was measured; with write_defaults the winner becomes the engine's default.

    Raises:
        FlexrollError: nothing was measured, or the winner may not become a default, with the reason.
    """
    summary = read_summary(out / "sweep.json")
    lacking = [name for name in ("scipy", "matplotlib") if importlib.util.find_spec(name) is None]
    if lacking:
        raise FlexrollError(
            f"measured, in {out}; this environment lacks {' and '.join(lacking)}: finish with "
            f"`.venv/bin/flexroll sweep --report --out {out}{' --write-defaults' if write_defaults else ''}`"
        )
    from flexroll.tune import summary as document

    summary = document.finish(summary)
    for path in document.write(summary, out):
        print(path)
    say(document.verdict(summary).replace("**", ""))
    if write_defaults:
        part = become_default(summary, FILE)
        say(f"{FILE.name}: {summary.facts['kind']} options of '{part}' are the winner's now; flex cells are stale")


def check_default(kind: Kind, device: str, page_size: int) -> None:
    """Whether a sweep's winner could be a default at all: what cannot is said before an hour is spent on it.

    Raises:
        FlexrollError: it is not of a GPU's kernel options, or of another page size than the engine's default.
    """
    if kind == "engine" or device == "cpu":
        raise FlexrollError("defaults are kernel options of a GPU; this sweep is of none, nothing was written")
    if page_size != PAGE_SIZE:
        raise FlexrollError(
            f"the sweep runs with pages of {page_size} tokens, the engine's default is {PAGE_SIZE}: nothing was "
            "written; leave --page-size or --write-defaults out"
        )


def become_default(summary: Summary, file: Path) -> str:
    """Write the winner into the defaults file; returns the GPU's name there. Raises FlexrollError with why not."""
    facts, w = summary.facts, summary.winner
    check_default(facts["kind"], facts["device"], facts["page_size"])
    if w is None or not w.faster:
        raise FlexrollError("no point is faster than the default by an interval that excludes 0: nothing was written")
    note = (
        f"{w.gain:.3f} ({w.low:.3f} to {w.high:.3f}) times the earlier default's tok/s over whole rollouts of "
        f"{facts['batch']} x ({facts['prompt_tokens']} + {facts['new_tokens']}) tokens, {facts['model']}, torch "
        f"{facts['torch']}, {len(w.duel)} paired rounds"
    )
    return write_default(facts["device"], facts["kind"], Entry(options=w.options, note=note), file)


def _check(request: Request, device: str) -> None:
    if not (request.model / "config.json").is_file():
        raise FlexrollError(f"{request.model}: not a checkpoint folder (no config.json)")
    if request.kind != "engine" and device == "cpu":
        raise FlexrollError(f"--kind {request.kind}: kernel options are a GPU's, and none is here; --kind engine runs")
    if request.rounds < LEAST_ROUNDS:
        raise FlexrollError(f"--rounds {request.rounds}: an interval needs at least {LEAST_ROUNDS}")


def _python(root: Path, stack: str | None) -> Path:
    if stack is None:
        if importlib.util.find_spec("torch") is None:
            raise FlexrollError("no torch in this environment; name the one that measures: --stack torch2.11")
        return Path(sys.executable)
    python = root / ".stacks" / stack / "bin" / "python"
    if not python.exists():
        raise FlexrollError(f"stack {stack} is not set up; run `make stack STACK={stack}`")
    return python


def _facts(request: Request, setup: dict[str, Any], plan: Plan, grid: Grid, machine: dict[str, Any]) -> dict[str, Any]:
    """What makes a sweep the same one: all but the budget."""
    kept = {name: value for name, value in setup.items() if name not in ("model", "reference", "device")}
    shape = json.loads((request.model / "config.json").read_text())
    steps = {f"plan_{name}": value for name, value in asdict(plan).items() if name != "budget_s"}
    axes = {name: list(values) for name, values in grid.axes.items()}
    return {
        "kind": request.kind,
        **machine,
        "model": request.model.resolve().name,
        "model_config": hash_json(shape),
        **kept,
        **steps,
        "axes": axes,
    }
