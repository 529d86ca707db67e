"""What `flexroll analyse` writes to analysis.json: all that the report needs besides the samples' text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flexroll.schema.claims import Published, Source, Unit, Verdict
from flexroll.schema.config import Sampling
from flexroll.schema.lengths import Lengths

Status = Literal["ok", "failed", "skipped", "missing", "unreadable"]
Method = Literal["t", "bootstrap", ""]


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RoundRow(Base):
    """started: Unix time, seconds. sm_clock: median clock of the GPU's multiprocessors in the round, MHz. flags: what
    disturbed it."""

    index: int
    tokens: int
    wall_s: float
    warmup: bool
    tokens_sha256: str
    started: float | None = None
    sm_clock: float | None = None
    flags: list[str] = []


class MemoryRow(Base):
    """Bytes; None where the backend could not tell."""

    weights: int | None = None
    kv_reserved: int | None = None
    peak_allocated: int | None = None
    device_total: int | None = None


class Workload(Base):
    """What each round did, as the record tells; two rates compare only where it is equal. slots: sequences that ran at
    once."""

    new_tokens: int | Lengths
    samples: int
    slots: int
    ignore_eos: bool
    sampling: Sampling


class Configuration(Base):
    """What a row is about: a cell without its session."""

    experiment: str
    section: str
    backend: str
    adapter: str
    batch: int
    option: str
    sampling: str
    stack: str


class CellRow(Configuration):
    """One cell of the matrix with its session, whatever became of it.

    rounds: all of them, warm-up included and marked. tps_*: tok/s over this session's measured rounds, None unless
    status is ok. spread: (best - min) / median. cv: the rounds' sd over their mean. trend: relative change of tok/s
    from the first measured round to the last, where the rounds go one way; else None. rounds_flagged: measured rounds
    with a flag, which count like any other; flags: the distinct ones. coherent: None without samples.
    perplexity: median of the samples', under the reference model. note: where the
    record was measured under other settings than the config now asks for. remark: how the backend did the work, where
    that is not plain. workload: None without a record. file: path relative to the run's folder.
    """

    session: int
    new_tokens: int | Lengths
    samples: int = 1
    slots: int | None = None
    status: Status
    reason: str = ""
    note: str = ""
    remark: str = ""
    n: int = 0
    tps_median: float | None = None
    tps_best: float | None = None
    tps_min: float | None = None
    decode_tps_median: float | None = None
    decode_tps_best: float | None = None
    decode_tps_min: float | None = None
    spread: float | None = None
    cv: float | None = None
    trend: float | None = None
    rounds_flagged: int = 0
    flags: list[str] = []
    memory: MemoryRow = MemoryRow()
    coherent: bool | None = None
    perplexity: float | None = None
    coherence_notes: list[str] = []
    start_s: float | None = None
    device: str | None = None
    device_uuid: str | None = None
    cpu: str | None = None
    on_gpu: bool | None = None
    prompts_sha256: str = ""
    prompt_tokens: int = 0
    workload: Workload | None = None
    file: str
    rounds: list[RoundRow] = []


class Result(Configuration):
    """A configuration: its cells over all sessions. tps: median of the sessions' medians, over ok cells only; best and
    min are over every measured round; n: rounds behind them. status is ok where any session is ok.

    tps_low, tps_high: 95 % interval of tps over sessions, in tok/s, made by interval_method; None with sufficient false
    where the sessions are too few ("insufficient n"). So too decode_*, of the decode-only rate. cv_between, cv_within:
    spread between and within sessions, and helps: which more of narrows the interval (`statistics.Split`). trends:
    sessions whose rounds go one way. rounds_flagged, flags: as in CellRow, over the ok sessions.
    """

    new_tokens: int | Lengths
    samples: int = 1
    slots: int | None = None
    option_values: dict[str, Any]
    status: Status
    reason: str = ""
    sessions: int = 0
    n: int = 0
    tps: float | None = None
    tps_best: float | None = None
    tps_min: float | None = None
    tps_low: float | None = None
    tps_high: float | None = None
    interval_method: Method = ""
    sufficient: bool = False
    decode_tps: float | None = None
    decode_tps_best: float | None = None
    decode_tps_min: float | None = None
    decode_tps_low: float | None = None
    decode_tps_high: float | None = None
    decode_interval_method: Method = ""
    decode_sufficient: bool = False
    cv_between: float | None = None
    cv_within: float | None = None
    helps: Literal["sessions", "rounds", ""] = ""
    trends: int = 0
    rounds_flagged: int = 0
    flags: list[str] = []
    memory: MemoryRow = MemoryRow()
    coherent: bool | None = None
    perplexity: float | None = None
    start_s: float | None = None
    devices: list[str] = []
    device_uuids: list[str] = []
    on_gpu: bool | None = None
    prompts_sha256: str = ""
    files: list[str] = []


class Comparison(Base):
    """The ratio of two configurations over blocks (`blocks.paired_ratio`).

    ratio: None where nothing pairs; low, high: its 95 % interval, made by `method`, None below the least number of
    blocks. n: blocks, whose session numbers are `sessions`; flagged: those with a flagged round on either side.
    verdict: faster or slower only where the interval excludes 1. reason: why no more can be said, and what does not
    pair.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    method: Method = ""
    n: int = 0
    sessions: list[int] = []
    flagged: int = 0
    verdict: Literal["faster", "slower", "no difference shown", "insufficient n", "not comparable"]
    reason: str = ""


class Pair(Base):
    """One result set against another. kind: what they differ in (`pairs.make_pairs`); across: fields of the workload
    that differ as well."""

    kind: Literal["vllm", "option", "stack"]
    over: Configuration
    under: Configuration
    across: list[str] = []
    comparison: Comparison


class EnvironmentRow(Base):
    """What a stack's cells ran in; every list holds the distinct values met, so that a mixed run shows."""

    stack: str
    cells: int
    image: list[str]
    python: list[str]
    platform: list[str]
    cpu: list[str]
    device: list[str]
    device_uuid: list[str]
    driver: list[str]
    commit: list[str]
    lock_sha256: list[str]
    packages: dict[str, list[str]]


class PeftCycle(Base):
    cycle: int
    max_abs_diff: float
    share_changed: float


class DriftRow(Base):
    """Drift verification of one stack; only stack, status, reason and file where it did not run."""

    stack: str
    status: Literal["ok", "missing", "unreadable"]
    reason: str = ""
    file: str
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    cycles: int | None = None
    base_sha256_before: str | None = None
    base_sha256_after: str | None = None
    base_identical: bool | None = None
    inference_identical: bool | None = None
    merged_exact: bool | None = None
    merged_wrong: int | None = None
    weights_checked: int | None = None
    refresh_ms_median: float | None = None
    peft: list[PeftCycle] = []
    peft_version: str | None = None
    torch_version: str | None = None


class QualityRow(Base):
    """How exact one engine configuration is (`schema.quality.QualityRecord`), and whether it is admissible.

    model: whose text and distributions these are, which may be another than the run's. times: its KL over the
    baseline's of the same backend, adapter and stack; times_low, times_high: its 95 % interval over the scored
    sequences, None where they are too few. near_ties: of `diverged`, as the config counts them now. admissible: None
    where it cannot be told; why says in words what decided. file: relative to the run's folder.
    """

    stack: str
    backend: str
    adapter: str
    option: str
    baseline: bool
    model: str = ""
    status: Status
    reason: str = ""
    unscored: str = ""
    device: str = ""
    prompts: int = 0
    tokens: int = 0
    kl: float | None = None
    times: float | None = None
    times_low: float | None = None
    times_high: float | None = None
    logprob_rms: float | None = None
    top1_agreement: float | None = None
    diverged: int | None = None
    near_ties: int | None = None
    coherent: bool | None = None
    admissible: bool | None = None
    why: str
    file: str


class GrpoRun(Base):
    """One training run, whatever became of it. Means are over the measured steps, those after skip_steps.

    wall_s, reward, kl, tokens: of each step done, in order. seconds: mean of each part of a step, `other` included, of
    which the mean step is the sum. step_s: median. tps: completion tokens over the seconds waited for them. peak_bytes:
    of the trainer's process; device_bytes: of the device, by everything. rewards_in_range: None where none was told.
    file: relative to the run's folder.
    """

    seed: int
    status: Status
    reason: str = ""
    file: str
    asked: int
    wall_s: list[float] = []
    tokens: list[int] = []
    reward: list[float | None] = []
    kl: list[float | None] = []
    seconds: dict[str, float] = {}
    start_s: float | None = None
    train_s: float | None = None
    step_s: float | None = None
    tps: float | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    logprob_difference: float | None = None
    importance_ratio: float | None = None
    losses_finite: bool | None = None
    rewards_in_range: bool | None = None
    coherent: bool | None = None
    base_identical: bool | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    recompiles: int | None = None
    resumed: int = 0
    notes: list[str] = []
    faults: list[str] = []
    device: str | None = None
    device_uuid: str | None = None
    on_gpu: bool | None = None


class Equivalence(Base):
    """Whether a mean over the measured steps is the reference's, within +-band: two one-sided tests at 5 %, which is a
    90 % interval of the difference inside the band.

    difference: own mean less the reference's; low, high: that interval over seeds, None where they are too few. n: of
    the seeds, or pairs of them, behind it. paired: by seed; else Welch's.
    """

    band: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    paired: bool = False
    verdict: Literal["equivalent", "different", "cannot be told"] = "cannot be told"
    reason: str = ""


class Share(Base):
    """A ratio to vLLM's, with its 95 % interval over seeds or, where those are too few, over steps of one number."""

    ratio: float
    low: float | None = None
    high: float | None = None
    over: Literal["seeds", "steps", ""] = ""
    n: int = 0


class GrpoRow(Base):
    """A rollout backend in one form, its runs over all seeds. Numbers are medians over the runs that are ok, peaks the
    most. reward, kl: mean over seeds of the runs' means; *_spread: sd between seeds.

    reference, baseline: whether others are held against it in what it learns, in what it costs. speed: vLLM's step time
    over its own; memory: its memory on the device over vLLM's. kl_test, reward_test: against the reference; None for
    itself, and of KL where none is logged. gate: None where it cannot be told; why says in words what decided.
    """

    stack: str
    backend: str
    option: str
    compile_mode: str | None = None
    pool: str = "kept"
    form: str
    status: Status
    reason: str = ""
    reference: bool = False
    baseline: bool = False
    runs: list[GrpoRun]
    train_s: float | None = None
    step_s: float | None = None
    seconds: dict[str, float] = {}
    tps: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    reward: float | None = None
    reward_spread: float | None = None
    kl: float | None = None
    kl_spread: float | None = None
    logprob_difference: float | None = None
    speed: Share | None = None
    memory: Share | None = None
    kl_test: Equivalence | None = None
    reward_test: Equivalence | None = None
    gate: bool | None = None
    why: str = ""

    @property
    def ok(self) -> list[GrpoRun]:
        return [run for run in self.runs if run.status == "ok"]

    @property
    def devices(self) -> list[str]:
        return sorted({run.device for run in self.ok if run.device})

    @property
    def on_gpu(self) -> bool:
        return bool(self.ok) and all(run.on_gpu for run in self.ok)


class PublishedTraining(Base):
    """A published number of one training run: of which rollout backends (the first that was run counts), and which."""

    claim: str
    source: int
    section: str
    backends: list[str]
    metric: str
    value: float


class VerdictRow(Base):
    """A claim and what became of it. measured, low, high in `unit`'s base (a fraction for %); computed: from the
    source's own numbers. gpu: what the claim holds for. direction: how measured must lie to published, '' without a
    number. device: what the measurement ran on. files: raw files behind it, relative to the run."""

    id: str
    kind: str
    source: int
    section: str
    topic: str
    quote: str
    note: str = ""
    gpu: str = ""
    direction: str = ""
    unit: Unit = ""
    metric: str = ""
    published: float | bool | None = None
    measured: float | bool | None = None
    low: float | None = None
    high: float | None = None
    interval: bool = False
    computed: float | None = None
    verdict: Verdict
    reason: str = ""
    device: str | None = None
    files: list[str] = []


class Analysis(Base):
    """config: the validated config as JSON. quality, grpo: [] where the config asks for none. left_out: stacks of the
    matrix that this run was told to leave out.
    unlisted: raw files that belong to no cell of the config. unscored: why a stack's samples have no perplexity."""

    schema_version: int = 1
    config: dict[str, Any]
    stacks: list[str]
    left_out: list[str]
    cells: list[CellRow]
    results: list[Result]
    pairs: list[Pair] = []
    environments: list[EnvironmentRow]
    drift: list[DriftRow]
    quality: list[QualityRow] = []
    grpo: list[GrpoRow] = []
    published_training: list[PublishedTraining] = []
    verdicts: list[VerdictRow]
    published: list[Published]
    published_gpu: str
    published_model: str
    sources: dict[int, Source]
    unlisted: list[str] = []
    unscored: dict[str, str] = {}
