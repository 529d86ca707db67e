"""torch.compile over a model's forward pass, and what it did while a call ran."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from flexroll.cpu_isa import remember_checks

METRICS = 100_000  # compilations remembered; dynamo's default of 64 is less than a call with a break a layer makes


def compile_forward(model: Any, mode: str) -> None:
    """Put torch.compile's version of model.forward in its place; it compiles when it is first called, and again for
    shapes that it was not compiled for."""
    import torch
    from torch._dynamo.utils import set_compilation_metrics_limit

    set_compilation_metrics_limit(METRICS)
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        remember_checks()
    model.forward = torch.compile(model.forward, mode=mode)


class CompileWatch:
    """Counts what dynamo does inside a `with` block, in every thread of the process.

    notes: graphs compiled, graph breaks, recompiles (a frame compiled again since a guard failed; one that dynamo gave
    up at its limit counts too), frames that ran into that limit, and seconds of compilation.
    """

    def __init__(self) -> None:
        self.notes: dict[str, float] = {}

    def __enter__(self) -> CompileWatch:
        from torch._dynamo import utils

        utils.counters.clear()
        utils.clear_compilation_metrics()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        from torch._dynamo import utils

        done = utils.get_compilation_metrics()
        self.notes = {
            "graphs": utils.counters["stats"]["unique_graphs"],
            "graph_breaks": sum(utils.counters["graph_break"].values()),
            "recompiles": sum(1 for one in done if one.recompile_reason),
            "recompile_limit_hits": sum(1 for one in done if "recompile_limit" in (one.fail_reason or "")),
            "compile_s": round(sum(one.duration_us or 0 for one in done) / 1e6, 3),
        }
