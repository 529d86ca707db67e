"""Choosing the next token: greedy, or temperature, top-k, top-p and min-p, each per row and seeded per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexroll.engine.philox import uniform
from flexroll.errors import FlexrollError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off; the filters apply in the order temperature, top-k,
    top-p, min-p, each on what the one before left, as in transformers. seed: of the noise, together with the request's
    index in its call. stop_token_ids end a sequence like EOS; ignore_eos silences EOS only, not them.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 0, "max_new_tokens must be 0 or more"),
            (self.temperature >= 0, "temperature must be 0 (greedy) or more"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top_p must lie in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p must lie in [0, 1]"),
        )
        for ok, message in checks:
            if not ok:
                raise FlexrollError(message)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], requests: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Next tokens int64 [n] for logits [n, vocab].

    Row i draws its noise at (params[i].seed, requests[i], positions[i]).

    A row of logits that is not finite raises: NaN would otherwise become a token.
    """
    if not torch.isfinite(logits).all():
        raise FlexrollError(
            "the model produced logits that are not finite; check the checkpoint and the kernel options"
        )
    greedy = logits.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if not drawn:
        return greedy
    device = logits.device
    rows = torch.tensor(drawn, device=device)

    def column(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    chosen = [params[i] for i in drawn]
    noise = uniform(
        column([_signed64(p.seed) for p in chosen], torch.int64),
        column([requests[i] for i in drawn], torch.int64),
        column([positions[i] for i in drawn], torch.int64),
    )
    tokens = draw(
        logits[rows].float() / column([p.temperature for p in chosen], torch.float32).unsqueeze(1),
        top_k=column([p.top_k for p in chosen], torch.int64),
        top_p=column([p.top_p for p in chosen], torch.float32),
        min_p=column([p.min_p for p in chosen], torch.float32),
        noise=noise,
    )
    return greedy.index_copy(0, rows, tokens)


def draw(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Inverse-CDF draw from filtered distributions.

    scaled: fp32 [n, vocab], logits over temperature; top_k: int64 [n]; top_p, min_p: fp32 [n]; noise: float64 [n] in
    [0, 1). Returns int64 [n]. One uniform a row is all the noise it takes.
    """
    probs, order = filtered(scaled, top_k, top_p, min_p)
    cumulative = probs.double().cumsum(dim=-1)
    target = noise.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target on the last step: never leave the tokens that were kept.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def filtered(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(unnormalised probabilities in descending order, 0 where filtered out; token ids in that order).

    Both [n, vocab].
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    limit = torch.where(top_k > 0, top_k, ordered.shape[-1]).unsqueeze(1)
    probs = torch.softmax(ordered.masked_fill(rank >= limit, float("-inf")), dim=-1)
    # Keep the smallest set whose mass reaches top_p: a token stays while the mass before it is below top_p.
    before = probs.cumsum(dim=-1) - probs
    keep = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    keep[:, 0] = True
    probs = probs * keep
    return probs * (probs >= min_p.unsqueeze(1) * probs[:, :1]), order


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
