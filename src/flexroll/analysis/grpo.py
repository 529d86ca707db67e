"""GRPO on several rollout backends: what each run was, and whether the backends train alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from flexroll.analysis.equivalence import equivalence
from flexroll.analysis.grpo_runs import PARTS, over, read_run
from flexroll.analysis.model import Equivalence, GrpoRow, GrpoRun, Share
from flexroll.analysis.statistics import MIN_SESSIONS, interval
from flexroll.schema.config import Config
from flexroll.schema.grpo import Grpo
from flexroll.schema.grpo_records import FOLDER, GrpoTarget, grpo_targets
from flexroll.schema.records import Environment

BASELINE = "vllm"  # what costs are told against


def read_grpos(
    config: Config, results: Path, stacks: Iterable[str] | None = None
) -> tuple[list[GrpoRow], list[Environment]]:
    """One row a form of a rollout backend that the config trains with, and the environments of runs with a record."""
    asked = config.grpo
    if asked is None:
        return [], []
    environments: list[Environment] = []
    forms: dict[str, list[tuple[GrpoTarget, GrpoRun]]] = {}
    for target in grpo_targets(config, stacks):
        run, environment = read_run(results, target, asked, random=config.model.source == "random")
        environments += [environment] if environment is not None else []
        forms.setdefault(target.form, []).append((target, run))
    rows = [_row([target for target, _ in form], [run for _, run in form]) for form in forms.values()]
    for row in rows:
        row.reference = row is chosen(rows, asked.reference, row.stack)
        row.baseline = row is chosen(rows, BASELINE, row.stack)
    for row in rows:
        _against(row, rows, asked)
        row.gate, row.why = judge(row, asked)
    return rows, environments


def unlisted(config: Config, results: Path) -> list[str]:
    """Records of GRPO that belong to no run of the config."""
    owned = {target.file for target in grpo_targets(config)}
    found = (path.relative_to(results).as_posix() for path in results.glob(f"{FOLDER}/*.json"))
    return sorted(name for name in found if name not in owned)


def chosen(rows: Sequence[GrpoRow], backend: str, stack: str) -> GrpoRow | None:
    """The row that stands for a backend: of this stack before others, that has a run, in its plainest form."""
    own = [row for row in rows if row.backend == backend]
    plain = {id(row): (row.option != "default", row.compile_mode is not None, row.pool != "kept") for row in own}
    return min(own, key=lambda row: (row.status != "ok", row.stack != stack, plain[id(row)]), default=None)


def measured(run: GrpoRun, name: str, asked: Grpo, steps: int | None = None) -> list[Any]:
    """A run's values after skip_steps, up to step `steps`, of those that were told."""
    return [value for value in getattr(run, name)[asked.skip_steps : steps] if value is not None]


def judge(row: GrpoRow, asked: Grpo) -> tuple[bool | None, str]:
    """(passes, why): losses finite, rewards in the range of their functions, coherent text, and the mean KL and reward
    those of the reference. None where one of them cannot be told and none is wrong."""
    if not row.ok:
        return None, f"no run to judge: {row.status}{f': {row.reason}' if row.reason else ''}"
    wrong = []
    for name, what in (
        ("losses_finite", "a loss that is not finite"),
        ("rewards_in_range", "rewards outside of their range"),
        ("coherent", "broken text"),
    ):
        seeds = [str(run.seed) for run in row.ok if getattr(run, name) is False]
        wrong += [f"{what} (seed {', '.join(seeds)})"] if seeds else []
    tests = [(name, test) for name, test in (("KL", row.kl_test), ("reward", row.reward_test)) if test is not None]
    wrong += [f"another {name} than {asked.reference}'s" for name, test in tests if test.verdict == "different"]
    if wrong:
        return False, "; ".join(wrong)
    doubts = [f"{name}: {test.reason}" for name, test in tests if test.verdict == "cannot be told"]
    if all(run.rewards_in_range is None for run in row.ok):
        doubts.append("no reward was told")
    if doubts:
        return None, "; ".join(doubts)
    said = ["losses finite", "rewards in range"]
    said += ["text coherent"] if any(run.coherent for run in row.ok) else ["text not judged"]
    said += (
        ["the reference"] if row.reference else [f"{' and '.join(name for name, _ in tests)} equivalent"] * bool(tests)
    )
    return True, "; ".join(said)


def _row(targets: Sequence[GrpoTarget], runs: list[GrpoRun]) -> GrpoRow:
    first, ok = targets[0], [run for run in runs if run.status == "ok"]
    bad = next((run for run in runs if run.status != "ok"), None)
    reason = bad.reason if bad else ""
    if ok and bad:
        reason = f"{len(runs) - len(ok)} of {len(runs)} seeds {bad.status}: {bad.reason}"
    middle = {name: over(median, (getattr(run, name) for run in ok)) for name in ("train_s", "step_s", "tps")}
    most = {name: over(max, (getattr(run, name) for run in ok)) for name in ("peak_bytes", "device_bytes")}
    identity = {name: getattr(first, name) for name in ("stack", "backend", "option", "compile_mode", "pool", "form")}
    return GrpoRow(
        **identity,
        **middle,
        **most,
        status=(ok or runs)[0].status,
        reason=reason,
        runs=runs,
        seconds={part: fmean(run.seconds[part] for run in ok) for part in PARTS} if ok else {},
        logprob_difference=over(fmean, (run.logprob_difference for run in ok)),
    )


def _against(row: GrpoRow, rows: Sequence[GrpoRow], asked: Grpo) -> None:
    """Fill in a row's means, and what it is held against."""
    for name in ("reward", "kl"):
        means = list(_means(row, name, asked).values())
        setattr(row, name, fmean(means) if means else None)
        setattr(row, f"{name}_spread", stdev(means) if len(means) > 1 else None)
    reference, baseline = chosen(rows, asked.reference, row.stack), chosen(rows, BASELINE, row.stack)
    if row.ok and row is not reference:
        row.reward_test = _test(row, reference, "reward", asked.reward_band, asked)
        if asked.beta:
            row.kl_test = _test(row, reference, "kl", asked.kl_band, asked)
    if baseline is not None and row is not baseline and row.ok and row.devices == baseline.devices:
        row.speed = _speed(row, baseline, asked)
        row.memory = _share([(r.device_bytes, v.device_bytes) for r, v in _pairs(row, baseline)])


def _test(row: GrpoRow, reference: GrpoRow | None, name: str, band: float, asked: Grpo) -> Equivalence:
    """Over the steps that both have: KL grows with the steps, so that a longer run is no other one."""
    if reference is None or not reference.ok:
        state = "none is in the config" if reference is None else f"{reference.status}: {reference.reason}"
        return Equivalence(band=band, reason=f"no run of the reference {asked.reference} ({state})")
    steps = min(len(run.wall_s) for run in (*row.ok, *reference.ok))
    return equivalence(_means(row, name, asked, steps), _means(reference, name, asked, steps), band)


def _means(row: GrpoRow, name: str, asked: Grpo, steps: int | None = None) -> dict[int, float]:
    """The mean over the measured steps of each run that is ok, by its seed."""
    values = {run.seed: measured(run, name, asked, steps) for run in row.ok}
    return {seed: fmean(told) for seed, told in values.items() if told}


def _pairs(row: GrpoRow, baseline: GrpoRow) -> list[tuple[GrpoRun, GrpoRun]]:
    """Runs of the two with the same seed, on the same card: cards of one model differ."""
    theirs = {(run.seed, run.device_uuid): run for run in baseline.ok}
    return [(run, theirs[key]) for run in row.ok if (key := (run.seed, run.device_uuid)) in theirs]


def _speed(row: GrpoRow, baseline: GrpoRow, asked: Grpo) -> Share | None:
    """The baseline's step time over its own: of runs where enough seeds pair, else of the steps of those that do."""
    pairs = _pairs(row, baseline)
    whole = _share([(theirs.step_s, own.step_s) for own, theirs in pairs])
    if whole is None or whole.over:
        return whole
    steps = [
        (theirs, own)
        for run, other in pairs
        for own, theirs in zip(measured(run, "wall_s", asked), measured(other, "wall_s", asked), strict=False)
    ]
    return _share(steps, "steps", whole.ratio)


def _share(
    pairs: Iterable[tuple[float | None, float | None]], what: str = "seeds", centre: float | None = None
) -> Share | None:
    ratios = [a / b for a, b in pairs if a and b]
    if not ratios:
        return None
    span = interval(ratios, median(ratios)) if len(ratios) >= MIN_SESSIONS else None
    ratio = median(ratios) if centre is None or span is not None else centre
    if span is None:
        return Share(ratio=ratio, n=len(ratios))
    return Share(ratio=ratio, low=span.low, high=span.high, over=what, n=len(ratios))  # type: ignore[arg-type]
