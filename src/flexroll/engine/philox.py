"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11), in torch integer arithmetic.

The noise of a token depends on (seed, request, sample, position) alone, so a run repeats whatever the slot, the bucket
or a preemption; no generator state exists that an order of execution could disturb.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds on four 32-bit counter words and two key words, each int64 [n] holding 0..2^32-1; four words out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps in int64, but its bits are those of the unsigned product.
        low = c0 * MULTIPLIERS[0]
        high = c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & MASK) ^ c1 ^ k0,
            high & MASK,
            ((low >> 32) & MASK) ^ c3 ^ k1,
            low & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(
    seeds: torch.Tensor, requests: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One float64 in [0, 1) with 53 random bits a row; all arguments integer [n].

    Seeds and requests count with 64 bits, samples and positions with 32.
    """
    seeds, requests, samples, positions = (v.to(torch.int64) for v in (seeds, requests, samples, positions))
    counter = (positions & MASK, requests & MASK, (requests >> 32) & MASK, samples & MASK)
    first, second, _, _ = philox4x32(counter, (seeds & MASK, (seeds >> 32) & MASK))
    bits = ((first << 21) ^ (second >> 11)) & ((1 << 53) - 1)
    return bits.double() / (1 << 53)
