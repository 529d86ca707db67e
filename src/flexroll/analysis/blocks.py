"""Ratios of two configurations, taken inside blocks: what both measured in one session, on one device, at one task.

Cards of one model differ by 8 % on average and 22 % at most (Sinha et al., arXiv 2208.11035), and what heats a card or
loads a machine slows both sides of a block: inside it such effects cancel, between blocks they are noise (Abedi &
Brecht, ICPE'17, found 38 % between identical systems measured one after the other).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

from flexroll.analysis.model import CellRow, Comparison, Workload
from flexroll.analysis.statistics import CONFIDENCE, MIN_SESSIONS, interval

Metric = str | Callable[[CellRow], float | None]


def paired_ratio(
    over: Sequence[CellRow],
    under: Sequence[CellRow],
    metric: Metric = "tps_median",
    across: Collection[str] = (),
) -> Comparison:
    """How many times `under`'s metric `over`'s is, with a 95 % interval over blocks.

    A block is a session number that both sides measured on the same device, prompts and workload; its ratio is that of
    the two session medians. The estimate is the median of the blocks' log ratios: on logs, so that the inverse
    comparison gives the inverse ratio; a median, so that one disturbed block does not move it. Its interval is that of
    `statistics.interval`, of the same logs.

    Args:
        over, under: the sessions of one configuration each; those that did not end ok are left out.
        metric: a field of CellRow or a function of one; any positive quantity that is one number a session, such as
            "decode_tps_median". None: this session does not tell it.
        across: fields of the workload in which the two may differ, where that is what is compared.

    Returns:
        The comparison. Its verdict is about rates: of another metric, read "faster" as "more".

    Raises:
        ValueError: one side holds a session twice, so it is not one configuration.
    """
    first, second = _by_session(over), _by_session(under)
    ratios: dict[int, float] = {}
    refused: list[str] = []
    for session in sorted(first.keys() & second.keys()):
        a, b = first[session], second[session]
        reason = _mismatch(a, b, across)
        if reason is None:
            x, y = _value(a, metric), _value(b, metric)
            if x is not None and y is not None:
                ratios[session] = x / y
                continue
            reason = "the metric is not told, or not a positive number"
        refused.append(reason)
    if not ratios:
        return Comparison(verdict="not comparable", reason=_nothing(first, second, refused))
    flagged = sum(bool(first[s].rounds_flagged or second[s].rounds_flagged) for s in ratios)
    left = f"{len(refused)} of {len(refused) + len(ratios)} sessions do not pair: {refused[0]}" if refused else ""
    return _judge(ratios, flagged, left)


def _judge(ratios: dict[int, float], flagged: int, left: str) -> Comparison:
    """The comparison of blocks that pair. flagged: those with a flagged round; left: what does not pair, in words."""
    ratio = math.exp(median(math.log(value) for value in ratios.values()))
    found = Comparison(ratio=ratio, n=len(ratios), sessions=list(ratios), flagged=flagged, verdict="insufficient n")
    span = interval(list(ratios.values()), ratio)
    if span is None:
        why = f"n = {len(ratios)}; an interval needs {MIN_SESSIONS} blocks"
    else:
        found.low, found.high, found.method = span.low, span.high, span.method
        found.verdict = "faster" if span.low > 1 else "slower" if span.high < 1 else "no difference shown"
        why = f"the {CONFIDENCE:.0%} interval holds 1" if found.verdict == "no difference shown" else ""
    found.reason = "; ".join(filter(None, (why, left)))
    return found


def _by_session(rows: Sequence[CellRow]) -> dict[int, CellRow]:
    found: dict[int, CellRow] = {}
    for row in rows:
        if found.setdefault(row.session, row) is not row:
            raise ValueError(f"two cells of session {row.session}: {found[row.session].file} and {row.file}")
    return {session: row for session, row in found.items() if row.status == "ok"}


def _value(row: CellRow, metric: Metric) -> float | None:
    value = getattr(row, metric) if isinstance(metric, str) else metric(row)
    return value if value is not None and 0 < value < math.inf else None


def _nothing(first: dict[int, CellRow], second: dict[int, CellRow], refused: list[str]) -> str:
    if refused:
        return "; ".join(dict.fromkeys(refused))
    if not first or not second:
        which = "neither side has" if not first and not second else "one side does not have"
        return f"{which} a session that ended ok"
    return f"no session in common: {_listed(first)} against {_listed(second)}"


def _listed(sessions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sessions)))


def _mismatch(a: CellRow, b: CellRow, across: Collection[str]) -> str | None:
    """Why two cells of one session are no block, or None."""
    devices = _device(a), _device(b)
    if None in devices:
        return "a record does not tell which device it ran on"
    if devices[0] != devices[1]:
        return "the two sides ran on different devices, and cards of one model differ"
    if a.prompts_sha256 != b.prompts_sha256:
        return "the two sides ran on different prompts"
    if a.workload is None or b.workload is None:
        return "a record does not tell what a round did"
    return different_work(a.workload, b.workload, [name for name in Workload.model_fields if name not in across])


def different_work(a: object, b: object, names: Iterable[str]) -> str | None:
    """Why rates of two sides do not compare, by those fields of what each did, or None."""
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in names)
    differ = [f"{name} {mine} against {theirs}" for name, mine, theirs in pairs if mine != theirs]
    return f"the two sides did different work: {', '.join(differ)}" if differ else None


def _device(row: CellRow) -> tuple[str, ...] | None:
    """A GPU is its uuid, a CPU its name; None where the record does not tell."""
    if row.device_uuid is not None:
        return ("gpu", row.device_uuid)
    return None if row.on_gpu or row.device is None else ("cpu", row.device, row.cpu or "")
