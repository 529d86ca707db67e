"""torch.compile of the trained model's and the reference model's forward pass, and what it did in a run."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

from flexroll.backends.cb_compile import compile_forward
from flexroll.schema.grpo_records import CompileCounts

REASONS = 20  # kept of each kind, the most frequent first
LENGTH = 240  # characters of a reason


class CompileDebugger:
    """Counts graphs, graph breaks and recompiles of the forward passes it compiles, and nothing else's: a rollout
    engine that compiles its own kernels in the same process is not counted.

    Use: `attach(trainer)` when the trainer is complete; `counts()` at the end.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.graphs = 0
        self.breaks: Counter[str] = Counter()
        self.recompiles: Counter[str] = Counter()
        self._depth = 0

    def attach(self, trainer: Any) -> None:
        """Compile the forward pass of trainer.model, below PEFT's wrapper, and of trainer.ref_model if there is one."""
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                self.watch(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def watch(self, model: Any) -> None:
        """Put torch.compile's version of model.forward in its place, and count what each call of it compiles."""
        compile_forward(model, self.mode)
        compiled = model.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            if self._depth:  # one that calls another, which is counted with it
                return compiled(*arguments, **named)
            before = _Snapshot()
            self._depth += 1
            try:
                return compiled(*arguments, **named)
            finally:
                self._depth -= 1
                self._count(before)

        # TRL and transformers look at the signature for what they may pass.
        forward.__signature__ = inspect.signature(compiled)  # type: ignore[attr-defined]
        model.forward = forward

    def counts(self) -> CompileCounts:
        reasons = [f"graph break ({n}x): {reason}" for reason, n in self.breaks.most_common(REASONS)]
        reasons += [f"recompile ({n}x): {reason}" for reason, n in self.recompiles.most_common(REASONS)]
        return CompileCounts(
            mode=self.mode,  # type: ignore[arg-type]
            graphs=self.graphs,
            graph_breaks=sum(self.breaks.values()),
            recompiles=sum(self.recompiles.values()),
            reasons=reasons,
        )

    def _count(self, before: _Snapshot) -> None:
        after = _Snapshot()
        self.graphs += after.graphs - before.graphs
        for reason, n in (after.breaks - before.breaks).items():
            self.breaks[_short(reason)] += n
        for one in after.done[len(before.done) :]:
            if one.recompile_reason:
                self.recompiles[_short(one.recompile_reason)] += 1


class _Snapshot:
    """dynamo's counts at one moment."""

    def __init__(self) -> None:
        from torch._dynamo import utils

        self.graphs = utils.counters["stats"]["unique_graphs"]
        self.breaks = Counter(utils.counters["graph_break"])
        self.done = utils.get_compilation_metrics()


def _short(reason: Any) -> str:
    text = " ".join(str(reason).split())
    return text if len(text) <= LENGTH else text[: LENGTH - 1] + "…"
