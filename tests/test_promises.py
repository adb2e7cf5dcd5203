"""Every promise has a test that is marked with it, and ``docs/promises.md`` is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import targets
from tests.kit.marks import KINDS, Held, collected, of_the_suite
from tests.kit.promises import PAGE, PROMISES, page, target


@pytest.fixture(scope="module")
def tests(request: pytest.FixtureRequest) -> list[Held]:
    return of_the_suite(request.config)


@pytest.mark.parametrize("kind", KINDS)
def test_each_promise_has_a_test(tests: list[Held], kind: str) -> None:
    assert [number for number in PROMISES[kind] if target(kind, number, tests) is None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_mark_names_a_promise_that_exists(tests: list[Held], kind: str) -> None:
    unknown = {each.test: each.numbers[kind] - PROMISES[kind].keys() for each in tests}
    assert {test: numbers for test, numbers in unknown.items() if numbers} == {}


def test_the_page_of_promises_says_where_each_is_tested(tests: list[Held]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(tests), "run: python -m tests.kit.promises"


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Held]]:
    """The tests of two modules, by module."""
    folder = tmp_path_factory.mktemp("marked")
    (folder / "test_marked.py").write_text(
        "import pytest\n"
        "@pytest.mark.rule('C1')\n"
        "@pytest.mark.slow_for('mysql', 'two words')\n"
        "@pytest.mark.parametrize('which', ['mysql', 'two words', 'my'])\n"
        "@pytest.mark.parametrize('often', [1, 2])\n"
        "def test_some(often, which): ...\n"
        "@pytest.mark.rule('C1')\n"
        "@pytest.mark.quick_for('1-sqlite', '3')\n"
        "@pytest.mark.parametrize('which', ['sqlite', 'other'])\n"
        "@pytest.mark.parametrize('often', [1, 2, 3])\n"
        "def test_most(often, which): ...\n"
        "@pytest.mark.rule('C1')\n"
        "@pytest.mark.each_value_once\n"
        "@pytest.mark.parametrize('which', ['a', pytest.param('b', marks=pytest.mark.slow), 'c'])\n"
        "@pytest.mark.parametrize('often', [1, 2, 3])\n"
        "def test_each(often, which): ...\n"
        "@pytest.mark.rules_only\n"
        "class TestOther:\n"
        "    @pytest.mark.behaviour('3.2')\n"
        "    def test_no_rule(self): ...\n"
        "    @pytest.mark.rule('C1')\n"
        "    def test_rule(self): ...\n"
    )
    (folder / "test_promising.py").write_text(
        "import pytest\n"
        "@pytest.mark.rule('C1', 'C2')\n"
        "@pytest.mark.parametrize('often', [1, pytest.param(9, marks=[pytest.mark.slow, pytest.mark.rule('C3')])])\n"
        "def test_quick_and_slow(often): ...\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.rule('C2')\n"
        "@pytest.mark.fault(7)\n"
        "def test_slow(): ...\n"
        "def test_unmarked(): ...\n"
    )
    found = collected(folder)
    return {
        name: [each for each in found if f"/{name}.py::" in f"/{each.test}"]
        for name in ("test_marked", "test_promising")
    }


def test_marks_make_some_parameters_slow(marked: dict[str, list[Held]]) -> None:
    quick = [each.test.rsplit("::")[-1] for each in marked["test_marked"] if not each.slow]
    assert quick == [
        "test_some[1-my]",
        "test_some[2-my]",
        "test_most[1-sqlite]",
        "test_most[3-sqlite]",
        "test_most[3-other]",
        "test_each[1-a]",
        "test_each[2-c]",
        "test_each[3-a]",
        "test_rule",
    ]


def test_a_promise_that_only_slow_tests_hold_is_tested_by_make_test_all(marked: dict[str, list[Held]]) -> None:
    found = marked["test_promising"]
    assert [(each.test.rsplit("::")[-1], each.slow) for each in found] == [
        ("test_quick_and_slow[1]", False),
        ("test_quick_and_slow[9]", True),
        ("test_slow", True),
    ]
    assert [target("rule", number, found) for number in ("C1", "C2", "C3", "C4")] == [
        "both",
        "both",
        "slow",
        None,
    ]
    assert target("fault", "7", found) == "slow"
    assert target("rule", "C1", found[:1]) == "quick"


def test_a_file_that_is_no_module_is_not_read_when_tests_are_collected() -> None:
    """Beside the folder with the tests, other programs may remove their files meanwhile."""
    hook = targets.pytest_collect_file(Path("/removed"))
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send([])
    assert ended.value.value == []
