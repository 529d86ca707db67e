"""Stand-ins for build_trainer that training workers load by path."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace


class Rollout:
    def __init__(self):
        self.faults = []

    def memory(self):
        return {"weights": 10, "kv_reserved": 20}

    def base_hash(self):
        return "base"

    def take_faults(self):
        faults, self.faults = self.faults, []
        return faults

    def child_pids(self):
        return []

    def close(self):
        pass


class Trainer:
    """Calls the callbacks as transformers' Trainer does; `act(step)` is called within each step."""

    notes = ("a note",)
    eos_token_ids = (1,)

    def __init__(self, spec, clock, rewards, dataset, callbacks, act):
        self.spec, self.clock, self.rewards, self.callbacks, self.act = spec, clock, rewards, callbacks, act
        self.rollout = Rollout()
        self.model = SimpleNamespace(save_pretrained=self.save)
        self.losses = {}

    def save(self, folder):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "adapter_model.safetensors").write_text("weights")

    def train(self, resume_from_checkpoint=None):
        first = int(Path(resume_from_checkpoint).name.split("-")[1]) if resume_from_checkpoint else 0
        state = SimpleNamespace(global_step=first, max_steps=self.spec.target.steps)
        arguments = SimpleNamespace(logging_nan_inf_filter=True, output_dir=str(self.spec.folder))
        control = SimpleNamespace(should_log=False)

        def call(name, **more):
            for callback in self.callbacks:
                getattr(callback, name)(arguments, state, control, **more)

        call("on_train_begin")
        while state.global_step < self.spec.target.steps:
            call("on_step_begin")
            with self.clock.part("rollout"):
                time.sleep(0.002)
            with self.clock.part("reward"):
                for reward in self.rewards:
                    reward(["p", "p"], ["#### 1", "x"], [[3, 4, 1], [5, 1]], answer=["1", "1"], trainer_state=state)
            self.act(self, state.global_step + 1)
            state.global_step += 1
            call("on_step_end")
            call("on_log", logs={"loss": self.losses.get(state.global_step, 0.5), "reward": 0.25})
            if self.spec.grpo.save_every and state.global_step % self.spec.grpo.save_every == 0:
                folder = Path(self.spec.folder) / f"checkpoint-{state.global_step}"
                folder.mkdir()
                (folder / "trainer_state.json").write_text("{}")
                call("on_save")
        call("on_log", logs={"train_loss": 0.5})


def well(*arguments):
    return Trainer(*arguments, act=lambda trainer, step: None)


def hangs(*arguments):
    return Trainer(*arguments, act=lambda trainer, step: time.sleep(1000 if step == 3 else 0))


def hangs_once(*arguments):
    """In step 4, the first time."""
    flag = Path(arguments[0].folder) / "hung"

    def act(trainer, step):
        if step == 4 and not flag.exists():
            flag.touch()
            time.sleep(1000)

    return Trainer(*arguments, act=act)


def dies(*arguments):
    return Trainer(*arguments, act=lambda trainer, step: step == 3 and os.kill(os.getpid(), signal.SIGKILL))


def raises(*arguments):
    def act(trainer, step):
        if step == 2:
            raise RuntimeError("no luck\nat all")

    return Trainer(*arguments, act=act)


def does_not_stand(*arguments):
    raise ValueError("no such thing")


def survives(*arguments):
    def act(trainer, step):
        if step == 2:
            trainer.rollout.faults.append("memory ran out; half as many")
            trainer.losses = {2: float("nan")}

    return Trainer(*arguments, act=act)


def moves_the_base(*arguments):
    def act(trainer, step):
        trainer.rollout.base_hash = lambda: "another"

    return Trainer(*arguments, act=act)
