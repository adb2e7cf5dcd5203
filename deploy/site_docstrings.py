"""Docstrings as Markdown: examples and literal blocks become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
_LITERAL = re.compile(r"(?P<before>^|[^:\n])::(?=\n\n {4})", re.MULTILINE)


class DocstringsAsMarkdown(griffe.Extension):
    """What is written for ``help()`` and for doctest, for the site."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """
    >>> print(as_markdown("Adds.\\n\\n>>> 1 + 1\\n2\\n"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    """
    fenced = _EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)
    return _LITERAL.sub(lambda found: f"{found['before']}:" if found["before"] else "", fenced)
