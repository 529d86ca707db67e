"""What a sweep is told, what it measures with, and what it finds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexroll.tune.grid import Point

SCREENING_ROUNDS = 3
SHORTEST = 16  # new tokens of the first rung, at least
LEAST_ROUNDS = 3  # below it there is no interval


@dataclass(frozen=True)
class Outcome:
    """One point in one measurement. tps: of each round, tok/s. run_s: seconds of those rounds.

    agreement: share of new tokens that are the default's, up to where each sequence first leaves them; None if not
    asked. reason: why it is out, or "". timed_out: it was stopped at the limit it was given.
    """

    tps: list[float] = field(default_factory=list)
    run_s: float = 0.0
    agreement: float | None = None
    reason: str = ""
    timed_out: bool = False


class Evaluator(Protocol):
    def measure(
        self, points: Sequence[Point], new_tokens: int, rounds: int, check: bool, limit_s: float
    ) -> tuple[dict[str, Outcome], float]:
        """Outcome of each point by id, rounds interleaved, and the seconds it all took.

        check: compare tokens with the default's. A point without tps and reason was lost with another one's crash.
        """


class Records(Protocol):
    records: list[dict[str, Any]]

    def add(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Plan:
    """new_tokens, rounds: of the final; budget_s: of all measurements, those of an interrupted sweep included;
    limit_s: most seconds of one point."""

    new_tokens: int
    rounds: int
    budget_s: float
    finalists: int = 4
    limit_s: float = 600.0
    seed: int = 0

    def rungs(self, n: int) -> list[tuple[int, int]]:
        """(points, new tokens) of each rung before the final."""
        counts, tokens = [n], max(SHORTEST, self.new_tokens // 8)
        while counts[-1] > self.finalists:
            counts.append(max(self.finalists, math.ceil(counts[-1] / 2)))
        return [(count, min(self.new_tokens, tokens << k)) for k, count in enumerate(counts[:-1] or counts)]


@dataclass
class Standing:
    """What became of a point. stage: the last one it was measured in; rank: of that stage, 0 the first rung, -1 none.

    tps, gain: there; gain is over the default in the same stage, a ratio. screened: gain in the first rung.
    """

    point: Point
    stage: str = ""
    rank: int = -1
    tps: float | None = None
    gain: float | None = None
    screened: float | None = None
    agreement: float | None = None
    reason: str = ""


@dataclass
class Found:
    """standings: best first, infeasible and unmeasured ones last. winner: None where nothing came so far. duel: gains
    of the winner over the default, round by round. notes: what was not run, and why."""

    standings: list[Standing]
    winner: Point | None
    duel: list[float]
    spent_s: float
    notes: list[str]


@dataclass
class Costs:
    """What measurements have taken, and so what others will: overhead by points, the rest by tokens."""

    spent: float = 0.0
    _overhead: float = 0.0
    _run_s: float = 0.0
    _tokens: int = 0
    _points: int = 0

    def add(self, seconds: float, outcomes: Sequence[Outcome], new_tokens: int) -> None:
        run_s = sum(o.run_s for o in outcomes)
        self.spent += seconds
        self._overhead += seconds - run_s
        self._run_s += run_s
        self._tokens += sum(new_tokens * len(o.tps) for o in outcomes)
        self._points += len(outcomes)

    def of(self, points: int, new_tokens: int, rounds: int = SCREENING_ROUNDS) -> float:
        """Seconds that so many points take."""
        return points * (self._overhead / self._points + new_tokens * rounds * self._run_s / max(1, self._tokens))

    def of_final(self, points: int, plan: Plan, rounds: int) -> float:
        """Seconds of the final among so many points, if there are two, and of the duel."""
        final = self.of(points + 1, plan.new_tokens, rounds) if points > 1 else 0.0
        return final + self.of(2, plan.new_tokens, rounds)

    def of_rest(self, points: int, plan: Plan, lengths: Sequence[int]) -> float:
        """Seconds of what follows a rung with so many points: the rungs of these new tokens, the final, the duel."""
        total = 0.0
        for length in lengths:
            points = max(min(plan.finalists, points), math.ceil(points / 2))
            total += self.of(points + 1, length)
        return total + self.of_final(min(plan.finalists, points), plan, plan.rounds)
