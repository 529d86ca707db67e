"""The one exception type whose message is meant for a person."""


class FlexrollError(Exception):
    """A problem the user can mend: bad input, a missing file, an unfit machine.

    The message is one line and says what to do. The CLI prints it without a traceback and exits with code 2.
    """


def one_line(error: BaseException, limit: int = 300) -> str:
    """`Type: first line of the message` for a record or a log, at most `limit` characters."""
    text = str(error) if isinstance(error, FlexrollError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
