"""Checkpoints that are missing, cut short, of another architecture, or do not fit their own config."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine_models import random_checkpoint
from flexroll.engine import decoder_config
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.schema.architecture import eos_ids


@pytest.fixture
def folder(tmp_path):
    return random_checkpoint(tmp_path / "model", "qwen3", head_dim=16)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def fails(folder, words):
    with pytest.raises(FlexrollError, match=words) as caught:
        load_weights(folder, torch.float32, "cpu")
    assert "\n" not in str(caught.value)


def test_views_hold_the_checkpoint(folder):
    weights = load_weights(folder, torch.float32, "cpu")
    tensors = load_file(folder / "model.safetensors")
    assert {name for name, _ in weights.named_views()} == set(tensors)
    for name, view in weights.named_views():
        assert torch.equal(view, tensors[name]), name


def test_shards_read_like_one_file(folder, tmp_path):
    sharded = random_checkpoint(tmp_path / "sharded", "qwen3", shard="20KB", head_dim=16)
    assert (sharded / "model.safetensors.index.json").exists()
    whole, parts = load_weights(folder, torch.float32, "cpu"), load_weights(sharded, torch.float32, "cpu")
    for name, view in whole.named_views():
        assert torch.equal(view, parts.view(name)), name


def test_missing_folder_and_files(tmp_path, folder):
    fails(tmp_path / "nowhere", "no config.json")
    (folder / "model.safetensors").unlink()
    fails(folder, "no model.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    folder = random_checkpoint(tmp_path, "qwen3", shard="20KB", head_dim=16)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    fails(folder, shard.name)


@pytest.mark.parametrize("keep", [0, 6, 200, -1])
def test_a_file_cut_short(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(folder, "corrupt")


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text('{"model_type": "qw')
    fails(folder, "not valid JSON")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"sliding_window": 32, "use_sliding_window": True}, "sliding-window"),
        ({"intermediate_size": 81}, "config.json asks for"),
        ({"num_hidden_layers": 3}, "are missing"),
        ({"num_hidden_layers": 1}, "not part of"),
    ],
)
def test_config_that_does_not_fit(folder, changes, words):
    edit_config(folder, **changes)
    fails(folder, words)


def test_tensors_missing_or_unknown(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.extra.weight": torch.zeros(2)}))
    fails(folder, "extra.weight")
    edit_tensors(folder, lambda t: (t.pop("model.layers.0.self_attn.extra.weight"), t.pop("model.norm.weight")))
    fails(folder, "model.norm.weight")


EOS = st.one_of(st.none(), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3))


@given(config=EOS, generation=EOS, files=st.booleans())
def test_every_backend_ends_a_sequence_at_the_same_tokens(config, generation, files):
    """The engine, which imports nothing of the pipeline, reads them by the same rule as all others."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), {"eos_token_id": config}
        (folder / "config.json").write_text(json.dumps(data))
        if files:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        found = eos_ids(folder)
        assert tuple(found) == decoder_config._eos_ids(folder, data)
    named = [config, *([generation] if files else [])]
    flat = [i for value in named for i in (value if isinstance(value, list) else [] if value is None else [value])]
    assert found == list(dict.fromkeys(flat))
