"""Fixed work: what was generated is what was asked for, and cells that are compared were asked for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flexroll.check.registry import COMPARED, MEASURED, Finding, Over, check, error, not_applicable, warning
from flexroll.check.submission import Held, Run

WORK = "fixed work"
# What cells of one experiment and batch have in common whatever their backend, option and sampling.
COMMON = ("new_tokens", "ignore_eos", "samples", "slots", "max_model_len", "model", "dtype", "seed", "warmup_prompts")

SESSIONS = Over(
    "measured session",
    lambda run: list(run.grouped(lambda held: held.cell.session).values()),
    lambda cells: f"session {cells[0].cell.session}",
)


@check(WORK, MEASURED)
def tokens_as_asked(run: Run, held: Held) -> Iterator[Finding]:
    """Every round generated the tokens that its cell asked for, in each of its calls; where EOS ends a sequence, at
    most those and at least one a sequence."""
    cell = held.record.cell
    for r in held.record.rounds:
        prompts = cell.warmup_prompts if r.warmup else cell.prompts
        asked = sum(cell.lengths(prompts)) * cell.samples * r.calls
        least = asked if cell.ignore_eos else prompts * cell.samples * r.calls
        if not least <= r.tokens <= asked:
            wanted = f"{asked}" if cell.ignore_eos else f"{least} to {asked}"
            yield error(f"round {r.index}: {r.tokens} tokens, asked for {wanted}")


@check(WORK, MEASURED)
def rounds_as_configured(run: Run, held: Held) -> Iterator[Finding]:
    """A cell has its measured rounds, each as long as the config asks, after its warm-up rounds, which are marked; all
    are numbered in order."""
    cell, rounds = held.record.cell, held.record.rounds
    if len(held.record.measured) != cell.rounds:
        yield error(f"{len(held.record.measured)} measured rounds, asked for {cell.rounds}")
    marked = [r.index for r in rounds if r.warmup]
    if marked != list(range(cell.warmup_rounds)):
        yield error(f"rounds {marked} are marked as warm-up, the first {cell.warmup_rounds} must be")
    if [r.index for r in rounds] != list(range(len(rounds))):
        yield error(f"rounds are numbered {[r.index for r in rounds]}")
    for r in held.record.measured:
        if r.wall_s < cell.min_round_s:
            yield error(f"round {r.index}: {r.wall_s:.4g} s, and a round takes at least {cell.min_round_s:g} s")


@check(WORK, COMPARED)
def same_prompts(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """Cells of one experiment and batch read the same prompts."""
    if not all(held.record.prompts_sha256 for held in cells):
        lacking = next(held for held in cells if not held.record.prompts_sha256)
        yield error("does not tell which prompts it read", lacking.file)
    yield from _alike(cells, "prompts", lambda held: held.record.prompts_sha256[:12])
    yield from _alike(cells, "prompt_tokens", lambda held: held.record.prompt_tokens)


@check(WORK, COMPARED)
def same_work(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """Cells of one experiment and batch have the same lengths, samples, slots, model and sampling values."""
    for name in COMMON:
        yield from _alike(cells, name, lambda held, name=name: getattr(held.record.cell, name))
    samplings = list(dict.fromkeys(held.cell.sampling for held in cells))
    for sampling in samplings:
        own = [held for held in cells if held.cell.sampling == sampling]
        yield from _alike(own, f"sampling '{sampling}'", lambda held: held.record.cell.sampling_values)
    if len(samplings) > 1:
        yield warning(f"{' and '.join(samplings)} sampling side by side: a ratio across them is not of like with like")


@check(WORK, SESSIONS)
def one_device_a_session(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """All cells of a session ran on one device: cards of one model differ, and ratios pair within a session."""
    known = [held for held in cells if _device(held)]
    if len(known) < len(cells):
        yield not_applicable(f"{len(cells) - len(known)} of {len(cells)} cells do not tell their device")
    yield from _alike(known, "device", _device)


def _device(held: Held) -> str:
    """A GPU is its uuid, a CPU its name; '' where the record does not tell."""
    found = held.record.environment
    if found is None:
        return ""
    return f"cpu, {found.cpu}" if found.device == "cpu" else found.device_uuid or ""


def _alike(cells: list[Held], what: str, value: Callable[[Held], Any]) -> Iterator[Finding]:
    """A finding unless all cells have the same value; it names a cell of each."""
    found: dict[str, str] = {}
    for held in cells:
        found.setdefault(str(value(held)), held.file)
    if len(found) > 1:
        yield error(f"{len(found)} values of {what}: {', '.join(f'{v} ({file})' for v, file in found.items())}")
