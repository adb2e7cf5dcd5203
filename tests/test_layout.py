"""Every import names a module that exists: none uses the old path of a module that has moved."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.kit.processes import ROOT

PACKAGES = ("framework", "spouts", "sinks", "integration", "tests", "examples", "benchmarks")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules that a file imports, with their lines.

    ``from a.b import c`` names ``a.b``. It also names ``a.b.c``, unless the package ``a.b``
    mentions ``c`` itself.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            package = ROOT.joinpath(*node.module.split(".")) / "__init__.py"
            if package.is_file():
                own = package.read_text()
                yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names if each.name not in own)


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
        "import framework.verify_all\nfrom sinks import sqlite_old, MapState\nfrom spouts.kafka import session"
    )
    names = [name for _, name in imported(tree) if not is_module(name)]
    assert names == ["framework.verify_all", "sinks.sqlite_old"]


def test_there_is_a_file_for_each_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(each) for each in folders if not (each / "__init__.py").exists()] == []
