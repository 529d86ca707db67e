"""Teacher forcing through decode steps: the engine's own log probabilities of given tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from flexroll.engine.decode import DecodeStep
from flexroll.engine.sampling import SamplingParams
from flexroll.engine.slots import Rows
from flexroll.errors import FlexrollError

if TYPE_CHECKING:
    from flexroll.engine.engine import Engine


class Forced:
    """Chooses the given tokens, and keeps the log probabilities at each place.

    found: one tensor fp32 [tokens, vocab] a prompt, on the host.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.begins = [len(prompt) for prompt in prompts]
        self.found = [torch.zeros(len(tokens), vocab_size) for tokens in continuations]
        longest = max(map(len, continuations))
        given = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, tokens in zip(given, continuations, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        self._given, self._begins = given.to(device), torch.tensor(self.begins, device=device)

    def choose(self, rows: Rows, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Given tokens int64 [rows] and their log probabilities fp32 [rows, 2]; token -1 where a row is not finite."""
        log_probs = logits.float().log_softmax(-1)
        requests = rows.columns.request.long()
        places = (rows.positions + 1 - self._begins[requests]).clamp(0, self._given.shape[1] - 1)
        tokens = self._given[requests, places]
        own = log_probs.gather(1, tokens[:, None])
        finite = logits.isfinite().all(-1)
        host = log_probs.cpu()
        for row, (slot, request, place) in enumerate(torch.stack([rows.slots, requests, places]).T.tolist()):
            if slot:  # slot 0 only pads the bucket
                self.found[request][place] = host[row]
        return torch.where(finite, tokens, -1), own.expand(-1, 2).contiguous()


def score(
    engine: Engine,
    steps: Iterable[DecodeStep],
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """See Engine.score. steps: all of the engine's."""
    if len(prompts) != len(continuations):
        raise FlexrollError(f"{len(prompts)} prompts but {len(continuations)} continuations; give one each")
    for index, tokens in enumerate(continuations):
        if not tokens:
            raise FlexrollError(f"continuation {index} is empty; give it at least one token")
        if min(tokens) < 0 or max(tokens) >= engine.config.vocab_size:
            raise FlexrollError(f"continuation {index} holds a token id outside the vocabulary")
    if not prompts:
        return []
    forced = Forced(prompts, continuations, engine.config.vocab_size, engine.device)
    params = [SamplingParams(max_new_tokens=len(tokens), ignore_eos=True) for tokens in continuations]
    with contextlib.ExitStack() as stack:
        for step in steps:
            stack.enter_context(step.choosing(partial(forced.choose, step.rows)))
        completions = engine.generate(prompts, params)
    for completion, tokens in zip(completions, continuations, strict=True):
        if completion.token_ids != list(tokens):
            raise FlexrollError(
                f"prompt {completion.index} and its continuation do not fit max_model_len {engine.max_model_len}"
            )
    return forced.found
