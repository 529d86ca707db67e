"""bf16 against fp32 on a trained checkpoint: the engine may round, and no more than transformers does.

Runs on the CPU, and on a GPU where there is one; there the fused kernels and graphs are what is judged.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM

from engine_models import gsm_prompts
from flexroll.engine import Engine, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def texts(tiny_gsm):
    """Prompts and what the fp32 model goes on with."""
    prompts = gsm_prompts(tiny_gsm, 6)
    engine = Engine.from_pretrained(
        tiny_gsm, dtype=torch.float32, device=DEVICE, max_batch=6, max_model_len=320, compiled=DEVICE == "cuda"
    )
    return prompts, [c.token_ids for c in engine.generate(prompts, GREEDY)]


def transformers_log_probs(folder, dtype, texts):
    """Log probabilities fp32 [tokens, vocab] of every generated place."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(DEVICE).eval()
    rows = []
    for prompt, generated in zip(*texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated], device=DEVICE)).logits[0]
        rows.append(logits[len(prompt) - 1 : -1].float().log_softmax(-1))
    return torch.cat(rows)


def engine_log_probs(folder, texts, **options):
    """The same from the engine's decode steps in bf16."""
    engine = Engine.from_pretrained(
        folder, dtype=torch.bfloat16, device=DEVICE, max_batch=len(texts[0]), max_model_len=320, **options
    )
    return torch.cat(engine.score(*texts)).to(DEVICE)


@pytest.mark.parametrize("attention", ["flex", "triton"] if DEVICE == "cuda" else ["flex"])
def test_rounding_costs_no_more_than_transformers_own(tiny_gsm, texts, attention):
    exact = transformers_log_probs(tiny_gsm, torch.float32, texts)

    def divergence(log_probs):
        return float((exact.exp() * (exact - log_probs)).sum(-1).mean())

    theirs = divergence(transformers_log_probs(tiny_gsm, torch.bfloat16, texts))
    ours = divergence(engine_log_probs(tiny_gsm, texts, attention=attention))
    print(f"KL to fp32, {attention}: engine {ours:.3g}, transformers {theirs:.3g}")
    assert 0 < ours <= 1.2 * theirs


def test_where_pages_lie_changes_no_bit(tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 6)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=True)
    # Eager flex_attention adds up over the pool as it lies; compiled, over a sequence's pages in their order.
    engine = Engine.from_pretrained(tiny_gsm, device=DEVICE, max_batch=6, max_model_len=320, page_size=32)
    expected = engine.generate(prompts, params)
    free = engine.cache.pages._free_pages
    for _ in range(2):
        free[::2], free[1::2] = free[1::2], free[::2]
        free.reverse()
        engine.cache.pool.uniform_(-9, 9)  # what other sequences left behind
        assert engine.generate(prompts, params) == expected


def test_another_bucket_or_a_preemption_changes_near_ties_only(tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 6)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=True)
    common = {"device": DEVICE, "max_model_len": 192, "page_size": 16, "compiled": DEVICE == "cuda"}
    expected = Engine.from_pretrained(tiny_gsm, max_batch=6, **common).generate(prompts, params)
    preempted = 0
    for options in ({"max_batch": 1}, {"max_batch": 6, "buckets": [5]}, {"max_batch": 6, "kv_tokens": 320}):
        engine = Engine.from_pretrained(tiny_gsm, **options, **common)
        for one, other in zip(expected, engine.generate(prompts, params), strict=True):
            apart = next(
                (i for i, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if len(set(pair)) > 1),
                None,
            )
            if apart is not None:
                # Both were the most likely token of nearly the same distribution.
                assert abs(one.raw_logprobs[apart] - other.raw_logprobs[apart]) < 0.15
        preempted += engine.stats.preemptions
    assert preempted
