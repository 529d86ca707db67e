"""Names in a config: which are allowed, which are known, and what an unknown one may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.]*$"  # names become file names; "-" separates them there


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of an error message: the closest known name, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"


def known(name: str, names: Iterable[str], kind: str, where: str) -> None:
    """Raise ValueError, for pydantic to collect, unless `name` is one of `names`."""
    if name not in names:
        raise ValueError(f"{where}: unknown {kind} '{name}'{suggest(name, names)}")
