"""Sampling: the noise generator's known answers, the filters against transformers', and the distribution drawn from.

All of it in torch; tests/test_sample_kernel.py compares the kernel with this.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flexroll.engine.philox import philox4x32, uniform
from flexroll.engine.sampling import SamplingColumns, SamplingParams, draw, sample, sample_torch
from flexroll.errors import FlexrollError


def columns(params, requests=None, samples=None):
    n = len(params)
    made = SamplingColumns.empty(n, "cpu")
    made.write(range(n), params, requests or [0] * n, samples or [0] * n)
    return made


def words(*values):
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors that accompany Salmon et al., SC'11
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(w) for w in philox4x32(words(*counter), words(*key))) == expected


def test_uniform_is_uniform_and_depends_on_every_argument():
    positions = torch.arange(20000)
    zeros = torch.zeros_like(positions)
    values = uniform(zeros + 3, zeros, zeros, positions)
    assert ((values >= 0) & (values < 1)).all()
    histogram = torch.histc(values.float(), bins=20, min=0, max=1)
    assert ((histogram - 1000).abs() < 5 * 1000**0.5).all()
    base = [torch.tensor([v]) for v in (1, 2, 3, 4)]
    seen = {float(uniform(*base))}
    for argument, value in ((0, 2), (0, -1), (0, 2**40), (1, 3), (1, 2**40), (2, 4), (3, 5)):
        changed = list(base)
        changed[argument] = torch.tensor([value])
        seen.add(float(uniform(*changed)))
    assert len(seen) == 8


def warped(logits, temperature, top_k, top_p, min_p):
    """Log probabilities [n, vocab] after transformers' warpers."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.log_softmax(dim=-1)


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 30, 100]),
    top_p=st.sampled_from([0.2, 0.9, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_and_logprobs_equal_transformers(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * 3
    expected = warped(logits, temperature, top_k, top_p, min_p)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    tokens, logprobs, threshold = sample_torch(logits, columns([params] * 3), torch.arange(3))
    assert torch.equal(logits >= threshold[:, None], expected > float("-inf"))
    pick = tokens[:, None]
    torch.testing.assert_close(logprobs[:, 1], expected.gather(1, pick).squeeze(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs[:, 0], logits.log_softmax(-1).gather(1, pick).squeeze(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "filters", "kept"),
    [
        ([3.0, 2.0, 1.0, 2.0, 0.0], {"top_k": 2}, [0, 1, 3]),
        ([1.0, 1.0, 1.0, 1.0], {"top_k": 1}, [0, 1, 2, 3]),
        ([1.0, 1.0, 1.0, 0.0], {"top_p": 0.2}, [0, 1, 2]),
        ([2.0, 1.0, 1.0, 0.0], {"top_p": 0.6}, [0, 1, 2]),  # 0.53, 0.20, 0.20, 0.07
        ([2.0, 1.0, 2.0, 0.0], {"min_p": 1.0}, [0, 2]),
        ([2.0, 1.0, 0.0, -1.0], {"top_k": 2, "top_p": 0.72}, [0]),  # 0.73 of what top-k leaves, 0.64 of all
        ([0.0, -0.0, -1.0], {"top_k": 1}, [0, 1]),
    ],
)
def test_what_ties_keep(logits, filters, kept):
    logits = torch.tensor([logits])
    _, _, threshold = sample_torch(logits, columns([SamplingParams(temperature=1.0, **filters)]), torch.tensor([0]))
    assert (logits >= threshold[:, None])[0].nonzero().flatten().tolist() == kept


def test_draws_follow_the_distribution_and_no_other_argument_than_position_moves_them():
    logits = torch.tensor([[2.0, -5.0, 1.0, 0.0, -1.0]])
    n = 20000
    params = [SamplingParams(temperature=1.0, top_k=4)] * n
    tokens, _ = sample(logits.expand(n, -1), columns(params), torch.arange(n))
    kept = [0, 2, 3, 4]
    expected = torch.softmax(logits[0, kept], dim=-1) * n
    counts = torch.bincount(tokens, minlength=5).float()
    assert counts[1] == 0
    assert (((counts[kept] - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1), (1 - 2**-53, 3)])
def test_extreme_noise_stays_inside_the_filter(noise, expected):
    kept = torch.tensor([[0.0, 0.1, 0.0, 0.7, 0.0]], dtype=torch.float64)
    assert int(draw(kept, torch.tensor([noise], dtype=torch.float64))) == expected


def test_rows_are_sampled_each_in_its_own_way_whatever_surrounds_them():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=3.0, min_p=0.01, seed=-1),
    ]
    made = columns(params, requests=[0, 1, 2, 3, 4], samples=[0, 7, 0, 0, 1])
    positions = torch.tensor([9, 8, 7, 6, 5])
    tokens, logprobs = sample(logits, made, positions)
    assert tokens[[0, 2, 3]].tolist() == logits.argmax(-1)[[0, 2, 3]].tolist()
    assert torch.equal(logprobs[[0, 2], 0], logprobs[[0, 2], 1])
    assert logprobs[3, 1] == 0
    for index in ([1], [4, 1, 3], [2, 2, 4, 0, 1]):
        index = torch.tensor(index)
        again, logprobs_again = sample(logits[index], made.take(index), positions[index])
        assert torch.equal(again, tokens[index])
        assert torch.equal(logprobs_again, logprobs[index])


def test_greedy_takes_the_lowest_index_among_equal_maxima():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]], dtype=torch.bfloat16)
    assert sample(logits, columns([SamplingParams()]), torch.tensor([0]))[0].tolist() == [1]


def test_temperatures_near_zero_take_the_peak():
    logits = torch.tensor([[0.0, 5.0, 1.0]] * 2)
    made = columns([SamplingParams(temperature=1e-30), SamplingParams(temperature=1e-39)])
    tokens, logprobs = sample(logits, made, torch.arange(2))
    assert tokens.tolist() == [1, 1]
    assert logprobs[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_give_no_token(temperature):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf] * 3, [-inf, 2.0, -inf]])
    made = columns([SamplingParams(temperature=temperature, top_k=2, top_p=0.9, min_p=0.1)] * 4)
    tokens, logprobs = sample(logits, made, torch.arange(4))
    assert tokens.tolist() == [-1, -1, -1, 1]
    assert logprobs[:3].isnan().all()
    assert logprobs[3].tolist() == [0, 0]


def test_columns_hold_what_was_written():
    made = SamplingColumns.empty(6, "cpu")
    params = [
        SamplingParams(temperature=0.5, top_k=2**40, top_p=0.25, min_p=0.125, seed=2**64 - 3),
        SamplingParams(temperature=2.0, top_k=7, seed=-(2**63)),
    ]
    made.write([4, 1], params, requests=[2**40, 5], samples=[3, 0])
    made.write([], [], [], [])
    assert len(made) == 6
    assert made.temperature.tolist() == [0, 2.0, 0, 0, 0.5, 0]
    assert made.top_k.tolist() == [0, 7, 0, 0, 2**31 - 1, 0]
    assert made.top_p.tolist() == [0, 1, 0, 0, 0.25, 0]
    assert made.min_p.tolist() == [0, 0, 0, 0, 0.125, 0]
    taken = made.take(torch.tensor([4, 4, 1]))
    assert taken.seed.tolist() == [-3, -3, -(2**63)]
    assert taken.request.tolist() == [2**40, 2**40, 5]
    assert taken.sample.tolist() == [3, 3, 0]
    with pytest.raises(FlexrollError, match="equally many"):
        made.write([0, 1], params, [0], [0, 0])


def test_nothing_waits_for_values():
    """Tensors without values refuse whatever a CUDA graph could not capture."""
    made = SamplingColumns.empty(8, "meta").take(torch.zeros(4, dtype=torch.int64, device="meta"))
    tokens, logprobs = sample(torch.empty(4, 50, device="meta"), made, torch.empty(4, dtype=torch.int64, device="meta"))
    assert tokens.shape == (4,)
    assert tokens.dtype == torch.int64
    assert logprobs.shape == (4, 2)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": -1},
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"n": 0},
    ],
)
def test_bad_parameters_are_named(bad):
    with pytest.raises(FlexrollError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_greedy_rows_alone_need_no_sort():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2], logits[3, 4] = float("nan"), float("-inf"), float("inf")
    logits[4, 5] = logits[4, 9] = 9.0
    logits[5, :49] = float("-inf")
    columns, positions = SamplingColumns.empty(7, "cpu"), torch.arange(7)
    tokens, logprobs = sample(logits, columns, positions)
    expected, expected_logprobs, _ = sample_torch(logits, columns, positions)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, equal_nan=True)
