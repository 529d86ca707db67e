"""`flexroll perplexity`: how likely the reference model finds each sample completion.

The reference is transformers in fp32, with the adapter's LoRA layers in place for cells that have an adapter. Broken
text that repeats nothing and prints well still is unlikely.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexroll.backends.base import EngineSpec
from flexroll.backends.transformers_common import load_model
from flexroll.bench.console import say
from flexroll.bench.lease import device_lease
from flexroll.bench.task import read_input, read_prompts
from flexroll.errors import FlexrollError, one_line
from flexroll.provenance import device_class, variant
from flexroll.schema.cells import Cell, expand
from flexroll.schema.config import Config
from flexroll.schema.records import Sample, read_record, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REFERENCE = "transformers, float32"


def perplexity(config: Config, *, stack: str, work: Path, results: Path, out: Path, root: Path) -> None:
    """Write {reason, cells: {file of the record: [perplexity a sample]}} of a stack; null for one without a token.

    What goes wrong is the reason, and ends no run: the document says it. A record that cannot be read is left out.

    Args:
        work: work/<run>, with model.json, prompts.json and adapter/. results: results/<run>.
    """
    reason, scores = "", {}
    try:
        scores = _scores(config, stack, work, results, root)
    except Exception as error:
        traceback.print_exc()
        reason = one_line(error)
    write_json(out, json.dumps({"reference": REFERENCE, "reason": reason, "cells": scores}, indent=1) + "\n")
    say(f"perplexity of {sum(map(len, scores.values()))} samples of {len(scores)} cells; {reason}".rstrip("; "))


def _scores(config: Config, stack: str, work: Path, results: Path, root: Path) -> dict[str, list[float | None]]:
    from tokenizers import Tokenizer

    folder = root / read_input(work / "model.json", "model", ("path",))["path"]
    prompts = [p["ids"] for p in read_prompts(work / "prompts.json")["prompts"]]
    held = list(_samples(config, stack, results))
    device = device_class()
    scores: dict[str, list[float | None]] = {}
    with device_lease(root, device):
        for adapted in (False, True):
            own = [(cell, samples) for cell, samples in held if (cell.engine_adapter != "none") == adapted]
            if not own:
                continue
            spec = _spec(config, folder, work / "adapter" if adapted else None, variant(device))
            scorer = Scorer(load_model(spec, "sdpa"), Tokenizer.from_file(str(folder / "tokenizer.json")), prompts)
            for cell, samples in own:
                scores[f"raw/{cell.path}"] = [scorer.score(i, sample.text) for i, sample in enumerate(samples)]
    return scores


class Scorer:
    """Perplexities under one model; equal completions of a prompt, as greedy ones are, are computed once."""

    def __init__(self, model: Any, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self._known: dict[tuple[int, str], float | None] = {}

    def score(self, prompt: int, text: str) -> float | None:
        """exp of the mean negative log-likelihood of the text's tokens after the prompt of that index."""
        key = (prompt, text)
        if key not in self._known:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            self._known[key] = self._perplexity(self.prompts[prompt], ids) if ids else None
        return self._known[key]

    def _perplexity(self, prompt: list[int], ids: list[int]) -> float:
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([prompt + ids], device=self.model.device)
            logits = self.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :])
        return round(math.exp(min(float(loss), 700.0)), 4)


def _samples(config: Config, stack: str, results: Path) -> Iterable[tuple[Cell, list[Sample]]]:
    for cell in expand(config, [stack]):
        try:
            record = read_record(results / "raw" / cell.path)
        except (FlexrollError, OSError):
            continue
        if record.samples:
            yield cell, record.samples


def _spec(config: Config, model: Path, adapter: Path | None, device: str) -> EngineSpec:
    return EngineSpec(
        model=model,
        adapter_mode="none" if adapter is None else "unmerged",
        adapter=adapter,
        merged=None,
        dtype="float32",
        device=device,
        max_batch=1,
        max_model_len=config.max_model_len,
        seed=config.seed,
    )
