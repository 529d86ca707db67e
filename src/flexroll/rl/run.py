"""`flexroll grpo`: one training run in a process that may hang, crash or raise; what becomes of it is a record.

Imports no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from flexroll.bench.environment import describe
from flexroll.bench.isolate import worker_env
from flexroll.bench.lease import device_lease, first_gpu
from flexroll.bench.process import Stopped, stop_signals
from flexroll.errors import FlexrollError
from flexroll.provenance import device_class, hash_json, lock_hash, source_hash, variant
from flexroll.rl.data import read_questions
from flexroll.rl.progress import ADAPTER
from flexroll.rl.rollouts import CLASSES
from flexroll.rl.spec import GrpoSpec
from flexroll.rl.supervise import Supervised, read_state
from flexroll.schema.config import Config
from flexroll.schema.grpo import JUDGING, OPTIONS_OF, Grpo
from flexroll.schema.grpo_records import FOLDER, GrpoRecord, GrpoTarget, grpo_targets, read_grpo
from flexroll.schema.names import named

# Fields that a target and its record have in common.
SHARED = ("stack", "backend", "option", "option_values", "compile_mode", "pool", "seed")


def find_grpo_target(config: Config, name: str) -> GrpoTarget:
    """The run of that name. Raises FlexrollError with the nearest name there is."""
    if config.grpo is None:
        raise FlexrollError(f"run {config.run} trains nothing; add `grpo:` to its config")
    return named(name, {target.name: target for target in grpo_targets(config)}, "GRPO run", config.run)


def grpo_source_hash(backend: str, src: Path | None = None) -> str:
    """Hash of the code that trains on this rollout backend."""
    roots = ("flexroll.rl.worker", "flexroll.rl.trainer", CLASSES[backend].split(":")[0], "flexroll.bench.isolate")
    return source_hash(*roots, src=src)


def grpo_key(root: Path, target: GrpoTarget, config: Config, device: str, inputs: dict[str, Any] | None = None) -> str:
    """Everything that makes a record stale: the settings, what is trained on, lock, code of the rollout backend and
    the trainer, device.

    inputs: hashes of what was read, known at run time only.
    """
    assert config.grpo is not None
    src = root / "src" if (root / "src" / "flexroll").is_dir() else None
    prompts = config.grpo.prompts or config.prompts
    return hash_json(
        {
            "target": target.model_dump(mode="json"),
            "settings": config.grpo.model_dump(mode="json", exclude=JUDGING | {"prompts"}),
            "prompts": prompts.model_dump(mode="json"),
            "sampling": config.samplings[config.grpo.sampling].model_dump(mode="json"),
            "adapter": config.adapter.model_dump(mode="json", include={"rank", "alpha", "targets"}),
            "model": [config.model.model_dump(mode="json"), config.max_model_len],
            "lock": lock_hash(root, target.stack, device),
            "source": grpo_source_hash(target.backend, src),
            "device": device,
            "inputs": inputs or {},
        }
    )


def grpo(
    config: Config,
    name: str,
    *,
    work: Path,
    out: Path,
    root: Path,
    stack: str,
    rewards: list[str] | None = None,
    keep_checkpoints: bool = False,
    resume: bool = True,
    log: Path | None = None,
    builder: str | None = None,
) -> GrpoRecord:
    """Train once and write the record, whatever becomes of it.

    A run that was stopped in any way, and is called again with nothing changed, goes on from its last complete
    checkpoint, see grpo.save_every.

    Args:
        work: work/<run>, which holds grpo/questions.json; the run's own files go to grpo/<name> in it.
        out: the record. stack: this interpreter's.
        rewards: names, or file.py:function, in place of the config's.
        keep_checkpoints: also when the run has ended well. resume: False begins anew.
        log: of the worker's output; default: logs/ of the run's results.
        builder: in place of build_trainer, as module:function or file.py:function; for tests.
    Raises:
        FlexrollError: no such run, or an input is missing. Stopped: on SIGTERM or SIGINT, the record written.
    """
    target = find_grpo_target(config, name)
    assert config.grpo is not None
    questions_file = work / FOLDER / "questions.json"
    questions = read_questions(questions_file)
    names: list[str] = rewards or list(config.grpo.rewards)
    inputs = {"questions": questions["sha256"], "model": questions["model_sha256"]}
    inputs |= {"rewards": _reward_hashes(names)} if rewards else {}
    model = root / questions["model"]
    if not (model / "config.json").is_file():
        raise FlexrollError(f"{model}: the checkpoint is missing; run `flexroll model` and `flexroll grpo-questions`")
    folder, device = work / FOLDER / target.name, device_class()
    key = grpo_key(root, target, config, device, inputs)
    spec = GrpoSpec(
        target=target,
        grpo=config.grpo if rewards is None or config.grpo.reward_weights is None else _unweighted(config.grpo),
        adapter=config.adapter,
        sampling=config.samplings[config.grpo.sampling],
        model=model,
        dtype=config.model.dtype,
        device=variant(device),
        max_model_len=config.max_model_len,
        questions=questions_file,
        folder=folder,
        resume=resume and _same_run(folder, key),
    )
    if not spec.resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = log or out.parent.parent / "logs" / f"{FOLDER}-{target.name}.log"
    record = GrpoRecord(
        **{part: getattr(target, part) for part in SHARED},
        settings=config.grpo.model_dump(mode="json", exclude={"backends"}) | {"steps": target.steps, "rewards": names},
        model=config.model.name,
        dtype=config.model.dtype,
        status="failed",
        reason="the run did not begin",
        key=key,
        device=device,
        log=f"{log.parent.name}/{log.name}",
    )
    run = Supervised(record, spec, out, log, keep_checkpoints)
    task = {"spec": spec.model_dump(mode="json"), "rewards": names} | ({"builder": builder} if builder else {})
    try:
        with stop_signals(), device_lease(root, device, _gpu_of_seed(out.parent, target.seed)):
            environment = describe(root, stack, OPTIONS_OF.get(target.backend, target.backend))
            run.record.environment = environment.model_copy(update={"source_sha256": grpo_source_hash(target.backend)})
            run.supervise(task, worker_env(root, target.stack, device))
    except Stopped as error:
        run.end({"status": "failed", "reason": f"stopped (signal {error.signum}) {run.where}"})
        raise
    return run.record


def adapter_folder(work: Path, target: GrpoTarget) -> Path:
    """Where a run that ended well leaves its adapter."""
    return work / FOLDER / target.name / ADAPTER


def _gpu_of_seed(records: Path, seed: int) -> str | None:
    """UUID of the GPU that a seed's first runs trained on: runs are held against each other by seed, on one card."""
    return first_gpu(sorted(records.glob(f"*-seed{seed}.json")), read_grpo)


def _same_run(folder: Path, key: str) -> bool:
    return read_state(folder).get("key") == key


def _reward_hashes(names: list[str]) -> list[list[str]]:
    """Each reward's name and, of one's own, the hash of its file."""
    from flexroll.bench.checkpoint import sha256_file

    files = {name: Path(name.rpartition(":")[0]) for name in names if ":" in name}
    return [[name, sha256_file(files[name]) if name in files and files[name].is_file() else ""] for name in names]


def _unweighted(grpo: Grpo) -> Grpo:
    """With other rewards than the config's, its weights mean nothing."""
    return grpo.model_copy(update={"reward_weights": None})
