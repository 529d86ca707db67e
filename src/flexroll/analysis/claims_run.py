"""What claims are judged against, and the reasons for which a run cannot judge one; for all modules that judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from flexroll.analysis.model import CellRow, DriftRow, GrpoRow, QualityRow, Result
from flexroll.analysis.pairs import Key
from flexroll.schema.claims import Claim, ClaimsFile, TrainFact, TrainMetric

TRAINING = (*get_args(TrainMetric), *get_args(TrainFact))


@dataclass(frozen=True)
class Run:
    """What claims are judged against. model_source random: its text is noise, so coherence says nothing."""

    model: str
    model_source: str
    results: list[Result]
    drift: list[DriftRow]
    left_out: list[str]
    sessions: dict[Key, list[CellRow]] = field(default_factory=dict)
    quality: list[QualityRow] = field(default_factory=list)
    grpo: list[GrpoRow] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """A value with the range of the rounds behind it, or its 95 % interval."""

    value: float
    low: float
    high: float
    interval: bool = False


class NotRunError(Exception):
    """Why a claim cannot be judged in this run; the message ends in the report."""


def foreign(claim: Claim, claims: ClaimsFile, run: Run) -> str | None:
    """Why a run of this model says nothing about the claim, or None."""
    if claim.any_model or claims.about_model(run.model):
        return None
    return f"published for {claims.model}; this run's model is {run.model}"


def unfit(claim: Claim, claims: ClaimsFile, run: Run, results: list[Result]) -> str | None:
    """Why these results cannot judge the claim, or None: another model, no GPU, another GPU."""
    reason = foreign(claim, claims, run)
    if reason or claim.gpu == "none":
        return reason
    if not all(result.on_gpu for result in results):
        return "measured on a CPU, which says nothing about a GPU"
    if claim.gpu != "any" and not all(claim.gpu.lower() in device.lower() for r in results for device in r.devices):
        return f"published for a {claim.gpu}; measured on {devices(results)}"
    return None


def devices(results: list[Result]) -> str:
    return ", ".join(sorted({device for result in results for device in result.devices})) or "an unknown device"


def check_run(claim: Claim, claims: ClaimsFile, run: Run) -> None:
    """Reasons that hold for the whole run come before those of single cells: they say more."""
    reason = foreign(claim, claims, run)
    if reason:
        raise NotRunError(reason)
    known = [r for r in run.results if r.on_gpu is not None]
    if claim.gpu != "none" and known and not any(r.on_gpu for r in known):
        raise NotRunError("this run is on a CPU, which says nothing about a GPU")
