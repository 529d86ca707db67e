"""How many tokens each request of a cell generates: one number for all, or lengths drawn once from a seed."""

from __future__ import annotations

import math
import random
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from flexroll.schema.base import Strict

TAGS = ("<number>", "<range>")  # name the two forms to pydantic; left out of messages


class Lengths(Strict):
    """Lengths spread log-uniformly between two bounds, both included, as those of reasoning rollouts are."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self

    def draw(self, count: int) -> list[int]:
        """The first `count` lengths; asking for more goes on with the same list."""
        rng = random.Random(self.seed)
        low, high = math.log(self.min), math.log(self.max)
        drawn = (round(math.exp(low + (high - low) * rng.random())) for _ in range(count))
        return [min(max(length, self.min), self.max) for length in drawn]

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


def _form(value: Any) -> str:
    return TAGS[isinstance(value, dict | Lengths)]


NewTokens = Annotated[
    Annotated[Annotated[int, Field(ge=1)], Tag(TAGS[0])] | Annotated[Lengths, Tag(TAGS[1])], Discriminator(_form)
]


def longest(new_tokens: int | Lengths) -> int:
    return new_tokens.max if isinstance(new_tokens, Lengths) else new_tokens


def lengths(new_tokens: int | Lengths, count: int) -> list[int]:
    """New tokens of each of `count` prompts, the same list for every backend."""
    return new_tokens.draw(count) if isinstance(new_tokens, Lengths) else [new_tokens] * count
