"""Names in a config: which are allowed, which are known, and what an unknown one may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from flexroll.errors import FlexrollError

Named = TypeVar("Named")
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


def named(name: str, found: Mapping[str, Named], kind: str, run: str, otherwise: str | None = None) -> Named:
    """The thing of that name in a run. otherwise: what to say where no name is close; default: all there are.

    Raises:
        FlexrollError: there is none; with the nearest name there is.
    """
    if name in found:
        return found[name]
    close = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean '{close[0]}'?" if close else otherwise or f"there are: {', '.join(found)}"
    raise FlexrollError(f"no {kind} '{name}' in run {run}; {hint}")
