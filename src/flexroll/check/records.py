"""What holds of records that are one file a target of the config, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flexroll.check.registry import Finding, error, not_applicable


def own(found: Any, target: Any) -> Any:
    """The target's record; None where there is none, it cannot be read, or it is of another. found: a record, None, or
    why it cannot be read."""
    return None if found is None or isinstance(found, str) or not found.is_of(target) else found


def whole(found: Any) -> Iterator[Finding]:
    """It can be read."""
    if isinstance(found, str):
        yield error(found)
    elif found is None:
        yield not_applicable("there is none to read")


def option_values(found: Any, target: Any) -> list[tuple[str, Any, Any]]:
    """(name, what the record has, what is asked for) of the option's values; one may have been added since."""
    asked = {name: value for name, value in target.option_values.items() if name in found.option_values}
    return [(f"option {name}", found.option_values[name], value) for name, value in asked.items()]


def as_asked(values: Iterable[tuple[str, Any, Any]]) -> Iterator[Finding]:
    """What a record has is what is asked for: (name, the one, the other) of each; all that differ in one finding."""
    differ = [f"{name} {had}, expected {wanted}" for name, had, wanted in values if had != wanted]
    if differ:
        yield error("; ".join(differ))


def recorded(found: Any, target: Any, nothing: str, whose: Callable[[Any], str]) -> Iterator[Finding]:
    """It is there, the target's own, and says why where it did not end well. nothing: that it is not there, in words.
    whose: what tells a record's target."""
    if found is None:
        yield error(nothing)
    elif isinstance(found, str):
        yield not_applicable("a record that cannot be read does not tell whose it is")
    elif not found.is_of(target):
        yield error(f"is of {whose(found)}")
    elif found.status != "ok" and not found.reason.strip():
        yield error(f"{found.status} without a reason")
