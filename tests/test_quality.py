"""Scoring: the engine's forced decode steps against transformers, the numbers by hand, and processes that fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import fake_backend
import synthetic
from engine_models import gsm_prompts, random_checkpoint, reference_model
from flexroll.backends.base import EngineSpec, Generation, Scores
from flexroll.backends.flex import FlexBackend
from flexroll.backends.transformers_generate import TransformersGenerate
from flexroll.backends.vllm import given_scores
from flexroll.bench import quality_worker
from flexroll.bench.quality import find_target, quality, quality_key, reference_file
from flexroll.bench.quality_reference import Reference, read_reference, write_reference
from flexroll.engine import Engine, SamplingParams
from flexroll.errors import FlexrollError
from flexroll.launch import running_stack
from flexroll.schema.config import Sampling
from flexroll.schema.quality import read_quality, targets
from flexroll.schema.records import write_json

FP32 = {"dtype": torch.float32, "device": "cpu", "compiled": False}
EXPERIMENT = {"title": "O", "section": "options", "batches": [2], "new_tokens": 8, "stacks": ["torch2.11"]}
BACKENDS = [{"backend": "flex", "options": ["default", "page32"]}, {"backend": "transformers_generate"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


PROMPTS = [[5, 9, 13], [7], list(range(2, 40)), [11, 12]]
GIVEN = [[3, 4, 5, 6, 7], [8], [90, 2, 90], [1, 1, 4, 3]]  # the end token too, for nothing ends a given text


def exact(folder, prompt, tokens):
    """Log probabilities [tokens, vocab] of transformers in fp32, each from a forward pass of its own."""
    model, rows = reference_model(folder), []
    for k in range(len(tokens)):
        with torch.no_grad():
            rows.append(model(torch.tensor([prompt + tokens[:k]])).logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 4},
        {"max_batch": 2},
        {"max_batch": 4, "buckets": [8]},
        {"max_batch": 4, "max_prefill_tokens": 16, "page_size": 16},
        {"max_batch": 4, "page_size": 16, "kv_tokens": 64},
    ],
    ids=["one batch", "waiting", "padded", "chunks", "preempted"],
)
def test_forced_steps_give_the_distributions_of_transformers(checkpoint, options):
    engine = Engine.from_pretrained(checkpoint, max_model_len=64, **FP32, **options)
    found = engine.score(PROMPTS, GIVEN)
    for prompt, tokens, own in zip(PROMPTS, GIVEN, found, strict=True):
        assert own.shape == (len(tokens), 97)
        torch.testing.assert_close(own.double(), exact(checkpoint, prompt, tokens), rtol=0, atol=2e-4)


def test_the_engine_goes_on_as_before(checkpoint):
    engine = Engine.from_pretrained(checkpoint, max_batch=4, max_model_len=64, **FP32)
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    before = engine.generate(PROMPTS, params)
    first = engine.score(PROMPTS, GIVEN)
    assert engine.generate(PROMPTS, params) == before
    for one, other in zip(first, engine.score(PROMPTS, GIVEN), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # eager attention adds up over pages as they lie
    with pytest.raises(FlexrollError, match="outside the vocabulary"):
        engine.score(PROMPTS[:1], [[97]])
    assert engine.generate(PROMPTS, params) == before


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        ([[5]], [[]], "continuation 0 is empty"),
        ([[5], [6]], [[7]], "2 prompts but 1 continuations"),
        ([[5] * 60], [[7] * 8], "do not fit max_model_len 64"),
        ([[]], [[7]], "prompt 0 is empty"),
    ],
)
def test_what_cannot_be_scored_is_one_line(checkpoint, prompts, given, message):
    engine = Engine.from_pretrained(checkpoint, max_batch=4, max_model_len=64, **FP32)
    with pytest.raises(FlexrollError, match=message) as error:
        engine.score(prompts, given)
    assert "\n" not in str(error.value)
    assert engine.score([], []) == []


def spec_of(folder, **changes):
    values = EngineSpec(
        model=folder,
        adapter_mode="none",
        adapter=None,
        merged=None,
        dtype="float32",
        device="cpu",
        max_batch=4,
        first_batch=4,
        max_model_len=64,
        seed=0,
        option={"compile": False},
    )
    return replace(values, **changes)


@pytest.mark.parametrize("backend", [FlexBackend, TransformersGenerate])
def test_backends_score_alike(checkpoint, backend):
    for prompt, tokens, own in zip(PROMPTS, GIVEN, backend(spec_of(checkpoint)).score(PROMPTS, GIVEN), strict=True):
        wanted = exact(checkpoint, prompt, tokens)
        torch.testing.assert_close(own.full.double(), wanted, rtol=0, atol=2e-4)
        assert own.argmax == wanted.argmax(-1).tolist()
        assert own.logprobs == pytest.approx(wanted[range(len(tokens)), tokens].tolist(), abs=2e-4)


def test_vllms_given_and_best_tokens():
    class Logprob:
        def __init__(self, logprob):
            self.logprob = logprob

    places = [{3: Logprob(-1.0), 7: Logprob(-0.5)}, {4: Logprob(-0.25)}, {9: Logprob(-0.5), 8: Logprob(-0.5)}]
    assert given_scores(places, [3, 4, 9]) == Scores([-1.0, -0.25, -0.5], [7, 4, 8])


def test_the_numbers_by_hand():
    """Two prompts over a vocabulary of three; KL, RMS and agreement from their definitions."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.4, 0.35, 0.25]])
    q = torch.tensor([[0.4, 0.4, 0.2], [0.1, 0.8, 0.1], [0.35, 0.4, 0.25]])
    reference = Reference([[1], [2]], [[0, 1], [0]], p.log())
    found = quality_worker.compare(reference, [Scores.of(q[:2].log(), [0, 1]), Scores.of(q[2:].log(), [0])])
    kl = sum(a * math.log(a / b) for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True)) / 3
    rms = math.sqrt((math.log(0.5 / 0.4) ** 2 + math.log(0.4 / 0.35) ** 2) / 3)
    assert found["kl"] == pytest.approx(kl, abs=1e-6) and found["logprob_rms"] == pytest.approx(rms, abs=1e-6)
    assert found["top1_agreement"] == pytest.approx(2 / 3)
    terms = [a * math.log(a / b) for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True)]
    assert found["kl_sequences"] == pytest.approx([sum(terms[:6]) / 2, sum(terms[6:])], abs=1e-6)
    assert found["sequence_tokens"] == [2, 1]
    apart = quality_worker.divergences(reference, [[0, 2], [1]])
    assert [(d.prompt, d.place, d.expected, d.got) for d in apart] == [(0, 1, 1, 2), (1, 0, 0, 1)]
    assert [d.gap for d in apart] == pytest.approx([math.log(8), math.log(0.4 / 0.35)], abs=1e-5)
    partial = Scores([-1.0, -1.0], [0, 1])
    untold = quality_worker.compare(reference, [partial, Scores([-1.0], [1])])
    assert untold["kl"] is None and "kl_sequences" not in untold
    with pytest.raises(ValueError, match="not finite"):
        quality_worker.compare(reference, [Scores.of(torch.tensor([[-math.inf, 0, 0]] * 2), [0, 1]), partial])


class Scorable(fake_backend.Good):
    """Goes on as the reference does but for one token, and finds every given token certain."""

    reference: Reference

    def generate(self, prompts, sampling, new_tokens, ignore_eos, seed, samples=1):
        assert sampling == Sampling() and ignore_eos and new_tokens == [len(t) for t in self.reference.tokens]
        rows = [list(tokens) for tokens in self.reference.tokens]
        rows[1][2] = (rows[1][2] + 1) % self.reference.full.shape[1]
        return Generation(rows)


def test_a_backend_that_cannot_score_is_judged_by_its_greedy_tokens(tiny_gsm, run):
    _, work = run
    reference = read_reference(work / "quality/reference-none.safetensors")
    Scorable.reference = reference
    found = quality_worker.score(Scorable(spec_of(tiny_gsm)), spec_of(tiny_gsm), reference)
    assert found["diverged"] == 1 and found["divergences"][0]["prompt"] == 1 and found["divergences"][0]["place"] == 2
    assert "cannot be scored" in found["unscored"] and "kl" not in found and found["coherent"] is True


@pytest.fixture(scope="module")
def config():
    changes = {
        "quality": {"count": 4, "new_tokens": 12},
        "options": {"page32": {"flex": {"page_size": 32, "compile": False}}},
        "defaults": {"flex": {"compile": False}},
        "limits": {"start_s": 60, "cell_s": 60},
        "experiments": {"options": EXPERIMENT | {"backends": BACKENDS}},
        "drift": {"stacks": []},
    }
    return synthetic.config(**changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory, config, tiny_gsm, root):
    """(results, work) with inputs and the reference of the embedded model; no lock of the whole tree is taken."""
    base = tmp_path_factory.mktemp("run")
    work = base / "work"
    write_json(work / "model.json", json.dumps({"path": str(tiny_gsm), "files": {}}))
    prompts = [{"ids": ids} for ids in gsm_prompts(tiny_gsm, 4)]
    write_json(work / "prompts.json", json.dumps({"prompts": prompts, "sha256": "e" * 64}))
    write_reference(
        config, work=work, adapted=False, out=work / "quality/reference-none.safetensors", root=own_root(base, root)
    )
    return base / "results", work


def own_root(base: Path, root: Path) -> Path:
    """A tree that is the project's but for its lock of the device, which other tests hold."""
    tree = base / "tree"
    tree.mkdir(exist_ok=True)
    for name in ("containers", "src"):
        if not (tree / name).exists():
            (tree / name).symlink_to(root / name)
    return tree


def scored(config, run, root, name, backend=None):
    results, work = run
    out = results / f"quality/{name}.json"
    stack = running_stack() or "torch2.11"
    tree = own_root(results.parent, root)
    quality(config, name, work=work, out=out, root=tree, stack=stack, backend=backend)
    return read_quality(out)


def test_the_reference_is_what_transformers_goes_on_with(run, tiny_gsm):
    reference = read_reference(run[1] / "quality/reference-none.safetensors")
    assert reference.prompts == gsm_prompts(tiny_gsm, 4) and max(map(len, reference.tokens)) == 12
    assert reference.full.shape[0] == sum(map(len, reference.tokens))
    greedy = [token for tokens in reference.tokens for token in tokens]
    assert reference.full.argmax(-1).tolist() == greedy
    torch.testing.assert_close(reference.full.exp().sum(-1), torch.ones(len(greedy)))


def test_a_configuration_is_scored_in_a_process_of_its_own(config, run, root):
    record = scored(config, run, root, "torch2.11-transformers_generate-none-default")
    assert record.status == "ok" and record.is_of(targets(config)[2])
    assert 0 < record.kl < 1e-3 and record.top1_agreement > 0.9 and 0 < record.logprob_rms < 0.1
    assert record.diverged == len(record.divergences) and record.coherent
    assert len(record.kl_sequences) == 4 and record.kl == pytest.approx(sum(record.kl_sequences) / 4)
    assert record.prompts == 4 and record.tokens == 48 and record.near_tie == 0.2
    assert record.device == "cpu" and record.environment.packages["torch"] and len(record.reference_sha256) == 64
    assert len(record.key) == 64


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("DiesAtStart", "failed", "crashed: exit code 7; last words: about to go"),
        ("HangsAtStart", "failed", "engine did not start: timeout after 4 s"),
        ("NoStart", "failed", "engine did not start: ValueError: no kernel image is available"),
        ("Absent", "skipped", "needs a CUDA GPU"),
        ("Slow", "ok", ""),
    ],
)
def test_whatever_a_backend_does_there_is_a_record(config, run, root, fault, status, reason):
    limits = config.limits.model_copy(update={"start_s": 4 if fault == "HangsAtStart" else 60})
    record = scored(
        config.model_copy(update={"limits": limits}),
        run,
        root,
        "torch2.11-flex-none-default",
        f"{Path(fake_backend.__file__)}:{fault}",
    )
    assert record.status == status and reason in record.reason
    assert (record.diverged is None) == (status != "ok") and "\n" not in record.reason


def test_a_record_is_of_its_option_its_code_and_what_it_read(config, root):
    first, second = targets(config)[:2]
    key = quality_key(root, first, config, "cpu")
    assert key != quality_key(root, second, config, "cpu") and key != quality_key(
        root, first, config, "cpu", {"a": "b"}
    )
    other = config.model_copy(update={"quality": config.quality.model_copy(update={"new_tokens": 13})})
    assert key != quality_key(root, first, other, "cpu")
    judged = config.quality.model_copy(update={"limit": 2.0, "near_tie": 1.0, "baseline": "page32"})
    assert key == quality_key(root, first, config.model_copy(update={"quality": judged, "title": "Words"}), "cpu")


def test_names_and_missing_inputs_are_told_in_one_line(config, run, root, tmp_path):
    with pytest.raises(FlexrollError, match=r"did you mean 'torch2\.11-flex-none-default'"):
        find_target(config, "torch2.11-flex-none-defualt")
    with pytest.raises(FlexrollError, match="asks for no scoring"):
        find_target(config.model_copy(update={"quality": None}), "torch2.11-flex-none-default")
    with pytest.raises(FlexrollError, match="quality-reference` writes it"):
        read_reference(tmp_path / "reference-none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(reference_file(run[1], targets(config)[0]).read_bytes()[:1000])
    with pytest.raises(FlexrollError, match="delete it and run that"):
        read_reference(cut)
