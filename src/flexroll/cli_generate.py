"""The options of `flexroll generate`; what it does is in generate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flexroll.errors import FlexrollError


def generate(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; - is all of stdin as one.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Prompts: a .jsonl, or text with one a line.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out.")] = False,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="LoRA folder (PEFT), merged in memory.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples a prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Write each token's log-probabilities.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    max_batch: Annotated[int | None, typer.Option("--max-batch", min=1, help="Sequences at once, at most.")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=2, help="Tokens of a sequence.")] = None,
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", min=1, help="Tokens the KV pool holds.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option("--dtype")] = "bfloat16",
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu; default: what is there.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Neither compile nor capture graphs.")] = False,
) -> None:
    """Continue prompts: one JSON object a completion, on stdout or in --out."""
    from flexroll.generate import Request, check_out, read_prompts
    from flexroll.generate import generate as run

    prompts = read_prompts(prompt or [], file)
    check_out(out, force)
    run(
        Request(
            model=model,
            prompts=prompts,
            raw=raw,
            engine={"adapter": adapter, "kv_tokens": kv_tokens, "dtype": _dtype(dtype), "device": device}
            | ({"compiled": False, "cuda_graphs": False} if eager else {}),
            sampling={"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
            | {"top_p": top_p, "min_p": min_p, "seed": seed, "ignore_eos": ignore_eos, "logprobs": logprobs},
            max_batch=max_batch,
            max_model_len=max_model_len,
        ),
        out,
    )


def _dtype(name: str) -> Any:
    try:
        import torch
    except ImportError:
        raise FlexrollError("generate needs torch; run `flexroll --stack STACK generate ...`") from None
    return getattr(torch, name)
