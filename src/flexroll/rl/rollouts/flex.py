"""The flex engine as a rollout backend; how it generates inside a trainer is flexroll.rl.generation's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexroll.rl.rollouts.base import Rollout, Rows, engine_spec

if TYPE_CHECKING:
    from flexroll.engine.engine import Engine
    from flexroll.rl.generation import FlexGeneration
    from flexroll.rl.spec import GrpoSpec

# Of the arguments of Engine.from_pretrained: what is the trainer's here.
TRAINERS = ("adapter", "adapter_mode", "dtype", "device")


class FlexRollout(Rollout):
    """Options are those of the flex engine; target.pool says whether the KV pool is kept between rollouts."""

    hook = True
    generation: FlexGeneration | None = None

    @classmethod
    def unavailable(cls, spec: GrpoSpec) -> str | None:
        option = spec.option
        if option.get("four_bit"):
            return "four_bit: a trainer's base in NF4 has nothing to merge into; the flex engine needs a dense one"
        if option.get("load_format") == "dummy":
            return "load_format dummy: the engine's weights are the trainer's, which are read from files"
        if option.get("replay"):
            return "replay: autotuned options belong to benchmark cells; name them as decode_kernel_options"
        from flexroll.backends.flex import FlexBackend

        return FlexBackend.unavailable(engine_spec(spec))

    @property
    def engine(self) -> Engine:
        return self.generation.engine

    def attach(self, trainer: Any) -> None:
        from flexroll.backends.flex import engine_arguments
        from flexroll.rl.generation import FlexGeneration

        super().attach(trainer)
        options = engine_arguments(engine_spec(self.spec))
        for name in TRAINERS:
            del options[name]
        self.generation = FlexGeneration(trainer, self.spec.model, pool=self.spec.target.pool, **options)

    def sync_weights(self) -> None:
        self.generation.sync_weights()

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Rows:
        """See FlexGeneration.generate, which survives one shortage of memory."""
        return self.generation.generate(prompts, images, num_generations, profiler)

    def take_faults(self) -> list[str]:
        faults, self.generation.faults = self.generation.faults, []
        return faults

    def memory(self) -> dict[str, int | None]:
        return {"weights": self.generation.weights_bytes, "kv_reserved": self.generation.kv_bytes}

    def close(self) -> None:
        if self.generation is not None:
            self.generation.close()
