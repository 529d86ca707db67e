"""4-bit options in the config, and the rule that writes the shard: no torch, nothing is quantised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("snakemake")

import yaml

from flexroll.backends.base import Backend, EngineSpec, unavailable
from flexroll.bench.quantise import dense_modules
from flexroll.errors import FlexrollError
from flexroll.schema.load import parse_config
from tree_copy import copy_tree

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def config(use: dict[str, Any], option: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "run": "x",
        "model": {"name": "m", "path": "models/m"},
        "prompts": {"source": "random", "count": 8},
        "drift": {"stacks": []},
        "options": {"four": option},
        "experiments": {
            "one": {
                "title": "t",
                "section": "four_bit",
                "batches": [2],
                "new_tokens": 8,
                "stacks": ["torch2.11"],
                "backends": [{"options": ["four"], **use}],
            }
        },
        **changes,
    }


@pytest.mark.parametrize("backend", ["flex", "transformers_generate", "transformers_cb"])
@pytest.mark.parametrize("kind", ["on_the_fly", "shard"])
def test_nothing_merges_into_four_bits(backend: str, kind: str) -> None:
    option = {backend: {"four_bit": kind}}
    parse_config(config({"backend": backend, "adapters": ["none", "unmerged"]}, option), "c.yaml")
    with pytest.raises(FlexrollError, match=r"experiments.one: nothing merges into 4-bit weights \(option 'four'\)"):
        parse_config(config({"backend": backend, "adapters": ["none", "merged"]}, option), "c.yaml")


def test_merged_is_refused_for_the_backend_that_is_four_bit_alone() -> None:
    given = config({"backend": "transformers_generate", "adapters": ["merged"]}, {"flex": {"four_bit": "shard"}})
    assert parse_config(given, "c.yaml").option("four").flex.four_bit == "shard"


def test_no_shard_of_drawn_weights() -> None:
    drawn = {"name": "m", "path": "models/m", "source": "random", "weights": "drawn"}
    use = {"backend": "flex"}
    parse_config(config(use, {"flex": {"four_bit": "on_the_fly"}}, model=drawn), "c.yaml")
    with pytest.raises(FlexrollError, match="reads a shard, and weights are drawn; set four_bit: on_the_fly"):
        parse_config(config(use, {"flex": {"four_bit": "shard"}}, model=drawn), "c.yaml")
    with pytest.raises(FlexrollError, match="reads a shard, and weights are drawn"):
        parse_config(config(use, {"flex": {"four_bit": "shard", "load_format": "dummy"}}), "c.yaml")


def test_what_stays_dense() -> None:
    assert dense_modules(SHAPE, []) == dense_modules(SHAPE, ["lm_head"]) == ["lm_head"]
    assert dense_modules(SHAPE, ["layers.1.mlp"]) == [
        "lm_head",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert len(dense_modules(SHAPE, ["layers.1", "k_proj"])) == 1 + 7 + 11
    with pytest.raises(FlexrollError, match=r"no module of the model has 'model.layers.12' in its name"):
        dense_modules(SHAPE, ["model.layers.12"])


def test_without_the_library_a_cell_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EngineSpec(Path("m"), "none", None, None, "bfloat16", "cpu", 1, 16, 0, option={"four_bit": "shard"})
    plain = EngineSpec(Path("m"), "none", None, None, "bfloat16", "cpu", 1, 16, 0)
    for there in (True, False):
        monkeypatch.setattr("flexroll.backends.base.find_spec", lambda name, there=there: there or None)
        assert (unavailable(Backend, spec) is None) == there
        assert unavailable(Backend, plain) is None


@pytest.mark.parametrize(("option", "wanted"), [("four_bit", False), ("four_bit_shard", True)])
def test_shard_is_made_only_where_it_is_read(root: Path, tmp_path: Path, option: str, wanted: bool) -> None:
    given = yaml.safe_load((root / "workflow/presets/smoke.yaml").read_text())
    given["options"] = {
        "four_bit": {"flex": {"four_bit": "on_the_fly"}},
        "four_bit_shard": {"flex": {"four_bit": "shard"}},
    }
    given["experiments"]["batch_sweep_greedy"]["backends"] = [{"backend": "flex", "options": [option]}]
    tree = copy_tree(root, tmp_path / "tree")
    (tree / "c.yaml").write_text(yaml.safe_dump(given))
    run = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--workflow-profile", "profiles/native", "--configfile", "c.yaml"],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    assert ("rule quantise:" in run.stdout + run.stderr) == wanted
