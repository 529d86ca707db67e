"""Perplexity of sample completions: by hand, of text and of noise, and what becomes of it in the analysis."""

from __future__ import annotations

import json
import math
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer

import synthetic
from engine_models import gsm_prompts
from flexroll.backends.transformers_common import load_model
from flexroll.bench.perplexity import Scorer, _spec, perplexity
from flexroll.engine import Engine, SamplingParams
from flexroll.schema.records import write_json


@pytest.fixture(scope="module")
def scorer(tiny_gsm):
    prompts = gsm_prompts(tiny_gsm, 4)
    model = load_model(_spec(synthetic.config(), tiny_gsm, None, "cpu"), "sdpa")
    return Scorer(model, Tokenizer.from_file(str(tiny_gsm / "tokenizer.json")), prompts)


def test_by_hand(scorer):
    """Token by token, each from the logits before it."""
    text = "The answer is 4."
    ids = scorer.tokenizer.encode(text, add_special_tokens=False).ids
    tokens = list(scorer.prompts[1])
    total = 0.0
    for token in ids:
        logits = scorer.model(input_ids=torch.tensor([tokens])).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[token])
        tokens.append(token)
    assert scorer.score(1, text) == pytest.approx(math.exp(total / len(ids)), rel=1e-3)
    assert scorer.score(1, "") is None


def test_text_is_likely_and_noise_is_not(scorer, tiny_gsm):
    engine = Engine.from_pretrained(tiny_gsm, dtype=torch.float32, device="cpu", max_batch=4, max_model_len=320)
    for index, done in enumerate(engine.generate(scorer.prompts, SamplingParams(max_new_tokens=48))):
        ids = [t for t in done.token_ids if t != 2]
        assert scorer.score(index, scorer.tokenizer.decode(ids)) < 3
        random.Random(index).shuffle(ids)
        assert scorer.score(index, scorer.tokenizer.decode(ids)) > 20


def test_equal_completions_are_scored_once(scorer, monkeypatch):
    calls = []
    monkeypatch.setattr(scorer, "_perplexity", lambda prompt, ids: calls.append(1) or 1.0)
    for _ in range(3):
        scorer.score(0, "twice the same")
    scorer.score(2, "twice the same")
    assert len(calls) == 2


def test_every_cell_with_samples_is_scored(root, tiny_gsm, tmp_path):
    config = synthetic.config(drift={"stacks": []})
    work, results = tmp_path / "work", tmp_path / "results"
    write_json(work / "model.json", json.dumps({"path": str(tiny_gsm), "files": {}}))
    prompts = [{"ids": ids} for ids in gsm_prompts(tiny_gsm, 4)]
    write_json(work / "prompts.json", json.dumps({"prompts": prompts, "sha256": "e" * 64}))
    from flexroll.lora.adapter import write_adapter

    write_adapter(tiny_gsm, work / "adapter", rank=4, alpha=8, targets=["q_proj"], b_std=0.5, seed=0)
    cells = synthetic.write_run(
        results,
        config,
        lambda c: None if c.backend == "unsloth" else synthetic.record(c, samples=[synthetic.sample()] * 2),
    )
    out = results / "perplexity" / "torch2.11.json"
    perplexity(config, stack="torch2.11", work=work, results=results, out=out, root=root)
    held = json.loads(out.read_text())
    found = held["cells"]
    assert not held["reason"]
    assert set(found) == {f"raw/{c.path}" for c in cells if c.backend != "unsloth" and c.stack == "torch2.11"}
    plain = {tuple(v) for k, v in found.items() if "-none-" in k}
    adapted = {tuple(v) for k, v in found.items() if "-none-" not in k}
    assert len(plain) == len(adapted) == 1 and plain != adapted  # the adapter's own model judges its text
    (work / "prompts.json").unlink()
    perplexity(config, stack="torch2.11", work=work, results=results, out=out, root=root)
    held = json.loads(out.read_text())
    assert "prompts.json: missing" in held["reason"] and held["cells"] == {}  # told, and no run ends for it
