"""Plausibility: times that add up, speeds that the device's memory allows, memory that holds what it must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flexroll.analysis.statistics import round_rates
from flexroll.check.registry import MEASURED, Finding, check, error, not_applicable, warning
from flexroll.check.submission import Held, Run
from flexroll.schema import architecture
from flexroll.schema.config import Adapter
from flexroll.schema.devices import find_device
from flexroll.schema.records import Round

PLAUSIBILITY = "plausibility"
# prefill_s and wall_s are of two clocks, the device's and the host's.
CLOCKS = 0.01
BANDWIDTH_SLACK = 0.02
WEIGHTS_SLACK = 0.03
# What stays in a device's L2 is not read again: 126 MB of a B200, the most of any in the table of devices.
CACHE = 126 * 2**20
SPREAD = 0.2  # rounds of one process on a quiet machine lie within a few hundredths


@check(PLAUSIBILITY, MEASURED)
def time_parts(run: Run, held: Held) -> Iterator[Finding]:
    """A round takes time, its prefill and decode take no more than all of it, and no more tokens are decoded than
    generated."""
    for r in held.record.rounds:
        parts = [value for value in (r.prefill_s, r.decode_s) if value is not None]
        if not all(0 <= value < math.inf for value in (r.wall_s, *parts)):
            yield error(f"round {r.index}: wall {r.wall_s}, prefill {r.prefill_s}, decode {r.decode_s} s are no times")
        elif sum(parts) > r.wall_s * (1 + CLOCKS):
            yield error(f"round {r.index}: prefill and decode take {sum(parts):.4g} s of {r.wall_s:.4g} s")
        if r.decode_tokens is not None and not 0 <= r.decode_tokens <= r.tokens:
            yield error(f"round {r.index}: {r.decode_tokens} tokens decoded of {r.tokens} generated")


@check(PLAUSIBILITY, MEASURED)
def round_spread(run: Run, held: Held) -> Iterator[Finding]:
    """Measured rounds of a cell lie within a fifth of their median."""
    found = round_rates(held.record.rounds)
    if found is None or found.n < 2:
        yield not_applicable("fewer than two measured rounds")
    elif found.spread > SPREAD:
        yield warning(f"rounds from {found.low:.4g} to {found.best:.4g} tok/s, {found.spread:.0%} of their median")


@check(PLAUSIBILITY, MEASURED)
def memory_bandwidth(run: Run, held: Held) -> Iterator[Finding]:
    """Decoding is no faster than the device's memory: each step reads the weights and its sequences' K and V once.

    Where decode time is not told, the round's whole time stands for it. K and V count where the model's config.json is
    here, prompts once for all their samples; what a device's cache can keep does not count.
    """
    found = held.record.environment
    device = find_device(found.device) if found is not None else None
    weights = _read_a_step(run, held)
    if found is None or device is None:
        yield not_applicable(f"peak memory bandwidth of {found.device if found else 'the device'} is not known")
    elif weights is None:
        yield not_applicable("the record does not tell the bytes of the weights")
    elif weights <= CACHE:
        yield not_applicable("the weights fit into the device's cache")
    else:
        for r in held.record.measured:
            steps, kv = _work(run, held, r)
            least = (steps * (weights - CACHE) + kv) / device.bandwidth
            took = r.wall_s if r.decode_s is None else r.decode_s
            if took < least * (1 - BANDWIDTH_SLACK):
                yield error(
                    f"round {r.index}: {took / steps * 1e3:.3g} ms a decode step, and {found.device} needs"
                    f" {least / steps * 1e3:.3g} ms to read {weights / 1e9:.3g} GB of weights"
                    f"{' and the K and V' if kv else ''} at {device.bandwidth / 1e12:g} TB/s"
                )


@check(PLAUSIBILITY, MEASURED)
def memory_parts(run: Run, held: Held) -> Iterator[Finding]:
    """Weights and KV cache fit into what was in use on the device, and that and the peak into the device."""
    memory, found = held.record.memory, held.record.environment
    if found is None or found.device == "cpu":
        yield not_applicable("no GPU: what is reserved in a machine's memory is not in use until it is written")
        return
    size, total, peak = found.device_memory_bytes, memory.device_total, memory.peak_allocated
    parts = (memory.weights or 0) + (memory.kv_reserved or 0)
    if total is None or (memory.weights is None and memory.kv_reserved is None):
        yield not_applicable("weights or memory in use are not told")
    elif parts > total:
        yield error(f"{_gb(parts)} of weights and KV cache, but {_gb(total)} in use on the device")
    if size is None:
        yield not_applicable("the record does not tell the device's memory")
        return
    for what, value in (("peak", peak), ("in use", total)):
        if value is not None and value > size:
            yield error(f"{what} {_gb(value)}, and the device has {_gb(size)}")


@check(PLAUSIBILITY, MEASURED)
def weights_size(run: Run, held: Held) -> Iterator[Finding]:
    """Weights take the model's parameters in its dtype, with the adapter's where it is loaded, and with the pristine
    matrices beside the merged ones where flex merges it."""
    weights, cell = held.record.memory.weights, held.record.cell
    if run.architecture is None:
        yield not_applicable("the model's config.json is not here, or of no known decoder")
    elif weights is None:
        yield not_applicable("the record does not tell the bytes of the weights")
    elif cell.option_values.get("four_bit"):
        yield not_applicable("weights are quantised")
    else:
        wanted = _expected_weights(run.architecture, run.config.adapter, held)
        if abs(weights - wanted) > WEIGHTS_SLACK * wanted:
            yield error(f"{_gb(weights)} of weights, and the model in {cell.dtype} takes {_gb(wanted)} in this mode")


def _expected_weights(model: dict[str, Any], adapter: Adapter, held: Held) -> int:
    """Bytes; see weights_size."""
    mode, backend = held.record.cell.engine_adapter, held.record.cell.backend
    count = architecture.parameters(model)
    merges = mode == "merged" and backend == "flex"  # the others read a merged checkpoint
    if merges or mode in ("unmerged", "request"):
        for name, shape in architecture.tensors(model):
            if name.removesuffix(".weight").rpartition(".")[2] in adapter.targets and len(shape) == 2:
                count += adapter.rank * sum(shape) + (math.prod(shape) if merges else 0)
    return count * architecture.DTYPE_BYTES[held.record.cell.dtype]


def _read_a_step(run: Run, held: Held) -> float | None:
    """Bytes of weights that a decode step reads at least: all but an embedding table that is not the head as well.

    Without the model's config.json half of what the record tells, for such a table and a second copy that serves
    merging are each less than half of it.
    """
    weights, cell = held.record.memory.weights, held.record.cell
    if weights is None or run.architecture is None:
        return None if weights is None else weights / 2
    return architecture.weights_read(run.architecture, cell.dtype, weights)


def _work(run: Run, held: Held, r: Round) -> tuple[int, float]:
    """Decode steps of a round and the bytes of K and V that they read, both at least.

    The first token of a sequence may be prefill's, each later one is a step's; it reads the sequence so far. Lengths
    that EOS cut are told by their sum alone, and steps and reads are fewest where all are alike.
    """
    cell = held.record.cell
    if cell.ignore_eos:
        own = [length - 1 for length in cell.lengths(cell.prompts)]
    else:
        own = [max(r.tokens // (cell.batch * r.calls) - 1, 0)] * cell.prompts
    steps = max(max(own), math.ceil(sum(own) * cell.samples / cell.running)) * r.calls
    steps = max(steps, r.steps or 0, 1)
    model = run.architecture
    if model is None or model.get("sliding_window"):  # a window reads less than the whole sequence
        return steps, 0.0
    read = sum(n * (n + 1) / 2 for n in own) * cell.samples + min(own) * held.record.prompt_tokens
    return steps, read * r.calls * architecture.kv_token_bytes(model, cell.dtype)


def _gb(value: float) -> str:
    return f"{value / 1e9:.4g} GB"
