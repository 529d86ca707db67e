"""From the task of a training process to TRL's trainer with the rollout backend inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexroll.errors import FlexrollError
from flexroll.rl.clock import Clock
from flexroll.rl.rollouts import load, make_ready, unavailable
from flexroll.rl.spec import GrpoSpec

if TYPE_CHECKING:
    from flexroll.rl.rollout_trainer import RolloutTrainer


def build_trainer(
    spec: GrpoSpec,
    clock: Clock,
    rewards: Sequence[Callable[..., list[float]]],
    dataset: Any,
    callbacks: Sequence[Any] = (),
) -> RolloutTrainer:
    """TRL's trainer, ready for `train(resume_from_checkpoint=...)`; the engine of the rollout backend stands too.

    rewards: functions of TRL's signature, whose names are in the logs. dataset: a datasets.Dataset, or its rows, with
    `prompt` (chat messages, or text) and whatever the rewards read. What a run reads off the result:
    `trainer.rollout` (memory(), base_hash(), take_faults(), child_pids(), close()) and `trainer.notes`, what was
    adjusted, in words. Checkpoints go to spec.folder.

    Raises:
        FlexrollError: the backend cannot run here, a name in grpo.trainer that TRL does not know, too few questions, a
            checkpoint or tokenizer that is missing.
    """
    if (problem := unavailable(spec)) is not None:
        raise FlexrollError(problem)
    make_ready(spec)
    rollout = load(spec.target.backend)(spec)
    model, peft_config = rollout.load_model()
    from datasets import Dataset
    from transformers import PrinterCallback

    from flexroll.rl.rollout_trainer import RolloutTrainer

    if not isinstance(dataset, Dataset):
        dataset = Dataset.from_list(list(dataset))
    if len(dataset) < spec.grpo.prompts_per_step:
        raise FlexrollError(
            f"{len(dataset)} questions are fewer than the {spec.grpo.prompts_per_step} of one step "
            "(grpo.prompts_per_step); give more, or lower it"
        )
    arguments, notes = trainer_arguments(spec, rollout.arguments())
    trainer = RolloutTrainer(
        model=model,
        reward_funcs=list(rewards),
        args=grpo_config(arguments),
        train_dataset=dataset,
        processing_class=load_tokenizer(spec.model),
        callbacks=list(callbacks),
        peft_config=peft_config,
        rollout=rollout,
        clock=clock,
    )
    trainer.remove_callback(PrinterCallback)  # it prints what the statistics tell
    trainer.notes = notes + rollout.notes
    return trainer


def trainer_arguments(spec: GrpoSpec, own: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(arguments of TRL's GRPOConfig, notes). Alike for all backends but for `own`, what the backend adds.

    An optimiser step takes one rollout, in passes of per_device_train_batch_size sequences. The learning rate is
    constant unless grpo.trainer says otherwise, for a schedule over max_steps would make runs of other lengths differ
    from the first step on.
    """
    grpo, sampling = spec.grpo, spec.sampling
    batch, notes = pass_size(grpo.prompts_per_step * grpo.num_generations, grpo.per_device_train_batch_size)
    passes = grpo.prompts_per_step * grpo.num_generations // batch
    arguments = {
        "output_dir": str(spec.folder),
        "max_steps": spec.target.steps,
        "seed": spec.seed,
        "learning_rate": grpo.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": grpo.beta,
        "reward_weights": grpo.reward_weights,
        "num_generations": grpo.num_generations,
        "max_completion_length": grpo.max_completion_length,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": passes,
        "steps_per_generation": passes,
        "gradient_checkpointing": grpo.gradient_checkpointing,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 is off there too
        "min_p": sampling.min_p or None,
        "vllm_importance_sampling_correction": grpo.importance_sampling,
        "bf16": spec.dtype == "bfloat16",
        "use_cpu": spec.device == "cpu",
        "dataloader_pin_memory": spec.device != "cpu",
        "disable_dropout": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": grpo.save_every or spec.target.steps,
        "save_total_limit": 2,  # should the last one be cut short, the one before it stands
    }
    return arguments | own | grpo.trainer, notes


def pass_size(completions: int, wanted: int) -> tuple[int, list[str]]:
    """(sequences of a forward and backward pass, notes): the most up to `wanted` that divide a step's completions."""
    size = max(n for n in range(1, min(wanted, completions) + 1) if completions % n == 0)
    if size == wanted:
        return size, []
    return size, [
        f"per_device_train_batch_size {wanted} does not divide the {completions} completions of a step "
        f"(prompts_per_step * num_generations); {size} was used"
    ]


def grpo_config(arguments: dict[str, Any]) -> Any:
    """TRL's GRPOConfig.

    Raises:
        FlexrollError: a name it does not know, with the nearest one that it does; a value it refuses.
    """
    from trl import GRPOConfig

    known = [field.name for field in fields(GRPOConfig) if field.init]
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise FlexrollError(f"grpo.trainer: TRL's GRPOConfig has no '{name}'{hint}")
    try:
        return GRPOConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise FlexrollError(f"grpo: TRL refuses these settings: {' '.join(str(error).split())}") from None


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, padding and cutting on the left as TRL wants it.

    Raises:
        FlexrollError: it has none.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise FlexrollError(f"{folder} has no tokenizer; take the model folder that the questions' file names")
    return AutoTokenizer.from_pretrained(folder, padding_side="left", truncation_side="left", local_files_only=True)
