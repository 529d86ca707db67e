"""The sampling kernel against its reference in torch.

On a GPU natively; elsewhere one test runs this file again under Triton's interpreter, in a process of its own, since
Triton reads the switch when it is imported.
"""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flexroll.engine.kernels.sample import BLOCK, sample_rows
from flexroll.engine.philox import uniform
from flexroll.engine.sampling import SamplingColumns, SamplingParams, sample_torch
from interpreter import DEVICE, NATIVE, run_interpreted, runs_kernel, starts_interpreter

TILE = 64

native = pytest.mark.skipif(not NATIVE, reason="needs a GPU")


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def columns(params, device=DEVICE):
    made = SamplingColumns.empty(len(params), device)
    made.write(range(len(params)), params, [2**33 + i for i in range(len(params))], [i % 5 for i in range(len(params))])
    return made


def random_logits(rows, vocab, scale, dtype, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def assert_same(logits, made, positions, block=TILE):
    """Kernel and reference keep the same tokens and draw the same one.

    A GPU's exp2 is good to two units in the last place, so there a row may differ whose noise, or whose mass at the
    threshold, lies within 1e-6 of a step.
    """
    tokens, logprobs, threshold = (t.cpu() for t in sample_rows(logits, made, positions, block))
    expected, expected_logprobs, expected_threshold = (t.cpu() for t in sample_torch(logits, made, positions))
    x = logits.cpu().float()
    same = ((x >= threshold[:, None]) == (x >= expected_threshold[:, None])).all(dim=1)
    weights = ((x - x.amax(dim=1, keepdim=True)).double() / made.temperature.cpu().double()[:, None]).exp()
    for row in (~same).nonzero().flatten().tolist():
        assert NATIVE, f"row {row}: thresholds {threshold[row]} and {expected_threshold[row]}"
        top_k = int(made.top_k[row]) or x.shape[1]
        ranked = x[row].topk(min(top_k, x.shape[1])).values
        mass = weights[row][x[row] >= ranked[-1]].sum()
        above = weights[row][x[row] >= max(threshold[row], expected_threshold[row])].sum()
        assert abs(above / mass - made.top_p[row].cpu()) < 1e-6
    noise = uniform(made.seed, made.request, made.sample, positions).cpu()
    for row in (same & (tokens != expected)).nonzero().flatten().tolist():
        kept = torch.where(x[row] >= threshold[row], weights[row], 0.0)
        steps = kept.cumsum(0) / kept.sum()
        assert (steps - noise[row]).abs().min() < 1e-6, f"row {row}: tokens {tokens[row]} and {expected[row]}"
    equal = same & (tokens == expected)
    torch.testing.assert_close(logprobs[equal], expected_logprobs[equal], atol=1e-5, rtol=1e-5)
    assert equal.float().mean() > 0.9


FILTERS = list(itertools.product([0, 1, 5, 90], [1.0, 0.97, 0.4], [0.0, 0.2]))


@runs_kernel
@pytest.mark.parametrize(
    ("vocab", "scale", "dtype", "temperature"),
    [
        (50, 1.0, torch.float16, 1.0),  # less than a block
        (200, 4.0, torch.bfloat16, 1.3),
        (201, 0.05, torch.bfloat16, 0.7),  # flat, many ties
        (333, 2.0, torch.float32, 0.1),
        (320, 0.01, torch.float32, 3.0),  # flat
    ],
)
def test_kernel_equals_the_reference(vocab, scale, dtype, temperature):
    params = [
        SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=m, seed=(i - 20) * 2**58 + i)
        for i, (k, p, m) in enumerate(FILTERS)
    ]
    logits = random_logits(len(params), vocab, scale, dtype)
    assert_same(logits, columns(params), torch.arange(len(params), device=DEVICE) * 101)


@runs_kernel
def test_hard_rows_equal_the_reference():
    inf = float("inf")
    vocab = 150
    ramp = torch.arange(vocab).float()
    rows = [
        torch.zeros(vocab),
        torch.full((vocab,), -inf).index_fill(0, torch.tensor([3, 77, 149]), 2.0),
        -ramp * 1e-38,  # neighbours that differ in no even step
        torch.where(ramp == 100, 3e38, -3e38),  # a range beyond fp32's
        ramp / 10,  # the peak is in the last tile
        torch.where(ramp > 70, 1000.0, -1000.0) + ramp,  # the first tile's peak is far below
        torch.where(ramp < 64, -inf, ramp % 7),  # the first tile is empty
        torch.where(ramp % 3 == 0, 0.0, -0.0),
    ]
    chosen = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_k=2, seed=2),
        SamplingParams(temperature=0.5, top_k=70, top_p=0.9, min_p=0.1, seed=3),
        SamplingParams(temperature=1e-39, top_p=0.5),
        SamplingParams(),
    ]
    params = [p for p in chosen for _ in rows]
    logits = torch.stack(rows * len(chosen)).to(DEVICE)
    assert_same(logits, columns(params), torch.arange(len(params), device=DEVICE))


@runs_kernel
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_give_no_token(temperature):
    logits = random_logits(4, 130, 1.0, torch.bfloat16)
    logits[0, 100] = float("nan")
    logits[1, 129] = float("inf")
    logits[2] = float("-inf")
    made = columns([SamplingParams(temperature=temperature, top_k=3, top_p=0.9)] * 4)
    tokens, logprobs, _ = sample_rows(logits, made, torch.arange(4, device=DEVICE), TILE)
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert logprobs[:3].isnan().all()
    assert 0 <= int(tokens[3]) < 130
    assert logprobs[3].isfinite().all()


@runs_kernel
def test_a_row_does_not_depend_on_the_batch_around_it():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.7, top_p=0.9, seed=5),
        SamplingParams(temperature=0.3, top_k=9, min_p=0.2),
    ]
    made = columns(params)
    # Rows of a wider tensor: the stride is not the vocabulary.
    logits = random_logits(4, 300, 2.0, torch.bfloat16)[:, :250]
    positions = torch.tensor([5, 6, 7, 8], device=DEVICE)
    together = sample_rows(logits, made, positions, TILE)
    index = torch.tensor([2, 0, 2, 3, 1], device=DEVICE)
    apart = sample_rows(logits[index], made.take(index), positions[index], TILE)
    for whole, part in zip(together, apart, strict=True):
        assert torch.equal(whole[index], part)


@runs_kernel
def test_no_rows_give_no_tokens():
    tokens, logprobs, _ = sample_rows(
        torch.empty(0, 70, device=DEVICE), columns([]), torch.empty(0, dtype=torch.int64, device=DEVICE)
    )
    assert tokens.shape == (0,)
    assert logprobs.shape == (0, 2)


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [151936, 50257])
def test_large_vocabularies_equal_the_reference(vocab, scale, dtype):
    filters = [(0, 1.0, 0.0), (5, 0.97, 0.5), (0, 0.97, 0.0), (0, 1.0, 0.1), (50, 1.0, 0.0), (100000, 0.9, 0.0)]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=9)
        for t in (0.1, 1.0)
        for k, p, m in filters
        for _ in range(4)
    ]
    logits = random_logits(len(params), vocab, scale, dtype)
    assert_same(logits, columns(params), torch.arange(len(params), device=DEVICE), BLOCK)


@native
def test_a_captured_step_follows_its_columns():
    made = columns([SamplingParams()] * 4)
    logits = random_logits(3, 1000, 1.0, torch.bfloat16)
    index = torch.tensor([0, 2, 3], device=DEVICE)
    positions = torch.tensor([1, 2, 3], device=DEVICE)
    sample_rows(logits, made.take(index), positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _, _ = sample_rows(logits, made.take(index), positions)
    graph.replay()
    assert tokens.tolist() == logits.argmax(-1).tolist()
    made.write([2, 3], [SamplingParams(temperature=5.0, seed=s) for s in (1, 2)], [0, 1], [0, 0])
    positions.add_(10)
    graph.replay()
    assert tokens.tolist() == sample_rows(logits, made.take(index), positions)[0].tolist()
    assert tokens.tolist() != logits.argmax(-1).tolist()
