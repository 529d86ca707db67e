"""Where the seconds of a training step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Part = Literal["rollout", "refresh", "reward", "loss", "optimizer"]


class Clock:
    """Seconds by part of a step. A part within another counts for the inner one alone.

    synchronise: waits until the device has done what it was given, so that a part's work is in the part's seconds.
    """

    def __init__(self, synchronise: Callable[[], None] = lambda: None) -> None:
        self.synchronise = synchronise
        self._open: list[float] = []  # seconds of inner parts, one number an open part
        self._spent = dict.fromkeys(get_args(Part), 0.0)

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        self.synchronise()
        begun = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            self.synchronise()
            took = time.perf_counter() - begun
            self._spent[name] += took - self._open.pop()
            if self._open:
                self._open[-1] += took

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call, as {part}_s; all parts begin at 0 again."""
        spent = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        self._spent = dict.fromkeys(self._spent, 0.0)
        return spent
