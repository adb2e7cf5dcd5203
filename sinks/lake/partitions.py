"""Partitions of a table of files: which rows belong together, and how their values are recorded.

A partition value is a text in the form of Delta's protocol, or None for null. It is recorded with
the name of each file, in the manifest or in Delta's log, and read from there. Folder names show the
values to users, and to engines that only list folders; Ratchet does not parse them, so any value is
possible. A moment contains its zone, which is always UTC: otherwise a reader would interpret it in
the zone of its session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError

#: The values of one partition, in the order of the columns.
Texts = tuple[str | None, ...]

#: The folder name's value for null in that column.
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
#: The longest folder name that shows its value. File systems allow 255 bytes.
_FOLDER_MAX = 200


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_moment(kind: pa.DataType) -> bool:
    """Whether it is a point in time, rather than a local clock reading."""
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


_KINDS = (
    is_text,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_floating,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_decimal,
)


def check_partitioning(schema: pa.Schema, names: Sequence[str], location: str) -> None:
    """Raise ``TopologyError`` if a table with this schema cannot be partitioned by ``names``."""
    for name in names:
        if name not in schema.names:
            raise TopologyError(f"{location} is partitioned by {name!r}, which is not among its columns")
        kind = schema.field(name).type
        if not any(fits(kind) for fits in _KINDS):
            raise TopologyError(
                f"{location} cannot be partitioned by {name!r}, {kind}: make it a text, a number, a date or a moment upstream"
            )
    if len(set(names)) != len(names):
        raise TopologyError(f"{location} is partitioned by {list(names)}: name each column once")
    if len(names) == len(schema):
        raise TopologyError(f"{location} is partitioned by all its columns: leave one for the files")


def split(table: pa.Table, names: Sequence[str]) -> Iterator[tuple[Texts, pa.Table]]:
    """The rows of each partition, in their order, without the partition columns."""
    if not names or table.num_rows == 0:
        yield (), table
        return
    keys = pa.table(
        [*(table.column(name) for name in names), pa.array(range(table.num_rows))], [*_numbered(names), "row"]
    )
    groups = keys.group_by(_numbered(names), use_threads=False).aggregate([("row", "list")])
    texts = zip(*(_texts_of(groups.column(each)) for each in _numbered(names)), strict=True)
    rest = table.drop_columns(list(names))
    for values, rows in zip(texts, groups.column("row_list"), strict=True):
        yield values, rest.take(rows.values)


def distinct(rows: pa.RecordBatch, names: Sequence[str]) -> set[Texts]:
    """The partitions of these rows."""
    if not names:
        return set()
    groups = pa.table([rows.column(name) for name in names], _numbered(names)).group_by(_numbered(names)).aggregate([])
    return set(texts_of(groups.columns))


def texts_of(columns: Sequence[pa.ChunkedArray]) -> list[Texts]:
    """The partition of each row, from the partition columns."""
    return list(zip(*map(_texts_of, columns), strict=True))


def folder_of(names: Sequence[str], texts: Texts) -> Path:
    """The folder of a partition, relative to the table's folder.

    >>> str(folder_of(["day", "kind"], ("2026-01-01", "a/b")))
    'day=2026-01-01/kind=a%2Fb'
    """
    return Path(*map(_segment, names, texts))


def texts_in(path: str, names: Sequence[str]) -> Texts | None:
    """The partition values in a path: format 1 recorded them in folder names only. None if the path
    lacks one of the columns.

    >>> texts_in("day=2026-01-01/kind=a%2Fb/part-1.parquet", ["day", "kind"])
    ('2026-01-01', 'a/b')
    """
    found = dict(part.split("=", 1) for part in Path(path).parts[:-1] if "=" in part)
    if not found.keys() >= set(names):
        return None
    return tuple(None if found[name] == NULL_FOLDER else unquote(found[name]) for name in names)


def expression_of(schema: pa.Schema, names: Sequence[str], texts: Texts) -> pc.Expression:
    """The expression that is true for every row of a partition, from which pyarrow fills in the
    partition columns. Raises ``pa.ArrowInvalid`` for texts that are not values of these columns."""
    known = (
        pc.field(name).is_null() if text is None else pc.field(name) == _scalar(text, schema.field(name).type)
        for name, text in zip(names, texts, strict=True)
    )
    return reduce(and_, known, pc.scalar(True))


def _numbered(names: Sequence[str]) -> list[str]:
    return [str(place) for place in range(len(names))]


def _texts_of(column: pa.ChunkedArray) -> list[str | None]:
    kind = column.type
    if pa.types.is_decimal(kind):  # Arrow writes small decimals with an exponent
        return [None if value is None else format(value, "f") for value in column.to_pylist()]
    texts = column.cast(_plain(kind)).cast(pa.string())
    if is_moment(kind):
        texts = pc.binary_join_element_wise(pc.replace_substring(texts, " ", "T"), "Z", "")
    found: list[str | None] = texts.to_pylist()
    return found


def _scalar(text: str, kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_timestamp(kind):
        text = text.removesuffix("Z")
    return pa.scalar(text).cast(_plain(kind)).cast(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type for writing as text: timestamps lose their zone's name, because they are in UTC."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind


def _segment(name: str, text: str | None) -> str:
    value = NULL_FOLDER if text is None else quote(text, safe="")
    found = f"{quote(name, safe='')}={value}"
    if len(found) <= _FOLDER_MAX:
        return found
    return f"long={hashlib.blake2b(found.encode(), digest_size=16).hexdigest()}"
