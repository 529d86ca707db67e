"""Choosing the next token: greedy, or temperature, top-k, top-p and min-p, each per row and seeded per request.

The filters apply in transformers' order (temperature, top-k, top-p, min-p), each on what the one before left. Each is
a threshold on the logit, and a token whose logit equals the threshold stays:
- top-k: the k-th largest logit, so that ties with the k-th token stay, as in transformers;
- top-p: the largest logit whose token, together with those at or above it, has a mass of top_p of what top-k left
  (the smallest set of values; transformers cuts through equal logits in the order of its sort);
- min-p: the logit at which a token is min_p times as likely as the most likely one.
What is left is drawn from by inverse CDF in vocabulary order with one Philox uniform a row.

Nothing here waits for the device, so that sampling can be part of a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexroll.engine.philox import uniform
from flexroll.errors import FlexrollError

# The host's message on reading token -1.
NOT_FINITE = "the model produced logits that are not finite; check the checkpoint and the kernel options"
# log2(e) / temperature ends here: infinity, from fp32's smallest temperatures, would make NaN of the peak's 0 * inf.
MAX_SCALE = 1e38
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off; the filters apply in the order temperature, top-k,
    top-p, min-p, each on what the one before left, as in transformers. seed: of the noise, together with the request's
    index in its call and the sample's in its request. n: samples of one prompt. logprobs: return each token's log
    probabilities too. stop_token_ids end a sequence like EOS; ignore_eos silences EOS only, not them.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 0, "max_new_tokens must be 0 or more"),
            (self.temperature >= 0, "temperature must be 0 (greedy) or more"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top_p must lie in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p must lie in [0, 1]"),
            (self.n >= 1, "n must be 1 or more"),
        )
        for ok, message in checks:
            if not ok:
                raise FlexrollError(message)


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling parameters of many sequences on the device, one tensor a dtype so that a gather is three kernels.

    reals: fp32 [3, rows], temperature, top_p, min_p; ints: int32 [2, rows], top_k, sample; longs: int64 [2, rows],
    seed, request.
    """

    reals: torch.Tensor
    ints: torch.Tensor
    longs: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> SamplingColumns:
        """Columns of zeros: every row greedy."""
        return cls(
            torch.zeros(3, rows, dtype=torch.float32, device=device),
            torch.zeros(2, rows, dtype=torch.int32, device=device),
            torch.zeros(2, rows, dtype=torch.int64, device=device),
        )

    @property
    def temperature(self) -> torch.Tensor:
        return self.reals[0]

    @property
    def top_p(self) -> torch.Tensor:
        return self.reals[1]

    @property
    def min_p(self) -> torch.Tensor:
        return self.reals[2]

    @property
    def top_k(self) -> torch.Tensor:
        return self.ints[0]

    @property
    def sample(self) -> torch.Tensor:
        return self.ints[1]

    @property
    def seed(self) -> torch.Tensor:
        return self.longs[0]

    @property
    def request(self) -> torch.Tensor:
        return self.longs[1]

    def __len__(self) -> int:
        return self.reals.shape[1]

    def write(
        self, rows: Sequence[int], params: Sequence[SamplingParams], requests: Sequence[int], samples: Sequence[int]
    ) -> None:
        """Set the given rows in place, in one host-to-device copy a dtype; requests of up to 64 bits, samples of 31."""
        if not len(rows) == len(params) == len(requests) == len(samples):
            raise FlexrollError("sampling columns: rows, params, requests and samples must be equally many")
        if not rows:
            return
        device = self.reals.device

        def staged(values: list[list], dtype: torch.dtype) -> torch.Tensor:
            pinned = device.type == "cuda"
            return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)

        # The rows travel with the other integers of 64 bits.
        longs = staged([list(rows), [_signed64(p.seed) for p in params], [_signed64(r) for r in requests]], torch.int64)
        # No vocabulary comes near int32's end, so a larger top_k means the same.
        top_k = [min(p.top_k, 2**31 - 1) for p in params]
        reals = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        self.longs.index_copy_(1, longs[0], longs[1:])
        self.ints.index_copy_(1, longs[0], staged([top_k, list(samples)], torch.int32))
        self.reals.index_copy_(1, longs[0], staged(reals, torch.float32))

    def take(self, index: torch.Tensor) -> SamplingColumns:
        """The rows at index (int64 [n]), as new columns; fit for a captured CUDA graph."""
        return SamplingColumns(*(t.index_select(1, index) for t in (self.reals, self.ints, self.longs)))

    def copy_(self, other: SamplingColumns) -> None:
        """Take over the values of as many other rows, in place."""
        self.reals.copy_(other.reals)
        self.ints.copy_(other.ints)
        self.longs.copy_(other.longs)


def sample(
    logits: torch.Tensor, columns: SamplingColumns, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens int64 [n] and their log probabilities fp32 [n, 2], for logits [n, vocab] and positions int64 [n].

    Row i draws at (seed, request, sample, positions[i]) and depends on nothing outside the row. Greedy rows take the
    lowest index among equal maxima. logprobs[:, 0] is the log softmax of the logits as they are, logprobs[:, 1] after
    temperature and filters, over what these kept; a greedy row has the first in both. A row that holds NaN or +inf, or
    -inf alone, gives token -1 and NaN: the host that reads it raises NOT_FINITE.
    """
    if logits.is_cuda:
        from flexroll.engine.kernels.sample import sample_rows

        tokens, logprobs, _ = sample_rows(logits, columns, positions)
    elif logits.device.type == "cpu" and not bool((columns.temperature > 0).any()):
        tokens, logprobs = greedy_torch(logits)
    else:
        tokens, logprobs, _ = sample_torch(logits, columns, positions)
    return tokens, logprobs


def greedy_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` where every row is greedy, without a sort."""
    raw, tokens = logits.float().log_softmax(dim=-1).max(dim=-1)
    return torch.where(raw.isnan(), -1, tokens), torch.stack([raw, raw], dim=1)


def sample_torch(
    logits: torch.Tensor, columns: SamplingColumns, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sample` in torch alone, by sorting, on any device; the third result is the threshold used, fp32 [n]."""
    x = logits.float()
    peak = x.amax(dim=-1)
    greedy = x.argmax(dim=-1)
    drawn = columns.temperature > 0
    temperature = torch.where(drawn, columns.temperature, 1.0)
    weights = ((x - peak[:, None]) * inverse(temperature)[:, None]).exp2()
    threshold = thresholds(x, weights, temperature, columns.top_k, columns.top_p, columns.min_p)
    threshold = torch.where(drawn, threshold, peak)
    kept = torch.where(x >= threshold[:, None], weights.double(), 0.0)
    mass = kept.sum(dim=-1)
    noise = uniform(columns.seed, columns.request, columns.sample, positions)
    tokens = torch.where(drawn, draw(kept, noise), greedy)
    above = (x.gather(1, tokens[:, None]).squeeze(1) - peak).double()
    total = (x - peak[:, None]).mul(LOG2E).exp2().sum(dim=-1, dtype=torch.float64)
    raw = above - total.log()
    logprobs = torch.stack([raw, torch.where(drawn, above / temperature - mass.log(), raw)], dim=1).float()
    finite = ~total.isnan()
    tokens = torch.where(finite, tokens, -1)
    return tokens, torch.where(finite[:, None], logprobs, float("nan")), threshold


def inverse(temperature: torch.Tensor) -> torch.Tensor:
    """log2(e) / temperature, fp32: what a difference of logits is multiplied by before exp2."""
    return (LOG2E / temperature).clamp(max=MAX_SCALE)


def thresholds(
    x: torch.Tensor,
    weights: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The logit from which on a token stays, fp32 [n].

    x: fp32 [n, vocab], untouched logits; weights: fp32 [n, vocab], likelihoods relative to the peak's; the others [n].
    """
    vocab = x.shape[-1]
    ordered, order = x.sort(dim=-1, descending=True)
    last = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None] - 1
    by_rank = ordered.gather(1, last)
    cumulative = weights.gather(1, order).double().where(ordered >= by_rank, 0.0).cumsum(dim=-1)
    before = (cumulative < top_p[:, None].double() * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    by_mass = ordered.gather(1, before.clamp(max=vocab - 1))
    by_mass = torch.where(top_p[:, None] < 1, by_mass, float("-inf"))
    by_ratio = x.amax(dim=-1).double() + temperature.double() * min_p.double().log()
    return torch.maximum(torch.maximum(by_rank, by_mass).squeeze(1), by_ratio.float())


def draw(kept: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw in vocabulary order, int64 [n].

    kept: float64 [n, vocab], weights, 0 where filtered out; noise: float64 [n] in [0, 1).
    """
    cumulative = kept.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)
    # Rounding may put the target on the last step: never leave the tokens that were kept.
    places = torch.arange(kept.shape[-1], device=kept.device)
    last = torch.where(kept > 0, places, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last).squeeze(1)


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
