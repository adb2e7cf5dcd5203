"""The blocks of code on a page of the documentation."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.processes import ROOT

DOCS = ROOT / "docs"
_SNIPPET = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?```python\n(?P<code>.*?)```(?:\n```text\n(?P<shown>.*?)```)?", re.S
)


class Snippet(NamedTuple):
    """Python on a page. ``note``: ``FILE: NAME`` where it is quoted, or why it cannot run.
    ``shown``: what it prints."""

    note: str | None
    code: str
    shown: str | None

    @property
    def is_quoted(self) -> bool:
        return self.note is not None and ".py: " in self.note


def snippets(page: Path) -> list[Snippet]:
    found = _SNIPPET.finditer(page.read_text(encoding="utf-8"))
    return [Snippet(each["note"], each["code"], each["shown"]) for each in found]


def blocks(language: str, page: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def source_of(place: str) -> str:
    """The source of ``FILE: NAME``."""
    file, name = place.split(": ")
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return inspect.getsource(found)


def printed(code: str, page: Path, namespace: dict[str, Any]) -> str:
    """Run code of a page. Returns what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(page), "exec"), namespace)
    return out.getvalue()
