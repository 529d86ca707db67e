"""Rotary position embeddings (Su et al., arXiv 2104.09864) and the scalings that published checkpoints use."""

from __future__ import annotations

import math

import torch

from flexroll.engine.decoder_config import DecoderConfig


def rope_tables(config: DecoderConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for positions 0..length-1, each fp32 [length, head_dim / 2], the attention factor folded in."""
    inv_freq, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def inverse_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Frequencies fp32 [head_dim / 2] and the factor on cos and sin (1.0 but for yarn)."""
    rope, dim = config.rope, config.head_dim
    base = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "linear":
        return base / float(rope.extra["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope.extra), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope.theta, dim, rope.extra)
    return base, 1.0


def _llama3(base: torch.Tensor, extra: dict) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    factor, low, high = (float(extra[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(extra["original_max_position_embeddings"])
    turns = original * base / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * base + (1 - keep) * base / factor


def _yarn(base: torch.Tensor, theta: float, dim: int, extra: dict) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071): a ramp over dimensions between interpolated and kept frequencies."""
    factor = float(extra["factor"])
    original = float(extra["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(float(extra.get("beta_fast") or 32)), dimension(float(extra.get("beta_slow") or 1))
    if extra.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)).clamp(0, 1)
    attention = extra.get("attention_factor")
    if attention is None:
        attention = _yarn_attention_factor(factor, extra.get("mscale"), extra.get("mscale_all_dim"))
    return base / factor * ramp + base * (1 - ramp), float(attention)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, heads, head_dim] by cos, sin [n, head_dim / 2]; computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
