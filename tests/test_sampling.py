"""Sampling: the noise generator's known answers, the filters against transformers', and the distribution drawn from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flexroll.engine.philox import philox4x32, uniform
from flexroll.engine.sampling import SamplingParams, draw, filtered, sample
from flexroll.errors import FlexrollError


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
    values = uniform(torch.full_like(positions, 3), torch.zeros_like(positions), positions)
    assert ((values >= 0) & (values < 1)).all()
    histogram = torch.histc(values.float(), bins=20, min=0, max=1)
    assert ((histogram - 1000).abs() < 5 * 1000**0.5).all()
    base = [torch.tensor([v]) for v in (1, 2, 3)]
    seen = {float(uniform(*base))}
    for argument, value in ((0, 2), (0, -1), (1, 3), (1, 2**40), (2, 4)):
        changed = list(base)
        changed[argument] = torch.tensor([value])
        seen.add(float(uniform(*changed)))
    assert len(seen) == 6


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 30]),
    top_p=st.sampled_from([0.2, 0.9, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_equal_transformers(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    column = torch.ones(3)
    probs, order = filtered(logits / temperature, (column * top_k).long(), column * top_p, column * min_p)
    ours = torch.zeros_like(logits).scatter(1, order, probs / probs.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(ours, expected.softmax(dim=-1), atol=1e-6, rtol=1e-5)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -5.0]])
    n = 20000
    noise = uniform(torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), torch.arange(n))
    ones = torch.ones(n)
    tokens = draw(logits.expand(n, -1), (ones * 4).long(), ones * 1.0, ones * 0.0, noise)
    expected = torch.softmax(logits[0, :4], dim=-1) * n
    counts = torch.bincount(tokens, minlength=5).float()
    assert counts[4] == 0
    assert (((counts[:4] - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_extreme_noise_stays_inside_the_filter(noise):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(8)
    tokens = draw(logits, (ones * 3).long(), ones * 0.9, ones * 0.1, torch.full((8,), noise, dtype=torch.float64))
    top = logits.topk(3).indices
    assert all(int(t) in row.tolist() for t, row in zip(tokens, top, strict=True))


def test_rows_are_sampled_each_in_its_own_way():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=1),
    ]
    tokens = sample(logits, params, [0, 1, 2, 3], [9, 9, 9, 9])
    assert tokens[[0, 2, 3]].tolist() == logits.argmax(-1)[[0, 2, 3]].tolist()
    alone = sample(logits[1:2], params[1:2], [1], [9])
    assert int(alone) == int(tokens[1])


def test_logits_that_are_not_finite_raise():
    with pytest.raises(FlexrollError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), [SamplingParams()], [0], [0])


@pytest.mark.parametrize(
    "bad",
    [{"max_new_tokens": -1}, {"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}],
)
def test_bad_parameters_are_named(bad):
    with pytest.raises(FlexrollError, match=next(iter(bad))):
        SamplingParams(**bad)
