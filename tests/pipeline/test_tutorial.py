"""The tutorial is right: its classes are those of the examples,
and its calls print what it shows.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

TUTORIAL = Path(__file__).parent.parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"(?:<!-- (?P<file>\S+): (?P<name>\S+) -->\n)?```python\n(?P<code>.*?)```(?:\n```text\n(?P<shown>.*?)```)?", re.S
)


def blocks() -> list[re.Match[str]]:
    return list(BLOCK.finditer(TUTORIAL.read_text(encoding="utf-8")))


QUOTED = [each for each in blocks() if each["file"]]


@pytest.mark.parametrize("block", QUOTED, ids=lambda each: each["name"])
def test_tutorial_quotes_the_examples_word_for_word(block: re.Match[str]) -> None:
    found: Any = importlib.import_module(block["file"].removesuffix(".py").replace("/", "."))
    for part in block["name"].split("."):
        found = getattr(found, part)
    assert textwrap.dedent(block["code"]) == textwrap.dedent(inspect.getsource(found))


@pytest.mark.behaviour("1.14")
def test_tutorial_prints_what_it_shows() -> None:
    namespace: dict[str, Any] = {}
    executed = [each for each in blocks() if not each["file"]]
    assert len(executed) >= 5
    for block in executed:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], str(TUTORIAL), "exec"), namespace)
        assert printed.getvalue() == block["shown"]
