"""The Python on the pages of the site: it runs, prints what is shown below it, and is the code of
the file that it is taken from.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("start/*.md", "concepts/*.md", "howto/*.md", "tutorial.md")
    for path in DOCS.glob(pattern)
    if "```python" in path.read_text(encoding="utf-8")
)
ALL_PAGES = sorted(DOCS.rglob("*.md"))

_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?```python\n(?P<code>.*?)```\n(?:```text\n(?P<shown>.*?)```\n)?", re.S
)


class Snippet(NamedTuple):
    """``note``: where the code is taken from, or why it cannot run. ``shown``: what it prints."""

    note: str | None
    code: str
    shown: str | None


def snippets(page: Path) -> list[Snippet]:
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Snippet(each["note"], each["code"], each["shown"]) for each in found]


def source_of(place: str) -> str:
    """The source of ``FILE: Class.method``."""
    file, name = place.split(": ")
    text = (ROOT / file).read_text(encoding="utf-8")
    body: list[Any] = ast.parse(text).body
    node: Any = None
    for part in name.split("."):
        node = next(each for each in body if getattr(each, "name", None) == part)
        body = getattr(node, "body", [])
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def dedented(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_the_code_of_a_page_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ran = 0
    for each in snippets(page):
        if each.note is not None and (each.note.startswith("compiled only") or ": " in each.note):
            continue  # the next test, and the one after it
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(each.code, str(page), "exec"), module.__dict__)
        if each.shown is not None:
            assert out.getvalue() == each.shown
        ran += 1
    assert ran or all(each.note is not None for each in snippets(page))


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_code_is_python_and_is_that_of_the_file_it_is_taken_from(page: Path) -> None:
    for each in snippets(page):
        if each.note is not None and ".py: " in each.note:
            assert dedented(each.code) == dedented(source_of(each.note)), each.note
        elif each.note is None or not each.code.startswith(" "):
            compile(each.code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
