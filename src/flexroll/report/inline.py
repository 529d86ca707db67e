"""The inline markdown of table cells and sentences -> HTML: links, code, bold, emphasis, entities, escapes.

Everything else is text and is escaped, so that nothing which a record holds can become markup. A link stands only where
its target is known; another one is printed as it was written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

from markupsafe import Markup

INLINE = re.compile(
    r"""
      \\(?P<escaped>[!-/:-@\[-`{-~])
    | (?P<ticks>`+)(?P<code>.+?)(?P=ticks)(?!`)
    | \*\*(?P<bold>(?=\S).+?(?<=\S))\*\*
    | \*(?P<emphasis>(?=[^\s*])[^*]*(?<=\S))\*
    | !?\[(?P<label>(?:\\.|[^\[\]\\])*)\]\((?P<target>[^()\s]+)\)
    | (?P<entity>&\#?\w+;)
    """,
    re.VERBOSE | re.DOTALL,
)


def to_html(text: object, allowed: Callable[[str], bool]) -> Markup:
    """Inline markdown as safe HTML. allowed: whether a link's target may stand."""
    source, made, at = str(text), [], 0
    for match in INLINE.finditer(source):
        made += [_escaped(source[at : match.start()]), _markup(match, allowed)]
        at = match.end()
    return Markup("".join([*made, _escaped(source[at:])]))


def to_text(text: object) -> str:
    """Inline markdown without its marks, as plain text."""
    return html.unescape(re.sub(r"<[^>]*>", "", to_html(text, lambda target: True)))


def _markup(match: re.Match[str], allowed: Callable[[str], bool]) -> str:
    part = match.groupdict()
    if part["escaped"] is not None:
        return _escaped(part["escaped"])
    if part["code"] is not None:
        # Cells escape | and < in code as well, for the markdown table's sake.
        return f"<code>{_escaped(html.unescape(part['code'].replace(chr(92) + '|', '|')))}</code>"
    if part["bold"] is not None:
        return f"<strong>{to_html(part['bold'], allowed)}</strong>"
    if part["emphasis"] is not None:
        return f"<em>{to_html(part['emphasis'], allowed)}</em>"
    if part["entity"] is not None:
        return _escaped(html.unescape(part["entity"]))
    if not allowed(part["target"]):
        return _escaped(match.group())
    target = _escaped(part["target"])
    return f'<a href="{target}" title="{target}">{to_html(part["label"], allowed)}</a>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
