"""transformers' continuous batching with paged attention, on transformers 5 and on 4.57, whose interface differs.

What is here: loading, and a call. How the library is driven is in `cb_drivers`, what it can do here in `cb_support`.
"""

from __future__ import annotations

from flexroll.backends import cb_support
from flexroll.backends import transformers_common as common
from flexroll.backends.base import Backend, EngineSpec, Generation
from flexroll.backends.cb_compile import CompileWatch, compile_forward
from flexroll.backends.cb_drivers import DRIVERS
from flexroll.backends.cb_manager import Library, Setting
from flexroll.schema import architecture
from flexroll.schema.config import Sampling


def version() -> tuple[int, int]:
    """(major, minor) of the transformers installed; (0, 0) without it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        major, minor = installed("transformers").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


class TransformersCb(Backend):
    """Options: see schema.options.TransformersCbOptions. Adapter modes: none, merged, unmerged.

    The pool holds the sequences that may run at once, at full max_model_len, so that none of them waits for memory; the
    others wait for a place. transformers 4.57 knows no such limit, and there all run at once. Blocks are never shared
    between prompts, so that a prompt is computed once a sample. min_p: the library warns that it might not be
    supported, but applies it, a row at a time (a test shows it).

    With `compile` a Generation's notes tell what the call compiled (see CompileWatch).
    """

    @classmethod
    def unavailable(cls, spec: EngineSpec) -> str | None:
        return cb_support.problem(spec, version())

    def __init__(self, spec: EngineSpec) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.spec = spec
        self.old = version()[0] == 4
        self.eos = architecture.eos_ids(spec.model)
        key = cb_support.attention_key(spec.option.get("attention", "paged|sdpa"), self.old)
        self.model = common.load_model(spec, key)
        cb_support.check_attention(self.model, key)
        self.mode = spec.option.get("compile")
        if self.mode:
            compile_forward(self.model, self.mode)
        driver = DRIVERS[spec.option.get("driver", "manager")]
        self.driver = driver(Library(spec, self.model, self.eos, self.old))
        self.running = spec.max_batch

    def prepare(self, running: int) -> None:
        if running != self.running:
            self.driver.close()  # its pool has another size
        self.running = running

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        new_tokens: list[int],
        ignore_eos: bool,
        seed: int,
        samples: int = 1,
    ) -> Generation:
        """Generate for all prompts at once; see Backend.generate.

        On transformers 4.57 a request takes one step more than it has tokens: its last token is computed and dropped.

        Raises:
            RuntimeError: a request failed or was lost; the message counts them and quotes the first error.
        """
        common.check_request(self.spec, prompts, new_tokens)
        if not prompts:
            return Generation([])
        prompts, new_tokens = common.repeated(prompts, samples), common.repeated(new_tokens, samples)
        running = max(self.running, len(prompts)) if self.old else self.running
        setting = Setting(running, sampling, ignore_eos)
        requests = list(zip(prompts, new_tokens, strict=True))
        if not self.mode:
            rows, notes = self.driver.run(setting, requests, seed), {}
        else:
            with CompileWatch() as watch:
                rows = self.driver.run(setting, requests, seed)
            notes = watch.notes
        return Generation(common.finish(rows, self.eos, new_tokens, ignore_eos), notes=notes)

    def memory(self) -> dict[str, int | None]:
        """kv_reserved: the pool of the latest call, None before the first."""
        return {"weights": common.parameter_bytes(self.model), "kv_reserved": self.driver.kv_bytes}

    def close(self) -> None:
        self.driver.close()
        self.model = self.driver.library.model = None
