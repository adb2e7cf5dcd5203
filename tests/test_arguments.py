"""More than five arguments are passed by keyword: a swapped integer passes mypy."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from tests.kit.processes import ROOT

PACKAGES = ("framework", "spouts", "sinks", "integration")
POSITIONAL_MAX = 5
#: What may take more, and why.
EXCEPTIONS = {
    "datetime": "year, month, day, hour, minute, second",
    "AnchoredTuple": "made for each tuple of a core topology: keywords cost a tenth of its construction",
    "create": "a command; typer passes its options by name",
    "produce": "a command; typer passes its options by name",
    "peek": "a command; typer passes its options by name",
}


def positional(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of positional parameters of every function and every dataclass."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            dataclass = next((each for each in node.decorator_list if "dataclass" in ast.unparse(each)), None)
            if dataclass is not None and "kw_only=True" not in ast.unparse(dataclass):
                yield node.lineno, node.name, len(list(fields(node)))
            yield from (named(each, node.name) for each in node.body if getattr(each, "name", "") == "__init__")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            yield named(node, node.name)


def named(function: Any, name: str) -> tuple[int, str, int]:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return function.lineno, name, len(names) - (names[:1] in (["self"], ["cls"]))


def fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields that a dataclass takes by position."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            annotation, value = (
                ast.unparse(part) if part is not None else "" for part in (each.annotation, each.value)
            )
            if annotation == "KW_ONLY":
                return
            if "ClassVar" not in annotation and "init=False" not in value:
                yield ast.unparse(each.target)


def calls(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of positional arguments of every call."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, node.func.id if isinstance(node.func, ast.Name) else node.func.attr, len(node.args)


def test_nothing_takes_or_gets_more_than_five_arguments_by_position() -> None:
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            for line, name, number in (*positional(nodes), *calls(nodes)):
                if number > POSITIONAL_MAX:
                    found[name] = f"{path.relative_to(ROOT)}:{line}: {name} has {number}"
    assert [what for name, what in found.items() if name not in EXCEPTIONS] == []
    assert sorted(EXCEPTIONS) == sorted(found), "an exception is no longer needed"


def test_a_sixth_argument_is_noticed() -> None:
    code = (
        "@dataclass(frozen=True)\nclass A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int = 0\n"
        "@dataclass\nclass B:\n    a: int\n    _: KW_ONLY\n    b: int\n"
        "class C:\n    def __init__(self, a, b, c, d, e, f): ...\n"
        "A(1, 2, 3, 4, 5, 6)\n"
    )
    nodes = [*ast.walk(ast.parse(code))]
    assert list(positional(nodes)) == [(2, "A", 6), (10, "B", 1), (15, "C", 6)]
    assert list(calls(nodes)) == [(1, "dataclass", 0), (16, "A", 6)]
