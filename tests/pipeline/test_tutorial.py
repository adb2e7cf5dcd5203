"""The tutorial is right: its calls print what it shows. (``tests/site`` holds what it quotes.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.pages import DOCS, printed, snippets

TUTORIAL = DOCS / "tutorial.md"


@pytest.mark.behaviour("1.14")
def test_tutorial_prints_what_it_shows() -> None:
    namespace: dict[str, Any] = {}
    executed = [each for each in snippets(TUTORIAL) if not each.is_quoted]
    assert len(executed) >= 5
    for each in executed:
        assert printed(each.code, TUTORIAL, namespace) == each.shown
