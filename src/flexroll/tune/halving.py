"""Which point of a grid makes rollouts fastest: successive halving (Jamieson & Talwalkar, arXiv 1502.07943).

Every point gets a short rollout, the better half a longer one, and so on. The last few are measured for many rounds,
interleaved with the default in one process; the best of them then duels with the default once more, for its gain must
come of rounds that did not choose it. Whatever does not compile, crashes or says other tokens is out, with its reason.

Decisions rest on records alone: a sweep that goes on from its records decides as one that was never interrupted.
Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import median

from flexroll.errors import FlexrollError
from flexroll.tune.grid import Point
from flexroll.tune.plan import LEAST_ROUNDS, SCREENING_ROUNDS, Costs, Evaluator, Found, Outcome, Plan, Records, Standing


class Sweep:
    """One sweep over `points`; `run` may be called once. tell: progress for a person."""

    def __init__(
        self,
        points: Sequence[Point],
        evaluator: Evaluator,
        records: Records,
        plan: Plan,
        page_size: int,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.evaluator, self.records, self.plan, self.tell = evaluator, records, plan, tell
        self.default = Point(points[0].kind, {})
        self.standings = {p.id: Standing(p, reason=p.misfit(page_size) or "") for p in points}
        self.order = [p for p in points if not self.standings[p.id].reason]
        random.Random(plan.seed).shuffle(self.order)
        self.known = {_name(r["stage"], r["group"], r["new_tokens"], r["rounds"]): r for r in records.records}
        self.costs, self.notes = Costs(), list[str]()

    def run(self) -> Found:
        """Raises FlexrollError where the default itself cannot be measured."""
        rungs = self.plan.rungs(len(self.order))
        alive = list(self.order)
        for k, (count, tokens) in enumerate(rungs):
            alive = self._rung(k, rungs, alive[:count], tokens)
        return self._decide(alive)

    def _rung(self, k: int, rungs: list[tuple[int, int]], points: list[Point], tokens: int) -> list[Point]:
        """Measure the points one by one as far as the budget goes; the survivors, best first."""
        stage, rest = f"rung {k}", [t for _, t in rungs[k + 1 :]]
        measured: list[Point] = []
        base: float | None = None
        for done, point in enumerate(points):
            # The default goes first: of the very first rung it is what costs are known from.
            if base is None:
                if k and not self._affords(tokens, 2, rest, 1):
                    break
                base = self._default(stage, tokens)
                if not k:
                    self._forecast(rungs)
            if not self._affords(tokens, 1, rest, len(measured) + 1):
                break
            outcome = self._measure(stage, [point], tokens, SCREENING_ROUNDS, k == 0)[point.id]
            if self._note(point, outcome, stage, k, base):
                measured.append(point)
            if k == 0 and (done + 1) % 12 == 0:
                self.tell(f"  {done + 1} of {len(points)} points, {self.costs.spent:.0f} s")
        left = len([p for p in points if self.standings[p.id].rank < k and not self.standings[p.id].reason])
        if left:
            self.notes.append(f"{stage} ({tokens} new tokens): {left} of {len(points)} points not run, for the budget")
        # Those that were not measured here stay behind those that were, in the order of the rung before.
        ranked = sorted(measured, key=self._gain, reverse=True)
        others = [p for p in points if p not in measured and self.standings[p.id].rank >= 0 and self._alive(p)]
        self.tell(f"{stage}: {len(measured)} points, best {self._best(ranked)}")
        return ranked + others

    def _decide(self, alive: list[Point]) -> Found:
        """The final among the first few, then the duel of the best with the default."""
        rounds, few = self.plan.rounds, alive[: self.plan.finalists]
        while few and self.costs.spent + self.costs.of_final(len(few), self.plan, rounds) > self.plan.budget_s:
            few, rounds = (few[:-1], rounds) if len(few) > 1 else (few, rounds // 2)
            if rounds < LEAST_ROUNDS:
                few = []
        if (len(few), rounds) != (min(len(alive), self.plan.finalists), self.plan.rounds):
            self.notes.append(f"final: {len(few)} points for {rounds if few else 0} rounds, for the budget")
        rank = len(self.plan.rungs(len(self.order)))
        if len(few) > 1:
            outcomes = self._together("final", few, rounds)
            base = outcomes.get(self.default.id)
            for point in few if base else ():
                if point.id in outcomes:
                    self._note(point, outcomes[point.id], "final", rank, median(base.tps), base.tps)
            if outcomes:
                few = sorted((p for p in few if p.id in outcomes), key=self._gain, reverse=True)
        winner, duel = None, list[float]()
        for point in filter(self._alive, few):  # the next one where the best crashes after all
            outcomes = self._together("duel", [point], rounds)
            if point.id in outcomes:
                pairs = zip(outcomes[point.id].tps, outcomes[self.default.id].tps, strict=True)
                winner, duel = point, [mine / base for mine, base in pairs]
                break
        standings = sorted(
            self.standings.values(),
            key=lambda s: (s.point is not winner, bool(s.reason), -s.rank, -(s.gain or 0)),
        )
        return Found(standings, winner, duel, self.costs.spent, self.notes)

    def _together(self, stage: str, points: list[Point], rounds: int) -> dict[str, Outcome]:
        """Points and default interleaved; without those that fail, {} where the budget or all of them are gone."""
        left = list(points)
        while (
            left and self.costs.of(len(left) + 1, self.plan.new_tokens, rounds) <= self.plan.budget_s - self.costs.spent
        ):
            group = [self.default, *left]
            outcomes = self._measure(stage, group, self.plan.new_tokens, rounds, True)
            if all(len(outcomes[p.id].tps) == rounds and not outcomes[p.id].reason for p in group):
                return outcomes
            failed = [p for p in group if outcomes[p.id].reason]
            if self.default in failed:
                raise FlexrollError(f"the default does not run: {outcomes[self.default.id].reason}")
            if not failed:
                break
            for point in failed:
                self._note(point, outcomes[point.id], stage, 0, None)
            left = [p for p in left if p not in failed]
        return {}

    def _default(self, stage: str, tokens: int) -> float:
        outcome = self._measure(stage, [self.default], tokens, SCREENING_ROUNDS, True)[self.default.id]
        if not outcome.tps:
            raise FlexrollError(f"the default does not run: {outcome.reason or 'nothing was measured'}")
        return median(outcome.tps)

    def _measure(self, stage: str, group: list[Point], tokens: int, rounds: int, check: bool) -> dict[str, Outcome]:
        """From the records, or measured and recorded."""
        ids = [p.id for p in group]
        full = self.plan.limit_s * len(group)
        record = self.known.get(_name(stage, ids, tokens, rounds))
        if record is not None and record["cut"] and self.plan.budget_s - self.costs.spent - record["seconds"] >= full:
            self.costs.spent += record["seconds"]  # another budget has room for it now
            record = None
        if record is None:
            limit = min(full, self.plan.budget_s - self.costs.spent)
            outcomes, seconds = self.evaluator.measure(group, tokens, rounds, check, limit)
            cut = limit < full and any(o.timed_out for o in outcomes.values())
            if cut:  # stopped for the budget's end, not for a fault of its own
                outcomes = {i: Outcome() if o.timed_out else o for i, o in outcomes.items()}
            record = {
                "stage": stage,
                "group": ids,
                "new_tokens": tokens,
                "rounds": rounds,
                "seconds": seconds,
                "cut": cut,
                "outcomes": {i: asdict(o) for i, o in outcomes.items()},
            }
            self.records.add(record)
        found = {i: Outcome(**record["outcomes"].get(i, {})) for i in ids}
        self.costs.add(record["seconds"], list(found.values()), record["new_tokens"])
        return found

    def _note(
        self, point: Point, outcome: Outcome, stage: str, rank: int, base: float | None, pairs: Iterable[float] = ()
    ) -> bool:
        """Enter what a measurement says; whether the point is still in."""
        s = self.standings[point.id]
        if outcome.agreement is not None:
            s.agreement = outcome.agreement
        if outcome.reason:
            s.reason, s.stage = outcome.reason, stage
            return False
        if not outcome.tps or base is None:
            return False
        ratios = [mine / theirs for mine, theirs in zip(outcome.tps, pairs, strict=False)]
        s.stage, s.rank, s.tps = stage, rank, median(outcome.tps)
        s.gain = median(ratios) if ratios else s.tps / base
        if rank == 0:
            s.screened = s.gain
        return True

    def _affords(self, tokens: int, more: int, rest: Sequence[int], points: int) -> bool:
        """Whether `more` points at this length, and all that follows for `points`, fit what is left of the budget."""
        needed = self.costs.of(more, tokens) + self.costs.of_rest(points, self.plan, rest)
        return self.costs.spent + needed <= self.plan.budget_s

    def _forecast(self, rungs: list[tuple[int, int]]) -> None:
        (count, tokens), *later = rungs
        total = self.costs.spent + self.costs.of(count, tokens)
        total += self.costs.of_rest(count, self.plan, [t for _, t in later])
        self.tell(
            f"{count} points, {len(rungs)} rungs and a final: about {total / 60:.1f} min by the default's cost; "
            f"the budget is {self.plan.budget_s / 60:.1f} min"
        )

    def _alive(self, point: Point) -> bool:
        return not self.standings[point.id].reason

    def _gain(self, point: Point) -> float:
        return self.standings[point.id].gain or 0.0

    def _best(self, ranked: list[Point]) -> str:
        return f"{self._gain(ranked[0]):.3f} of the default: {ranked[0].id}" if ranked else "none"


def _name(stage: str, group: Sequence[str], new_tokens: int, rounds: int) -> tuple[str, ...]:
    """What makes a measurement the same one."""
    return (stage, str(new_tokens), str(rounds), *group)
