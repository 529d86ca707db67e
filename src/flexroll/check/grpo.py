"""GRPO: every run that the config asks for has its record, whose numbers add up and whose base stayed as it was."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from flexroll.check.files import COMPLETENESS, SCHEMA
from flexroll.check.plausibility import PLAUSIBILITY
from flexroll.check.provenance import HASH, PROVENANCE
from flexroll.check.records import as_asked, option_values, own, recorded, whole
from flexroll.check.registry import Finding, Over, check, error, not_applicable, warning
from flexroll.check.submission import Run
from flexroll.check.work import WORK
from flexroll.provenance import hash_json
from flexroll.schema.grpo import JUDGING
from flexroll.schema.grpo_records import GrpoRecord, GrpoTarget

SLACK = 0.02  # of a step: clocks are read a few times in it


TRAININGS = Over("GRPO run of the config", lambda run: run.trainings, lambda target: target.file)
TRAINED = Over(
    "GRPO run that ended well",
    lambda run: [target for target in run.trainings if (found := _record(run, target)) and found.status == "ok"],
    lambda target: target.file,
)


def _record(run: Run, target: GrpoTarget) -> GrpoRecord | None:
    return own(run.trained.get(target.file), target)


@check(SCHEMA, TRAININGS)
def grpo_schema(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """A GRPO record is whole and of the strict model."""
    yield from whole(run.trained.get(target.file))


@check(COMPLETENESS, TRAININGS)
def grpo_recorded(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """Every run that the config asks for has a record of its own, with all steps, or why it has not."""
    yield from recorded(
        run.trained.get(target.file),
        target,
        "no record of this run",
        lambda found: f"{found.stack}, {found.backend}, {found.option}, seed {found.seed}",
    )
    found = _record(run, target)
    if found and found.status == "ok" and [step.step for step in found.steps] != list(range(1, target.steps + 1)):
        yield error(f"holds steps {_short([step.step for step in found.steps])}, expected 1 to {target.steps}")


@check(WORK, TRAININGS)
def grpo_as_configured(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """A run had the settings, the option's values and the model that the config asks for."""
    found, asked = _record(run, target), run.config.grpo
    if found is None or asked is None:
        yield not_applicable("there is no record of it")
        return
    wanted = asked.model_dump(mode="json", exclude=set(JUDGING)) | {"steps": target.steps}
    pairs = [(name, found.settings.get(name), value) for name, value in wanted.items() if name in found.settings]
    pairs += option_values(found, target)
    pairs += [("model", found.model, run.config.model.name), ("dtype", found.dtype, run.config.model.dtype)]
    yield from as_asked(pairs)


@check(WORK, TRAINED)
def grpo_tokens(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """A step's rollout holds at most as many tokens as its completions may have."""
    found, asked = _record(run, target), run.config.grpo
    assert found is not None and asked is not None
    most = asked.prompts_per_step * asked.num_generations * asked.max_completion_length
    over = [step.step for step in found.steps if step.tokens > most]
    if over:
        yield error(f"more than {most} tokens in steps {_short(over)}")


@check(PLAUSIBILITY, TRAINED)
def grpo_times(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """The parts of a step take no longer than the step, and the steps no longer than the training."""
    found = _record(run, target)
    assert found is not None
    for step in found.steps:
        parts = step.rollout_s + step.refresh_s + step.reward_s + step.loss_s + step.optimizer_s
        if parts > step.wall_s * (1 + SLACK):
            yield error(f"step {step.step}: its parts take {parts:.3g} s, the step {step.wall_s:.3g} s")
    total = sum(step.wall_s for step in found.steps)
    if found.train_s is not None and total > found.train_s * (1 + SLACK):
        yield error(f"its steps take {total:.3g} s, the training {found.train_s:.3g} s")


@check(PLAUSIBILITY, TRAINED)
def grpo_base_unchanged(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """The frozen base has the same hash after every step that was verified."""
    found = _record(run, target)
    assert found is not None
    if found.base_identical is None:
        yield not_applicable("no step was verified")
    for step in found.steps:
        if step.base_sha256 and found.base_sha256 and step.base_sha256 != found.base_sha256:
            yield error(f"step {step.step}: base {step.base_sha256[:12]}, before training {found.base_sha256[:12]}")


@check(PLAUSIBILITY, TRAINED)
def grpo_learning(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """Losses are finite, KL is not negative, no fault was met."""
    found = _record(run, target)
    assert found is not None
    if not found.losses_finite:
        yield error(f"no finite loss in steps {_short([step.step for step in found.steps if step.loss is None])}")
    below = [step.step for step in found.steps if step.kl is not None and step.kl < 0]
    if below:
        yield error(f"KL is negative in steps {_short(below)}")
    for step in found.steps:
        for fault in step.faults:
            yield warning(f"step {step.step}: {fault}")


@check(PROVENANCE, TRAINED)
def grpo_provenance(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """A record tells its key and where it ran; runs of one stack and form differ in the seed alone."""
    found = _record(run, target)
    assert found is not None
    environment = found.environment
    if not HASH.fullmatch(found.key):
        yield error("without a key that tells when it is stale")
    if environment is None:
        yield error("does not tell where it ran")
        return
    for name in ("lock_sha256", "source_sha256", "device"):
        others = [other for other in map(lambda t: _record(run, t), run.trainings) if other is not None]
        alike = [other for other in others if other.stack == found.stack and other.backend == found.backend]
        theirs = {getattr(other.environment, name) for other in alike if other.environment is not None}
        if len(theirs) > 1:
            yield error(f"{name} is not one for {found.backend} on {found.stack}: {_short(sorted(theirs))}")
    same = [other for other in alike if other.key == found.key]
    if len(same) > 1:
        yield error("another run has the same key")


@check(COMPLETENESS, TRAININGS)
def grpo_analysed(run: Run, target: GrpoTarget) -> Iterator[Finding]:
    """analysis.json says of a run what its record says now, and its median step is that of the steps."""
    if run.analysis is None:
        yield not_applicable("there is no analysis.json that can be read")
        return
    now, then = (
        next((one for row in rows for one in row.runs if one.file == target.file), None)
        for rows in (run.grpo, run.analysis.grpo)
    )
    if now is None or then is None or hash_json(now.model_dump()) != hash_json(then.model_dump()):
        yield error("analysis.json tells something else; run `flexroll analyse` again")
        return
    found = _record(run, target)
    steps = found.steps[run.config.grpo.skip_steps :] if found and run.config.grpo else []
    if steps and then.step_s != statistics.median(step.wall_s for step in steps):
        yield error(f"analysis.json has a median step of {then.step_s} s, its steps another")


def _short(values: list[object]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"{shown}, ..." if len(values) > 6 else shown or "none"
