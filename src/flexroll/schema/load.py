"""Reading a config file, and saying in one line what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flexroll.errors import FlexrollError
from flexroll.schema.config import Config
from flexroll.schema.lengths import TAGS
from flexroll.schema.names import suggest


def known_stacks(root: Path) -> list[str]:
    """The stacks of a tree: the folders of containers/ that hold a requirements.in."""
    return sorted(p.parent.name for p in (root / "containers").glob("*/requirements.in"))


def parse_config(data: Any, where: str = "config") -> Config:
    """Validate a mapping. Raises FlexrollError with the first problem in one line."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise FlexrollError(f"{where}: {_explain(error)}") from None


def read_yaml(path: Path, kind: str) -> Any:
    """The contents of a YAML file. Raises FlexrollError, naming the kind of file, where it is missing or not YAML."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise FlexrollError(f"{path}: no such {kind} file") from None
    except yaml.YAMLError as error:
        raise FlexrollError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def load_config(path: Path, root: Path | None = None) -> Config:
    """Read and validate a YAML file; with `root`, the stacks it names must exist there.

    Raises:
        FlexrollError: the file is missing, is not YAML, or holds an unknown or bad value.
    """
    data = read_yaml(path, "config")
    if not isinstance(data, dict):
        raise FlexrollError(f"{path}: expected a mapping of settings at the top level")
    config = _with_options(data, Path(path))
    if root is not None:
        check_stacks(config, root, str(path))
    return config


def _with_options(data: dict[str, Any], path: Path) -> Config:
    """The config with the options of its options_file that it names and does not define itself."""
    own, name = data.get("options") or {}, data.get("options_file")
    if not isinstance(name, str) or not isinstance(own, dict):
        return parse_config(data, str(path))
    shared = read_yaml(path.parent / name, "options")
    if not isinstance(shared, dict):
        raise FlexrollError(f"{path.parent / name}: expected a mapping of named options")
    config = parse_config({**data, "options": shared | own}, str(path))
    used = {option for e in config.experiments.values() for use in e.backends for option in use.options}
    used |= {config.quality.baseline} if config.quality else set()
    used |= {use.option for use in config.grpo.backends} if config.grpo else set()
    kept = {key: value for key, value in config.options.items() if key in used | own.keys()}
    return config.model_copy(update={"options": kept})


def check_stacks(config: Config, root: Path, where: str = "config") -> None:
    known = known_stacks(root)
    for stack in config.stacks:
        if stack not in known:
            raise FlexrollError(
                f"{where}: unknown stack '{stack}'{suggest(stack, known)} (a stack is a folder of containers/)"
            )


def _explain(error: ValidationError) -> str:
    """The first problem of a ValidationError as `key.path: what is wrong; what would be right`.

    An unknown key comes first: it may be why another one is missing.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    loc = tuple(part for part in first["loc"] if part not in TAGS)
    path = ".".join(map(str, loc))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"unknown key '{path}'{suggest(str(loc[-1]), _fields_at(loc[:-1]))}"
    if first["type"] == "literal_error" and isinstance(first.get("input"), str):
        expected = str(first.get("ctx", {}).get("expected", ""))
        names = [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]
        kind = str(loc[-1])
        return f"{path}: unknown {kind} '{first['input']}'{suggest(first['input'], names)}"
    return f"{path}: {message}" if path else message


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """Field names of the model that lies at `loc`, walking annotations; [] where it cannot be told."""
    model: Any = Config
    skip = False
    for part in loc:
        if skip or isinstance(part, int):  # a name in a dict[str, X], a position in a list[X]: already inside X
            skip = False
            continue
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            return []
        annotation = fields[part].annotation
        skip = getattr(annotation, "__origin__", None) is dict
        model = _inner_model(annotation)
    return list(getattr(model, "model_fields", {}))


def _inner_model(annotation: Any) -> Any:
    """The pydantic model inside list[X], dict[str, X] or X | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _inner_model(part)
        if found is not None:
            return found
    return None
