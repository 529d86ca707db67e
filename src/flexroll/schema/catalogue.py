"""What the project knows about each backend before importing it: adapter modes, needs, and which code it runs."""

from __future__ import annotations

from dataclasses import dataclass

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class BackendFacts:
    """label: as printed. adapters: modes it can run. needs_gpu: it cannot run on the CPU at all.
    warmup: a fresh process compiles for long unless a cache was filled before (see the warm-up rule).
    resizes: the number of sequences that run at once follows each cell; otherwise it is the engine's, for good.
    static_batch: it runs a batch from start to end together; nothing joins, and none ends before the longest.
    draws: it can run a config.json on weights that it draws on the device itself.
    alone: at its start it claims memory of a GPU as if nobody else were there.
    start_s: seconds to start on a GPU, for `flexroll plan`; rough (vLLM took 80 to 131 on an H200)."""

    label: str
    adapters: tuple[str, ...]
    needs_gpu: bool = False
    warmup: bool = False
    resizes: bool = True
    static_batch: bool = False
    draws: bool = False
    alone: bool = False
    start_s: float = 20.0


BACKENDS: dict[str, BackendFacts] = {
    "flex": BackendFacts("flex", ("none", "merged", "unmerged"), warmup=True, draws=True, start_s=60),
    "transformers_generate": BackendFacts("transformers generate", ("none", "merged", "unmerged"), static_batch=True),
    "transformers_cb": BackendFacts("transformers CB", ("none", "merged", "unmerged")),
    "vllm": BackendFacts(
        "vLLM", ("none", "merged", "request"), warmup=True, resizes=False, draws=True, alone=True, start_s=130
    ),
    "unsloth": BackendFacts("Unsloth", ("none", "unmerged"), needs_gpu=True, static_batch=True, alone=True, start_s=60),
}
