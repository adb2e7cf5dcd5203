"""JSON objects as Arrow columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.json_values import json_encoder
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import BulkCodec, Values, all_good
from spouts.codecs.encoding_codec import EncodingCodec
from spouts.codecs.field_aliases import names_in_records
from spouts.codecs.json_arrow import nullable
from spouts.codecs.json_arrow_schema import schema_of_json_schema, schema_of_sample
from spouts.codecs.json_reader import JsonReader, Rows
from spouts.codecs.json_types import Conversion, in_json
from spouts.codecs.json_undeclared_fields import EXTRA, Extra, OnExtra, checked_extra

#: Text of a JSON document. ``json.dumps`` would make an encoder for each row.
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class JsonCodec(BulkCodec, EncodingCodec):
    """JSON objects with a declared schema: each value is one object, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. A missing field is null. ``alias``: field ->
    its name in the objects, if different; a dot is a part of the name. ``extra``: other keys of the
    objects are ignored ("ignore"), or kept ("capture"): a last field ``extra`` has them as one JSON
    object, each value as it is written; null where there is none. ``non_finite``: whether a field
    that is a float may be NaN or infinite: in JSON the text "NaN", "Infinity" or "-Infinity", which
    is an error otherwise. ``spouts.codecs.json_types`` lists how values of each type are written:
    what ``KafkaSink`` writes is read back.

    Errors: null, or nothing, in a field that the Arrow schema declares as not nullable (in one of a
    nested object only where that object is there), a value of another type, an integer beyond 64
    bits, a bare NaN, a number beyond a double, a moment or a date that Python cannot hold, invalid
    UTF-8, and a value that is not exactly one object.

    Arrow's JSON reader defines the meaning of a value. If the compiled part is installed
    (``spouts._native``), and no field is a decimal or of a large type, the compiled part decodes
    the usual values several times as fast, with the same results. It leaves single values to
    Arrow's reader: a declared key given twice, numbers with more than 64 characters or an exponent
    of three digits, nesting beyond 200 levels, and apparent errors. Otherwise Arrow's reader
    decodes all values.

    >>> JsonCodec(Fields(word=str, amount=int)).decode([b'{"word": "a", "amount": 7, "x": 1}']).to_pylist()
    [{'word': 'a', 'amount': 7}]
    >>> JsonCodec(Fields(user=str), alias={"user": "user.name"}).decode([b'{"user.name": "ann"}']).to_pylist()
    [{'user': 'ann'}]
    >>> JsonCodec(Fields(n=int), extra="capture").decode([b'{"n": 1, "price": 1.50}', b'{"n": 2}']).to_pylist()
    [{'n': 1, 'extra': '{"price":1.50}'}, {'n': 2, 'extra': None}]
    """  # noqa: W505 - doctest lines are not wrapped

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that decodes together in its own way decodes so in every call."""
        super().__init_subclass__(**options)
        if "decode_together" in vars(cls):
            for name in ("decode", "decode_good", "decode_array", "decode_good_array"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(BulkCodec, name))

    def __init__(
        self,
        fields: Fields | pa.Schema,
        *,
        alias: Mapping[str, str] | None = None,
        extra: OnExtra = "ignore",
        non_finite: bool = False,
    ) -> None:
        self.fields = fields if isinstance(fields, Fields) else Fields.of_schema(fields)
        schema = self.fields.schema()
        if schema is None or not len(schema):
            raise TopologyError("JsonCodec needs a type for every field, as in JsonCodec(Fields(word=str, amount=int))")
        declared = pa.schema(fields) if isinstance(fields, pa.Schema) else schema
        names = names_in_records(self.fields, alias)
        self._names = dict(zip(self.fields, names, strict=True))
        self._rows = nullable(declared)
        self._non_finite = non_finite
        self._extra = checked_extra(extra, self._rows.names, names)
        captured = [pa.field(EXTRA, pa.string())] if self._extra is not None else []
        self.fields = Fields.of_schema(pa.schema([*self._rows, *captured]))
        self._conversions = [Conversion(name, each.type) for name, each in zip(names, self._rows, strict=True)]
        self._as_read = names == self._rows.names and not any(each.is_needed for each in self._conversions)
        #: What the readers read. It says where null is an error: the rows have ``nullable`` of it.
        self._schema = pa.schema(
            [
                pa.field(name, in_json(each.type), nullable=each.nullable)
                for name, each in zip(names, declared, strict=True)
            ]
        )
        self._required = [each.name for each in self._schema if not each.nullable]
        try:
            shown = pa.schema([each.with_name(name) for name, each in zip(names, self._rows, strict=True)])
            self._reader = JsonReader(self._schema, shown, non_finite=non_finite)
        except pa.ArrowException as error:
            raise TopologyError(f"JsonCodec cannot decode into {schema.to_string()}: {error}") from error

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | str | Path) -> JsonCodec:
        """From a JSON Schema: a mapping, its text, or the path of a file.

        Enforces types, nested objects, arrays, and ``required``: of a nested object, where that
        object is there. Null and nothing are the same: an optional property may be null, and a
        required property that may be null may be missing. An item of an array may be null. An
        integer has 64 bits, and is not written as ``1.0``. Ignores other restrictions, such as
        ``minimum`` or ``pattern``. Raises ``TopologyError`` for what has no Arrow type (``oneOf``,
        ``$ref`` to another document).

        >>> JsonCodec.from_json_schema({"type": "object", "properties": {"n": {"type": "integer"}}}).fields
        Fields(n: int64)
        """  # noqa: W505 - doctest lines are not wrapped
        return cls(schema_of_json_schema(schema))

    @classmethod
    def from_sample(cls, values: Sequence[bytes | str | Mapping[str, Any]]) -> JsonCodec:
        """From a few sample values: the fields of all of them, with the types that Arrow infers.
        Text stays text, even if it looks like a time. Raises ``TopologyError`` for a field that is
        null in all values, or has two types.

        >>> JsonCodec.from_sample([b'{"word": "a", "n": 1}', b'{"word": "b", "n": 1.5}']).fields
        Fields(word: string, n: double)
        """
        raw = [
            each if isinstance(each, bytes) else (each if isinstance(each, str) else json.dumps(each)).encode()
            for each in values
        ]
        return cls(schema_of_sample(raw))

    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        encoders = self._encoders
        document = {}
        for name, value in row.items():
            if name in encoders:
                written, encode = encoders[name]
                document[written] = None if value is None else encode(value)
        for each in self._required:
            if document.get(each) is None:
                raise ValueError(f"{each} is null")
        captured = row.get(EXTRA) if self._extra is not None else None
        encoded = _written(document)
        if captured is not None:
            members = json.loads(captured)
            if not isinstance(members, dict) or not members.keys().isdisjoint(self._names.values()):
                raise ValueError(f"{EXTRA} is no JSON object of other fields")
            if members:  # the text as it is, so that a number keeps its digits
                inside = captured.strip()[1:-1]
                encoded = f"{encoded[:-1]},{inside}}}" if document else f"{{{inside}}}"
        return encoded.encode()

    @cached_property
    def _encoders(self) -> dict[str, tuple[str, Callable[[Any], Any]]]:
        """Field -> its name in the records, and the conversion of its values."""
        return {
            name: (self._names[name], json_encoder(self._rows.field(name).type, non_finite=self._non_finite))
            for name in self._names
        }

    def __getstate__(self) -> dict[str, Any]:
        """Without the functions, which are made again where they are needed."""
        return {name: value for name, value in vars(self).items() if name != "_encoders"}

    def decode_together(self, values: Values) -> pa.RecordBatch:
        batch, bad = self._decoded(values, only_first=True)
        if bad:
            raise ValueError(bad[0].reason)
        return batch

    def decode(self, values: Values) -> pa.RecordBatch:
        return all_good(*self._decoded(values, only_first=True))

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._decoded(values, only_first=False)

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return all_good(*self._decoded(values, only_first=True))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._decoded(values, only_first=False)

    def _decoded(self, values: Values | pa.BinaryArray, *, only_first: bool) -> tuple[pa.RecordBatch, list[BadRecord]]:
        read = self._reader.read(values, only_first=only_first)
        if self._extra is not None:
            return self._with_extra(self._extra, values, read)
        return (read.batch, read.bad) if self._as_read else self._converted(read)

    def _with_extra(
        self, extra: Extra, values: Values | pa.BinaryArray, read: Rows
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """The rows with the undeclared fields, and the bad values."""
        listed = values.to_pylist() if isinstance(values, (pa.Array, pa.ChunkedArray)) else values
        batch, bad = (read.batch, read.bad) if self._as_read else self._converted(read)
        gone = {each.index for each in bad}
        places = [place for place in read.places.tolist() if place not in gone]
        column, refused = extra.read(listed, places)
        batch = pa.RecordBatch.from_arrays([*batch.columns, column], names=[*self._rows.names, EXTRA])
        if refused:
            gone = {each.index for each in refused}
            batch = batch.filter(pa.array([place not in gone for place in places]))
        return batch, sorted([*bad, *refused], key=lambda each: each.index)

    def _converted(self, read: Rows) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """The rows in the declared types, and the bad values."""
        columns: list[pa.Array] = []
        bad = {each.index: each for each in read.bad}
        good = np.ones(read.batch.num_rows, np.bool_)
        for conversion, column in zip(self._conversions, read.batch.columns, strict=True):
            made, is_bad = conversion(column)
            columns.append(made)
            for row in np.flatnonzero(is_bad & good) if is_bad is not None else ():
                place = int(read.places[row])
                bad[place] = BadRecord(place, conversion.reason(column[int(row)].as_py()))
                good[row] = False
        batch = pa.RecordBatch.from_arrays(columns, names=self._rows.names)
        return (batch if good.all() else batch.filter(pa.array(good))), [bad[place] for place in sorted(bad)]
