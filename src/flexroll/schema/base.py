"""What the models of config and claims have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
