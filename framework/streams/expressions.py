"""What users write for a column: a polars expression, or SQL text of the same.

An expression must see one row at a time. What it gave for several rows together (a sum, a sort, a
shift) would depend on how records fall into batches, which may differ when a batch is replayed.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from framework.streams.call_site import Call
from framework.streams.polars_frames import empty_frame, schema_of

Expression: TypeAlias = str | pl.Expr
_CLOCK = re.compile(r"\b(now|current_timestamp|current_date|current_time|localtimestamp)\b", re.IGNORECASE)
_GATHERING = frozenset({"Agg", "Over", "Rolling", "Sort", "SortBy", "Gather", "Slice"})
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def parsed(call: Call, given: Any, schema: pa.Schema) -> pl.Expr:
    """The expression, checked against the columns that there are. Raises ``TopologyError``."""
    if isinstance(given, str):
        if _CLOCK.search(_QUOTED.sub("", given)):
            raise call.mistake(
                f"{given!r} asks for the time, which is another one when a batch is replayed: use a time of the record"
            )
        try:
            expression = pl.sql_expr(given)
        except (pl.exceptions.PolarsError, pl.exceptions.SQLInterfaceError) as error:
            raise call.mistake(f"{given!r} is no SQL expression: {_first_line(error)}") from None
    elif isinstance(given, pl.Expr):
        expression = given
    else:
        raise call.mistake(
            f"{given!r} is a {type(given).__name__}: give SQL text, or a polars expression such as pl.col('name')"
        )
    _check_columns(call, expression, schema)
    _check_rows(call, given, expression)
    return expression


def column_or_expression(call: Call, given: Any, schema: pa.Schema) -> pl.Expr:
    """The column of this name, or the expression."""
    if isinstance(given, str) and given in schema.names:
        return pl.col(given)
    if isinstance(given, str) and given.isidentifier():
        raise call.unknown_column(given, schema.names)
    return parsed(call, given, schema)


def checked_types(call: Call, columns: Mapping[str, pl.Expr], schema: pa.Schema) -> pa.Schema:
    """The types of the columns, found by running the expressions over no rows. Raises
    ``TopologyError``."""
    fields = []
    for name, expression in columns.items():
        if expression.meta.is_column():
            fields.append(schema.field(expression.meta.root_names()[0]).with_name(name).with_nullable(True))
            continue
        found = schema_of(ran(call, empty_frame(schema), expression.alias(name)))
        fields.append(found.field(0))
    return pa.schema(fields)


def ran(call: Call, frame: pl.DataFrame, expression: pl.Expr) -> pl.DataFrame:
    """The expression over a frame without rows."""
    try:
        return frame.select(expression)
    except pl.exceptions.PolarsError as error:
        raise call.mistake(_first_line(error)) from None


def check_names(call: Call, names: Iterable[object], schema: pa.Schema) -> None:
    """Raise ``TopologyError`` for a name that no column has."""
    for name in names:
        if not isinstance(name, str):
            raise call.mistake(f"{name!r} is a {type(name).__name__}: give the name of a column")
        if name not in schema.names:
            raise call.unknown_column(name, schema.names)


def _check_columns(call: Call, expression: pl.Expr, schema: pa.Schema) -> None:
    if expression.meta.has_multiple_outputs():
        raise call.mistake("it makes several columns: name each column, with an expression of its own")
    for name in expression.meta.root_names():
        if name not in schema.names:
            raise call.unknown_column(name, schema.names)


def _check_rows(call: Call, given: Any, expression: pl.Expr) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # polars calls this form of an expression unstable
        text = expression.meta.serialize(format="json")
    tree = json.loads(text)
    if _has_python(tree):
        raise call.mistake(
            f"{str(given)!r} calls a Python function, whose types cannot be found: use map(...) or map_batches(...)"
        )
    try:
        shape = pl.Expr.deserialize(io.StringIO(json.dumps(_without_types(tree))), format="json").meta
        separable = shape.is_row_separable() and not _gathers(tree)
        keeps_rows = shape.is_length_preserving() or shape.is_scalar()
    except pl.exceptions.PolarsError as error:
        raise call.mistake(f"{str(given)!r} cannot be checked: {_first_line(error)}") from None
    if not separable:
        raise call.mistake(
            f"{str(given)!r} needs several rows together, and its value would depend on how records fall into batches: use "
            "group_by(...).agg(...)"
        )
    if not keeps_rows:
        raise call.mistake(f"{str(given)!r} makes another number of rows: use explode(...) or filter(...)")


def _has_python(node: Any) -> bool:
    if isinstance(node, dict):
        return "AnonymousFunction" in node or any(map(_has_python, node.values()))
    return isinstance(node, list) and any(map(_has_python, node))


def _gathers(node: Any) -> bool:
    """Whether rows are taken together. What is done to the items of a list is no matter of rows."""
    if isinstance(node, list):
        return any(map(_gathers, node))
    if not isinstance(node, dict):
        return bool(node == "Len")
    if "Literal" in node:
        return False
    inside = node.get("Eval")
    if isinstance(inside, dict):
        return _gathers(inside.get("expr"))
    return not _GATHERING.isdisjoint(node) or any(map(_gathers, node.values()))


def _without_types(node: Any) -> Any:
    """The tree of an expression, with another function of the same shape in place of those that
    polars knows only with the types of their columns: the arithmetic of SQL."""
    if isinstance(node, list):
        return [_without_types(each) for each in node]
    if not isinstance(node, dict) or "Literal" in node:
        return node
    function = node.get("Function")
    if isinstance(function, dict) and isinstance(function.get("function"), dict) and "Sql" in function["function"]:
        return {"Function": {"input": _without_types(function["input"]), "function": "Coalesce"}}
    if set(node) == {"Cast"}:  # polars takes the cast of a sum for one row
        return _without_types(node["Cast"]["expr"])
    return {name: _without_types(each) for name, each in node.items()}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
