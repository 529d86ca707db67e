"""The adapter kept apart from the weights, as a PEFT wrapper does: two more products a projection."""

from __future__ import annotations

from flexroll.engine.ops import LowRank
from flexroll.engine.weights import DecoderWeights
from flexroll.lora.adapter import AdapterWeights


def low_rank_updates(adapter: AdapterWeights, weights: DecoderWeights) -> dict[str, list[LowRank]]:
    """Fused weight name -> the updates of its parts, in the weights' dtype and on their device."""
    updates: dict[str, list[LowRank]] = {}
    for module, (a, b) in adapter.to(weights.device, weights.dtype).pairs.items():
        part = weights.slices[f"{module}.weight"]
        updates.setdefault(part.key, []).append(LowRank(part.start, part.stop, a, b, adapter.scale))
    return updates
