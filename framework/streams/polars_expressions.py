"""Expressions of users for a column: polars expressions, or SQL text.

An expression must see one row at a time. A result of several rows (a sum, a sort, a shift) would
depend on the division of records into batches, which may differ in a replay.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.streams.polars_frames import empty_frame, schema_of

Expression: TypeAlias = str | pl.Expr
_CLOCK = re.compile(r"\b(now|current_timestamp|current_date|current_time|localtimestamp)\b", re.IGNORECASE)
_GATHERING = frozenset({"Agg", "Over", "Rolling", "Sort", "SortBy", "Gather", "Slice"})
_COMPARISONS = frozenset({"Eq", "NotEq", "Lt", "LtEq", "Gt", "GtEq"})
#: The format of a time of day as a text, with its fraction.
TIME_TEXT = "%T%.f"
_NULL = {"Literal": {"Scalar": {"Null": "Null"}}}
#: Words of other languages -> the SQL for them.
_NOT_SQL = (
    ("&&", "AND"),
    ("!(", "NOT ("),
    (" is None", "IS NULL"),
    (" is not None", "IS NOT NULL"),
    (" in [", "IN (...)"),
    (" if ", "CASE WHEN ... THEN ... ELSE ... END"),
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def parsed(call: Call, given: Any, schema: pa.Schema) -> pl.Expr:
    """The expression, checked against the columns that there are. Raises ``TopologyError``."""
    if isinstance(given, str):
        if _CLOCK.search(_QUOTED.sub("", given)):
            raise call.mistake(
                f"{given!r} asks for the time, which is another one when a batch is replayed: use a time of the record"
            )
        if given.strip() == "*":
            raise call.mistake(
                "'*' is all columns: with_columns(...) keeps them and adds others, drop(...) leaves some out"
            )
        try:
            expression = pl.sql_expr(given)
        except (pl.exceptions.PolarsError, pl.exceptions.SQLInterfaceError) as error:
            said = _first_line(error)
            clause = next((each for each in schema.names if f"{each!r} clause" in said), None)
            quoted = f"; a column with the name of a clause is written '\"{clause}\"'" if clause is not None else ""
            raise call.mistake(f"{given!r} is no SQL expression: {_hint_of(given) or said}{quoted}") from None
    elif isinstance(given, pl.Expr):
        expression = given
    elif hasattr(given, "output_type"):
        raise call.mistake(f"{given} is an aggregate: agg(n=count()) goes after group_by(...)")
    elif callable(given):
        raise call.mistake(f"{getattr(given, '__name__', given)} is a function: use map(...) for columns that it makes")
    else:
        constant = ""
        if isinstance(given, bool | int | float):
            constant = f"; the constant is {str(given).lower()!r}"
        elif isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
            constant = "; give several one by one, without a list"
        raise call.mistake(
            f"{given!r} is a {type(given).__name__}: give SQL text, or a polars expression such as pl.col('name'){constant}"
        )
    _check_columns(call, given, expression, schema)
    tree = tree_of(expression)
    _check_rows(call, given, expression, tree)
    _check_comparisons(call, given, tree, schema)
    if isinstance(given, str):
        _check_casts(call, given, tree, schema)
    return expression


def column_or_expression(call: Call, given: Any, schema: pa.Schema) -> pl.Expr:
    """The column of this name, or the expression."""
    if isinstance(given, str) and given in schema.names:
        return pl.col(given)
    if isinstance(given, str) and given.isidentifier():
        raise call.unknown_column(given, schema.names)
    return parsed(call, given, schema)


def is_named(expression: pl.Expr) -> bool:
    """Whether an expression of SQL text is a column, or ends with ``AS name``."""
    return bool(expression.meta.is_column()) or "Alias" in tree_of(expression)


def is_always_true(expression: pl.Expr) -> bool:
    """Whether a condition takes no column, and is true."""
    return not expression.meta.root_names() and bool(pl.select(expression).item())


def tests_not_null(expression: pl.Expr, column: str) -> bool:
    """Whether a condition requires that a column is not null, alone or combined with others by
    AND."""
    waiting = [tree_of(expression)]
    is_null = {"Function": {"input": [{"Column": column}], "function": {"Boolean": "IsNull"}}}
    is_not_null = {"Function": {"input": [{"Column": column}], "function": {"Boolean": "IsNotNull"}}}
    told = (is_not_null, {"Function": {"input": [is_null], "function": {"Boolean": "Not"}}})
    while waiting:
        node = waiting.pop()
        if node in told:
            return True
        both = node.get("BinaryExpr", {})
        if both.get("op") in ("And", "LogicalAnd"):
            waiting += [both["left"], both["right"]]
    return False


def time_of_number(name: str) -> str:
    """How a number becomes a time."""
    return (
        f"write with_columns({name}=pl.from_epoch('{name}', time_unit='s').dt.replace_time_zone('UTC')), where 's' may be "
        "'ms' or 'us'"
    )


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


def check_cast(kind: pl.DataType, to: pl.DataType) -> None:
    """Raise ``PolarsError`` if no value of one type can be cast to another. Polars checks that only
    for values."""
    try:
        one = pl.Series([0]).cast(kind)
    except pl.exceptions.PolarsError:  # a list, or a record
        return
    one.cast(to, strict=False)


def check_names(call: Call, names: Iterable[object], schema: pa.Schema) -> None:
    """Raise ``TopologyError`` for a name that no column has."""
    for name in names:
        if not isinstance(name, str):
            several = "; give several one by one" if isinstance(name, list | tuple) else ""
            raise call.mistake(f"{name!r} is a {type(name).__name__}: give the name of a column{several}")
        if name not in schema.names:
            raise call.unknown_column(name, schema.names)


def _check_columns(call: Call, given: Any, expression: pl.Expr, schema: pa.Schema) -> None:
    if expression.meta.has_multiple_outputs():
        raise call.mistake("it makes several columns: name each column, with an expression of its own")
    for name in expression.meta.root_names():
        if name not in schema.names:
            may_be_text = isinstance(given, str) and (given == name or f'"{name}"' in given)
            text = f"; a text is written \"'{name}'\"" if may_be_text else ""
            raise call.unknown_column(name, schema.names, text)


def tree_of(expression: pl.Expr) -> Any:
    """The parts of an expression, as polars writes them in JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # polars calls this form of an expression unstable
        return json.loads(expression.meta.serialize(format="json"))


def of_tree(tree: Any) -> pl.Expr:
    """The expression of such parts."""
    return pl.Expr.deserialize(io.StringIO(json.dumps(tree)), format="json")


def _check_rows(call: Call, given: Any, expression: pl.Expr, tree: Any) -> None:
    if _has_python(tree):
        raise call.mistake(
            f"{str(given)!r} calls a Python function, whose types cannot be found: use map(...) or map_batches(...)"
        )
    try:
        plain = _without_types(tree)
        shape = of_tree(plain).meta
        # Of an expression of several functions, polars does not look into each.
        separable = all(of_tree(each).meta.is_row_separable() for each in [plain, *_functions(plain)])
        separable = separable and not _gathers(tree)
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


def _check_comparisons(call: Call, given: Any, tree: Any, schema: pa.Schema) -> None:
    """Refuse comparisons with surprising results: with null, and of a time with a number."""
    for left, right in _comparisons(tree):
        if _NULL in (left, right):
            other = right if left == _NULL else left
            name = str(other["Column"]) if isinstance(other, dict) and "Column" in other else "..."
            raise call.mistake(
                f"{str(given)!r} compares with null, which is true for no row: write '{name} IS NULL' or '{name} IS NOT NULL'"
            )
        kinds = [_type_of(each, schema) for each in (left, right)]
        times = [each for each in kinds if each is not None and each.is_temporal()]
        if pl.Boolean in kinds and any(each is not None and each.is_numeric() for each in kinds):
            raise call.mistake(
                f"{str(given)!r} compares a condition with a number: write 'a > 1 AND a < 5' for two conditions of a value, and "
                "AND and OR, not & and |, between conditions"
            )
        if len(times) == 1 and any(each is not None and each.is_numeric() for each in kinds):
            raise call.mistake(
                f"{str(given)!r} compares a time with a number, which has no unit: give a time, such as "
                "pl.col('at') > datetime(2026, 1, 1, tzinfo=UTC)"
            )


def _check_casts(call: Call, given: str, tree: Any, schema: pa.Schema) -> None:
    """Refuse CAST(number AS TIMESTAMP), which has seconds in most dialects of SQL, and a cast of a
    time of day to a text, which polars makes without the fraction."""
    for node in _nodes(tree):
        cast = node.get("Cast")
        to = json.dumps(cast.get("dtype")) if isinstance(cast, dict) else ""
        if cast is None or ("Datetime" not in to and "String" not in to):
            continue
        kind, names = _type_of(cast["expr"], schema), of_tree(cast["expr"]).meta.root_names()
        name = names[0] if names else "name"
        if "Datetime" in to and kind is not None and kind.is_numeric():
            raise call.mistake(f"{given!r} makes a time of a number, which has no unit: {time_of_number(name)}")
        if "String" in to and kind == pl.Time:
            raise call.mistake(
                f"{given!r} cuts the fraction of a time of day: write pl.col({name!r}).dt.to_string({TIME_TEXT!r}), or "
                f"cast({name}=str)"
            )


def _type_of(tree: Any, schema: pa.Schema) -> pl.DataType | None:
    """The type of a part of an expression; None where it cannot be found."""
    try:
        return empty_frame(schema).select(of_tree(tree).alias("value")).dtypes[0]
    except pl.exceptions.PolarsError:
        return None


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every part of an expression, without the operations on the items of a list."""
    if isinstance(tree, list):
        for each in tree:
            yield from _nodes(each)
    if isinstance(tree, dict) and "Literal" not in tree:
        yield tree
        for name, each in tree.items():
            yield from _nodes(each.get("expr") if name == "Eval" and isinstance(each, dict) else each)


def _functions(tree: Any) -> list[dict[str, Any]]:
    return [node for node in _nodes(tree) if set(node) == {"Function"}]


def _comparisons(tree: Any) -> Iterator[tuple[Any, Any]]:
    for node in _nodes(tree):
        compared = node.get("BinaryExpr")
        if isinstance(compared, dict) and compared.get("op") in _COMPARISONS:
            yield compared["left"], compared["right"]


def _has_python(node: Any) -> bool:
    if isinstance(node, dict):
        return "AnonymousFunction" in node or any(map(_has_python, node.values()))
    return isinstance(node, list) and any(map(_has_python, node))


def _gathers(node: Any) -> bool:
    """Whether rows are taken together. Operations on the items of a list do not count."""
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
    """The tree of an expression, in which another function of the same shape replaces those that
    polars resolves only with the types of their columns: the arithmetic of SQL."""
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


def _hint_of(given: str) -> str | None:
    """The mistake in a text that cannot be parsed, if it is a frequent mistake."""
    text = _QUOTED.sub("", given)
    for each, sql in _NOT_SQL:
        if each in text:
            return f"write {sql}, not {each.strip()}"
    opened, closed = text.count("("), text.count(")")
    if opened != closed:
        return f"it opens {opened} brackets and closes {closed}"
    words = text.upper().split()
    if words.count("CASE") != words.count("END"):
        return "a CASE ends with END, as in CASE WHEN cents > 0 THEN 'paid' ELSE 'open' END"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
