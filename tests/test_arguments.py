"""More than five arguments are passed by keyword: a swapped integer passes mypy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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


def positional(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of positional parameters of every function and every dataclass."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            dataclass = next((each for each in node.decorator_list if "dataclass" in ast.unparse(each)), None)
            if dataclass is not None and "kw_only=True" not in ast.unparse(dataclass):
                yield node.lineno, node.name, len(list(fields(node)))
        for function in ast.iter_child_nodes(node):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
                name = node.name if isinstance(node, ast.ClassDef) and function.name == "__init__" else function.name
                yield function.lineno, name, len(names) - (names[:1] in (["self"], ["cls"]))


def fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields that a dataclass takes by position."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            if ast.unparse(each.annotation) == "KW_ONLY":
                return
            value = ast.unparse(each.value) if each.value is not None else ""
            if "ClassVar" not in ast.unparse(each.annotation) and "init=False" not in value:
                yield ast.unparse(each.target)


def calls(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of positional arguments of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, node.func.id if isinstance(node.func, ast.Name) else node.func.attr, len(node.args)


def test_nothing_takes_or_gets_more_than_five_arguments_by_position() -> None:
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for line, name, number in (*positional(tree), *calls(tree)):
                if number > POSITIONAL_MAX:
                    found[name] = f"{path.relative_to(ROOT)}:{line}: {name} has {number}"
    assert [what for name, what in found.items() if name not in EXCEPTIONS] == []
    assert sorted(EXCEPTIONS) == sorted(found), "an exception is no longer needed"


def test_a_sixth_argument_is_noticed() -> None:
    tree = ast.parse(
        "@dataclass(frozen=True)\nclass A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int = 0\n"
        "@dataclass\nclass B:\n    a: int\n    _: KW_ONLY\n    b: int\n"
        "class C:\n    def __init__(self, a, b, c, d, e, f): ...\n"
        "A(1, 2, 3, 4, 5, 6)\n"
    )
    assert list(positional(tree)) == [(2, "A", 6), (10, "B", 1), (15, "C", 6)]
    assert list(calls(tree)) == [(1, "dataclass", 0), (16, "A", 6)]
