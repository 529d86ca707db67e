# The config in use, its jobs, what each of them reads, and what makes it stale. Only this file holds functions.
import os
import re
import shutil
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import DeploymentMethod
from snakemake.utils import validate

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from flexroll import provenance
from flexroll.bench.inputs import SHARD, replay_file, replay_kind, wants_shard
from flexroll.bench.prompts import longest_prompt, needed_prompts
from flexroll.bench.quality import own_model, quality_key, scored_config, seats
from flexroll.bench.steps import needs_warmup
from flexroll.errors import FlexrollError
from flexroll.images import deploy
from flexroll.rl.run import grpo_key
from flexroll.schema.cells import expand, jobs, measuring_order
from flexroll.schema.grpo_records import grpo_targets
from flexroll.schema.load import load_config
from flexroll.schema.quality import job_of, targets
from flexroll.tune.autotune import decode_shape, tuned_cell

# Shell lines find `flexroll` beside the Python that runs Snakemake, and nothing of the caller's Python leaks in.
os.environ.update(
    PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    PYTHONNOUSERSITE="1",
    FLEXROLL_ROOT=str(ROOT),
)
os.environ.pop("PYTHONPATH", None)
# Without bytecode every process compiles what it imports anew: 1 s for torch, 6 s for all that compiling a kernel needs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def read_config():
    """The config file in use, its contents, and the stacks that --config stacks= leaves (None: all).

    Snakemake merges config files, so that a preset would keep the default's experiments. There is no `configfile:`
    here: exactly one file is read, and --config takes nothing but preset= and stacks=.
    """
    given = [Path(path) for path in workflow.overwrite_configfiles]
    asked = dict(workflow.config_settings.config or {})
    preset, only = asked.pop("preset", None), asked.pop("stacks", None)
    if asked:
        raise FlexrollError(
            f"--config {next(iter(asked))}=...: only preset= and stacks= are taken; edit the config file"
        )
    if len(given) + (preset is not None) > 1:
        raise FlexrollError("give one config: one --configfile FILE, or --config preset=NAME")
    if preset is not None:
        given = [ROOT / "workflow" / "presets" / f"{preset}.yaml"]
    path = given[0] if given else ROOT / "config.yaml"
    parsed = load_config(path, ROOT)
    if only is not None:
        only = [str(name) for name in only] if isinstance(only, list) else str(only).replace(",", " ").split()
        for name in only:
            if name not in parsed.stacks:
                raise FlexrollError(f"--config stacks={name}: this config uses {', '.join(parsed.stacks)}")
    validate(parsed.model_dump(mode="json"), str(ROOT / "workflow" / "config.schema.json"), set_default=False)
    return str(path), parsed, only


def use_images():
    """Make ready for images: (runtime, None), or (None, why none can serve); (None, None) where all runs natively."""
    settings = workflow.deployment_settings
    if DeploymentMethod.APPTAINER not in settings.deployment_method:
        os.environ.pop("FLEXROLL_DEPLOYMENT", None)
        return None, None
    wanted, arguments = deploy.split_runtime(settings.apptainer_args)
    try:
        # A job that Snakemake starts as a process of its own reads this file again, and has nothing to choose.
        runtime = deploy.choose_runtime(
            ROOT, [*STACKS, deploy.REPORT], provenance.variant(DEVICE), wanted, ask=workflow.is_main_process
        )
    except FlexrollError as error:
        if shutil.which("apptainer") is None:
            os.environ.update(deploy.look_alike(ROOT))  # Snakemake asks for Apptainer before anything can be said
        return None, str(error)
    settings.apptainer_args = " ".join([arguments, *deploy.binds(ROOT, Path.cwd(), Path(CONFIG_PATH), CONFIG)])
    os.environ.update(deploy.environment(ROOT, runtime))
    return runtime, None


def cores_of_a_measurement():
    """All cores: two measurements side by side spoil both. With `--resources gpu=N`, N of them run side by side, each on
    a GPU of its own (bench/lease.py) and with its share of the cores."""
    given = workflow.global_resources.get("gpu")
    gpus = 1 if DEVICE == "cpu" or given is None else max(1, given.value)
    return max(1, (workflow.cores or 1) // gpus)


def lanes(kind, group_of):
    """A resource a group (a session, a seed), of which one job runs at a time: its jobs keep to one GPU, as what is held
    against each other must, so that with several GPUs groups run side by side. group_of: by the rule's one wildcard."""
    groups = sorted(set(group_of.values()))
    for group in groups:
        workflow.register_resource(f"{kind}{group}", 1)
    return {f"{kind}{group}": lambda wildcards, group=group: int(group_of[wildcards[0]] == group) for group in groups}


def image(name):
    """The image of a stack or of the report, as `container:` wants it. Natively nobody reads it."""
    return str(deploy.container(Path(os.path.relpath(ROOT)), RUNTIME, name)) if RUNTIME else f".images/{name}"


def job_inputs(job, after_warmup=False):
    """What a job reads.

    Snakemake overlooks the other reasons of a job whose ancient input comes from a job that is to run again, so
    `ancient` is left to preflight, which has no parameters and runs again only for another machine. A warm-up is stale
    when its jobs are.
    """
    files = {
        "preflight": ancient(PREFLIGHT),
        "model": f"work/{RUN}/model.json",
        "prompts": f"work/{RUN}/prompts.json",
    }
    if job.adapter != "none":
        files["adapter"] = f"work/{RUN}/adapter"
    if job.adapter == "merged" and job.backend != "flex":  # flex merges in memory
        files["merged"] = f"work/{RUN}/merged"
    if wants_shard(job):
        files["shard"] = f"work/{RUN}/{SHARD}"
    if replay_kind(job) is not None:
        files["replay"] = f"work/{RUN}/{replay_file(job.stack, replay_kind(job))}"
    if after_warmup and needs_warmup(job, ENGINES, CONFIG, DEVICE != "cpu"):
        files["warmup"] = f"work/{RUN}/warmup/{job.engine}.json"
    return files


def quality_inputs(target):
    """What scoring one engine configuration reads: what a job of its own would, of the model that is scored."""
    files = job_inputs(job_of(target, CONFIG))
    if own_model(CONFIG):
        theirs = ("model", "prompts", "adapter", "merged", "shard")
        files |= {name: files[name].replace(f"work/{RUN}/", f"{SCORED}/", 1) for name in theirs if name in files}
    return files | {"reference": f"work/{RUN}/quality/reference-{target.reference}.safetensors"}


def shard_stack():
    """The stack that writes the NF4 checkpoint: of those that read it, the first whose lock has bitsandbytes."""
    wanting = list(dict.fromkeys(job.stack for job in JOBS.values() if wants_shard(job))) or STACKS
    locks = {stack: ROOT / "containers" / stack / f"{provenance.variant(DEVICE)}.lock" for stack in wanting}
    able = [stack for stack, lock in locks.items() if lock.exists() and "\nbitsandbytes==" in lock.read_text()]
    return (able or wanting)[0]


def job_minutes(job):
    """Most minutes the job may take: the limits that the CLI enforces."""
    return int((CONFIG.limits.start_s + len(job.cells) * CONFIG.limits.cell_s) / 60) + 1


try:
    CONFIG_PATH, CONFIG, ONLY = read_config()
    RUN = CONFIG.run
    STACKS = [stack for stack in CONFIG.stacks if ONLY is None or stack in ONLY]
    os.environ.update(FLEXROLL_STACKS=",".join(STACKS))  # for the progress that a job tells
    DEVICE = provenance.device_class()
    JOBS = {job.name: job for job in jobs(expand(CONFIG, ONLY))}
    TRAININGS = {target.name: target for target in grpo_targets(CONFIG, ONLY)}
    # Trainings last, seed by seed in the order of the config, so that a run cut short can be compared.
    ORDER = [*measuring_order(JOBS.values(), CONFIG.seed), *sorted(TRAININGS.values(), key=lambda target: target.seed)]
    # Snakemake starts the job of the highest number first.
    PRIORITY = {one.name: n for n, one in enumerate(reversed(ORDER), 1)}
    FIRST = len(ORDER) + 1  # inputs and warm-ups: a job that waited for them would leave its block
    CORES = cores_of_a_measurement()
    SESSIONS = lanes("session", {name: job.session for name, job in JOBS.items()})
    KEYS = {name: provenance.job_key(ROOT, job, DEVICE) for name, job in JOBS.items()}
    ENGINES = {job.engine: job for job in reversed(JOBS.values())}  # the first session stands for its engine
    RUNTIME, NO_IMAGES = use_images()
    PROMPTS = [needed_prompts(CONFIG), longest_prompt(CONFIG)]
    SHARD_STACK = shard_stack()
    TARGETS = {target.name: target for target in targets(CONFIG, ONLY)}
    SCORED = f"work/{RUN}/quality" if own_model(CONFIG) else f"work/{RUN}"  # the model that is scored, and its prompts
    SEATS = {name: seats(CONFIG, target, DEVICE) for name, target in TARGETS.items()}
    QUALITY_KEYS = {name: quality_key(ROOT, target, CONFIG, DEVICE) for name, target in TARGETS.items()}
    SEEDS = lanes("seed", {name: target.seed for name, target in TRAININGS.items()})
    TRAINING_KEYS = {name: grpo_key(ROOT, target, CONFIG, DEVICE) for name, target in TRAININGS.items()}
    LOCKS = {stack: provenance.lock_hash(ROOT, stack, DEVICE) for stack in STACKS}
    CODE = {
        name: provenance.source_hash(*modules, src=ROOT / "src")
        for name, modules in {
            "model": ["flexroll.bench.model"],
            "prompts": ["flexroll.bench.prompts"],
            "drift": ["flexroll.lora.drift"],
            "grpo_questions": ["flexroll.rl.data"],
            "analyse": ["flexroll.analysis.run"],
            "report": ["flexroll.report.page"],
        }.items()
    }
    # Without what they import: a change to the engine must not make other engines' cells run again.
    CODE |= {
        name: provenance.module_hash(*modules, src=ROOT / "src")
        for name, modules in {
            "adapter": ["flexroll.lora.adapter"],
            "merge": ["flexroll.lora.adapter", "flexroll.lora.merge"],
            "quality_reference": ["flexroll.bench.quality_reference"],
            "quantise": ["flexroll.bench.quantise", "flexroll.backends.nf4"],
            "autotune": [
                *("flexroll.tune.autotune", "flexroll.tune.autotune_worker", "flexroll.tune.inductor_log"),
                *("flexroll.engine.attention", "flexroll.engine.masks"),
            ],
            "perplexity": ["flexroll.bench.perplexity"],
        }.items()
    }
except FlexrollError as error:
    raise WorkflowError(str(error)) from None

LOGS = f"results/{RUN}/logs/rules"
PREFLIGHT = f"work/{RUN}/preflight-{re.sub(r'[^A-Za-z0-9]+', '_', DEVICE)}.json"

# A published run keeps its results: nothing but its table and its document is ever made again.
PUBLISHED = Path(f"results/{RUN}/PUBLISHED").exists()
MANIFESTS = [f"results/{RUN}/raw/{name}/job.json" for name in JOBS]
DRIFT = [f"results/{RUN}/drift/{stack}.json" for stack in CONFIG.drift.stacks if stack in STACKS]
# Random weights write noise, which no model finds likely; what only trains has no sample of a cell.
MEASURED = [stack for stack in STACKS if any(job.stack == stack for job in JOBS.values())]
PERPLEXITY = [f"results/{RUN}/perplexity/{stack}.json" for stack in MEASURED if CONFIG.model.source != "random"]
QUALITY = [f"results/{RUN}/{target.file}" for target in TARGETS.values()]
GRPO = [f"results/{RUN}/{target.file}" for target in TRAININGS.values()]
if PUBLISHED:
    MANIFESTS, DRIFT, PERPLEXITY, QUALITY, GRPO = (
        [path for path in paths if Path(path).exists()] for paths in (MANIFESTS, DRIFT, PERPLEXITY, QUALITY, GRPO)
    )
