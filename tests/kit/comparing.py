"""What the comparisons of codecs with reference libraries share: the comparison of columns, and the
loop over seeds."""

from __future__ import annotations

import argparse
import collections
import itertools
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spouts import Codec
from tests.kit.avro_pairs import double_bits
from tests.kit.fuzzing import Counts

#: A line of progress each so many seconds.
_SAID_EACH_S = 10
#: So much of a value is shown.
_SHOWN = 2_000
NAN = "nan"


class Difference(AssertionError):
    """A codec and another implementation do not agree."""


def check_rows(ours: pa.RecordBatch, theirs: Sequence[pa.Array], values: Sequence[bytes], schema: Any) -> None:
    """Raise ``Difference`` for the shortest value that has another row. ``theirs``: the columns of
    the reference. ``values``: one for each row. ``schema``: is shown."""
    if not len(ours) == len(values) == len(theirs[0]):
        raise Difference(
            f"schema {schema}\n{len(values)} values: {len(ours)} rows, and {len(theirs[0])} of the reference"
        )
    for name, column, expected in zip(ours.schema.names, ours.columns, theirs, strict=True):
        if not same(column, expected):
            pairs = zip(plain_values(column), plain_values(expected), values, strict=True)
            found = [(value, *pair) for *pair, value in pairs if pair[0] != pair[1]]
            value, one, other = min(found, key=lambda each: len(each[0]), default=(b"", "another type", expected.type))
            raise Difference(
                f"schema {schema}\nvalue {value!r:.{_SHOWN}}\nfield {name} of {column.type}: {one!r:.{_SHOWN}}\n"
                f"the reference: {other!r:.{_SHOWN}}\n{len(found)} such values"
            )


def check_verdicts(
    bad: Mapping[int, str], refused: Mapping[int, str], values: Sequence[bytes | None], schema: Any
) -> None:
    """Raise ``Difference`` for the shortest value that only one side refuses. ``bad``: the values
    that the codec refuses, ``refused``: those that the reference refuses, with the reasons."""
    if different := bad.keys() ^ refused.keys():
        place = min(different, key=lambda each: len(values[each] or b""))
        raise Difference(
            f"schema {schema}\nvalue {values[place]!r:.{_SHOWN}}\nthe codec: {bad.get(place, 'a row')}\n"
            f"the reference: {refused.get(place, 'a row')}\n{len(different)} such values"
        )


def check_own(codec: Codec, batch: pa.RecordBatch, written: Sequence[bytes], schema: Any) -> None:
    """Raise ``Difference`` where the codec does not read its rows in what it has written of
    them."""
    again, bad = codec.decode_good(written)
    check_verdicts({each.index: each.reason for each in bad}, {}, written, schema)
    check_rows(again, batch.columns, written, f"{schema}, as written")


def same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two columns have the same values: floats bit by bit, apart from NaN, and times as
    numbers."""
    if len(one) != len(other) or not one.is_valid().equals(other.is_valid()):
        return False
    if pa.types.is_nested(one.type):
        return all(found.equals(wanted) for found, wanted in zip(_shape(one), _shape(other), strict=True)) and all(
            same(*pair) for pair in zip(_children(one), _children(other), strict=True)
        )
    if pa.types.is_floating(one.type):
        nan, wanted = pc.is_nan(one), pc.is_nan(other)
        return nan.equals(wanted) and _numbers(_without(one, nan)).equals(_numbers(_without(other, wanted)))
    return bool(_numbers(one).equals(_numbers(other)))


def _shape(column: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_map(column.type):
        yield pc.subtract(column.offsets[1:], column.offsets[:-1])
    elif pa.types.is_list(column.type):
        yield pc.list_value_length(column)


def _children(column: pa.Array) -> Sequence[pa.Array]:
    if pa.types.is_map(column.type):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return [each.slice(begin, end - begin) for each in (column.keys, column.items)]
    found: Sequence[pa.Array] = column.flatten() if pa.types.is_struct(column.type) else [column.flatten()]
    return found


def _without(column: pa.Array, nan: pa.Array) -> pa.Array:
    return pc.if_else(nan, pa.scalar(0.0, column.type), column)


def _numbers(column: pa.Array) -> pa.Array:
    if pa.types.is_floating(column.type) or pa.types.is_temporal(column.type):
        return column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    return column


def as_numbers(declared: pa.DataType) -> pa.DataType:
    """The type with integers in place of times."""
    return with_times(declared, lambda each: pa.int32() if each.bit_width == 32 else pa.int64())


def with_times(declared: pa.DataType, of_time: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with what ``of_time`` makes of the types of times in it."""
    types = pa.types
    if types.is_struct(declared):
        return pa.struct([pa.field(each.name, with_times(each.type, of_time)) for each in declared])
    if types.is_map(declared):
        return pa.map_(declared.key_type, with_times(declared.item_type, of_time))
    if types.is_list(declared):
        return pa.list_(with_times(declared.value_type, of_time))
    return of_time(declared) if types.is_temporal(declared) else declared


def plain_values(array: pa.Array) -> list[Any]:
    """The values of a column: times as numbers, structs as tuples, maps as sorted pairs."""
    kind = array.type
    valid = array.is_valid().to_pylist()
    found: list[Any]
    if pa.types.is_struct(kind):
        fields = [plain_values(each) for each in array.flatten()]
        found = list(zip(*fields, strict=True)) if fields else [()] * len(array)
    elif pa.types.is_map(kind):
        pairs = list(zip(plain_values(array.keys), plain_values(array.items), strict=True))
        found = [tuple(sorted(each, key=lambda pair: pair[0])) for each in _split(array, pairs)]
    elif pa.types.is_list(kind):
        found = [tuple(each) for each in _split(array, plain_values(array.values))]
    elif pa.types.is_floating(kind):
        found = [bits(each, kind) for each in array.to_pylist()]
    elif pa.types.is_temporal(kind):
        found = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    else:
        found = array.to_pylist()
    return [each if good else None for each, good in zip(found, valid, strict=True)]


def _split(array: Any, items: list[Any]) -> Iterator[list[Any]]:
    offsets = array.offsets.to_pylist()
    for begin, end in itertools.pairwise(offsets):
        yield items[begin:end]


def bits(value: float | None, kind: pa.DataType) -> Any:
    if value is None or value != value:
        return NAN
    return struct.unpack("<i", struct.pack("<f", value))[0] if kind == pa.float32() else double_bits(value)


def go_through(what: str | None, compare: Callable[[int], Counts]) -> None:
    """Compare with one seed after the other, until there were as many values as the command line
    says. A line each ten seconds names the seed that is next: ``--seed`` goes on there. Ends the
    process with status 1 at the first difference."""
    arguments = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    arguments.add_argument("--values", type=int, default=10_000_000)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    counts: Counts = collections.Counter()
    begun = said = time.monotonic()
    seed = chosen.seed
    while counts["values"] < chosen.values:
        try:
            counts += compare(seed)
        except Difference as difference:
            sys.exit(f"seed {seed}, after {counts['values']:,} values: {difference}")
        except BaseException:
            print(f"seed {seed}, after {counts['values']:,} values", flush=True)
            raise
        seed += 1
        if time.monotonic() - said > _SAID_EACH_S:
            said = time.monotonic()
            print(f"next seed {seed}: {_shown(counts)}, {counts['values'] / (said - begun):,.0f} a second", flush=True)
    print(f"seeds {chosen.seed} to {seed - 1}, no difference: {_shown(counts)}")


def _shown(counts: Counts) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
