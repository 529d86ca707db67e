"""The options of `flexroll grpo` and `flexroll grpo-questions`; what they do is in flexroll.rl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flexroll.errors import FlexrollError


def grpo_questions(
    config: Annotated[Path, typer.Option("--config", help="The run's configuration (YAML).")],
    model: Annotated[Path, typer.Option("--model", help="model.json, as `flexroll model` writes it.")],
    out: Annotated[Path, typer.Option("--out", help="File to write: work/RUN/grpo/questions.json.")],
) -> None:
    """Prepare the questions and answers that GRPO trains on."""
    from flexroll.provenance import find_root
    from flexroll.rl.data import prepare_questions
    from flexroll.schema.load import load_config

    root = find_root()
    prepare_questions(load_config(config, root), model, out, root)


def grpo(
    out: Annotated[Path, typer.Option("--out", help="Record to write.")],
    config: Annotated[Path | None, typer.Option("--config", help="The run's configuration (YAML).")] = None,
    run_name: Annotated[str | None, typer.Option("--run-name", help="STACK-BACKEND-OPTION-...-seedN.")] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder of what the run needs; work/RUN, or with --model OUT.work.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Without --config: the checkpoint folder.")] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="With --model: .json, .jsonl or .parquet with the questions.")
    ] = None,
    field: Annotated[str | None, typer.Option("--field", help="Key of the question; default: the usual ones.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="Key of the answer; default: the usual ones.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="What generates: flex, trl, vllm, ...")] = "flex",
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="exact, format, distinct, or your file.py:function.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 10,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    prompts_per_step: Annotated[int, typer.Option("--prompts-per-step", min=1)] = 4,
    num_generations: Annotated[int, typer.Option("--num-generations", min=2, help="Completions a prompt.")] = 4,
    max_completion_length: Annotated[int, typer.Option("--max-completion-length", min=1, help="Tokens.")] = 128,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = 1e-5,
    beta: Annotated[float, typer.Option("--beta", help="Weight of the KL to the base model; 0 is off.")] = 0.02,
    temperature: Annotated[float, typer.Option("--temperature")] = 1.0,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the LoRA that is trained.")] = 16,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option("--dtype", help="Default: bfloat16, float32 on a CPU.")
    ] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=0, help="Steps from checkpoint to checkpoint.")] = 10,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Also when the run has ended well.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Leave aside what an earlier run left; begin at step 1.")
    ] = False,
) -> None:
    """Train a LoRA with TRL's GRPO on a rollout backend. A run that was stopped goes on from its last checkpoint.

    Of a pipeline: --config and --run-name. Of your own: --model and --questions.
    """
    from flexroll.launch import require_stack, running_stack
    from flexroll.provenance import find_root
    from flexroll.rl.run import adapter_folder, find_grpo_target
    from flexroll.rl.run import grpo as run

    root = find_root()
    if config is not None:
        from flexroll.schema.load import load_config

        if model is not None or questions is not None or run_name is None:
            raise FlexrollError("grpo: give --config and --run-name, or --model and --questions")
        loaded = load_config(config, root)
        work = work or root / "work" / loaded.run
    else:
        from flexroll.rl.own import own_config, prepare_own

        if model is None or questions is None:
            raise FlexrollError("grpo: give --model and --questions, or --config and --run-name")
        stack = running_stack()
        if stack is None:
            raise FlexrollError("grpo needs a stack's interpreter; run `flexroll --stack STACK grpo ...`")
        work = work or out.with_name(out.name + ".work")
        values: dict[str, Any] = {
            "steps": steps,
            "seeds": [seed],
            "prompts_per_step": prompts_per_step,
            "num_generations": num_generations,
            "max_completion_length": max_completion_length,
            "learning_rate": learning_rate,
            "beta": beta,
            "save_every": save_every,
        }
        loaded = own_config(stack, backend, model, questions, field, answer, reward, values, temperature, rank, dtype)
        loaded = prepare_own(loaded, work, root)
        run_name = f"{stack}-{backend}-default-seed{seed}"
    target = find_grpo_target(loaded, run_name)
    require_stack(target.stack, "grpo")
    record = run(
        loaded,
        run_name,
        work=work,
        out=out,
        root=root,
        stack=target.stack,
        rewards=reward or None,
        keep_checkpoints=keep_checkpoints,
        resume=not anew,
        log=None if config is not None else work / "grpo.log",
    )
    if config is None:
        print(f"{record.status}: {out}" + (f"; adapter: {adapter_folder(work, target)}" * (record.status == "ok")))
        raise typer.Exit(0 if record.status == "ok" else 1)
