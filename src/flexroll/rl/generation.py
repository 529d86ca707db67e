"""The flex engine inside TRL's GRPOTrainer: yours, or that of flexroll.rl.trainer.

    trainer = GRPOTrainer(model=model, ..., peft_config=LoraConfig(...))
    use_flex(trainer, "path/to/checkpoint", max_model_len=2048)
    trainer.train()

The trainer's frozen base is the pristine copy of the engine's double copy, its live LoRA layers the adapter. A refresh
merges them afresh into the copy that generates, and nothing writes the base: two copies of the weights, never three.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from flexroll.engine.engine import Engine
from flexroll.engine.requests import Completion
from flexroll.engine.sampling import SamplingParams
from flexroll.errors import FlexrollError, one_line
from flexroll.rl.rollouts.base import Rows, grouped, held_bytes, rollout_seed
from flexroll.rl.trainer_weights import double_copy


def use_flex(trainer: Any, folder: str | Path, **options: Any) -> FlexGeneration:
    """Let a complete TRL GRPOTrainer (TRL 1.15, with a LoRA peft_config, without use_vllm) generate with the engine.

    TRL's own log probabilities are Triton kernels, so that a plain GRPOTrainer trains on a GPU only; the trainer of
    flexroll.rl.trainer trains on a CPU too.

    TRL then corrects for the difference between the engine's and its own probabilities, as it does for vLLM
    (`vllm_importance_sampling_correction`). folder: the checkpoint that the model was loaded from. options: see
    FlexGeneration. Returns what generates, also at `trainer.vllm_generation`.

    Raises:
        FlexrollError: the trainer already uses vLLM, and see FlexGeneration.
    """
    if trainer.use_vllm:
        raise FlexrollError("this trainer uses vLLM; make it without use_vllm")
    generation = FlexGeneration(trainer, folder, **options)
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, generation
    return generation


class FlexGeneration:
    """What TRL calls: `sync_weights` before the first rollout of a step, `generate` for each.

    Prompts, sampling, stop tokens and lengths are the trainer's. The noise of a rollout follows from the trainer's seed
    and step, so that a run that was resumed repeats. Samples of one prompt share its pages.

    Args:
        trainer: TRL's GRPOTrainer with a plain LoRA adapter.
        folder: checkpoint that its model was loaded from.
        pool: kept, or released: KV pool and graphs are made for each rollout anew, and given to the trainer between.
        max_batch: sequences at once; default all completions of a rollout.
        options: of Engine.

    Raises:
        FlexrollError: a model or adapter that the engine does not serve, or a setting of the trainer that it lacks.
    """

    def __init__(
        self, trainer: Any, folder: str | Path, *, pool: str = "kept", max_batch: int | None = None, **options: Any
    ) -> None:
        _check(trainer, pool)
        self.trainer, self.pool = trainer, pool
        self.running_at_once = max_batch or trainer.args.generation_batch_size
        self.kv_tokens: int | None = options.pop("kv_tokens", None)
        self.faults: list[str] = []
        self.copy = double_copy(trainer.model, Path(folder))
        self.engine = Engine(
            self.copy.weights,
            merged=self.copy,
            max_batch=self.running_at_once,
            kv_tokens=self.kv_tokens,
            **options,
        )
        self.kv_bytes = self.engine.cache.n_bytes
        if pool == "released":
            self.engine.release()

    @property
    def weights_bytes(self) -> int:
        """Of the trainer's model and the engine together, what they share counted once."""
        return held_bytes(self.trainer.model.parameters(), self.copy.weights.tensors.values())

    def sync_weights(self) -> None:
        """Merge the trainer's present adapter afresh."""
        self.engine.refresh()

    def generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> Rows:
        """See rollouts.base.Rollout.generate. Where memory runs out, once more with half as many sequences at once: the
        noise depends on seed, prompt, sample and position alone, so that the tokens are the same but for rounding.

        Raises:
            FlexrollError: memory runs out again, or a prompt leaves no room for a completion.
        """
        if images is not None:
            raise FlexrollError("the flex engine serves text models; these prompts hold images")
        try:
            completions = self._run(prompts)
        except torch.OutOfMemoryError as error:
            problem = one_line(error, 120)
        else:
            return _rows(prompts, completions)
        # Outside the handler, whose traceback holds what the failed rollout had taken.
        self._halve(problem)
        try:
            completions = self._run(prompts)
        except torch.OutOfMemoryError as error:
            raise FlexrollError(
                f"the rollout ran out of memory again with {self.running_at_once} sequences at once "
                f"({one_line(error, 120)}); lower the completions of a step, their length or kv_tokens"
            ) from None
        return _rows(prompts, completions)

    def _run(self, prompts: list[list[int]]) -> list[Completion]:
        trainer, engine, groups = self.trainer, self.engine, grouped(prompts)
        new_tokens = trainer.max_completion_length
        longest = max(len(prompt) for prompt, _ in groups)
        if longest + new_tokens > engine.max_model_len:
            raise FlexrollError(
                f"a prompt of {longest} tokens and {new_tokens} of max_completion_length exceed max_model_len "
                f"{engine.max_model_len}; raise it"
            )
        if engine.released:
            engine.resize(self.running_at_once, self.kv_tokens)
        params = [
            SamplingParams(
                n=times,
                max_new_tokens=new_tokens,
                temperature=trainer.temperature,
                top_k=trainer.top_k or 0,
                top_p=trainer.top_p,
                min_p=trainer.min_p or 0.0,
                seed=rollout_seed(trainer.args.seed, trainer.state.global_step),
                stop_token_ids=tuple(trainer.eos_token_ids),
                logprobs=True,
            )
            for _, times in groups
        ]
        completions = engine.generate([prompt for prompt, _ in groups], params)
        self.kv_bytes = engine.cache.n_bytes
        if self.pool == "released":
            engine.release()
        return completions

    def _halve(self, problem: str) -> None:
        """Give the pool back; the next one has room for half the sequences."""
        before = self.running_at_once
        if before == 1:
            raise FlexrollError(f"the rollout of one sequence at a time ran out of memory ({problem}); use another GPU")
        self.engine.release()
        gc.collect()
        self.running_at_once = before // 2
        if self.kv_tokens is not None:
            self.kv_tokens = max(self.kv_tokens // 2, self.engine.max_model_len)
        self.faults.append(
            f"out of memory in a rollout of {before} sequences at once ({problem}); repeated with "
            f"{self.running_at_once}, which stays"
        )

    def close(self) -> None:
        """Give the KV pool back; safe to call twice."""
        self.engine.release()


def _check(trainer: Any, pool: str) -> None:
    if pool not in ("kept", "released"):
        raise FlexrollError(f"unknown pool '{pool}'; choose kept or released")
    if trainer.accelerator.num_processes > 1:
        raise FlexrollError("the flex engine trains in one process; start the trainer without a distributed launcher")
    if trainer.repetition_penalty != 1.0 or trainer.args.generation_kwargs:
        raise FlexrollError("the flex engine has no repetition_penalty and takes no generation_kwargs; leave them out")


def _rows(prompts: list[list[int]], completions: list[Completion]) -> Rows:
    logprobs = [[[value] for value in c.logprobs or []] for c in completions]
    return prompts, [list(c.token_ids) for c in completions], logprobs, None
