"""Small checkpoints and reference outputs shared by the engine's tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

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


def reference_model(folder: Path) -> object:
    """transformers' model in fp32, to be loaded once for many references."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def reference_logprobs(
    model: object,
    prompt: list[int],
    tokens: list[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[list[float], list[float]]:
    """(raw, processed) log probabilities of `tokens` after `prompt`: log_softmax of transformers' logits, before and
    after its own warpers in its own order. Greedy (temperature 0) warps nothing."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    warped = logits
    if temperature > 0:
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        warpers += [MinPLogitsWarper(min_p)] if min_p else []
        for warper in warpers:
            warped = warper(None, warped)
    chosen = torch.tensor(tokens)[:, None]
    raw, processed = (x.log_softmax(-1).gather(1, chosen)[:, 0].tolist() for x in (logits, warped))
    return raw, processed


def attend_by_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: object,
    enable_gqa: bool,
    kernel_options: dict[str, object] | None,
) -> torch.Tensor:
    """What compiled flex_attention computes, in plain torch: a block that is listed as full is seen as a whole, one in
    the partial list as the mask function says, any other not at all. Far quicker than the eager function, which asks
    the mask function alone and says nothing about the lists.

    A block listed twice is an error, for a kernel would count its keys twice.
    """
    batch, _, n_queries, _ = q.shape
    rows, size = block_mask.BLOCK_SIZE
    b, h, m, n = (torch.arange(x, device=q.device) for x in (batch, 1, n_queries, k.shape[2]))
    place = (b[:, None, None, None], h[:, None, None], m[:, None], n)

    def listed(count: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        used = torch.arange(pages.shape[-1], device=q.device) < count[..., None]
        times = torch.zeros_like(pages, dtype=torch.int64).scatter_add_(-1, pages.long(), used.long())
        return times[:, :, m // rows][..., n // size]

    times = partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    mask = (partial > 0) & block_mask.mask_mod(*place)
    if block_mask.full_kv_indices is not None:
        full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        times, mask = partial + full, mask | (full > 0)
    assert int(times.max()) <= 1, "a block is listed twice"
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)
    return torch.where(mask.any(dim=-1, keepdim=True), out, 0.0)


def gsm_prompts(folder: Path, count: int) -> list[list[int]]:
    """The first held-out questions as token ids, in the checkpoint's chat format."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    questions = json.loads((folder / "gsm_test.json").read_text())[:count]
    return [tokenizer.encode(f"<|im_start|>user\n{q['q']}<|im_end|>\n<|im_start|>assistant\n").ids for q in questions]
