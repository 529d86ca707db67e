"""What stands below each figure, and what is read in its place: made from the same data as the figure."""

from __future__ import annotations

from collections.abc import Iterable

from flexroll.analysis.model import Analysis
from flexroll.analysis.statistics import MIN_SESSIONS
from flexroll.report.figures import memory_parts, options, throughput
from flexroll.report.roofline import rooflines

ALT = {
    "throughput": "tok/s against batch",
    "ratio": "tok/s over vLLM's against batch",
    "workloads": "tok/s over vLLM's by workload",
    "roofline": "share of the memory-bandwidth floor against batch",
    "memory": "memory against batch",
    "memory_parts": "where the memory goes",
    "options": "gain of every option",
    "rounds": "rounds over time",
    "drift": "drift per cycle",
    "grpo_curves": "reward and KL over training steps",
    "grpo_steps": "where the seconds of a training step go",
}
BARS = {
    "interval": " Bars are 95 % intervals over sessions.",
    "range": f" Bars span the slowest and the best round: an interval needs {MIN_SESSIONS} sessions.",
    "mixed": " Bars with caps are 95 % intervals over sessions; thin ones span the slowest and the best round, where "
    f"there are fewer than {MIN_SESSIONS} sessions.",
    "": "",
}
LOOK = (
    " The colour is the backend, the marker the form of the adapter; hollow, dashed series are further options or "
    "stacks, a cross at the foot a failed cell."
)
COMPARED = (
    "Ratios are taken session by session on one device, bars are their 95 % intervals. Filled: the interval excludes "
    f"1; hollow: it holds 1, or there are fewer than {MIN_SESSIONS} sessions."
)


def captions(analysis: Analysis, drawn: Iterable[str]) -> dict[str, str]:
    """Name -> caption of the figures that were drawn; plain text, one or more sentences."""
    makers = {
        "throughput": lambda: f"Throughput against batch, median of the sessions' medians.{_bars(analysis)}{LOOK}",
        "ratio": lambda: f"Throughput over vLLM's at the same work, against batch. {COMPARED}",
        "workloads": lambda: f"Throughput over vLLM's of the workloads that ran at one batch. {COMPARED}",
        "roofline": lambda: _roofline(analysis),
        "memory": lambda: "Memory in use against batch. A reservation is not a need: see where it goes.",
        "memory_parts": lambda: _memory_parts(analysis),
        "options": lambda: _options(analysis),
        "rounds": lambda: (
            "Every measured round: its tok/s against the median of its cell, by the time it began. A slope or a step "
            "that backends share is the machine's. A square marks a round that was throttled or disturbed."
        ),
        "drift": lambda: (
            "Base weights after each cycle: the refresh, which never writes them, beside PEFT's merge and unmerge on "
            "one copy."
        ),
        "grpo_curves": lambda: (
            "Reward and KL to the base model over training steps: the mean over seeds, the band from the least to the "
            "most of them. Steps on a grey ground are left out of all means and medians."
        ),
        "grpo_steps": lambda: (
            "Where the seconds of a training step go, mean of the measured steps over all seeds. Loss holds its log "
            "probabilities and the backward pass, other the trainer's own work."
        ),
    }
    return {name: makers[name]() for name in drawn if name in makers}


def _bars(analysis: Analysis) -> str:
    return BARS[throughput.bars(analysis)]


def _roofline(analysis: Analysis) -> str:
    peaks = {f"{one.bandwidth / 1e12:g} TB/s on {one.device}" for one in rooflines(analysis)}
    return (
        "Decoding against the memory-bandwidth floor: the time to read the weights and the K and V of all sequences "
        f"once at peak bandwidth ({', '.join(sorted(peaks))}), over the time a decode step takes. No device reaches "
        "its peak."
    )


def _memory_parts(analysis: Analysis) -> str:
    batch = memory_parts.choose(analysis)[0].batch
    return (
        f"Where the memory goes at batch {batch}, GB. A KV cache that fills a share of the device is a reservation, "
        "not a need."
    )


def _options(analysis: Analysis) -> str:
    missing = options.left_out(analysis)
    shown = f" Of each setting the {options.BEST} best and the {options.WORST} worst." if missing else ""
    return (
        "Gain of every option in tok/s, paired session by session, with 95 % intervals. Filled markers: faster or "
        f"slower; hollow: no difference shown, or fewer than {MIN_SESSIONS} sessions.{shown}"
    )
