"""The options of `flexroll autotune` and `flexroll sweep`; what they do is in tune/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexroll.errors import FlexrollError


def autotune(
    config: Annotated[Path, typer.Option("--config", help="The run's configuration (YAML).")],
    work: Annotated[Path, typer.Option("--work", help="work/RUN: model.json.")],
    kind: Annotated[Literal["plain", "tma"], typer.Option("--kind", help="Without or with USE_TMA.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
) -> None:
    """Have Inductor tune a decode step's flex_attention and write the options it likes best."""
    from flexroll.launch import running_stack
    from flexroll.provenance import find_root
    from flexroll.schema.load import load_config
    from flexroll.tune.autotune import autotune as run

    root = find_root()
    stack = running_stack()
    if stack is None:
        raise FlexrollError("autotune runs in a stack: `flexroll --stack torch2.11 autotune ...`")
    run(load_config(config, root), stack=stack, kind=kind, work=work, out=out, root=root)


def sweep(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; one that was interrupted goes on.")],
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder.")] = None,
    kind: Annotated[
        Literal["prefill", "decode", "engine"],
        typer.Option("--kind", help="Kernel options of prefill or decode; engine: page size and prefill chunks."),
    ] = "decode",
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights for the folder's config.json.")] = False,
    stack: Annotated[str | None, typer.Option("--stack", help="Environment that measures; default: this one.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 64,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", min=2, help="Of each prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=1, help="Of each sequence.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of the final, each beside one of the default.")] = 15,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=1, help="Seconds of measuring, all runs together.")
    ] = 3600,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens a KV page.")] = 64,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option("--dtype")] = "bfloat16",
    only: Annotated[list[str] | None, typer.Option("--only", help="Part of the grid: num_warps=4,8.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and of the order.")] = 0,
    eager: Annotated[bool, typer.Option("--eager", help="flex_attention without torch.compile.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing: document and figure alone.")] = False,
    write_defaults: Annotated[
        bool, typer.Option("--write-defaults", help="A faster winner becomes the engine's default for this GPU.")
    ] = False,
) -> None:
    """Find the options that make rollouts fastest: a grid, by successive halving, scored by end-to-end tok/s."""
    from flexroll.tune import sweep as tune

    if not report:
        from flexroll.provenance import device_class, find_root

        if model is None:
            raise FlexrollError("sweep: name a checkpoint folder, --model FOLDER")
        request = tune.Request(
            model=model,
            kind=kind,
            out=out,
            dummy=dummy,
            batch=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            budget_s=budget_s,
            page_size=page_size,
            dtype=dtype,
            seed=seed,
            compiled=not eager,
            only=_axes(only or []),
        )
        if write_defaults:
            tune.check_default(kind, device_class(), page_size)
        tune.sweep(request, find_root(), stack)
    tune.report(out, write_defaults)


def _axes(given: list[str]) -> dict[str, list[str]]:
    axes = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise FlexrollError(f"--only {text}: say AXIS=VALUE,VALUE")
        axes[name] = values.split(",")
    return axes
