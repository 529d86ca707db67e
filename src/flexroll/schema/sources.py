"""What a run reads from elsewhere: the checkpoint and the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from flexroll.schema.base import Strict
from flexroll.schema.names import NAME


class Model(Strict):
    """The checkpoint under test.

    source: hub (repo at a pinned revision), local (a folder of your own), random (weights drawn for a config.json;
    for speed only, the text is noise). Random weights are written to files that every backend reads, or drawn: each
    engine then fills its own tensors on the device, from config.json alone.
    """

    name: str = Field(pattern=NAME, description="Label in results and folder name under models/.")
    source: Literal["hub", "local", "random"] = "local"
    repo: str | None = Field(None, description="hub: owner/name.")
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="hub: commit, 40 hex digits.")
    path: Path | None = Field(None, description="local: checkpoint folder; random: folder or file of config.json.")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["written", "drawn"] = Field("written", description="random: files, or drawn by each engine.")
    seed: int = Field(0, description="random, written: seed of the weights.")

    @model_validator(mode="after")
    def _source_is_complete(self) -> Model:
        if self.weights == "drawn" and self.source != "random":
            raise ValueError(f"weights 'drawn' needs source 'random', not '{self.source}'")
        if self.source == "hub" and not (self.repo and self.revision):
            raise ValueError("model source 'hub' needs repo and revision (a pinned commit)")
        if self.source != "hub" and self.path is None:
            raise ValueError(f"model source '{self.source}' needs path")
        return self


class Prompts(Strict):
    """Where prompts come from. Every cell takes the first `batch` prompts of the same prepared list."""

    source: Literal["hub", "file", "random"] = "file"
    repo: str | None = Field(None, description="hub: dataset repository.")
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    file: str | None = Field(None, description="hub: file inside the repository (.parquet, .json or .jsonl).")
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", description="hub, file: expected hash of the file.")
    path: Path | None = Field(None, description="file: a .json list, .jsonl or .parquet.")
    field: str = Field("prompt", description="Column or key with the question: a string or a list of chat messages.")
    answer: str | None = Field(None, description="Column or key with the right answer, for GRPO's rewards.")
    format: Literal["chat", "text"] = "chat"
    count: int = Field(256, ge=1, description="How many prompts to prepare.")
    max_tokens: int = Field(1024, ge=1, description="Longer prompts are left out, and counted.")
    lengths: tuple[int, int] = Field((60, 200), description="random: shortest and longest prompt, tokens.")
    seed: int = Field(0, description="random: seed of lengths and tokens.")

    @model_validator(mode="after")
    def _source_is_complete(self) -> Prompts:
        if self.source == "hub" and not (self.repo and self.revision and self.file):
            raise ValueError("prompts source 'hub' needs repo, revision and file")
        if self.source == "file" and self.path is None:
            raise ValueError("prompts source 'file' needs path")
        if not 1 <= self.lengths[0] <= self.lengths[1]:
            raise ValueError("prompts lengths must be [shortest, longest] with 1 <= shortest <= longest")
        return self
