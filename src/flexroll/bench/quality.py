"""`flexroll quality`: one engine configuration against fp32, in a process that may hang, crash or raise.

What becomes of it is a record in any case: a configuration that cannot be scored is a finding. Imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flexroll.bench.availability import cannot_run, note_skip
from flexroll.bench.console import say
from flexroll.bench.environment import describe
from flexroll.bench.inputs import Inputs, read_inputs
from flexroll.bench.isolate import worker_env
from flexroll.bench.lease import device_lease
from flexroll.bench.process import describe_exit, event_lines, stop_signals, worker
from flexroll.bench.task import engine_spec, read_prompts
from flexroll.errors import FlexrollError
from flexroll.provenance import backend_source_hash, device_class, hash_json, lock_hash, module_hash, variant
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.config import Config, Limits
from flexroll.schema.names import named
from flexroll.schema.quality import FOLDER, QualityRecord, Target, job_of, targets
from flexroll.schema.records import write_json

CLOSE_S = 60.0  # an engine that has told everything may take this long to end
# What turns an engine's answers into numbers; hashed without what it imports, as engines have a hash of their own.
SCORING = ("flexroll.bench.quality_worker", "flexroll.bench.quality_reference")


def find_target(config: Config, name: str) -> Target:
    """The configuration of that name. Raises FlexrollError with the nearest name there is."""
    if config.quality is None:
        raise FlexrollError(f"run {config.run} asks for no scoring; add `quality: {{}}` to its config")
    return named(name, {target.name: target for target in targets(config)}, "engine configuration", config.run)


def own_model(config: Config) -> bool:
    """Whether scoring has a model or prompts of its own, under work/<run>/quality."""
    quality = config.quality
    return quality is not None and (quality.model is not None or quality.prompts is not None)


def scored_config(config: Config) -> Config:
    """The config whose model and prompts are scored: the run's own, or that of the scoring's own model."""
    return config.for_quality() if own_model(config) else config


def inputs_folder(config: Config, work: Path) -> Path:
    """Where model.json, prompts.json, adapter/, merged/ and four_bit/ of the scoring are."""
    return work / FOLDER if own_model(config) else work


def reference_file(work: Path, target: Target) -> Path:
    return work / FOLDER / f"reference-{target.reference}.safetensors"


def seats(config: Config, target: Target, device: str) -> int:
    """How many scorings may share a device with this one, itself included."""
    assert config.quality is not None
    return 1 if device != "cpu" and BACKENDS[target.backend].alone else config.quality.side_by_side


def quality_key(root: Path, target: Target, config: Config, device: str, inputs: dict[str, str] | None = None) -> str:
    """Everything that makes a record stale: option values, what is scored, lock, code of backend and scoring, device.

    inputs: hashes of what was read, known at run time only.
    """
    assert config.quality is not None
    scored = scored_config(config)
    src = root / "src" if (root / "src" / "flexroll").is_dir() else None
    return hash_json(
        {
            "target": target.model_dump(mode="json"),
            "model": [scored.model.model_dump(mode="json"), config.max_model_len, config.seed],
            "asked": [config.quality.count, config.quality.new_tokens, config.quality.slots],
            "lock": lock_hash(root, target.stack, device),
            "source": backend_source_hash(target.backend, src),
            "scoring": module_hash(*SCORING, src=src),
            "device": device,
            "inputs": inputs or {},
        }
    )


def quality(
    config: Config, name: str, *, work: Path, out: Path, root: Path, stack: str, backend: str | None = None
) -> QualityRecord:
    """Score one configuration and write its record, whatever becomes of it.

    Args:
        work: work/<run>. out: the record. stack: this interpreter's. backend: another class, as `file.py:Class`; for
            tests.
    Raises:
        FlexrollError: no such configuration, or an input is missing. Stopped: on SIGTERM or SIGINT.
    """
    target, scored = find_target(config, name), scored_config(config)
    assert config.quality is not None
    folder, reference = inputs_folder(config, work), reference_file(work, target)
    job = job_of(target, scored)
    inputs = read_inputs(folder, job, root, tuned=work)
    if not reference.exists():
        raise FlexrollError(f"{reference}: missing; `flexroll quality-reference` writes it")
    device = device_class()
    log = out.parent.parent / "logs" / f"{FOLDER}-{target.name}.log"
    with device_lease(root, device, seats=seats(config, target, device)):
        task = {
            "backend": backend or target.backend,
            "spec": _spec(config, job, inputs, device),
            "reference": str(reference),
        }
        environment = describe(root, stack, target.backend)
        begun = time.monotonic()
        task_file = work / "jobs" / f"{FOLDER}-{target.name}.json"
        reason = cannot_run(task["backend"], task["spec"])
        if reason is not None:
            note_skip(log, reason)
            found = {"status": "skipped", "reason": reason}
        else:
            found = _supervised(task, task_file, log, config.limits, worker_env(root, target.stack, device))
    record = QualityRecord(
        **{name: getattr(target, name) for name in ("stack", "backend", "adapter", "option", "option_values")},
        model=scored.model.name,
        dtype=scored.model.dtype,
        key=quality_key(root, target, config, device, inputs.hashes),
        device=device,
        environment=environment,
        prompts_sha256=inputs.prompts_sha256,
        near_tie=config.quality.near_tie,
        seconds=round(time.monotonic() - begun, 1),
        log=f"logs/{log.name}",
        **found,
    )
    if record.diverged is not None:
        record.near_ties = sum(d.gap <= config.quality.near_tie for d in record.divergences)
    write_json(out, record.model_dump_json(indent=1) + "\n")
    say(f"{target.name}: {_outcome(record)}")
    return record


def _spec(config: Config, job: Any, inputs: Inputs, device: str) -> dict[str, Any]:
    """Fields of EngineSpec. Weights are read whatever the option says of drawing them; vLLM scores a continuation as
    part of a prompt, and generates one token more."""
    assert config.quality is not None
    cell = job.cells[0]
    prompts = read_prompts(inputs.prompts)["prompts"][: config.quality.count]
    longest = max(len(p["ids"]) for p in prompts) + config.quality.new_tokens + 1
    spec = engine_spec(
        job, cell, variant(device), inputs.model, inputs.adapter, inputs.merged, inputs.shard, inputs.replay
    )
    return spec | {"dummy": False, "max_model_len": max(cell.max_model_len, longest)}


def _supervised(
    task: dict[str, Any], task_file: Path, log: Path, limits: Limits, env: dict[str, str]
) -> dict[str, Any]:
    """Run the worker to its end; fields of the record, of which status and reason are always there."""
    for path in (task_file, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    task_file.write_text(json.dumps(task, indent=1))
    command = [sys.executable, "-m", "flexroll.bench.quality_worker", str(task_file)]
    with stop_signals(), log.open("wb") as output, worker(command, output, env) as (process, read_end):
        return _follow(process, read_end, log, limits)


def _follow(process: subprocess.Popen, read_end: int, log: Path, limits: Limits) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    late = f"engine did not start: timeout after {limits.start_s:g} s (limits.start_s)"
    deadline = time.monotonic() + limits.start_s
    for line in event_lines(read_end, process):
        if line is not None:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "started":
                late = f"timeout: scoring took longer than {limits.cell_s:g} s (limits.cell_s)"
                deadline = time.monotonic() + limits.cell_s
            else:
                found = {"status": "ok" if kind == "done" else kind, **event}
                deadline = time.monotonic() + CLOSE_S
        elif time.monotonic() > deadline:
            return found or {"status": "failed", "reason": late}
    return found or {"status": "failed", "reason": describe_exit(process.wait(), log)}


def _outcome(record: QualityRecord) -> str:
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    kl = record.unscored or (f"KL {record.kl:.3g} nats a token" if record.kl is not None else "KL not told")
    return f"{kl}; {record.diverged} of {record.prompts} diverged, {record.near_ties} of them at near-ties"
