"""TRL's GRPOTrainer with a rollout backend and a clock; imports TRL, so that it is imported late."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, selective_log_softmax_and_entropy

from flexroll.rl.clock import Clock
from flexroll.rl.rollouts.base import Rollout, rollout_seed


class EpochSampler(RepeatSampler):
    """TRL's sampler, whose order follows from seed and epoch, so that a run resumed in a later epoch repeats.

    TRL's draws each epoch's order from where the last one left its generator, and a new process begins with the first.
    """

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + getattr(self, "_epoch", 0))
        return super().__iter__()


class RolloutTrainer(GRPOTrainer):
    """GRPOTrainer whose completions come from `rollout` and whose seconds go to `clock`.

    Parts of the clock: rollout, all of generating; refresh within it, `sync_weights`; reward, the reward functions;
    loss, every forward pass for log probabilities (old and reference policy too), loss and backward; optimizer, its
    step. Torch's generators are set from (seed, step) around each rollout: what an engine draws from them depends on
    nothing before, and the order in which a step's completions are trained on is the same for all backends.
    """

    def __init__(self, *args: Any, rollout: Rollout, clock: Clock, **kwargs: Any) -> None:
        self.rollout, self.clock = rollout, clock
        self._until_step_end = contextlib.ExitStack()
        with rollout.building():
            super().__init__(*args, **kwargs)
        rollout.attach(self)
        if rollout.hook:
            self.use_vllm, self._last_loaded_step, self.vllm_generation = True, -1, rollout
        engine = getattr(self, "vllm_generation", None)  # Unsloth's trainer keeps its vLLM elsewhere
        if engine is not None:
            self.vllm_generation = _Timed(engine, clock)

    def _send_telemetry(self) -> None:
        """Nothing is told to the hub."""

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        own = super()._get_train_sampler(dataset)
        return EpochSampler(
            own.data_source, own.mini_repeat_count, own.batch_size, own.repeat_count, own.shuffle, own.seed
        )

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        seed = rollout_seed(self.args.seed, self.state.global_step)
        torch.manual_seed(seed)
        with self.clock.part("rollout"), self.rollout.running():
            made = super()._generate_single_turn(*args, **kwargs)
        torch.manual_seed(seed)
        return made

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.clock.part("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        of = super()._get_per_token_logps_and_entropies
        if input_ids.device.type == "cpu":  # TRL's are Triton kernels, which a CPU does not run
            of = self._plain_logps_and_entropies
        with self.clock.part("loss"):
            return of(model, input_ids, *arguments, **named)

    def _plain_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Log probabilities and entropies fp32 [rows, logits_to_keep] at the sampling temperature, from full logits.
        Text models without experts only."""
        found = []
        parts = (tensor.split(batch_size or len(input_ids)) for tensor in (input_ids, attention_mask))
        for ids, mask in zip(*parts, strict=True):
            with self.accelerator.autocast():
                logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits[:, :-1]
            found.append(
                selective_log_softmax_and_entropy(
                    logits.float(), ids[:, -logits_to_keep:], temperature=self.temperature
                )
            )
        logps, entropies = (torch.cat(part) for part in zip(*found, strict=True))
        return logps, entropies, None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._until_step_end:
            return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Until the step's end, for the backward pass follows at once.
        self._until_step_end.enter_context(self.clock.part("loss"))
        return super().compute_loss(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if new:
            stack = contextlib.ExitStack()
            optimizer.register_step_pre_hook(lambda *_: stack.enter_context(self.clock.part("optimizer")) and None)
            optimizer.register_step_post_hook(lambda *_: stack.close())
        return optimizer


class _Timed:
    """An engine as TRL calls it, its refresh on the clock; all else is the engine's own."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sync_weights(self) -> None:
        with self._clock.part("refresh"):
            self._engine.sync_weights()
