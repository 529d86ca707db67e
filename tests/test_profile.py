"""`flexroll profile`: what it averages over are decode steps of the whole batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from engine_models import random_checkpoint
from flexroll.engine import Engine
from flexroll.errors import FlexrollError
from flexroll.profile import STEPS, as_markdown, profile_decode


def test_every_step_has_the_whole_batch(tmp_path, monkeypatch):
    model = random_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    engines = []
    plain = Engine.generate

    def generate(self, *args, **kwargs):
        engines.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", generate)
    # More prompt tokens than a prefill pass has by default, more prompts than are admitted at once.
    profile = profile_decode(model, 40, 60, False, {"device": "cpu", "compiled": False})
    stats = engines[-1].stats
    assert (stats.steps, stats.decode_tokens) == (STEPS, 40 * STEPS)
    assert sum(k.share for k in profile.kernels) == pytest.approx(1)
    assert profile.step_ms > 0 and "| `aten::" in as_markdown(profile)


def test_a_prompt_too_short_is_an_error(tiny_gsm):
    with pytest.raises(FlexrollError, match="at least 2 tokens"):
        profile_decode(tiny_gsm, 4, 1, False, {})
