"""Rows of comma-separated values as Arrow columns."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.exact_decimals import decimals_of_text
from spouts.codecs.codec import BulkCodec, Values
from spouts.codecs.encoding_codec import EncodingCodec
from spouts.codecs.iso8601 import times_of_day
from spouts.codecs.messagepack import declared_types

#: A cell may be as large as a record. The module's own limit is 128 kB.
_CELL_BYTES_MAX = 1 << 30
#: Arrow's error of a time with an offset for a type without a zone, or the reverse.
_ZONE = re.compile("string: (?P<text>'.*') as a scalar of type .*: expected (?P<no>no )?(?:a )?zone offset")
#: Of the writer, which quotes cells with these characters.
_LINE_END = "\r\n"


class CsvCodec(BulkCodec, EncodingCodec):
    """Rows of CSV (RFC 4180): each value is one row, each cell a column, in the order of the
    fields. There is no row of names.

    ``fields``: typed ``Fields`` or an Arrow schema. ``delimiter``, ``quote``: one character each.
    ``null``: a cell with this text is null; by default an empty one.

    Text is taken as it is. Numbers, ``true`` and ``false``, decimals, and dates and times of ISO
    8601 are those that Arrow reads; a timestamp of UTC needs a zone.

    Errors: more or fewer cells than fields, a cell that is no value of its type, an open quote, a
    second row, and invalid UTF-8.

    >>> codec = CsvCodec(Fields(word=str, n=int))
    >>> codec.decode([b'"a, b",7', b"dog,"]).to_pylist()
    [{'word': 'a, b', 'n': 7}, {'word': 'dog', 'n': None}]
    """

    def __init__(self, fields: Fields | pa.Schema, *, delimiter: str = ",", quote: str = '"', null: str = "") -> None:
        self.fields, self._types = declared_types(type(self).__name__, fields)
        for name, given in (("delimiter", delimiter), ("quote", quote)):
            if not isinstance(given, str) or len(given) != 1 or given in "\r\n":
                raise TopologyError(f"CsvCodec: {name}={given!r}: give one character")
        if delimiter == quote:
            raise TopologyError(f"CsvCodec: delimiter and quote are both {quote!r}")
        for name, declared in self._types.items():
            if not _is_cell(declared):
                raise TopologyError(f"CsvCodec: field {name!r} is {declared}, which a cell of text does not hold")
        self._options: dict[str, Any] = {"delimiter": delimiter, "quotechar": quote, "strict": True}
        self._null = null

    def decode_together(self, values: Values) -> pa.RecordBatch:
        rows = [self._cells(value) if value is not None else [None] * len(self._types) for value in values]
        columns = []
        for number, (name, declared) in enumerate(self._types.items()):
            cells = pa.array([row[number] for row in rows], pa.string())
            try:
                columns.append(_parsed(cells, declared))
            except pa.ArrowException as error:
                raise ValueError(f"{name}: {error}") from error
        return pa.RecordBatch.from_arrays(columns, names=[*self._types])

    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        cells = []
        for name, declared in self._types.items():
            value = row.get(name)
            text = self._null if value is None else _text(value, declared)
            if value is not None and text == self._null:
                raise ValueError(f"{name}: {text!r} would be read as null")
            cells.append(text)
        written = io.StringIO()
        csv.writer(written, lineterminator=_LINE_END, **self._options).writerow(cells)
        return written.getvalue().removesuffix(_LINE_END).encode()

    def _cells(self, value: bytes) -> list[str | None]:
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid UTF-8 at byte {error.start}") from None
        if csv.field_size_limit() < _CELL_BYTES_MAX:
            csv.field_size_limit(_CELL_BYTES_MAX)
        try:
            found = list(islice(csv.reader(io.StringIO(text, newline=""), **self._options), 2))
        except csv.Error as error:
            raise ValueError(f"no row of CSV: {error}") from None
        if len(found) > 1:
            raise ValueError("more than one row, and a value is one")
        cells = found[0] if found and found[0] else [""]
        if len(cells) != len(self._types):
            raise ValueError(f"{len(cells):,} cells, and there are {len(self._types):,} fields")
        return [None if each == self._null else each for each in cells]


def _is_cell(declared: pa.DataType) -> bool:
    types = pa.types
    return any(
        each(declared)
        for each in (
            types.is_string,
            types.is_integer,
            types.is_floating,
            types.is_boolean,
            types.is_decimal,
            types.is_timestamp,
            types.is_date,
            types.is_time,
        )
    )


def _parsed(cells: pa.Array, declared: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(declared):  # Arrow reads 1 and 0, too
        wrong = pc.any(pc.invert(pc.is_in(cells, pa.array(["true", "false", None])))).as_py()
        if wrong:
            raise pa.ArrowInvalid("a truth is true or false")
    if pa.types.is_time(declared):  # which Arrow does not read
        found = times_of_day(cells, declared)
        if found.null_count > cells.null_count:
            raise pa.ArrowInvalid(f"a cell is no time of day of ISO 8601, as {declared} is")
        return found
    if pa.types.is_decimal(declared):
        return decimals_of_text(cells, declared)
    try:
        return cells.cast(declared)
    except pa.ArrowInvalid as error:
        zone = _ZONE.search(str(error)) if pa.types.is_timestamp(declared) else None
        if zone is None:
            raise
        has, other = ("an", f"'{declared.unit}', 'UTC'") if zone["no"] else ("no", f"'{declared.unit}'")
        raise pa.ArrowInvalid(
            f"{zone['text']} has {has} offset from UTC: declare pa.timestamp({other}) for such times"
        ) from error


def _text(value: Any, declared: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(declared):
        return "true" if value else "false"
    if types.is_timestamp(declared):
        digits = "milliseconds" if declared.unit == "ms" else "auto"  # Arrow reads no more than the unit has
        return str(value.isoformat(" ", digits)).replace("+00:00", "Z")
    if types.is_date(declared) or types.is_time(declared):
        return str(value.isoformat())
    return format(value, "f") if types.is_decimal(declared) else str(value)
