"""A checkpoint's tokenizer: text or chat messages to token ids and back, on the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from flexroll.chat import ChatTemplate, Messages
from flexroll.errors import FlexrollError


class Tokenizer:
    """tokenizer.json of a checkpoint folder, and the folder's chat template, read when it is first asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Raises FlexrollError if there is no tokenizer.json or it cannot be read."""
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise FlexrollError(f"{path}: missing; the folder holds no tokenizer")
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise FlexrollError(f"{path}: cannot be read ({error}); fetch it again") from None

    @cached_property
    def template(self) -> ChatTemplate:
        """The folder's chat template. Raises FlexrollError if there is none or it is not valid."""
        return ChatTemplate(self.folder)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of plain text; special: with those that the tokenizer adds (a BOS, for Llama)."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def render(self, prompt: str | Messages) -> str:
        """The chat prompt as text, ending where the reply begins; a string is one user message.

        Raises:
            FlexrollError: the folder has no chat template, or it refuses the messages.
        """
        return self.template.render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def chat(self, prompt: str | Messages) -> list[int]:
        """Token ids of a chat prompt; the template writes its own special tokens. Raises as `render`."""
        return self.encode(self.render(prompt), special=False)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids; special: with the special tokens among them."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
