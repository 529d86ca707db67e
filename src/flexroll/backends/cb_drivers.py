"""Three ways to drive transformers' continuous batching: a manager a call, one for all calls, or none at all.

None of them uses `generate_batch`: that function only logs requests that fail (and on 4.57 waits for them for ever),
and its pool cannot be asked for its size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from flexroll.backends import cb_manager
from flexroll.backends.cb_manager import Library, Request, Setting
from flexroll.errors import one_line

POLL_S = 1.0
STALL_S = 900.0  # without a step; the longest one compiles


class Driver(ABC):
    """kv_bytes: of the latest pool; None before the first call."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.kv_bytes: int | None = None

    @abstractmethod
    def run(self, setting: Setting, requests: list[Request], seed: int) -> list[list[int]]:
        """The new tokens of every request, in order.

        Raises:
            RuntimeError: a request failed or was lost, or the library stopped getting on.
        """

    def close(self) -> None:
        """Let go of whatever is kept between calls; a later call makes it anew."""

    def _watch(self, processor: Any) -> None:
        if processor is not None:
            self.kv_bytes = cb_manager.kv_bytes(processor)


class Managed(Driver):
    """A manager with its thread for each call, as generate_batch has it by default; CUDA graphs are captured anew."""

    def run(self, setting: Setting, requests: list[Request], seed: int) -> list[list[int]]:
        import torch

        manager, done = self.library.manager(setting, seed), {}
        ids = cb_manager.add(manager, requests)
        torch.manual_seed(seed)
        pulse = Pulse(manager)
        try:
            manager.start()
            wait(manager, ids, done, pulse)
            self._watch(manager.batch_processor)
        finally:
            self.library.stop(manager, [name for name in ids if name not in done])
        return cb_manager.rows(ids, done)


class Persistent(Driver):
    """One manager, started once and kept while what it was made for (see Setting) stays the same.

    Its thread idles between calls; that of 4.57 does so at full speed. What failed once is not trusted with another
    call: the next one starts a new manager.
    """

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.manager: Any = None
        self.setting: Setting | None = None

    def run(self, setting: Setting, requests: list[Request], seed: int) -> list[list[int]]:
        import torch

        if self.manager is None or self.setting != setting:
            self.close()
            self.manager, self.setting = self.library.manager(setting, seed), setting
            self.pulse = Pulse(self.manager)
            self.manager.start()
        torch.manual_seed(seed)  # the thread has nothing to draw for; a pool it is still making seeds the same
        done: dict[str, Any] = {}
        ids = cb_manager.add(self.manager, requests)
        try:
            wait(self.manager, ids, done, self.pulse)
            self._watch(self.manager.batch_processor)
            return cb_manager.rows(ids, done)
        except BaseException:
            self._stop([name for name in ids if name not in done])
            raise

    def close(self) -> None:
        self._stop([])

    def _stop(self, unfinished: list[str]) -> None:
        manager, self.manager = self.manager, None
        if manager is not None:
            self.library.stop(manager, unfinished)


class Sync(Driver):
    """No thread: the cache and the batch processor are this object's, and are stepped where `run` is called, until
    both queues and the scheduler are empty. They are kept like the manager of Persistent."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.manager: Any = None  # never started; it makes requests and holds the queues
        self.processor: Any = None
        self.setting: Setting | None = None

    def run(self, setting: Setting, requests: list[Request], seed: int) -> list[list[int]]:
        import torch

        if self.manager is None or self.setting != setting:
            self.close()
            manager = self.library.manager(setting, seed)
            self.processor = self.library.processor(manager)
            self.manager, self.setting = manager, setting
            self._watch(self.processor)
        torch.manual_seed(seed)
        ids, done = cb_manager.add(self.manager, requests), {}
        # Every step takes a token of some request at least, and 4.57 one more than were asked for.
        steps = sum(len(prompt) + new + 1 for prompt, new in requests)
        try:
            self._step_until_empty(steps, done)
            return cb_manager.rows(ids, done)
        except Exception as error:
            self.close()
            left = sum(name not in done for name in ids)
            if left:
                raise RuntimeError(f"{left} of {len(ids)} requests failed: {one_line(error)}") from error
            raise
        except BaseException:  # an interrupt leaves the processor in the middle of a step
            self.close()
            raise

    def _step_until_empty(self, steps: int, done: dict[str, Any]) -> None:
        manager, processor = self.manager, self.processor
        for _ in range(steps + 1):
            stepped = processor.prepare_next_batch()
            if stepped:
                self.library.step(manager, processor)
                processor.update_batch()
            for output in self.library.outputs(manager):
                if cb_manager.ended(output):
                    done[output.request_id] = output
            if not stepped:
                break
        if processor.has_pending_requests() or not manager.input_queue.empty():
            raise RuntimeError("the scheduler holds requests but gets on with none")

    def close(self) -> None:
        manager, self.manager, self.processor = self.manager, None, None
        if manager is not None and not self.library.old:
            manager.destroy()


class Pulse:
    """Counts the steps of a manager's thread, and knows when the last one began."""

    def __init__(self, manager: Any) -> None:
        self.steps = 0
        step = manager._generation_step

        def counted(*arguments: Any) -> Any:
            self.steps += 1
            return step(*arguments)

        manager._generation_step = counted


def wait(manager: Any, ids: list[str], done: dict[str, Any], pulse: Pulse) -> None:
    """Fill `done` until every request is in it or the manager's thread has ended.

    Raises:
        RuntimeError: the thread began no step for STALL_S seconds.
    """
    steps, since = pulse.steps, time.monotonic()
    while len(done) < len(ids):
        alive = manager.is_running()  # asked first: what a thread leaves behind when it ends is still read
        output = manager.get_result(timeout=POLL_S)
        if output is not None:
            if cb_manager.ended(output):
                done[output.request_id] = output
        elif not alive:
            return
        if pulse.steps != steps:
            steps, since = pulse.steps, time.monotonic()
        elif time.monotonic() - since > STALL_S:
            raise RuntimeError(f"{len(ids) - len(done)} of {len(ids)} requests failed: no step in {STALL_S:g} s")


DRIVERS: dict[str, type[Driver]] = {"manager": Managed, "persistent": Persistent, "sync": Sync}
