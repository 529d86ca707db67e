"""How near decoding comes to what the device's memory allows.

A decode step of `batch` sequences reads the weights and every sequence's K and V once, whatever the engine does. At the
device's peak bandwidth that takes

    floor   = (weights + kv) / bandwidth
    kv      = (prompt tokens + batch * new tokens / 2) * bytes of K and V a token
    step    = batch / decode tok/s
    share   = floor / step

weights: bytes of the shape in the run's dtype without an embedding table that is not also the head, or what the engine
holds where that is less, as with 4-bit weights: the pristine copy beside a merged one is held and not read. prompt
tokens: of all prompts, one that several samples share counted once. new tokens / 2: the n - 1 decode steps of a
sequence attend to 1 .. n - 1 generated tokens beside its prompt, n / 2 in the mean. Activations, logits and written K
and V are left out, and no device reaches its peak, so the floor is lower than any engine gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.analysis.model import Analysis, CellRow, Result
from flexroll.analysis.pairs import key_of, sessions_by_key
from flexroll.errors import FlexrollError
from flexroll.provenance import find_root
from flexroll.report import text
from flexroll.report.text import Table
from flexroll.schema import architecture
from flexroll.schema.architecture import kv_token_bytes, weights_read
from flexroll.schema.devices import find_device


@dataclass(frozen=True)
class Roofline:
    """One result against the floor. weights, kv: bytes that a step reads. bandwidth: bytes/s. decode_tps: the median,
    with its 95 % interval where there are enough sessions."""

    result: Result
    device: str
    bandwidth: float
    weights: int
    kv: float
    decode_tps: float
    decode_low: float | None = None
    decode_high: float | None = None

    @property
    def floor_s(self) -> float:
        """Seconds of a step at peak bandwidth."""
        return (self.weights + self.kv) / self.bandwidth

    @property
    def step_s(self) -> float:
        """Seconds of a step as measured."""
        return self.result.batch / self.decode_tps

    @property
    def ceiling(self) -> float:
        """Decode tok/s at the floor."""
        return self.result.batch / self.floor_s

    @property
    def read_rate(self) -> float:
        """Bytes/s that the measured step reads of what it must."""
        return (self.weights + self.kv) / self.step_s

    @property
    def share(self) -> float:
        return self.decode_tps / self.ceiling

    @property
    def low(self) -> float | None:
        return None if self.decode_low is None else self.decode_low / self.ceiling

    @property
    def high(self) -> float | None:
        return None if self.decode_high is None else self.decode_high / self.ceiling


def rooflines(analysis: Analysis, shape: dict[str, Any] | None = None) -> list[Roofline]:
    """Every result of which all is known, in the order of the results.

    Left out: results without a decode time, off a GPU, on a device of unknown bandwidth or on several, and those whose
    sequences differ in length, stop at EOS or wait for a place, for then no step has the mean length.

    Args:
        analysis: the run.
        shape: the model's config.json; default: read from where the config says.
    """
    shape = read_shape(analysis.config["model"]) if shape is None else shape
    if shape is None:
        return []
    sessions = sessions_by_key(analysis.cells)
    found = (_roofline(r, sessions.get(key_of(r), ()), analysis, shape) for r in analysis.results)
    return [one for one in found if one is not None]


def read_shape(model: dict[str, Any]) -> dict[str, Any] | None:
    """config.json of the run's model, in its folder or in the one where `flexroll model` puts it; None without one."""
    try:
        root = find_root()
    except FlexrollError:
        return None
    return architecture.read_shape(root / (model["path"] or Path("models") / model["name"]))


def _roofline(r: Result, rows: Iterable[CellRow], analysis: Analysis, shape: dict[str, Any]) -> Roofline | None:
    row = next((row for row in rows if row.status == "ok"), None)
    device = find_device(r.devices[0]) if r.on_gpu and len(r.devices) == 1 else None
    if row is None or device is None or r.decode_tps is None or r.memory.weights is None:
        return None
    if not isinstance(r.new_tokens, int) or row.workload is None or not row.workload.ignore_eos:
        return None
    if (r.slots or r.batch) < r.batch or not row.prompt_tokens or shape.get("use_sliding_window"):
        return None
    dtype = analysis.config["model"]["dtype"]
    tokens = row.prompt_tokens + r.batch * r.new_tokens / 2
    return Roofline(
        result=r,
        device=r.devices[0],
        bandwidth=device.bandwidth,
        weights=weights_read(shape, dtype, r.memory.weights),
        kv=tokens * kv_token_bytes(shape, dtype),
        decode_tps=r.decode_tps,
        decode_low=r.decode_tps_low,
        decode_high=r.decode_tps_high,
    )


def table(found: Iterable[Roofline]) -> Table:
    """The numbers behind the figure, one row a result."""
    rows = [
        {
            "Batch": str(one.result.batch),
            "Backend": text.series_label(one.result.backend, one.result.adapter),
            "Experiment": f"`{one.result.experiment}`",
            "Option": text.cell(one.result.option),
            "Stack": one.result.stack,
            "Weights read, GB": text.gigabytes(one.weights),
            "KV read, GB": text.gigabytes(round(one.kv)),
            "Floor, ms": text.significant(1000 * one.floor_s),
            "Step, ms": text.significant(1000 * one.step_s),
            "Share of the floor": text.percent(one.share),
            "95 % interval": text.span(one.low, one.high, "%") if one.low and one.high else text.NONE,
            "Read, TB/s": text.significant(one.read_rate / 1e12),
            "Decode tok/s": text.rate(one.decode_tps),
            "At the floor, tok/s": text.rate(one.ceiling),
        }
        for one in found
    ]
    left = frozenset({"Backend", "Experiment", "Option", "Stack"})
    return Table(rows, left).without_empty().without_constant("Option", "Stack")
