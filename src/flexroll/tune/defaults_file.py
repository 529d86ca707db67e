"""The measured defaults of flex_attention's kernels as a file: validated, and written by `flexroll sweep`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError, field_validator, model_validator

from flexroll.errors import FlexrollError
from flexroll.provenance import SRC
from flexroll.schema.records import write_json

FILE = SRC / "flexroll" / "engine" / "kernel_defaults.json"
KINDS = ("prefill", "decode")


class Entry(BaseModel):
    """options: kernel_options; note: the measurement they come of."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, bool | int | str]
    note: str

    @field_validator("note")
    @classmethod
    def _said(cls, note: str) -> str:
        if not note.strip():
            raise ValueError("a default needs a note of its measurement")
        return note

    @model_validator(mode="after")
    def _safe(self) -> Entry:
        if self.options.get("BLOCKS_ARE_CONTIGUOUS"):
            raise ValueError("BLOCKS_ARE_CONTIGUOUS is no default: pages lie anywhere")
        return self


class Defaults(RootModel[dict[str, dict[str, Entry]]]):
    """Part of a GPU's name -> prefill, decode -> entry. The empty name stands for every other GPU and has both."""

    @model_validator(mode="after")
    def _whole(self) -> Defaults:
        for part, kinds in self.root.items():
            for kind in kinds:
                if kind not in KINDS:
                    raise ValueError(f"{part or 'other GPUs'}: unknown kind '{kind}'; there are {' and '.join(KINDS)}")
        if set(self.root.get("", {})) != set(KINDS):
            raise ValueError("the entry of the empty name, for every other GPU, needs prefill and decode")
        return self


def read_defaults(file: Path = FILE) -> Defaults:
    """Raises FlexrollError where the file is missing or not valid."""
    try:
        return Defaults.model_validate_json(file.read_text())
    except OSError as error:
        raise FlexrollError(f"{file}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise FlexrollError(f"{file}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def write_default(device: str, kind: str, entry: Entry, file: Path = FILE) -> str:
    """Enter a measured default for a GPU, under the longest part of its name that the file has, else its whole name.

    Returns: the name it stands under.
    """
    known = read_defaults(file).root
    part = max((part for part in known if part and part in device), key=len, default=device)
    known.setdefault(part, {})[kind] = entry
    checked = Defaults.model_validate(
        {name: {k: e.model_dump() for k, e in kinds.items()} for name, kinds in known.items()}
    )
    write_json(file, json.dumps(checked.model_dump(), indent=2) + "\n")
    return part
