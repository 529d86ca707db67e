"""Correctness: every engine configuration that the config scores has its record, of the code that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flexroll.check.files import COMPLETENESS, SCHEMA
from flexroll.check.provenance import HASH, PROVENANCE
from flexroll.check.records import as_asked, option_values, own, recorded, whole
from flexroll.check.registry import Finding, Over, check, error, not_applicable
from flexroll.check.submission import Run
from flexroll.schema.quality import QualityRecord, Target
from flexroll.schema.records import Environment

TARGETS = Over("engine configuration that the config scores", lambda run: run.targets, lambda target: target.file)

MEASURED = Over(
    "scored configuration whose backend was measured",
    lambda run: [target for target in run.targets if _measured(run, target)],
    lambda target: target.file,
)


def _measured(run: Run, target: Target) -> list[Environment]:
    """Environments of the measured cells of its backend and stack."""
    place = (target.stack, target.backend)
    found = (held.record.environment for held in run.measured if (held.cell.stack, held.cell.backend) == place)
    return [environment for environment in found if environment is not None]


def _record(run: Run, target: Target) -> QualityRecord | None:
    return own(run.qualities.get(target.file), target)


@check(SCHEMA, TARGETS)
def quality_schema(run: Run, target: Target) -> Iterator[Finding]:
    """A quality record is whole and of the strict model."""
    yield from whole(run.qualities.get(target.file))


@check(COMPLETENESS, TARGETS)
def quality_recorded(run: Run, target: Target) -> Iterator[Finding]:
    """Every configuration that the config scores has a record of its own, which says why where it was not scored."""
    yield from recorded(
        run.qualities.get(target.file),
        target,
        "no quality record of this configuration",
        lambda found: f"{found.stack}, {found.backend}, {found.adapter}, {found.option}",
    )


@check(COMPLETENESS, TARGETS)
def quality_as_configured(run: Run, target: Target) -> Iterator[Finding]:
    """A configuration was scored with the option's values, model and number of prompts that the config asks for."""
    found, asked = _record(run, target), run.config.quality
    if found is None or asked is None:
        yield not_applicable("there is no record of it")
        return
    model = asked.model or run.config.model
    pairs = [("model", found.model, model.name), ("dtype", found.dtype, model.dtype)]
    pairs += option_values(found, target)
    if found.status == "ok":
        pairs += [("prompts", found.prompts, asked.count), ("divergences", len(found.divergences), found.diverged)]
        if not found.prompts <= found.tokens <= asked.count * asked.new_tokens:
            yield error(f"{found.tokens} tokens scored of {asked.count} prompts with at most {asked.new_tokens} each")
    yield from as_asked(pairs)


@check(COMPLETENESS, TARGETS)
def quality_adds_up(run: Run, target: Target) -> Iterator[Finding]:
    """A quality record's KL is the mean of its sequences', each by its tokens, and its counts are of what it lists."""
    found = _record(run, target)
    if found is None or found.status != "ok":
        yield not_applicable("there is no record with numbers")
        return
    if found.kl is not None:
        total = sum(found.sequence_tokens)
        if total != found.tokens or min(found.sequence_tokens) < 1:
            yield error(f"sequence_tokens add up to {total}, tokens is {found.tokens}")
            return
        pairs = zip(found.kl_sequences, found.sequence_tokens, strict=True)
        mean = sum(kl * tokens for kl, tokens in pairs) / total
        if not math.isclose(found.kl, mean, rel_tol=1e-9, abs_tol=1e-15):
            yield error(f"kl is {found.kl:.6g}, its sequences give {mean:.6g}")
    places = [(d.prompt, d.place) for d in found.divergences]
    outside = [prompt for prompt, _ in places if not 0 <= prompt < found.prompts]
    if outside or len({prompt for prompt, _ in places}) < len(places):
        yield error("its divergences are not one a sequence")
    if found.near_tie is not None and found.near_ties is not None:
        ties = sum(d.gap <= found.near_tie for d in found.divergences)
        if ties != found.near_ties:
            yield error(f"near_ties is {found.near_ties}, {ties} of its divergences are")


@check(PROVENANCE, MEASURED)
def quality_same_code(run: Run, target: Target) -> Iterator[Finding]:
    """What was scored is what was measured: the lock, the backend's code and the device of that backend's cells."""
    found = _record(run, target)
    if found is None or found.environment is None:
        yield not_applicable("there is no record of it, or none that tells where it ran")
        return
    for name in ("lock_sha256", "source_sha256", "device"):
        own, theirs = getattr(found.environment, name), {getattr(cell, name) for cell in _measured(run, target)}
        if name != "device":  # environment-complete tells of what is no hash
            theirs = {value for value in theirs if HASH.fullmatch(value)}
        if theirs and own not in theirs:
            yield error(
                f"scored with {name} {own[:12]}, its backend was measured with {', '.join(sorted(theirs))[:80]}"
            )


@check(COMPLETENESS, TARGETS)
def quality_analysed(run: Run, target: Target) -> Iterator[Finding]:
    """analysis.json says of a configuration what its quality record says now."""
    if run.analysis is None:
        yield not_applicable("there is no analysis.json that can be read")
        return
    now, then = (next((q for q in rows if q.file == target.file), None) for rows in (run.quality, run.analysis.quality))
    if now != then:
        yield error("analysis.json tells something else; run `flexroll analyse` again")
