"""What is asked of an engine, checked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexroll.engine.decoder_config import DecoderConfig
from flexroll.engine.page_table import PageTable
from flexroll.engine.sampling import SamplingParams
from flexroll.engine.scheduler import Group
from flexroll.engine.scheduler import Sequence as Running
from flexroll.errors import FlexrollError


@dataclass(frozen=True)
class Completion:
    """What one sample of one prompt was continued with.

    index: the prompt's; sample: 0..n-1. token_ids: generated ids, the stop token included. finish_reason: stop |
    length. logprobs, raw_logprobs: of each token, after temperature and filters, and of the model's own distribution;
    None unless asked for.
    """

    index: int
    sample: int
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None


def groups_of(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    config: DecoderConfig,
    pages: PageTable,
    max_model_len: int,
) -> list[Group]:
    """A group of `n` sequences a prompt; those with nothing to generate are finished already.

    Raises:
        FlexrollError: see Engine.generate.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise FlexrollError(
            f"{len(prompts)} prompts but {len(params)} sampling parameters; give one each, or one for all"
        )
    groups = []
    for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        tokens = [int(t) for t in prompt]
        _check_prompt(index, tokens, p, config.vocab_size, pages, max_model_len)
        stop = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else frozenset(config.eos_ids))
        members = [Running(index, sample, len(tokens), list(tokens), p, stop, max_model_len) for sample in range(p.n)]
        if p.max_new_tokens == 0:
            for sequence in members:
                sequence.finish_reason = "length"
        groups.append(Group(members))
    return groups


def completion_of(sequence: Running) -> Completion:
    given = sequence.params.logprobs
    return Completion(
        sequence.index,
        sequence.sample,
        sequence.generated,
        sequence.finish_reason or "length",
        [kept for _, kept in sequence.logprobs] if given else None,
        [raw for raw, _ in sequence.logprobs] if given else None,
    )


def _check_prompt(
    index: int, tokens: list[int], params: SamplingParams, vocab_size: int, pages: PageTable, max_model_len: int
) -> None:
    if not tokens:
        raise FlexrollError(f"prompt {index} is empty; give it at least one token")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise FlexrollError(f"prompt {index} holds a token id outside the vocabulary of {vocab_size}")
    if len(tokens) >= max_model_len:
        raise FlexrollError(
            f"prompt {index} has {len(tokens)} tokens; max_model_len {max_model_len} allows "
            f"{max_model_len - 1} and one new token"
        )
    # The last generated token is never attended to and needs no place; admission asks for one place to spare.
    longest = min(len(tokens) + max(params.max_new_tokens, 1) - 1, max_model_len - 1)
    if pages.blocks_for(longest + 1) > pages.n_pages:
        raise FlexrollError(
            f"prompt {index} may grow to {longest} tokens, which can never fit the KV pool of "
            f"{pages.n_pages * pages.page_size}; raise kv_tokens or lower max_new_tokens"
        )
