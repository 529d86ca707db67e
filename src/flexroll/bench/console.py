"""Progress for a person, on stderr."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Print a line; a reader that is gone (a killed `tee`) must not stop a measurement."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
