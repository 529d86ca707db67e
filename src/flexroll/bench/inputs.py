"""What a job reads: its cells, and the model, prompts and adapter that earlier commands prepared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flexroll.bench.checkpoint import fingerprint
from flexroll.bench.task import read_input, read_prompts
from flexroll.errors import FlexrollError
from flexroll.provenance import hash_json
from flexroll.schema.cells import Job, expand, jobs
from flexroll.schema.config import Config
from flexroll.schema.names import named

SHARD = "four_bit"  # folder of the NF4 checkpoint, under work/<run>
MERGED_FILES = "files.json"  # {name: sha256} of the merged checkpoint, written when it is complete


@dataclass(frozen=True)
class Inputs:
    """What earlier rules prepared for a job.

    hashes: of model and prompts; of adapter, merged checkpoint, NF4 shard and replayed options where the job reads
    them.
    """

    model: Path
    prompts: Path
    prompts_sha256: str
    adapter: Path | None
    merged: Path | None
    hashes: dict[str, str]
    shard: Path | None = None
    replay: Path | None = None


def find_job(config: Config, name: str) -> Job:
    """The job of that name. Raises FlexrollError with the nearest name there is."""
    return named(name, {job.name: job for job in jobs(expand(config))}, "job", config.run, "see `flexroll plan`")


def read_inputs(work: Path, job: Job, root: Path, tuned: Path | None = None) -> Inputs:
    """What the job reads from work/<run>; tuned: another folder that holds autotuned kernel options.

    Raises:
        FlexrollError: an input is missing; the message names the command that makes it.
    """
    model = read_input(work / "model.json", "model", ("path", "files"))
    folder = root / model["path"]
    prompts = read_prompts(work / "prompts.json")
    largest = max(max(c.prompts, c.warmup_prompts) for c in job.cells)
    if len(prompts["prompts"]) < largest:
        raise FlexrollError(
            f"{work / 'prompts.json'}: {len(prompts['prompts'])} prompts, the job needs {largest}; raise prompts.count"
        )
    hashes = {"model": fingerprint(model["files"]), "prompts": prompts["sha256"]}
    adapter = merged = None
    if job.adapter != "none":
        adapter = work / "adapter"
        hashes["adapter"] = _adapter_hash(adapter)
    if job.adapter == "merged" and job.backend != "flex":  # flex merges in memory
        merged = work / "merged"
        hashes["merged"] = fingerprint(read_input(merged / MERGED_FILES, "merge", ("config.json",)))
    shard = replay = None
    if wants_shard(job):
        shard = work / SHARD
        hashes["shard"] = fingerprint(read_input(shard / MERGED_FILES, "quantise", ("config.json",)))
    if (kind := replay_kind(job)) is not None:
        replay = (tuned or work) / replay_file(job.stack, kind)
        hashes["replay"] = hash_json(read_input(replay, "autotune", ("options",))["options"])
    return Inputs(folder, work / "prompts.json", prompts["sha256"], adapter, merged, hashes, shard, replay)


def wants_shard(job: Job) -> bool:
    """Whether its engine reads the NF4 checkpoint."""
    return job.cells[0].option_values.get("four_bit") == "shard"


def replay_kind(job: Job) -> str | None:
    """Which autotuned kernel options its engine runs with: plain, tma, or none."""
    return job.cells[0].option_values.get("replay")


def replay_file(stack: str, kind: str) -> str:
    """Where under work/<run> `flexroll autotune` puts what it found."""
    return f"autotune/{stack}-{kind}.json"


def _adapter_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        try:
            digest.update((folder / name).read_bytes())
        except FileNotFoundError:
            raise FlexrollError(f"{folder / name}: missing; `flexroll adapter` writes it") from None
    return digest.hexdigest()
