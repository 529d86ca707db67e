"""Raw records -> one row a cell, and cells -> one result a configuration. A bad file is a row with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flexroll.analysis import statistics
from flexroll.analysis.model import CellRow, EnvironmentRow, MemoryRow, Result, RoundRow, Workload
from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell, expand
from flexroll.schema.config import Config
from flexroll.schema.records import MANIFEST, Environment, Record, Round, read_record

if TYPE_CHECKING:
    import pandas

# A model finds its own text likely: perplexities of 1 to 5. Noise comes near the size of the vocabulary.
MAX_PERPLEXITY = 20.0
IDENTITY = ("experiment", "section", "backend", "adapter", "batch", "option", "sampling", "stack")
WORKLOAD = ("new_tokens", "samples", "slots")
# Fields that a result's number depends on and that the record's path does not name.
SETTINGS = tuple(name for name in Cell.model_fields if name not in (*IDENTITY, "session"))


def read_perplexities(results: Path, stacks: Iterable[str]) -> tuple[dict[str, list[float | None]], dict[str, str]]:
    """({file of a record: perplexity of each sample under the reference model}, {stack: why it has none})."""
    scores: dict[str, list[float | None]] = {}
    reasons: dict[str, str] = {}
    for stack in stacks:
        try:
            held = json.loads((results / "perplexity" / f"{stack}.json").read_text())
            scores |= held["cells"]
            if held["reason"]:
                reasons[stack] = str(held["reason"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            reasons[stack] = (
                f"perplexity/{stack}.json is not what `flexroll perplexity` writes; remove it and run again"
            )
    return scores, reasons


def collect(
    config: Config, results: Path, stacks: Iterable[str] | None = None
) -> tuple[list[CellRow], list[Environment]]:
    """Rows of every cell of the config in document order, and the environments of those with a record.

    Args:
        config: the matrix.
        results: results/<run>; records lie in its raw/ folder.
        stacks: only these stacks; None for all.
    """
    rows: list[CellRow] = []
    environments: list[Environment] = []
    perplexities, _ = read_perplexities(results, stacks or config.stacks)
    for cell in expand(config, stacks):
        file = f"raw/{cell.path}"
        path = results / file
        try:
            record = read_record(path)
        except FlexrollError as error:
            status = "unreadable" if path.exists() else "missing"
            rows.append(_row(cell, file, status=status, reason=_relative(str(error), path, file)))
            continue
        except OSError as error:
            rows.append(_row(cell, file, status="unreadable", reason=f"{file}: {error.strerror or error}"))
            continue
        rows.append(_judged(_from_record(cell, record, file), perplexities.get(file, [])))
        if record.environment is not None:
            environments.append(record.environment)
    return rows, environments


def unlisted(config: Config, results: Path) -> list[str]:
    """Raw files of the run that no cell of the config owns, for instance of an experiment since removed."""
    owned = {f"raw/{cell.path}" for cell in expand(config)}
    found = (p.relative_to(results).as_posix() for p in results.glob("raw/*/*.json") if p.name != MANIFEST)
    return sorted(name for name in found if name not in owned)


def _relative(message: str, path: Path, file: str) -> str:
    return message.replace(str(path), file)


def _row(cell: Cell, file: str, **rest: Any) -> CellRow:
    identity = {name: getattr(cell, name) for name in (*IDENTITY, "session", *WORKLOAD)}
    return CellRow(**identity, file=file, **rest)


def _from_record(cell: Cell, record: Record, file: str) -> CellRow:
    for name in (*IDENTITY, "session"):
        if name != "section" and getattr(record.cell, name) != getattr(cell, name):
            what = f"{name} {getattr(record.cell, name)}, expected {getattr(cell, name)}"
            reason = f"{file}: holds another cell ({what}); remove it and run again"
            return _row(cell, file, status="unreadable", reason=reason)
    status, reason = record.status, record.reason
    whole = statistics.round_rates(record.rounds)
    decode = statistics.decode_rates(record.rounds)
    if status == "ok" and whole is None:
        status, reason = "failed", "the record says ok but holds no measured round"
    stats: dict[str, Any] = {}
    if status == "ok" and whole is not None:
        stats = {"n": whole.n, "tps_median": whole.median, "tps_best": whole.best, "tps_min": whole.low}
        flagged = [r.flags for r in record.measured if r.flags]
        stats |= {"spread": whole.spread, "cv": whole.cv, "trend": statistics.trend([r.tps for r in record.measured])}
        stats |= {"rounds_flagged": len(flagged), "flags": sorted({flag for flags in flagged for flag in flags})}
        if decode is not None:
            stats |= {"decode_tps_median": decode.median, "decode_tps_best": decode.best, "decode_tps_min": decode.low}
    environment = record.environment
    return _row(
        cell,
        file,
        status=status,
        reason=" ".join(reason.split()),
        note=_differences(cell, record.cell),
        remark=record.note,
        memory=MemoryRow(**record.memory.model_dump()),
        coherent=all(s.coherence.ok for s in record.samples) if record.samples else None,
        coherence_notes=sorted({note for s in record.samples for note in s.coherence.notes}),
        start_s=record.start_s,
        device=environment.device if environment else None,
        device_uuid=environment.device_uuid if environment else None,
        cpu=environment.cpu if environment else None,
        on_gpu=is_gpu(environment) if environment else None,
        prompts_sha256=record.prompts_sha256,
        prompt_tokens=record.prompt_tokens,
        workload=_workload(record.cell),
        rounds=[_round(r) for r in record.rounds],
        **stats,
    )


def _judged(row: CellRow, perplexities: list[float | None]) -> CellRow:
    """The row with the perplexity of its samples, and text that is too unlikely called broken."""
    told = [p for p in perplexities if p is not None]
    if not told or row.coherent is None:
        return row
    changes: dict[str, Any] = {"perplexity": median(told)}
    if max(told) > MAX_PERPLEXITY:
        changes |= {"coherent": False, "coherence_notes": [*row.coherence_notes, f"perplexity {max(told):.3g}"]}
    return row.model_copy(update=changes)


def _workload(cell: Cell) -> Workload:
    return Workload(
        new_tokens=cell.new_tokens,
        samples=cell.samples,
        slots=cell.running,
        ignore_eos=cell.ignore_eos,
        sampling=cell.sampling_values,
    )


def _round(r: Round) -> RoundRow:
    clock = r.telemetry.sm_mhz if r.telemetry else None
    return RoundRow(
        index=r.index,
        tokens=r.tokens,
        wall_s=r.wall_s,
        warmup=r.warmup,
        tokens_sha256=r.tokens_sha256,
        started=r.started,
        sm_clock=clock.median if clock else None,
        flags=r.flags,
    )


def is_gpu(environment: Environment) -> bool:
    """Only a GPU has a uuid or a driver in its environment."""
    return environment.device_uuid is not None or environment.driver is not None


def _differences(asked: Cell, held: Cell) -> str:
    """`rounds 5 (config: 3)` for each setting that the config has changed since the record was measured."""
    parts = []
    for name in SETTINGS:
        before, now = getattr(held, name), getattr(asked, name)
        if name == "option_values":  # an option that was added since had its default
            now = {key: value for key, value in now.items() if key in before}
        if before != now:
            parts.append(f"{name} {_short(before)} (config: {_short(now)})")
    return "; ".join(parts)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def combine(rows: list[CellRow], config: Config) -> list[Result]:
    """One result a configuration, over its sessions, in the order of the rows."""
    grouped: dict[tuple, list[CellRow]] = {}
    for row in rows:
        grouped.setdefault(tuple(getattr(row, name) for name in IDENTITY), []).append(row)
    return [_combine(dict(zip(IDENTITY, key, strict=True)), group, config) for key, group in grouped.items()]


def _combine(identity: dict[str, Any], group: list[CellRow], config: Config) -> Result:
    ok = [row for row in group if row.status == "ok"]
    basis = ok or group
    noise = statistics.split([r.tps_median for r in ok], [r.cv for r in ok if r.cv is not None], [r.n for r in ok])
    bad = next((row for row in group if row.status != "ok"), None)
    reason = bad.reason if bad else ""
    if ok and bad:
        reason = f"{len(group) - len(ok)} of {len(group)} sessions {bad.status}: {bad.reason}"
    return Result(
        **identity,
        **{name: getattr(group[0], name) for name in WORKLOAD},
        option_values=config.option(identity["option"]).for_backend(identity["backend"]),
        status=basis[0].status,
        reason=reason,
        sessions=len(ok),
        n=sum(row.n for row in ok),
        **_rate(ok, "tps"),
        **_rate(ok, "decode_tps"),
        cv_between=noise.between,
        cv_within=noise.within,
        helps=noise.helps,
        trends=sum(row.trend is not None for row in ok),
        rounds_flagged=sum(row.rounds_flagged for row in ok),
        flags=sorted({flag for row in ok for flag in row.flags}),
        memory=MemoryRow(**{part: _over([r.memory for r in ok], part, max) for part in MemoryRow.model_fields}),
        coherent=_over(ok, "coherent", all),
        perplexity=_over(ok, "perplexity", median),
        start_s=_over(ok, "start_s", median),
        devices=sorted({row.device for row in basis if row.device}),
        device_uuids=sorted({row.device_uuid for row in ok if row.device_uuid}),
        on_gpu=_over(ok, "on_gpu", all),
        prompts_sha256=ok[0].prompts_sha256 if ok else "",
        files=[row.file for row in group if row.status not in ("missing",)],
    )


def _rate(ok: list[CellRow], name: str) -> dict[str, Any]:
    """A result's fields about one rate, "tps" or "decode_tps"."""
    medians = [value for row in ok if (value := getattr(row, f"{name}_median")) is not None]
    estimate = statistics.estimate(medians)
    if estimate is None:
        return {}
    fields: dict[str, Any] = {name: estimate.value}
    fields |= {f"{name}_best": _over(ok, f"{name}_best", max), f"{name}_min": _over(ok, f"{name}_min", min)}
    if estimate.interval is not None:
        prefix, span = name.removesuffix("tps"), estimate.interval
        fields |= {f"{name}_low": span.low, f"{name}_high": span.high}
        fields |= {f"{prefix}interval_method": span.method, f"{prefix}sufficient": estimate.sufficient}
    return fields


def _over(items: list[Any], name: str, function: Callable[[Any], Any]) -> Any:
    """`function` over an attribute where it is known; None where no item has it."""
    values = [getattr(item, name) for item in items if getattr(item, name) is not None]
    return function(values) if values else None


def environments_by_stack(
    environments: list[Environment], stacks: list[str], trained: Iterable[Environment] = ()
) -> list[EnvironmentRow]:
    """Distinct values of what a stack's cells, and its training runs, ran in, for every stack that has a record."""
    rows = []
    for stack in stacks:
        own, more = ([e for e in found if e.stack == stack] for found in (environments, trained))
        if own or more:
            rows.append(_environment(stack, [*own, *more], cells=len(own)))
    return rows


def _environment(stack: str, own: list[Environment], cells: int) -> EnvironmentRow:
    def distinct(value: Callable[[Environment], Any]) -> list[str]:
        return sorted({str(value(e)) for e in own if value(e) is not None})

    names = sorted({name for e in own for name in e.packages})
    return EnvironmentRow(
        stack=stack,
        cells=cells,
        image=distinct(lambda e: e.image),
        python=distinct(lambda e: e.python),
        platform=distinct(lambda e: e.platform),
        cpu=distinct(lambda e: f"{e.cpu}, {e.cores} cores"),
        device=distinct(lambda e: e.device),
        device_uuid=distinct(lambda e: e.device_uuid),
        driver=distinct(lambda e: e.driver),
        commit=distinct(lambda e: f"{e.commit}{' + uncommitted changes' if e.dirty else ''}" if e.commit else None),
        lock_sha256=distinct(lambda e: e.lock_sha256),
        packages={name: distinct(lambda e, name=name: e.packages.get(name)) for name in names},
    )


def table(rows: list[CellRow]) -> pandas.DataFrame:
    """The tidy table: one row a cell; memory parts in bytes, rates in tok/s, rounds left to the raw files."""
    import pandas

    flat = []
    for row in rows:
        data = row.model_dump(exclude={"rounds", "memory", "coherence_notes", "coherent", "workload"})
        data["new_tokens"] = str(row.new_tokens)
        data["rounds"] = row.n
        data["flags"] = "; ".join(row.flags)
        data |= {f"memory_{part}_bytes": value for part, value in row.memory.model_dump().items()}
        data["coherence"] = {True: "coherent", False: "broken", None: "no samples"}[row.coherent]
        data["coherence_notes"] = "; ".join(row.coherence_notes)
        del data["n"]
        data["file"] = data.pop("file")
        flat.append(data)
    frame = pandas.DataFrame(flat)
    whole = [c for c in frame.columns if c.startswith("memory_") or c == "slots"]  # none where no stack has a cell
    return frame.astype({c: "Int64" for c in whole})
