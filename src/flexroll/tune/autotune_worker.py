"""The process that has Inductor tune one decode call: `python -m flexroll.tune.autotune_worker TASK.json`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from flexroll.engine.attention import FlexAttention, check_kernel_options
from flexroll.engine.decoder_config import read_decoder_config
from flexroll.engine.kv_cache import KVCache
from flexroll.engine.masks import DecodeMask
from flexroll.engine.page_table import PageTable
from flexroll.tune.autotune import NO_LOG

MODE = "max-autotune-no-cudagraphs"


def main(arguments: list[str]) -> int:
    task = json.loads(Path(arguments[0]).read_text())
    if not logs_tuning():
        print(f"torch {torch.__version__} writes no log of flex_attention's tuning", flush=True)
        return NO_LOG
    options = {"FORCE_USE_FLEX_ATTENTION": True, **({"USE_TMA": True} if task["use_tma"] else {})}
    decode_call(task, MODE, check_kernel_options(options, "autotune", False))
    return 0


def logs_tuning() -> bool:
    """Whether this torch writes the log at all."""
    from torch._inductor import select_algorithm

    return hasattr(select_algorithm, "get_flex_attention_log_filename")


@torch.inference_mode()
def decode_call(task: dict[str, Any], mode: str, options: dict[str, Any]) -> torch.Tensor:
    """Attention of one decode step as the engine calls it, compiled in `mode`: its cache, its mask, its call.

    One layer stands for all, and no weights are there: neither has a part in the call's shape. Kernel options are
    those given and no defaults, which would leave nothing to tune. Returns [batch, heads * head_dim].
    """
    device = torch.device(task["device"])
    config = dataclasses.replace(read_decoder_config(Path(task["model"])), n_layers=1)
    batch, page_size = task["batch"], task["page_size"]
    max_blocks = -(-task["max_model_len"] // page_size)
    n_pages = batch * max_blocks if task["kv_tokens"] is None else task["kv_tokens"] // page_size
    cache = KVCache(config, PageTable(batch, n_pages, page_size, max_blocks), getattr(torch, task["dtype"]), device)
    slots, positions = torch.zeros(2, batch, dtype=torch.int64, device=device)
    mask = DecodeMask(cache, slots, positions, True)
    mask.fill()
    compiled = torch.compile(flex.flex_attention, mode=mode, dynamic=False, fullgraph=True)
    q = torch.zeros(batch, config.n_heads, config.head_dim, dtype=cache.pool.dtype, device=device)
    return FlexAttention(cache, compiled, True, options, {}).decode(0, q, mask)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
