"""Whether a point's greedy tokens are the default's, up to near-ties. Imports no torch.

Another block size or number of warps rounds otherwise, and greedy text leaves the default's where two tokens are nearly
as likely: there both runs give their own choice nearly the same log-probability. A kernel that is wrong does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Nats between the two choices' log-probabilities, each under its own run: bf16 logits of 8 to 16 are 0.06 apart.
NEAR_TIE = 0.2
# A wrong kernel may hit the default's likelihoods by chance, above all with random weights, but not its first tokens.
FIRST_SHARE = 0.5


@dataclass(frozen=True)
class Text:
    """Greedy tokens of each prompt and their log-probabilities under the model's own distribution, in nats."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]


def agreement(reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> float:
    """Share of tokens that come before their sequence first leaves the reference."""
    same = sum(_common(a, b) for a, b in zip(reference, tokens, strict=True))
    return same / max(1, sum(min(len(a), len(b)) for a, b in zip(reference, tokens, strict=True)))


def problem(reference: Text, found: Text, near_tie: float = NEAR_TIE) -> str | None:
    """Why the tokens are wrong, in a line, or None: where they differ they first do so at near-ties."""
    n = len(reference.tokens)
    apart, first, shifts = 0, 0, 0
    for tokens, base, mine, theirs in zip(
        found.tokens, reference.tokens, found.logprobs, reference.logprobs, strict=True
    ):
        common = _common(base, tokens)
        # Before they part, the same token is about as likely under both.
        shifts += any(not abs(a - b) <= near_tie for a, b in zip(mine[:common], theirs[:common], strict=True))
        if common < min(len(base), len(tokens)):
            first += common == 0
            apart += not abs(mine[common] - theirs[common]) <= near_tie
    if apart or shifts:
        return f"wrong tokens: {max(apart, shifts)} of {n} sequences leave the default's by more than {near_tie} nats"
    if first > FIRST_SHARE * n:
        return f"wrong tokens: {first} of {n} sequences differ from the default's at the first token"
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
