"""Provenance: where every number comes from is told, and what is compared came from the same place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from flexroll.check.registry import Finding, Over, check, error, not_applicable, warning
from flexroll.check.submission import Held, Run
from flexroll.images.here import NATIVE
from flexroll.schema.records import Environment

PROVENANCE = "provenance"
HASH = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
DIGEST = re.compile(r"(.*@)?sha256:[0-9a-f]{64}")

# Failed cells too: on another machine they might not have failed.
TRIED = Over(
    "record that is ok or failed",
    lambda run: [held for held in run.held if held.record.status != "skipped"],
    lambda held: held.file,
)
STACKS = Over(
    "measured stack",
    lambda run: list(run.grouped(lambda held: held.cell.stack).values()),
    lambda cells: f"stack {cells[0].cell.stack}",
)


@check(PROVENANCE, TRIED)
def environment_complete(run: Run, held: Held) -> Iterator[Finding]:
    """A record names device (a GPU with uuid and driver), lock, source, commit, Python and packages."""
    found = held.record.environment
    if found is None:
        yield error("no environment: nothing says where it ran")
        return
    told = {
        "device": bool(found.device),
        "device_uuid": found.device == "cpu" or bool(found.device_uuid),
        "driver": found.device == "cpu" or bool(found.driver),
        "lock_sha256": HASH.fullmatch(found.lock_sha256),
        "source_sha256": HASH.fullmatch(found.source_sha256),
        "commit": COMMIT.fullmatch(found.commit or ""),
        "image": bool(found.image),
        "python": bool(found.python),
        "packages": bool(found.packages),
        "stack": found.stack == held.cell.stack,
    }
    lacking = [name for name, there in told.items() if not there]
    if lacking:
        yield error(f"environment without a valid {', '.join(lacking)}")


@check(PROVENANCE, TRIED)
def clean_tree(run: Run, held: Held) -> Iterator[Finding]:
    """The code was that of its commit: nothing uncommitted in src/ and containers/."""
    found = held.record.environment
    if found is None:
        yield not_applicable("the record holds no environment")
    elif found.dirty is None:
        yield warning("does not tell whether the working tree had uncommitted changes")
    elif found.dirty:
        yield warning(f"measured with uncommitted changes on top of commit {(found.commit or 'unknown')[:12]}")


@check(PROVENANCE, STACKS)
def one_lock(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """All cells of a stack ran with one lock."""
    yield from _one(cells, "lock", lambda e: e.lock_sha256[:12])


@check(PROVENANCE, STACKS)
def one_source(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """All cells of a backend in a stack ran the same code."""
    for backend in dict.fromkeys(held.cell.backend for held in cells):
        own = [held for held in cells if held.cell.backend == backend]
        yield from _one(own, f"{backend} source", lambda e: e.source_sha256[:12])


@check(PROVENANCE, STACKS)
def one_environment(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """All cells of a stack ran with the same versions of packages, Python and driver."""
    names = sorted({name for e in _environments(cells) for name in e.packages})
    for name in names:
        yield from _one(cells, name, lambda e, name=name: e.packages.get(name, "none"))
    yield from _one(cells, "Python", lambda e: e.python)
    yield from _one(cells, "driver", lambda e: e.driver or "none", warning)


@check(PROVENANCE, STACKS)
def image_named(run: Run, cells: list[Held]) -> Iterator[Finding]:
    """All cells of a stack ran in one image, named by its digest, or all in none."""
    yield from _one(cells, "image", lambda e: e.image)
    for image in sorted({e.image for e in _environments(cells)}):
        if image != NATIVE and not DIGEST.fullmatch(image):
            yield error(f"image '{image}' is no digest, so nobody can tell which it was")


def _environments(cells: list[Held]) -> list[Environment]:
    return [held.record.environment for held in cells if held.record.environment is not None]


def _one(
    cells: list[Held], what: str, value: Callable[[Environment], str], severity: Callable[[str], Finding] = error
) -> Iterator[Finding]:
    """A finding unless all environments tell one value; it names a cell of each."""
    found: dict[str, str] = {}
    for held in cells:
        if held.record.environment is not None:
            found.setdefault(value(held.record.environment), held.file)
    if not found:
        yield not_applicable("no record of it holds an environment")
    elif len(found) > 1:
        yield severity(f"{len(found)} values of {what}: {', '.join(f'{v} ({file})' for v, file in found.items())}")
