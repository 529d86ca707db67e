"""Which configurations are set against which: every result against vLLM, every option and stack against another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flexroll.analysis.blocks import paired_ratio
from flexroll.analysis.model import CellRow, Configuration, Pair, Result

NAMES = tuple(Configuration.model_fields)
BASE_OPTION = "default"
OPTION_SECTIONS = ("options", "tried")  # of experiments that set options against each other
Key = tuple[object, ...]


def key_of(configuration: Configuration) -> Key:
    return tuple(getattr(configuration, name) for name in NAMES)


def sessions_by_key(cells: Iterable[CellRow]) -> dict[Key, list[CellRow]]:
    """The cells of each configuration, one a session."""
    found: dict[Key, list[CellRow]] = {}
    for cell in cells:
        found.setdefault(key_of(cell), []).append(cell)
    return found


def make_pairs(results: Sequence[Result], cells: Iterable[CellRow], baselines: Mapping[str, str | None]) -> list[Pair]:
    """Every comparison of the report, in the order of the results.

    vllm: against vLLM at the same work, LoRA against LoRARequest before merged weights; with another sampling where
    vLLM has no result with the same, as the published tables pair them. option: in the same setting, against the
    baseline that the experiment names, else `default`, else the first option. stack: against the same configuration on
    the first stack.

    baselines: by experiment, the option that it names, or None.
    """
    sessions = sessions_by_key(cells)
    pairs: list[Pair] = []
    for result in results:
        if result.status != "ok":
            continue
        wanted = [("vllm", other) for other in _vllm(result, results)]
        option = _base_option(result, results, baselines.get(result.experiment))
        bases = (("option", option), ("stack", _first_stack(result, results)))
        wanted += [(kind, base) for kind, base in bases if base]
        for kind, other in wanted:
            across = ("sampling",) if kind == "vllm" and other.sampling != result.sampling else ()
            over, under = Configuration(**_fields(result)), Configuration(**_fields(other))
            comparison = paired_ratio(sessions[key_of(result)], sessions[key_of(other)], across=across)
            pairs.append(Pair(kind=kind, over=over, under=under, across=list(across), comparison=comparison))
    return pairs


def _fields(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in NAMES}


def _same(a: Result, b: Result, *but: str) -> bool:
    """Whether two configurations agree in all but the named fields."""
    return all(getattr(a, name) == getattr(b, name) for name in NAMES if name not in but)


def _vllm(result: Result, results: Sequence[Result]) -> list[Result]:
    if result.backend == "vllm":
        return []
    adapters = ["none"] if result.adapter == "none" else ["request", "merged"]
    found = [
        other
        for other in results
        if other.backend == "vllm"
        and other.status == "ok"
        and other.adapter in adapters
        and _same(result, other, "backend", "adapter", "option", "sampling")
    ]
    same = [other for other in found if other.sampling == result.sampling]
    return sorted(same or found, key=lambda r: adapters.index(r.adapter))


def _base_option(result: Result, results: Sequence[Result], baseline: str | None) -> Result | None:
    if result.section not in OPTION_SECTIONS:
        return None
    found = {other.option: other for other in results if other.status == "ok" and _same(result, other, "option")}
    base = next((found[name] for name in (baseline, BASE_OPTION) if name in found), next(iter(found.values())))
    return None if base.option == result.option else base


def _first_stack(result: Result, results: Sequence[Result]) -> Result | None:
    found = [other for other in results if other.status == "ok" and _same(result, other, "stack")]
    first = min(found, key=lambda r: version(r.stack))
    return None if first.stack == result.stack else first


def version(stack: str) -> list[int]:
    """torch2.9.1 before torch2.11: the numbers in a stack's name."""
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in stack.split(".")]
