"""One description for every supported decoder: Qwen3, Qwen2/2.5 and Llama-type checkpoints (Llama, SmolLM, Mistral).

What tells the families apart is data here (QK-norm, biases, tied head, rope scaling), read from `config.json`; there is
no module per family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

SUPPORTED = ("qwen3", "qwen2", "llama", "mistral")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters. kind: default | linear | llama3 | yarn; extra holds that kind's own numbers."""

    theta: float
    kind: str
    extra: dict[str, Any]


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a decoder with RMSNorm, RoPE, grouped-query attention and a SwiGLU MLP."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    qk_norm: bool
    tied_head: bool
    eos_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one token over all layers (Qwen3-4B in bf16: 147,456)."""
        return 2 * self.n_layers * self.kv_size * element_size


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read `config.json` (and EOS ids from `generation_config.json`) of a checkpoint folder.

    Reads both spellings of the rope settings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`.

    Raises:
        FlexrollError: no config, not JSON, or an architecture this decoder does not compute.
    """
    data = _read_json(folder / "config.json")
    model_type = data.get("model_type")
    if model_type not in SUPPORTED:
        raise FlexrollError(
            f"{folder}: model_type '{model_type}' is not supported; the flex engine runs {', '.join(SUPPORTED)}"
        )
    try:
        heads = int(data["num_attention_heads"])
        config = DecoderConfig(
            model_type=model_type,
            vocab_size=int(data["vocab_size"]),
            hidden_size=int(data["hidden_size"]),
            intermediate_size=int(data["intermediate_size"]),
            n_layers=int(data["num_hidden_layers"]),
            n_heads=heads,
            n_kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or int(data["hidden_size"]) // heads),
            rms_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(data, folder),
            qk_norm=model_type == "qwen3",
            tied_head=bool(data.get("tie_word_embeddings", False)),
            eos_ids=_eos_ids(folder, data),
        )
    except KeyError as error:
        raise FlexrollError(f"{folder}/config.json has no {error.args[0]!r}") from None
    if data.get("hidden_act", "silu") != "silu":
        raise FlexrollError(
            f"{folder}: hidden_act '{data['hidden_act']}' is not supported; the flex engine computes silu"
        )
    if config.n_heads % config.n_kv_heads:
        raise FlexrollError(f"{folder}: {config.n_heads} query heads cannot share {config.n_kv_heads} KV heads")
    _check_window(data, folder)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise FlexrollError(f"{path.parent}: not a checkpoint folder (no {path.name})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FlexrollError(f"{path}: not valid JSON ({error}); fetch the checkpoint again") from None


def _read_rope(data: dict[str, Any], folder: Path) -> Rope:
    scaling = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or data.get("rope_theta") or 10000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise FlexrollError(f"{folder}: rope scaling '{kind}' is not supported (default, linear, llama3, yarn are)")
    if float(scaling.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise FlexrollError(f"{folder}: partial rotary embeddings are not supported")
    scaling.setdefault("original_max_position_embeddings", data.get("max_position_embeddings"))
    return Rope(theta, kind, scaling)


def _eos_ids(folder: Path, data: dict[str, Any]) -> tuple[int, ...]:
    """EOS ids of both config files: base and chat variants of one family disagree, and either may be generated."""
    ids: list[int] = []
    for source in (
        data,
        _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {},
    ):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(i) for i in ids))


def _check_window(data: dict[str, Any], folder: Path) -> None:
    """Sliding windows shorter than the context would need another mask; refuse them instead of computing wrongly."""
    window = data.get("sliding_window")
    uses = data.get("use_sliding_window", data.get("model_type") == "mistral")
    layers = data.get("layer_types") or []
    if window and (uses or "sliding_attention" in layers) and window < data.get("max_position_embeddings", 0):
        raise FlexrollError(f"{folder}: sliding-window attention ({window} tokens) is not supported")
