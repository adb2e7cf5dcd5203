"""The page of all operators has each, with its arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from framework.streams import Grouped
from framework.streams.table import AggregatesTable, ExpiringTable, NewestTable
from ratchet import Pipeline, Stream, Table
from tests.kit.processes import ROOT

#: Heading of the page, and the class whose own methods are below it.
CLASSES: dict[str, tuple[str, type]] = {
    "Pipeline": ("Pipeline", Pipeline),
    "Stream": ("Stream", Stream),
    "Grouped": ("Grouped", Grouped),
    "Table": ("Table", Table),
    "AggregatesTable": ("Table of aggregates", AggregatesTable),
}
#: What the parts of a pipeline call on each other.
INTERNAL = {
    "Pipeline": {
        "carries",
        "carries_tombstones",
        "check_open",
        "check_sequence",
        "check_timestamps",
        "keep_dead_letters",
        "left_out_of_joins",
        "note",
        "partition",
        "place",
        "place_of",
        "set_policy",
        "stateful_steps",
        "topic",
        "watermarks",
        "watermarks_of",
        "without_partition",
    },
    "Table": {"check_tombstones", "tombstone_keys"},
    "NewestTable": {"joining", "rows_of_join"},
}


def signature(kind: type, name: str) -> str:
    """The call as the page shows it: ``filter(condition, *, deterministic=False)``."""
    method = inspect.getattr_static(kind, name)
    if isinstance(method, property):
        return name
    shown: list[str] = []
    for each in list(inspect.signature(method).parameters.values())[1:]:
        if each.name.startswith("_"):
            continue  # only there to be refused
        if each.kind is each.KEYWORD_ONLY and not any(item.startswith("*") for item in shown):
            shown.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={each.default!r}".replace("'", '"')
        shown.append(f"{star}{each.name}{default}")
    return f"{name}({', '.join(shown)})"


def sections() -> dict[str, str]:
    text = (ROOT / "docs/reference/operators.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.M))


def public(kind: type) -> set[str]:
    return {each for each in dir(kind) if not each.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_each_public_operator_is_on_the_page_with_its_arguments(name: str) -> None:
    heading, kind = CLASSES[name]
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \| [^|]+ \|$", sections()[heading], re.M)
    inherited = public(Table) if name == "AggregatesTable" else set()
    operators = public(kind) - INTERNAL.get(name, set()) - inherited
    assert sorted(rows) == sorted(signature(kind, each) for each in operators)


def test_other_tables_have_no_operators_of_their_own() -> None:
    assert public(NewestTable) - public(Table) == INTERNAL["NewestTable"]
    assert public(ExpiringTable) == public(Table)


def test_a_signature_is_shown_as_it_is_written() -> None:
    class Some:
        @property
        def schema(self) -> int:
            return 1

        def one(self, *columns: str, on: str, how: str = "inner", **types: Any) -> None: ...

        def two(self, other: str, /, *, late: int = 0) -> None: ...

    assert signature(Some, "schema") == "schema"
    assert signature(Some, "one") == 'one(*columns, on, how="inner", **types)'
    assert signature(Some, "two") == "two(other, *, late=0)"
