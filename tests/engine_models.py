"""Small checkpoints and reference outputs shared by the engine's tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def random_checkpoint(
    folder: Path, model_type: str, shard: str = "10GB", rope: str | None = None, **changes: object
) -> Path:
    """Save a random model of a family as transformers saves it: large weights, so that attention matters."""
    settings = {**SHAPE, **changes}
    if rope is not None:
        scaling = dict(ROPES[rope])
        settings["rope_scaling"] = scaling
        settings["rope_parameters"] = {**scaling, "rope_theta": 10000.0}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def reference_greedy(
    folder: Path, prompts: list[list[int]], new_tokens: int, eos: int | None = None, model: object | None = None
) -> list[list[int]]:
    """transformers' own greedy continuation in fp32, one prompt at a time, so that no padding can play a part."""
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = eos, 0
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
            )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def gsm_prompts(folder: Path, count: int) -> list[list[int]]:
    """The first held-out questions as token ids, in the checkpoint's chat format."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    questions = json.loads((folder / "gsm_test.json").read_text())[:count]
    return [tokenizer.encode(f"<|im_start|>user\n{q['q']}<|im_end|>\n<|im_start|>assistant\n").ids for q in questions]
