"""How numbers, names and tables are printed: one place, so that the whole document agrees with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flexroll.schema.catalogue import BACKENDS

ADAPTERS = {"none": "", "merged": "LoRA merged", "unmerged": "LoRA unmerged", "request": "LoRARequest"}
SECTIONS = {
    "batch_sweep": "batch sweep",
    "grpo": "GRPO workload with LoRA",
    "lora": "LoRA forms",
    "group": "group sampling",
    "uneven": "uneven lengths",
    "memory": "memory",
    "options": "options",
    "broke": "what broke",
    "tried": "what did not move the needle",
    "torch_versions": "torch versions",
    "drift": "drift",
    "second_text": "second text",
    "four_bit": "4-bit",
}
# Sections that set flex against vLLM, in the order of the document.
AGAINST_VLLM = ("batch_sweep", "grpo", "group", "uneven")
NONE = "–"


def series_label(backend: str, adapter: str) -> str:
    """`flex`, `flex + LoRA merged`, `vLLM + LoRARequest`."""
    label = BACKENDS[backend].label
    return f"{label} + {ADAPTERS[adapter]}" if ADAPTERS[adapter] else label


def significant(value: float | None, digits: int = 3) -> str:
    """Rounded to so many significant digits, never in exponent form between 0.001 and a million; a dash for None."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if magnitude >= digits:
        return f"{value:.0f}"
    if abs(value) >= 1:
        return f"{value:.{digits - magnitude}f}"
    return f"{value:.{digits}g}"


def plain(value: float | None) -> str:
    """A published number as it was given."""
    return NONE if value is None else f"{value:.6g}"


def rate(value: float | None) -> str:
    """tok/s: whole numbers from 100, three significant digits below."""
    return significant(value, 3)


def gigabytes(value: int | None) -> str:
    """Bytes as GB (10^9)."""
    return NONE if value is None else significant(value / 1e9, 3)


def percent(value: float | None, digits: int = 0, sign: bool = False) -> str:
    if value is None:
        return NONE
    value = round(value * 100, digits) + 0.0  # no minus zero
    return f"{value:{'+' if sign else ''}.{digits}f} %"


def device(name: str) -> str:
    return "a CPU" if name == "cpu" else name


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def listed(items: Iterable[Any]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    names = [str(item) for item in items]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


FACTS = {
    "base_identical": ("identical", "changed"),
    "inference_identical": ("identical", "changed"),
    "merged_exact": ("exact", "not exact"),
    "peft_drifts": ("drifts", "does not drift"),
    "coherent": ("coherent", "broken text"),
    "fails": ("fails", "runs"),
    "losses_finite": ("finite", "not finite"),
    "rewards_expected": ("in range", "out of range"),
    "admissible": ("admissible", "not admissible"),
}


def quantity(value: float | bool | None, unit: str, metric: str = "", exact: bool = False) -> str:
    """A claim's value with its unit; a fraction where the unit is %. exact: as given, not rounded."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return FACTS[metric][0 if value else 1]
    value = value * 100 if unit == "%" else value
    number = plain(value) if exact else significant(value)
    return f"{number}×" if unit == "x" else f"{number} {unit}".strip()


def interval(low: float | None, high: float | None) -> str:
    """`12602–13068`, in tok/s; a dash where there is none."""
    return NONE if low is None or high is None else f"{rate(low)}–{rate(high)}"


def span(low: float, high: float, unit: str) -> str:
    """`12602–13068 tok/s`."""
    scale = 100 if unit == "%" else 1
    return f"{significant(low * scale)}–{quantity(high, unit)}"


def cell(text: Any) -> str:
    """Text made safe inside a table: one line, no column break, no HTML."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def fence(text: str) -> str:
    """A code block that the text cannot close."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}text\n{text}\n{ticks}"


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters in all)"


def links(files: Sequence[str], existing: set[str], limit: int = 4) -> str:
    """Numbered links to files, relative to the document; only files that exist become links."""
    found = [file for file in dict.fromkeys(files) if file in existing]
    if not found:
        return NONE
    shown = " ".join(f"[{i}]({file})" for i, file in enumerate(found[:limit], 1))
    return shown if len(found) <= limit else f"{shown} +{len(found) - limit}"


@dataclass(frozen=True)
class Table:
    """A markdown table: every row maps a header to its text, with the same headers in the same order.

    left: headers whose column holds words; the others hold numbers and are aligned right.
    """

    rows: list[dict[str, str]]
    left: frozenset[str] = frozenset()

    def without_empty(self) -> Table:
        """The table without columns in which no row says anything."""
        return self._keep(lambda values: any(value not in ("", NONE) for value in values))

    def without_constant(self, *names: str) -> Table:
        """The table without those of the named columns that say the same in every row."""
        keep = self._keep(lambda values: len(set(values)) > 1)
        wanted = {h for h in self.headers if h not in names or h in keep.headers}
        return Table([{h: v for h, v in row.items() if h in wanted} for row in self.rows], self.left)

    @property
    def headers(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    def _keep(self, useful: Callable[[list[str]], bool]) -> Table:
        wanted = [h for h in self.headers if useful([row[h] for row in self.rows])]
        return Table([{h: row[h] for h in wanted} for row in self.rows], self.left)

    def __str__(self) -> str:
        rules = ["---" if header in self.left else "---:" for header in self.headers]
        lines = [self.headers, rules, *(list(row.values()) for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
