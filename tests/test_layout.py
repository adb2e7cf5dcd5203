"""Every import names a module that exists: none uses the old path of a module that has moved."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import packages_distributions

import pytest

from tests.kit.processes import ROOT

PACKAGES = ("framework", "spouts", "sinks", "integration", "ratchet", "tests", "examples", "benchmarks")
#: Imported, and brought by a distribution that is declared: pyspark, testcontainers.
COME_ALONG = {"py4j", "docker"}
#: The parts of a statement that hold statements.
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules that a file imports, with their lines.

    ``from a.b import c`` names ``a.b``. It also names ``a.b.c``, unless the package ``a.b``
    mentions ``c`` itself, or has it when it is asked.
    """
    statements = [tree]
    for node in statements:  # grows: to look into expressions would take as long as to parse
        statements += (each for part in BLOCKS for each in getattr(node, part, ()))
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            package = ROOT.joinpath(*node.module.split(".")) / "__init__.py"
            if package.is_file():
                own = package.read_text()
                asked = import_module(node.module) if "__getattr__" in own else None
                yield from (
                    (node.lineno, f"{node.module}.{each.name}")
                    for each in node.names
                    if each.name != "*" and each.name not in own and not hasattr(asked, each.name)
                )


@pytest.mark.slow
def test_every_module_that_is_imported_is_where_the_import_says() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in imported(ast.parse(path.read_text()))
        if name.split(".")[0] in PACKAGES and not is_module(name)
    ]
    assert missing == []


def test_a_path_that_is_gone_is_noticed() -> None:
    tree = ast.parse(
        "import framework.verify_all\nfrom sinks import sqlite_old, MapState\nfrom spouts.kafka.consumer import consumer_seek"
    )
    names = [name for _, name in imported(tree) if not is_module(name)]
    assert names == ["framework.verify_all", "sinks.sqlite_old"]


def test_there_is_a_file_for_each_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(each) for each in folders if not (each / "__init__.py").exists()] == []


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    shipped = [each for each in PACKAGES if each not in ("tests", "examples", "benchmarks")]
    found = [path.parent.relative_to(ROOT) for each in shipped for path in (ROOT / each).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(each.parts) for each in found)


def test_what_is_imported_comes_with_the_package_or_with_an_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, wanted in project["optional-dependencies"].items() if name != "dev" for each in wanted]
    declared = {canonical(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in [*project["dependencies"], *extras]}
    distributions = packages_distributions()

    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in ("framework", "spouts", "sinks", "integration", "ratchet")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "conformance" not in path.relative_to(ROOT).parts  # suites for pytest
        for name in {name.partition(".")[0] for _, name in imported(ast.parse(path.read_text()))}
        if name not in PACKAGES and name not in sys.stdlib_module_names and name not in COME_ALONG
        if not declared & {canonical(each) for each in distributions[name]}
    ]
    assert missing == []


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
