"""The Python on the pages of the site: it runs, prints what is shown below it, and is the code of
the file that it is taken from.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import types
from pathlib import Path

import pytest

from tests.kit.pages import DOCS, Snippet, printed, snippets, source_of
from tests.kit.processes import ROOT

ALL_PAGES = sorted(DOCS.rglob("*.md"))
#: The others are run by ``tests/test_documents.py`` and ``tests/pipeline``.
PAGES = [
    page
    for page in ALL_PAGES
    if page.parent.name in ("start", "concepts", "howto") and "```python" in page.read_text(encoding="utf-8")
]
QUOTED = [(page, each) for page in ALL_PAGES for each in snippets(page) if each.is_quoted]


@pytest.mark.slow_for("howto/from-foreachbatch.md", "howto/joins.md")
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
        if each.note is not None and (each.note.startswith("compiled only") or each.is_quoted):
            continue  # the next two tests
        said = printed(each.code, page, module.__dict__)
        if each.shown is not None:
            assert said == each.shown
        ran += 1
    assert ran or all(each.note is not None for each in snippets(page))


@pytest.mark.parametrize(("page", "snippet"), QUOTED, ids=[each.note for _, each in QUOTED])
def test_quoted_code_is_that_of_the_file_word_for_word(page: Path, snippet: Snippet) -> None:
    assert snippet.note is not None
    assert textwrap.dedent(snippet.code) == textwrap.dedent(source_of(snippet.note))


def test_the_first_page_shows_the_pipeline_that_a_new_project_has() -> None:
    template = (ROOT / "framework/commands/project/pipeline.py.txt").read_text(encoding="utf-8")
    shown = snippets(DOCS / "start" / "own-topology.md")[0].code
    assert template.replace("{name}", "orders").partition("\n\n")[2] == shown


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_code_is_python(page: Path) -> None:
    for each in snippets(page):
        compile(textwrap.dedent(each.code), str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
