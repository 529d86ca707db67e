"""`config.yaml` as strict pydantic models: what to measure, on which model, for how long.

An unknown key anywhere is an error. `schema.load` reads the file and puts what is wrong with it into one line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from flexroll.schema.base import Strict
from flexroll.schema.catalogue import BACKENDS, LORA_TARGETS
from flexroll.schema.grpo import Grpo
from flexroll.schema.lengths import Lengths, NewTokens, longest
from flexroll.schema.names import NAME, known
from flexroll.schema.options import Option
from flexroll.schema.sources import Model, Prompts

BackendName = Literal["flex", "transformers_generate", "transformers_cb", "vllm", "unsloth"]
AdapterMode = Literal["none", "merged", "unmerged", "request"]
Section = Literal[
    "batch_sweep",
    "grpo",
    "lora",
    "four_bit",
    "group",
    "uneven",
    "memory",
    "options",
    "broke",
    "tried",
    "torch_versions",
]


class Adapter(Strict):
    """The canonical LoRA adapter: made from a seed, so that every backend reads the same files.

    b_std: lora_B is drawn from N(0, b_std^2). PEFT's zeros would make the adapter a no-op, and 1e-4 all but vanishes in
    a bf16 merge (6-15 % of the weights change); 1e-2 survives it.
    """

    rank: int = Field(32, ge=1, le=512)
    alpha: int = Field(64, ge=1)
    targets: list[str] = Field(default_factory=lambda: list(LORA_TARGETS), min_length=1)
    b_std: float = Field(1e-2, gt=0)
    seed: int = 0

    @field_validator("targets")
    @classmethod
    def _known_targets(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in LORA_TARGETS:
                raise ValueError(f"unknown target '{name}'; choose from {', '.join(LORA_TARGETS)}")
        return value


class Sampling(Strict):
    """How the next token is chosen. temperature 0 is greedy and ignores the rest; top_k 0, top_p 1, min_p 0 are off."""

    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)


class BackendUse(Strict):
    """One line of an experiment: a backend in one or more forms.

    batches, stacks and sampling override the experiment's.
    """

    backend: BackendName
    adapters: list[AdapterMode] = Field(default_factory=lambda: ["none"], min_length=1)
    options: list[str] = Field(default_factory=lambda: ["default"], min_length=1)
    batches: list[PositiveInt] | None = None
    stacks: list[str] | None = None
    sampling: str | None = None

    @model_validator(mode="after")
    def _adapter_fits_backend(self) -> BackendUse:
        known = BACKENDS[self.backend].adapters
        for mode in self.adapters:
            if mode not in known:
                raise ValueError(f"backend '{self.backend}' has no adapter mode '{mode}'; it has {', '.join(known)}")
        return self


class Experiment(Strict):
    """A table of the results document: the product of batches, backends, options and stacks under one workload."""

    title: str
    section: Section
    batches: list[PositiveInt] = Field(min_length=1, description="Sequences of a round: prompts times samples.")
    new_tokens: NewTokens = Field(
        512,
        description="Tokens generated a sequence, or {min, max, seed}: a length a prompt. EOS is ignored unless "
        "ignore_eos is false.",
    )
    ignore_eos: bool = True
    samples: int = Field(1, ge=1, description="Sequences a prompt; every batch is a multiple of it.")
    slots: int | None = Field(None, ge=1, description="Sequences that run at once, the rest wait; default: the batch.")
    max_model_len: int | None = Field(None, ge=16, description="Overrides the run's max_model_len.")
    sampling: str = "greedy"
    baseline: str | None = Field(
        None,
        description="The option that gains are told over, in sections options and tried; default: `default`, else "
        "the first.",
    )
    vary_prompts: bool = Field(
        False, description="A round takes the next prompts of the list, round and round, instead of the same ones."
    )
    warmup_prompts: int | None = Field(
        None, ge=1, description="Prompts of the warm-up round; default: those of the batch."
    )
    rounds: int | None = Field(None, ge=1, description="Overrides repeats.rounds.")
    sessions: int | None = Field(None, ge=1, description="Overrides repeats.sessions: what breaks needs one.")
    stacks: list[str] = Field(min_length=1)
    backends: list[BackendUse] = Field(min_length=1)

    @model_validator(mode="after")
    def _workload_fits(self) -> Experiment:
        for batch in (b for use in self.backends for b in use.batches or self.batches):
            if batch % self.samples:
                raise ValueError(f"batch {batch} is not a multiple of samples {self.samples}")
        if isinstance(self.new_tokens, Lengths) and not self.ignore_eos:
            raise ValueError("new_tokens drawn from a range needs ignore_eos, or lengths would not be as drawn")
        return self


class Repeats(Strict):
    sessions: int = Field(1, ge=1, description="Fresh processes a configuration.")
    rounds: int = Field(5, ge=1, description="Measured rounds a cell and session.")
    warmup_rounds: int = Field(1, ge=0, description="Rounds before them, recorded but excluded from every statistic.")
    min_round_s: float = Field(
        0, ge=0, description="A measured round runs its batch again until it has taken this long."
    )
    fill_caches: bool = Field(
        True,
        description="A run of its own for each engine that compiles fills the compile caches before anything is "
        "measured; false: the first process compiles, in its warm-up round.",
    )

    @model_validator(mode="after")
    def _compiles_unmeasured(self) -> Repeats:
        if not (self.fill_caches or self.warmup_rounds):
            raise ValueError("fill_caches: false needs a warm-up round, for a measured one would compile")
        return self


class Limits(Strict):
    start_s: float = Field(900, gt=0, description="Engine start (load, compile, capture), seconds.")
    cell_s: float = Field(1800, gt=0, description="One cell, warm-up included, seconds.")


class Drift(Strict):
    """Refresh cycles of `flexroll drift`. noise_std: of the noise on A and B that stands in for an optimiser step.
    stacks: where it runs; [] leaves it out."""

    cycles: int = Field(10, ge=1)
    noise_std: float = Field(1e-3, gt=0)
    stacks: list[str]


class FourBitShard(Strict):
    """The NF4 checkpoint that `flexroll quantise` writes for options with `four_bit: shard`.

    skip: parts of module names that stay in the model's dtype, as pre-quantised checkpoints on the hub leave some.
    """

    skip: list[str] = Field(default_factory=lambda: ["lm_head"])


class Quality(Strict):
    """How exact each engine configuration is: teacher-forced log-probabilities against transformers in fp32.

    model, prompts: the run's own where left out. Random weights tell nothing about rounding, so that a run on them
    names a real checkpoint here. baseline: the option that others are held against, of the same backend, adapter and
    stack.
    """

    model: Model | None = None
    prompts: Prompts | None = None
    count: int = Field(32, ge=1, description="Prompts.")
    new_tokens: int = Field(64, ge=2, description="Tokens of the fp32 model's greedy continuation that are scored.")
    slots: int | None = Field(
        None,
        ge=1,
        description="Sequences that run at once; a measured batch's have their kernels already. Default: all.",
    )
    side_by_side: int = Field(
        1,
        ge=1,
        description="Scorings that may share a device: they measure no time. Its memory must hold as many engines.",
    )
    baseline: str = "default"
    limit: float = Field(1.1, gt=1, description="An option is admissible up to this multiple of the baseline's KL.")
    near_tie: float = Field(
        0.2, gt=0, description="A first divergence is a near-tie if fp32 holds both tokens this close, in nats."
    )


class Requires(Strict):
    """What the machine must have; preflight checks it before anything is downloaded or run."""

    gpu: str | None = Field(None, description="Part of the GPU's name, e.g. B200; 'any' for any CUDA GPU.")
    gpu_memory_gb: float = Field(0, ge=0)
    disk_gb: float = Field(0, ge=0)


class Config(Strict):
    run: str = Field(pattern=NAME, description="Results go to results/<run>/.")
    title: str = ""
    model: Model
    prompts: Prompts
    adapter: Adapter = Adapter()
    max_model_len: int = Field(2048, ge=16, description="Prompt and new tokens of one sequence, at most.")
    requires: Requires = Requires()
    repeats: Repeats = Repeats()
    limits: Limits = Limits()
    drift: Drift
    quality: Quality | None = Field(None, description="Left out: no configuration is scored.")
    four_bit: FourBitShard = FourBitShard()
    grpo: Grpo | None = Field(None, description="Left out: nothing is trained.")
    seed: int = 0
    samplings: dict[str, Sampling] = Field(default_factory=lambda: {"greedy": Sampling()})
    options_file: Path | None = Field(
        None, description="More named options, beside this file; those that no experiment names are left out."
    )
    options: dict[str, Option] = Field(default_factory=dict)
    defaults: Option = Field(Option(), description="What every option starts from, `default` too.")
    experiments: dict[str, Experiment] = Field(default_factory=dict)

    @field_validator("samplings", "options", "experiments")
    @classmethod
    def _file_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not re.match(NAME, name):
                raise ValueError(f"'{name}' cannot be part of a file name; use letters, digits, '_' and '.'")
        return value

    @model_validator(mode="after")
    def _references_exist(self) -> Config:
        for key, experiment in self.experiments.items():
            where = f"experiments.{key}"
            for use in experiment.backends:
                for name in use.options:
                    if name != "default":
                        known(name, self.options, "option", where)
                self._check_use(experiment, use, where)
            if experiment.baseline is not None:
                named = dict.fromkeys(name for use in experiment.backends for name in use.options)
                known(experiment.baseline, named, "option of the experiment", f"{where}.baseline")
            room, needed = self.length_of(experiment), longest(experiment.new_tokens)
            if self.prompts.source != "random" and needed >= room:
                raise ValueError(f"{where}: new_tokens {needed} leaves no room for a prompt in max_model_len {room}")
        if not self.experiments and self.grpo is None:
            raise ValueError("experiments: there is none, and no grpo either; a run needs something to do")
        self._check_quality()
        self._check_grpo()
        if self.model.weights == "drawn" and self.drift.stacks:
            raise ValueError("drift: there is no base to verify where weights are drawn; set drift.stacks: []")
        return self

    def _check_use(self, experiment: Experiment, use: BackendUse, where: str) -> None:
        sampling = use.sampling or experiment.sampling
        known(sampling, self.samplings, "sampling", where)
        if experiment.samples > 1 and self.samplings[sampling].temperature == 0:
            raise ValueError(f"{where}: {experiment.samples} samples of a prompt are all alike with '{sampling}'")
        if self.model.weights == "drawn" and not BACKENDS[use.backend].draws:
            raise ValueError(f"{where}: backend '{use.backend}' cannot draw weights; set model.weights: written")
        for name in use.options:
            self._check_four_bit(use, name, where)
        for batch in use.batches or experiment.batches:
            prompts = batch // experiment.samples
            if prompts > self.prompts.count:
                raise ValueError(f"{where}: batch {batch} needs prompts.count of at least {prompts}")

    def _check_quality(self) -> None:
        quality = self.quality
        if quality is None:
            return
        if quality.baseline != "default":
            known(quality.baseline, self.options, "option", "quality.baseline")
        if (quality.model or self.model).weights == "drawn":
            raise ValueError("quality: weights that each engine draws are no model to score; set quality.model")
        if (quality.prompts or self.prompts).source != "random" and quality.new_tokens >= self.max_model_len:
            raise ValueError(
                f"quality: new_tokens {quality.new_tokens} leaves no room for a prompt in max_model_len "
                f"{self.max_model_len}"
            )
        if quality.model is None and quality.prompts is None and quality.count > self.prompts.count:
            raise ValueError(f"quality: count {quality.count} needs prompts.count of at least as many")

    def _check_grpo(self) -> None:
        grpo = self.grpo
        if grpo is None:
            return
        known(grpo.sampling, self.samplings, "sampling", "grpo")
        if self.samplings[grpo.sampling].temperature == 0:
            raise ValueError(f"grpo: {grpo.num_generations} samples of a prompt are all alike with '{grpo.sampling}'")
        if self.model.weights == "drawn":
            raise ValueError("grpo: a trainer reads its weights from files; set model.weights: written")
        prompts = grpo.prompts or self.prompts
        if "exact" in grpo.rewards and prompts.answer is None:
            raise ValueError("grpo: reward 'exact' needs prompts.answer, the key of the right answer")
        if prompts.source != "random" and grpo.max_completion_length >= self.max_model_len:
            raise ValueError(
                f"grpo: max_completion_length {grpo.max_completion_length} leaves no room for a prompt in "
                f"max_model_len {self.max_model_len}"
            )
        for use in grpo.backends:
            if use.option != "default":
                known(use.option, self.options, "option", "grpo.backends")

    def for_quality(self) -> Config:
        """What the scoring's own model, prompts and NF4 shard are made from, by the commands that make the run's.

        Its matrix asks for nothing but the scored work, so that the prompts are as many and as long as that needs. It
        holds nothing else: what it holds makes what is made from it stale.

        Raises:
            ValueError: there is no `quality`.
        """
        if self.quality is None:
            raise ValueError("this config asks for no scoring (quality)")
        quality = self.quality
        prompts = quality.prompts or self.prompts
        work = {
            "title": "Scoring",
            "section": "options",
            "batches": [quality.count],
            "new_tokens": quality.new_tokens,
            "stacks": self.stacks[:1],
            "backends": [{"backend": "flex"}],
        }
        values = {
            "run": self.run,
            "model": (quality.model or self.model).model_dump(mode="json"),
            "prompts": prompts.model_dump(mode="json") | {"count": quality.count},
            "max_model_len": self.max_model_len,
            "four_bit": self.four_bit.model_dump(mode="json"),
            "seed": self.seed,
            "quality": {"count": quality.count, "new_tokens": quality.new_tokens, "slots": quality.slots},
            "drift": {"stacks": []},
            "experiments": {"quality": work},
        }
        return Config.model_validate(values)

    def _check_four_bit(self, use: BackendUse, name: str, where: str) -> None:
        option = self.option(name).for_backend(use.backend)
        kind = option.get("four_bit")
        if kind is not None and "merged" in use.adapters:
            raise ValueError(f"{where}: nothing merges into 4-bit weights (option '{name}'); use adapter 'unmerged'")
        drawn = self.model.weights == "drawn" or option.get("load_format") == "dummy"
        if kind == "shard" and drawn:
            raise ValueError(f"{where}: option '{name}' reads a shard, and weights are drawn; set four_bit: on_the_fly")

    def length_of(self, experiment: Experiment) -> int:
        """max_model_len of an experiment."""
        return experiment.max_model_len or self.max_model_len

    def option(self, name: str) -> Option:
        """The named option over the config's defaults."""
        return self.options.get(name, Option()).over(self.defaults)

    @property
    def stacks(self) -> list[str]:
        """Every stack the matrix names, in order of first mention."""
        names: list[str] = []
        for experiment in self.experiments.values():
            for use in experiment.backends:
                names += use.stacks or experiment.stacks
        names += [use.stack for use in self.grpo.backends] if self.grpo else []
        return list(dict.fromkeys(names + self.drift.stacks))
