"""Cheap signs of broken text: one token over and over, a loop, unprintable noise. No judgement of sense."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flexroll.schema.records import Coherence

MAX_UNIT = 16
MIN_DISTINCT, MAX_DISTINCT, MAX_REPEAT, MAX_NONPRINTABLE = 0.1, 0.97, 0.5, 0.05
SHORT, LONG = 32, 128  # tokens below which a low, or a high, share of distinct tokens says nothing


def before_end(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens before the first end token, or all: what follows one was forced, and is no part of the text."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:stop])


def judge(ids: Sequence[int], text: str) -> Coherence:
    """Verdict on one completion, given as token ids (without end tokens) and as text."""
    if not ids:
        return Coherence(ok=True, distinct_ratio=1.0, longest_repeat=0.0, nonprintable=0.0, notes=["ended at once"])
    distinct = len(set(ids)) / len(ids)
    repeat = longest_repeat(ids)
    nonprintable = nonprintable_share(text)
    notes = []
    if len(ids) >= SHORT and distinct < MIN_DISTINCT:
        notes.append(f"only {distinct:.0%} of the tokens are distinct")
    if len(ids) >= LONG and distinct > MAX_DISTINCT:
        notes.append(f"{distinct:.0%} of the tokens are distinct, as in noise")
    if repeat > MAX_REPEAT:
        notes.append(f"one unit repeated over {repeat:.0%} of the text")
    if nonprintable > MAX_NONPRINTABLE:
        notes.append(f"{nonprintable:.0%} of the characters are not printable")
    return Coherence(
        ok=not notes, distinct_ratio=distinct, longest_repeat=repeat, nonprintable=nonprintable, notes=notes
    )


def longest_repeat(ids: Sequence[int]) -> float:
    """Share of the tokens that the longest run of one unit (1 to 16 tokens, three times or more) covers."""
    best = 0
    for unit in range(1, min(MAX_UNIT, len(ids) // 3) + 1):
        run = 0
        for position in range(unit, len(ids)):
            run = run + 1 if ids[position] == ids[position - unit] else 0
            if run >= 2 * unit:
                best = max(best, run + unit)
    return best / len(ids) if ids else 0.0


def nonprintable_share(text: str) -> float:
    """Share of characters that are neither printable nor white space; the replacement character is among them."""
    bad = sum(1 for c in text if c == "\ufffd" or not (c.isprintable() or c.isspace()))
    return bad / len(text) if text else 0.0
