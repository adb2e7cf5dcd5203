"""The bytes of values whose size another value determines, in expressions.

``LPAD(s, w, 'x')`` makes ``w`` letters, and polars ends the process if memory does not suffice.
Before such a function runs, its bytes are computed from its arguments. A row for which it would
make too many is bad, and other rows are computed in parts. This includes functions in branches that
a CASE does not choose, because polars computes all branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from framework.call_site import Call
from framework.streams.polars_expressions import of_tree, tree_of
from framework.streams.polars_frames import arrow_of, refusing
from framework.streams.row_growth_limits import divided, sizes_of

_ITEM, _ROW = "item", "row"
#: A day, in microseconds.
_DAY = 86_400_000_000
_FIXED_BYTES = 8
#: The bytes of each row.
Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A function that makes ``count`` values. ``of``: the repeated value; None: each value has one
    byte. ``items``: the list whose largest item is repeated."""

    name: str
    count: pl.Expr
    of: pl.Expr | None = None
    items: bool = False

    def bytes_of(self, frame: pl.DataFrame) -> Bytes:
        made = frame.select(self.count.cast(pl.Float64).fill_null(0).fill_nan(0).alias("count"))
        counts = np.resize(made.get_column("count").to_numpy(), frame.height)
        if self.of is None:
            return counts
        values = np.resize(self._sizes(frame.select(self.of.alias("of")).get_column("of")), frame.height)
        return counts * np.maximum(values, _FIXED_BYTES)

    def _sizes(self, values: pl.Series) -> npt.NDArray[Any]:
        if not self.items:
            return sizes_of(arrow_of(values))
        rows = values.to_frame(_ITEM).with_row_index(_ROW).explode(_ITEM)
        found = np.zeros(len(values), np.int64)
        np.maximum.at(found, rows.get_column(_ROW).to_numpy(), sizes_of(arrow_of(rows.get_column(_ITEM))))
        return found


def growing_in(expressions: Iterable[pl.Expr]) -> tuple[Repeated, ...]:
    """The functions in expressions whose bytes another value determines, each after those in its
    arguments. Functions of the items of a list are not among them, because ``parsed`` refuses
    ``list.eval``."""
    return tuple(each for expression in expressions for each in _growing(tree_of(expression)))


def parts_within(call: Call, growing: Sequence[Repeated], frame: pl.DataFrame) -> Sequence[pl.DataFrame]:
    """The rows in parts for which each function makes few bytes. Raises ``BadRecordError`` for a
    row for which a function makes too many."""
    parts: Sequence[pl.DataFrame] = (frame,)
    for each in growing:
        parts = [small for part in parts for small in _divided(call, each, part)]
    return parts


def _divided(call: Call, growing: Repeated, frame: pl.DataFrame) -> Sequence[pl.DataFrame]:
    if not frame.height:
        return (frame,)
    with refusing(call):
        found = growing.bytes_of(frame)
    return divided(call, frame, found, lambda worst: f"{growing.name} would make {found[worst]:,.0f} bytes of one row")


def _growing(tree: Any) -> Iterator[Repeated]:
    if isinstance(tree, list):
        for each in tree:
            yield from _growing(each)
    if not isinstance(tree, dict) or "Literal" in tree:
        return
    for each in tree.values():
        yield from _growing(each)
    function = tree.get("Function")
    if isinstance(function, dict):
        name, options = _named(function["function"])
        found = _RULES.get(name)
        if found is not None:
            yield from found(function["input"], options)


def _named(function: Any) -> tuple[str, Any]:
    """The name of a function, as in ``StringExpr.PadStart``, and its options."""
    if isinstance(function, str):
        return function, None
    ((name, its),) = function.items()
    if name in ("StringExpr", "ListExpr", "Range"):
        inner, options = _named(its)
        return f"{name}.{inner}", options
    return name, its


def _varies(tree: Any) -> bool:
    """Whether the value depends on a record."""
    if isinstance(tree, list):
        return any(map(_varies, tree))
    return isinstance(tree, dict) and "Literal" not in tree and ("Column" in tree or any(map(_varies, tree.values())))


def _padded(inputs: Any, options: Any) -> Iterator[Repeated]:
    wide = len(options["fill_char"].encode()) if options else 1
    if _varies(inputs[1]):
        yield Repeated("a padded text", _number(inputs[1]) * wide)


def _repeated(inputs: Any, options: Any) -> Iterator[Repeated]:
    if _varies(inputs[1]):
        yield Repeated("repeat_by", of_tree(inputs[1]), of_tree(inputs[0]))


def _substituted(inputs: Any, options: Any) -> Iterator[Repeated]:
    """Texts in place of each match. A text that is written in the expression is short. Each
    reference to a group (``$1``) becomes at most the length of the match, and all matches of a text
    are not longer than the text."""
    if not _varies(inputs[2]):
        return
    text, made = of_tree(inputs[0]), of_tree(inputs[2])
    if options["n"] != 1:
        matches = text.str.count_matches(of_tree(inputs[1]), literal=options["literal"])
        yield Repeated("replace_all", matches.cast(pl.Float64), made)
    if not options["literal"]:
        references = made.str.count_matches("$", literal=True)
        yield Repeated("replace with groups", references.cast(pl.Float64), text)


def _joined(inputs: Any, options: Any) -> Iterator[Repeated]:
    if _varies(inputs[1]):
        yield Repeated("a joined list", of_tree(inputs[0]).list.len(), of_tree(inputs[1]))


def _sampled(inputs: Any, options: Any) -> Iterator[Repeated]:
    if _varies(inputs[1]):
        yield Repeated("list.sample", of_tree(inputs[1]), of_tree(inputs[0]), items=True)


def _counted(inputs: Any, options: Any) -> Iterator[Repeated]:
    start, end, step = map(_number, inputs)
    if _varies(inputs):
        yield Repeated("a range", (end - start) / step * _FIXED_BYTES)


def _times(inputs: Any, options: Any) -> Iterator[Repeated]:
    epochs = [of_tree(each).dt.epoch("us").cast(pl.Float64) for each in inputs[:2]]
    return _spread(inputs, options, *epochs)


def _clock_times(inputs: Any, options: Any) -> Iterator[Repeated]:
    return _spread(inputs, options, *(_number(each) / 1000 for each in inputs[:2]))


def _spread(inputs: Any, options: Any, start: pl.Expr, end: pl.Expr) -> Iterator[Repeated]:
    every = options["interval"]
    days = every["months"] * 28 + every["weeks"] * 7 + every["days"]
    micros = days * _DAY + every["nsecs"] / 1000
    if _varies(inputs):
        yield Repeated("a range", (end - start) / micros * _FIXED_BYTES)


def _spaced(inputs: Any, options: Any) -> Iterator[Repeated]:
    if _varies(inputs[2]):
        yield Repeated("a range", _number(inputs[2]) * _FIXED_BYTES)


def _number(tree: Any) -> pl.Expr:
    return of_tree(tree).cast(pl.Float64)


_RULES: Mapping[str, Callable[[Any, Any], Iterable[Repeated]]] = {
    "StringExpr.PadStart": _padded,
    "StringExpr.PadEnd": _padded,
    "StringExpr.ZFill": _padded,
    "StringExpr.Replace": _substituted,
    "RepeatBy": _repeated,
    "ListExpr.Join": _joined,
    "ListExpr.Sample": _sampled,
    "Range.IntRanges": _counted,
    "Range.DateRanges": _times,
    "Range.DatetimeRanges": _times,
    "Range.TimeRanges": _clock_times,
    "Range.LinearSpaces": _spaced,
}
