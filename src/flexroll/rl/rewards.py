"""Rewards of completions, in [0, 1], with TRL's signature; and the check that nothing else is ever trained on."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError, one_line

# A function of prompts, completions, completion_ids and the data's columns, each a list with an entry a completion.
Reward = Callable[..., list[float]]
Completion = str | list[dict[str, Any]]
MARK = "####"  # of the line that holds the answer, as in GSM8K
# A minus after a word or a digit is a hyphen or a subtraction.
NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
ANSWER_LINE = re.compile(rf"{MARK}\s*[-$€£]*(?:{NUMBER.pattern})\s*[.%]?")


def exact(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion's final number, that after its last ####, else its last one, is the answer's."""
    return [
        float((given := final_answer(text_of(c))) is not None and given == final_answer(right))
        for c, right in zip(completions, answer, strict=True)
    ]


def format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 where the last line, and no other, is `#### number`; 0.5 where there is such a line elsewhere or more."""
    rewards = []
    for completion in completions:
        lines = [line.strip() for line in text_of(completion).splitlines() if line.strip()]
        places = [i for i, line in enumerate(lines) if ANSWER_LINE.fullmatch(line)]
        rewards.append(0.0 if not places else 1.0 if places == [len(lines) - 1] else 0.5)
    return rewards


def distinct(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Distinct tokens over tokens; 0 for none. It needs no meaning, so that random weights can be trained on it."""
    return [len(set(ids)) / len(ids) if len(ids) else 0.0 for ids in completion_ids]


REWARDS: dict[str, Reward] = {"exact": exact, "format": format, "distinct": distinct}


def text_of(completion: Completion) -> str:
    """The text of a completion, which TRL gives as a string or as chat messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(m["content"] for m in completion if isinstance(m.get("content"), str))


def final_answer(text: str) -> Decimal | str | None:
    """The number after the last ####, else the last number; text after #### that holds none, else None."""
    _, mark, after = text.rpartition(MARK)
    numbers = NUMBER.findall(after if mark else text)
    if numbers:
        return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))
    return after.strip().casefold() or None if mark else text.strip().casefold() or None


class RolloutLog:
    """What the first reward function was given last: a step's completions, for counts and samples."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.prompts: list[Any] = []
        self.completions: list[Completion] = []
        self.ids: list[list[int]] = []

    def add(self, prompts: Sequence[Any], completions: Sequence[Completion], ids: Sequence[Sequence[int]]) -> None:
        self.prompts += prompts
        self.completions += completions
        self.ids += [list(each) for each in ids]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def reward_functions(names: Sequence[str], log: RolloutLog | None = None) -> list[Reward]:
    """Checked reward functions: names of REWARDS, or `file.py:function` for one's own. log: is told every completion.

    Each raises FlexrollError, which names function, step and completion, where the function inside raises or returns
    anything but one finite number in [0, 1] a completion.

    Raises:
        FlexrollError: an unknown name, no such file or function, one that cannot be loaded, a name twice.
    """
    found: list[Reward] = []
    for name in names:
        function, label = load_reward(name)
        if label in [each.__name__ for each in found]:
            raise FlexrollError(f"two rewards are called '{label}'; rename one")
        found.append(_checked(label, function, log if not found else None))
    return found


def load_reward(name: str) -> tuple[Reward, str]:
    """The function behind a name, and what it is called. Raises FlexrollError."""
    if ":" not in name:
        if name not in REWARDS:
            raise FlexrollError(f"unknown reward '{name}'; there are {', '.join(REWARDS)}, and file.py:function")
        return REWARDS[name], name
    file, _, label = name.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise FlexrollError(f"reward '{name}': no such file {path}; give file.py:function")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise FlexrollError(f"reward '{name}': {path} cannot be loaded ({one_line(error, 160)})") from error
    function = getattr(module, label, None)
    if not callable(function):
        raise FlexrollError(f"reward '{name}': {path} has no function '{label}'")
    if inspect.iscoroutinefunction(function):
        raise FlexrollError(f"reward '{name}' is async; give a plain function")
    return function, label


def _checked(name: str, function: Reward, log: RolloutLog | None) -> Reward:
    def reward(
        prompts: list[Any], completions: list[Completion], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        if log is not None:
            log.add(prompts, completions, completion_ids)
        state = columns.get("trainer_state")
        where = f"reward '{name}' in step {state.global_step + 1}" if state is not None else f"reward '{name}'"
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids} | columns
        try:
            values = function(**given)
        except Exception as error:
            raise FlexrollError(f"{where} failed{_culprit(function, given)}: {one_line(error, 160)}") from error
        return _values(values, len(completions), where)

    reward.__name__ = name
    return reward


def _values(values: Any, count: int, where: str) -> list[float]:
    try:
        found = list(values)
    except TypeError:
        raise FlexrollError(f"{where} returned {type(values).__name__}, not a list of numbers") from None
    if len(found) != count:
        raise FlexrollError(f"{where} returned {len(found)} rewards for {count} completions")
    rewards = []
    for index, value in enumerate(found):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= 1:
            raise FlexrollError(f"{where}, completion {index}: {value!r:.60} is no number in [0, 1]")
        rewards.append(number)
    return rewards


def _culprit(function: Reward, given: dict[str, Any]) -> str:
    """`, completion N`: the first that raises when it is asked for alone; nothing where none does."""
    count = len(given["completions"])
    for index in range(count):
        alone = {
            name: [value[index]] if isinstance(value, list) and len(value) == count else value
            for name, value in given.items()
        }
        try:
            function(**alone)
        except Exception:
            return f", completion {index}"
    return ""
