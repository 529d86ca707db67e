"""What a checkpoint of a config.json holds: names and shapes of its tensors, and the bytes of K and V a token takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a checkpoint with this config. Raises FlexrollError for an unknown family."""
    family = config["model_type"]
    if family not in FAMILIES:
        raise FlexrollError(f"random weights: model_type '{family}' is not known; known: {', '.join(FAMILIES)}")
    try:
        hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    except KeyError as error:
        raise FlexrollError(f"random weights: config.json lacks {error.args[0]}") from None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = config.get("attention_bias", family == "qwen2")
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows * head_dim, hidden)
            if qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (rows * head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head_dim)
        if qkv_bias and family != "qwen2":
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        if family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)


def parameters(config: dict[str, Any]) -> int:
    """Number of parameters of a checkpoint with this config, a tied head counted once."""
    return sum(prod(shape) for _, shape in tensors(config))


def kv_token_bytes(config: dict[str, Any], dtype: str) -> int:
    """Bytes of K and V that one token takes over all layers."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * DTYPE_BYTES[dtype]


def read_shape(path: Path) -> dict[str, Any] | None:
    """The config.json of that folder, or of that name; None where it is not there or no known decoder's."""
    try:
        shape = json.loads((path if path.is_file() else path / "config.json").read_text())
        parameters(shape), kv_token_bytes(shape, "bfloat16")
        return shape
    except (OSError, ValueError, KeyError, TypeError, FlexrollError):
        return None


def weights_read(shape: dict[str, Any], dtype: str, held: int) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that is not the head as well, or what the
    engine holds where that is less, as with 4-bit weights. held: bytes of weights that the engine says it has."""
    count = parameters(shape)
    if not shape.get("tie_word_embeddings", False):
        count -= shape["vocab_size"] * shape["hidden_size"]
    return min(held, count * DTYPE_BYTES[dtype])


def eos_ids(folder: Path) -> list[int]:
    """Token ids that end a sequence: those of config.json and generation_config.json together, [] where neither names
    one. Base and chat variants of a family disagree, and either may be generated; every backend stops at the same."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        try:
            value = json.loads((folder / name).read_text()).get("eos_token_id")
        except FileNotFoundError:
            continue
        except ValueError:
            raise FlexrollError(f"{folder / name}: not valid JSON; restore the checkpoint") from None
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return list(dict.fromkeys(int(i) for i in ids))
