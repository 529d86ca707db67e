"""A checkpoint's chat template, rendered with jinja2 under the rules transformers documents for templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flexroll.errors import FlexrollError, one_line

Messages = list[dict[str, str]]
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template of a checkpoint folder: chat_template.jinja, else `chat_template` of tokenizer_config.json."""

    def __init__(self, folder: Path) -> None:
        """Raises FlexrollError if there is none or it is not valid."""
        settings = _settings(folder)
        source = _source(folder, settings)
        self.where = folder
        # Line statements of templates are written for these two settings.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        # No strftime_now: templates then fall back to a fixed date, and prompts do not change from day to day.
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise FlexrollError(f"{folder}: its chat template is not valid ({one_line(error, 120)})") from None
        self.special = {name: _token(settings.get(name)) for name in SPECIAL if settings.get(name) is not None}

    def render(self, messages: Messages) -> str:
        """The prompt text, ending where the assistant's reply begins."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, tools=None, **self.special)
        except jinja2.TemplateError as error:
            raise FlexrollError(f"{self.where}: its chat template refuses a prompt ({one_line(error, 120)})") from None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FlexrollError(f"{path}: not valid JSON ({error}); fetch it again") from None


def _source(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named ones
        value = next((t.get("template") for t in value if t.get("name") == "default"), None)
    if not isinstance(value, str):
        raise FlexrollError(f"{folder}: no chat template there; use plain text (prompts.format: text, or --raw)")
    return value


def _token(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
