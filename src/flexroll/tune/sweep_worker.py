"""The process that runs the rollouts of a sweep: `python -m flexroll.tune.sweep_worker SETUP.json EVENT_FD`.

It reads one request a line from stdin and tells what happens by one JSON line an event. The weights are loaded once and
serve every engine. A point that raises is out; where the device does not work any more this process ends, and a fresh
one goes on (exit code 4).
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from flexroll.bench.worker import Events, die_with_parent
from flexroll.engine.dummy import random_weights
from flexroll.engine.engine import Engine
from flexroll.engine.sampling import SamplingParams
from flexroll.engine.weights import load_weights
from flexroll.errors import one_line
from flexroll.tune.agreement import Text, agreement, problem

CHECKED_TOKENS = 32
BROKEN = 4


class Bench:
    """Engines on one set of weights. setup: see tune.evaluator."""

    def __init__(self, setup: dict[str, Any], events: Events) -> None:
        self.setup, self.events = setup, events
        self.device = torch.device(setup["device"])
        load = random_weights if setup["dummy"] else load_weights
        self.weights = load(Path(setup["model"]), getattr(torch, setup["dtype"]), self.device)
        config = self.weights.config
        generator = torch.Generator().manual_seed(setup["seed"])
        shape = (setup["batch"], setup["prompt_tokens"])
        self.prompts = torch.randint(0, config.vocab_size, shape, generator=generator).tolist()
        self.reference = Path(setup["reference"])

    def engine(self, arguments: dict[str, Any]) -> Engine:
        given = {"page_size": self.setup["page_size"], "compiled": self.setup["compiled"], **arguments}
        batch = self.setup["batch"]
        length = self.setup["prompt_tokens"] + self.setup["new_tokens"] + 1
        # One bucket: all sequences begin and end together.
        return Engine(self.weights, attention="flex", max_batch=batch, buckets=[batch], max_model_len=length, **given)

    def measure(self, points: list[dict[str, Any]], new_tokens: int, rounds: int, check: bool) -> bool:
        """Events begin, ready or failed of each point, then run and round; False where the device is broken."""
        engines: dict[int, Engine] = {}
        try:
            for index, arguments in enumerate(points):
                self.events.send("begin", index=index)
                try:
                    engines[index] = engine = self.engine(arguments)
                    wrong, agreed = self._check(engine, not arguments) if check else (None, None)
                    self._rollout(engine, min(new_tokens, 4))  # what a first run allocates and compiles
                except Exception as error:
                    if not self._failed(index, error):
                        return False
                    engines.pop(index, None)
                    continue
                if wrong:
                    self.events.send("failed", index=index, reason=wrong, agreement=agreed)
                    del engines[index]
                else:
                    self.events.send("ready", index=index, agreement=agreed)
            for number in range(rounds):
                order = list(engines)
                random.Random(number).shuffle(order)  # nobody always runs behind the same one
                for index in order:
                    self.events.send("run", index=index)
                    try:
                        seconds, tokens = self._rollout(engines[index], new_tokens)
                    except Exception as error:
                        del engines[index]
                        if not self._failed(index, error):
                            return False
                        continue
                    self.events.send("round", index=index, seconds=seconds, tps=tokens / seconds)
            self.events.send("done")
            return True
        finally:
            engines.clear()
            engine = None
            gc.collect()
            torch._dynamo.reset()
            if self.device.type == "cuda" and self._sound():
                torch.cuda.empty_cache()

    def _rollout(self, engine: Engine, new_tokens: int) -> tuple[float, int]:
        """(seconds, tokens) of one whole rollout, prefill included."""
        begun = time.perf_counter()
        done = engine.generate(self.prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        return time.perf_counter() - begun, sum(len(c.token_ids) for c in done)

    def _check(self, engine: Engine, default: bool) -> tuple[str | None, float]:
        """(what is wrong with its tokens, share that agrees) against the default's; the default's are written down."""
        params = SamplingParams(
            max_new_tokens=min(CHECKED_TOKENS, self.setup["new_tokens"]), ignore_eos=True, logprobs=True
        )
        done = engine.generate(self.prompts, params)
        found = Text([c.token_ids for c in done], [c.raw_logprobs or [] for c in done])
        if default and not self.reference.exists():
            self.reference.write_text(json.dumps({"tokens": found.tokens, "logprobs": found.logprobs}))
        reference = Text(**json.loads(self.reference.read_text()))
        return problem(reference, found), agreement(reference.tokens, found.tokens)

    def _failed(self, index: int, error: Exception) -> bool:
        """Tell; whether the device still works."""
        traceback.print_exc()
        self.events.send("failed", index=index, reason=one_line(error), agreement=None)
        return self._sound()

    def _sound(self) -> bool:
        """An illegal access leaves a CUDA context in which nothing runs any more."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
            return int(torch.ones(1, device=self.device).sum()) == 1
        except Exception:
            return False


def main(arguments: list[str]) -> int:
    die_with_parent()
    events = Events(int(arguments[1]))
    bench = Bench(json.loads(Path(arguments[0]).read_text()), events)
    on_gpu = bench.device.type == "cuda"
    name = torch.cuda.get_device_name(bench.device) if on_gpu else "cpu"
    events.send("hello", torch=torch.__version__, device=name)
    for line in sys.stdin:
        request = json.loads(line)
        if not bench.measure(request["points"], request["new_tokens"], request["rounds"], request["check"]):
            return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
