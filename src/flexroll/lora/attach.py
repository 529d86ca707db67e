"""An adapter and a base become what the engine runs: merged weights, or weights and updates."""

from __future__ import annotations

from pathlib import Path

from flexroll.engine.ops import LowRank
from flexroll.engine.weights import DecoderWeights
from flexroll.errors import FlexrollError
from flexroll.lora.adapter import check_fits, read_adapter
from flexroll.lora.merge import MergedCopy
from flexroll.lora.unmerged import low_rank_updates


def attach(
    base: DecoderWeights, folder: Path, mode: str
) -> tuple[DecoderWeights, dict[str, list[LowRank]] | None, MergedCopy | None]:
    """(weights to run, unmerged updates or None, double copy or None) for a PEFT folder; mode: merged | unmerged."""
    if mode not in ("merged", "unmerged"):
        raise FlexrollError(f"unknown adapter mode '{mode}'; the flex engine has merged and unmerged")
    if mode == "merged" and base.quantised:
        raise FlexrollError("adapter mode 'merged': nothing merges into 4-bit weights; use unmerged, or drop four_bit")
    adapter = read_adapter(folder)
    check_fits(adapter, base, folder)
    if mode == "unmerged":
        return base, low_rank_updates(adapter, base), None
    copy = MergedCopy(base, adapter)
    return copy.weights, None, copy
