"""The steps of the workflow for a config, by rule, as Snakemake counts them: for `flexroll plan`, and for the rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flexroll.backends.flex_support import cpu_problem
from flexroll.bench.inputs import replay_kind, wants_shard
from flexroll.bench.quality import own_model
from flexroll.schema.catalogue import BACKENDS
from flexroll.schema.cells import Job, expand, jobs
from flexroll.schema.config import Config
from flexroll.schema.grpo_records import grpo_targets
from flexroll.schema.quality import job_of, targets


def needs_warmup(job: Job, engines: Collection[str], config: Config, on_gpu: bool) -> bool:
    """Whether a fresh process of this job would compile for long: flex unless eager, and on a GPU vLLM too.

    engines: names of all engines of the run. Without repeats.fill_caches the first process that needs a kernel compiles
    it, in its warm-up round.
    """
    values = job.cells[0].option_values
    if not config.repeats.fill_caches:
        return False
    if not on_gpu:
        # A merged adapter is only other weights: it runs the kernels that the warm-up without an adapter compiles.
        twin = job.engine.replace("-flex-merged-", "-flex-none-")
        if job.backend != "flex" or (job.adapter == "merged" and twin in engines):
            return False
        if cpu_problem(values):  # skipped
            return False
    return BACKENDS[job.backend].warmup and values.get("compile", True)


def workflow_steps(config: Config, stacks: Iterable[str] | None, on_gpu: bool) -> dict[str, int]:
    """{rule: how many times it runs} where nothing was made yet. stacks: only these."""
    only = None if stacks is None else set(stacks)
    used = [stack for stack in config.stacks if only is None or stack in only]
    measured, scored, trained = jobs(expand(config, only)), targets(config, only), grpo_targets(config, only)
    scoring = [job_of(target, config) for target in scored]
    engines = {job.engine for job in measured}
    drifting = [stack for stack in config.drift.stacks if stack in used]
    own = own_model(config) and bool(scored)
    reading = measured + ([] if own else scoring)  # what reads the run's own model
    steps = {
        "preflight": 1,
        "model": 1,
        "prompts": int(bool(reading)),
        "adapter": int(bool(drifting) or any(job.adapter != "none" for job in reading)),
        "merge": int(any(map(reads_merged, reading))),
        "quantise": int(any(map(wants_shard, reading))),
        "autotune": len({(job.stack, replay_kind(job)) for job in measured if replay_kind(job)}),
        "warmup": len({job.engine for job in measured if needs_warmup(job, engines, config, on_gpu)}),
        "bench": len(measured),
        "drift": len(drifting),
        "perplexity": len({job.stack for job in measured}) if config.model.source != "random" else 0,
        "quality_config": int(own),
        "quality_model": int(own),
        "quality_prompts": int(own),
        "quality_adapter": int(own and any(job.adapter != "none" for job in scoring)),
        "quality_merge": int(own and any(map(reads_merged, scoring))),
        "quality_quantise": int(own and any(map(wants_shard, scoring))),
        "quality_reference": len({target.reference for target in scored}),
        "quality": len(scored),
        "grpo_questions": int(bool(trained)),
        "grpo": len(trained),
        "analyse": 1,
        "report": 1,
        "all": 1,
    }
    return {rule: count for rule, count in steps.items() if count}


def reads_merged(job: Job) -> bool:
    """Whether it reads the checkpoint that has the adapter merged in; flex merges in memory."""
    return job.adapter == "merged" and job.backend != "flex"
