"""The two targets. ``make test`` leaves out what is marked ``slow``; ``make test-all`` (``--all``)
runs that too.

``@pytest.mark.slow`` marks a test, or one of its parameters: a campaign of kills, a fault that
takes its time, one more executor for what another one shows already. ``slow_for("mysql")`` makes a
test slow for the parameters that are named so, ``quick_for("sqlite")`` for all others. A test of
many combinations of parameters is marked ``each_value_once``: so many of them are quick that each
value comes once. Of a class marked ``rules_only``, one more backend under the contract that others
pass, the tests of rules are quick. Where slow tests alone hold a promise, ``docs/promises.md`` says
so.

``make test`` is to end within ten minutes on two cores. A test that takes more than two seconds
there is slow, unless nothing quicker holds a promise, or tests what its file is for.

A test that repeats something takes the number from the fixture ``often``, and a property its number
of examples from ``examples``.

With ``--dist loadgroup`` the tests that want Spark run in one process, with those that kill drivers
again and again, and the others that want Kafka and ZooKeeper in another: so Spark starts once, and
the servers twice. In ``make test-all``, two processes share those that want Spark, by module:
together they take longer than all others. Those that want MariaDB, or the built site, share a
process too. Tests that use a module-scoped fixture share a process by module. The rest run wherever
there is room.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kit import marks

#: The profile of Hypothesis in ``make test``: the same examples at each run.
USUAL = "usual"
#: So much of a value stands in the name of a test.
_NAMED = 200
#: Fixtures that start something large. The tests that use one of them share a process.
_SPARK = {"spark", "cluster", "spark_masters"}
_ON_SPARK = "spark"
_SERVERS = {"servers", "topics", "ratchet_servers"}
#: The same for what fewer tests use: name of a fixture, or value of a parameter -> group.
_OTHERS = {
    "built_site": "site",
    "cleaning": "cleaning",
    "mariadb": "mariadb",
    "mysql": "mariadb",
    "apicurio": "apicurio",
}
#: Tests of what works on the rows of a table, whatever the database -> where they are slow: tables
#: there have the whole contract of writing in make test.
_ON_TABLES = {
    "test_inspection.py": {"mysql", "postgres"},
    "test_mirror.py": {"mysql"},
    "test_mirror_inspection.py": {"mysql", "postgres"},
    "test_rebuild.py": {"mysql", "postgres"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("targets")
    group.addoption("--all", action="store_true", help="the slow tests too, as make test-all does")
    group.addoption(marks.OPTION, metavar="FILE", help="write which promises each test says that it holds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: for nights and releases (make test-all); make test leaves it out")
    config.addinivalue_line("markers", "slow_for(*names): slow for the parameters with these names")
    config.addinivalue_line("markers", "each_value_once: slow, but for combinations with each value of each parameter")
    config.addinivalue_line("markers", "rules_only: slow, but for tests of a rule of the protocol")
    config.addinivalue_line("markers", "quick_for(*names): slow for all parameters but those with these names")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_each_value_once(items)
    marks.note(config, items)
    if not config.getoption("--all"):
        left_out = {item for item in items if "slow" in marks.names(item)}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def _keep_each_value_once(items: list[pytest.Item]) -> None:
    """Make all combinations of parameters slow but a few in which each value of each parameter
    comes, if a test is marked so."""
    tests: dict[str, dict[pytest.Item, set[tuple[int, str]]]] = {}
    for item in items:
        marked = marks.names(item)
        if "each_value_once" in marked and "slow" not in marked:
            values = set(enumerate(item.callspec._idlist))  # type: ignore[attr-defined]
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for combinations in tests.values():
        left = set().union(*combinations.values())
        quick = set()
        while left:
            quick.add(best := max(combinations, key=lambda item: len(combinations[item] & left)))
            left -= combinations[best]
        for item in combinations.keys() - quick:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected becomes garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """The collected tests stay to the end: the garbage collector need not look through them again
    and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Only modules with examples are imported and searched for examples. Other files, which other
    programs may remove at any time, are not read."""
    found = yield
    if not found or b">>> " in file_path.read_bytes():
        return found
    return [each for each in found if type(each) is pytest.Module]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test after the beginning of a long value, because processes exchange the names of all
    tests."""
    return ascii(val[:_NAMED]) if isinstance(val, str | bytes) and len(val) > _NAMED else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Not later: xdist looks for groups before other plugins may modify the collected tests."""
    marked = marks.names(item)
    group = _group_of(item, marked)
    if group == _ON_SPARK and item.config.getoption("--all"):
        group = f"{group} {zlib.crc32(item.path.name.encode()) % 2}"
    if group is not None:
        item.add_marker(pytest.mark.xdist_group(group))
    callspec: Any = getattr(item, "callspec", None)
    if marked & {"slow_for", "quick_for"} and _is_slow_for(item, callspec.id if callspec is not None else ""):
        item.add_marker(pytest.mark.slow)
    if "rules_only" in marked and "rule" not in marked:
        item.add_marker(pytest.mark.slow)
    parameters = callspec.params if callspec is not None else {}
    if parameters.get("opaque") is False and parameters.get("runner", "local") != "local":
        item.add_marker(pytest.mark.slow)  # the spout's kind matters to the driver alone, wherever tasks run
    if parameters.get("runner") == "collapsed" and item.path.name != "test_executors.py":
        item.add_marker(pytest.mark.slow)  # tests of the executor itself show what one task for a batch changes
    if parameters.get("database") in _ON_TABLES.get(item.path.name, ()):
        item.add_marker(pytest.mark.slow)


def _is_slow_for(item: pytest.Item, parameters: str) -> bool:
    """Whether a mark of the test makes it slow for its parameters: names, with ``-`` between
    them."""

    def among(mark: pytest.Mark) -> bool:
        return any(f"-{name}-" in f"-{parameters}-" for name in mark.args)

    return any(map(among, item.iter_markers("slow_for"))) or not all(map(among, item.iter_markers("quick_for")))


def _group_of(item: pytest.Item, marked: set[str]) -> str | None:
    fixtures = set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    runner = callspec.params.get("runner", "local") if callspec is not None else "local"
    if "spark" in marked or runner != "local" or fixtures & _SPARK:
        return _ON_SPARK
    if not fixtures & _SERVERS:
        values = {str(each) for each in callspec.params.values()} if callspec is not None else set()
        others = (group for name, group in _OTHERS.items() if name in fixtures | values)
        return next(others, _module_of(item))
    return _ON_SPARK if "kills" in marked else "servers"


def _module_of(item: pytest.Item) -> str | None:
    """The file of the test, if the test uses a module-scoped fixture."""
    definitions = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    lasting = any(each[-1].scope == "module" for each in definitions.values())
    return item.nodeid.partition("::")[0] if lasting else None


@pytest.fixture
def in_all(request: pytest.FixtureRequest) -> bool:
    """Whether this is ``make test-all``."""
    return bool(request.config.getoption("--all"))


Often = Callable[[int, int], int]


@pytest.fixture
def often(in_all: bool) -> Often:
    """How often to repeat something: the first number in ``make test``,
    the second in ``make test-all``.
    """
    return lambda usually, whole: whole if in_all else usually


def examples(whole: int) -> int:
    """How many examples a property has: so many in ``make test-all``, a tenth of them in
    ``make test``, where they are the same at each run.
    """
    return whole // 10 if settings.get_current_profile_name() == USUAL else whole
