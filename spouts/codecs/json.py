"""JSON objects as Arrow columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import BulkCodec, UndecodableValueError, Values, joined
from spouts.codecs.json_arrow import ArrowJsonCodec, nullable
from spouts.codecs.json_native import native_json
from spouts.codecs.json_schema import schema_of_json_schema, schema_of_sample


class JsonCodec(BulkCodec):
    """JSON objects with a declared schema: each value is one object, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. Other keys of the objects are ignored. A
    missing field is null. Errors: null, or nothing, in a field that the Arrow schema declares as not
    nullable (in one of a nested object only where that object is there), a value of another type,
    an integer beyond 64 bits, NaN, a number beyond a double, invalid UTF-8, and a value that is not
    exactly one object.

    Arrow's JSON reader says what a value means. Where the compiled part is installed
    (``spouts._native``), and every field is an integer, a float, a bool, a string, or a struct or
    list of these, it decodes the usual values several times as fast, with the same results. It
    leaves to Arrow's reader, value by value: a declared key given twice, numbers with more than 64
    characters or an exponent of three digits, nesting beyond 200 levels, and whatever seems to be
    an error. If a field has another type, such as a timestamp, Arrow's reader decodes all values.

    >>> JsonCodec(Fields(word=str, amount=int)).decode([b'{"word": "a", "amount": 7, "x": 1}']).to_pylist()
    [{'word': 'a', 'amount': 7}]
    """  # noqa: W505 - doctest lines are not wrapped

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that decodes together in its own way decodes so in every call."""
        super().__init_subclass__(**options)
        if "decode_together" in vars(cls):
            for name in ("decode", "decode_good", "decode_array", "decode_good_array"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(BulkCodec, name))

    def __init__(self, fields: Fields | pa.Schema) -> None:
        self.fields = fields if isinstance(fields, Fields) else Fields.of_schema(fields)
        schema = self.fields.schema()
        if schema is None or not len(schema):
            raise TopologyError("JsonCodec needs a type for every field, as in JsonCodec(Fields(word=str, amount=int))")
        #: As declared: it says where null is an error. The rows have ``nullable`` of it.
        self._schema = pa.schema(fields) if isinstance(fields, pa.Schema) else schema
        self.fields = Fields.of_schema(nullable(schema))
        try:
            self._arrow = ArrowJsonCodec(self._schema)
        except pa.ArrowException as error:
            raise TopologyError(f"JsonCodec cannot decode into {schema.to_string()}: {error}") from error

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | str | Path) -> JsonCodec:
        """From a JSON Schema: a mapping, its text, or the path of a file.

        Enforces types, nested objects, arrays, and ``required``: of a nested object, where that
        object is there. Ignores other restrictions, such as ``minimum`` or ``pattern``. Raises
        ``TopologyError`` for what has no Arrow type (``oneOf``, ``$ref`` to another document).

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

    def decode_together(self, values: Values) -> pa.RecordBatch:
        array = self._array(values)
        if array is None:
            return self._arrow.decode_together(values)
        return self._decoded(array, lambda rest: (self._arrow.decode_together(rest), []))[0]

    def decode(self, values: Values) -> pa.RecordBatch:
        array = self._array(values)
        return self._arrow.decode(values) if array is None else self._decoded_or_failed(array)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        array = self._array(values)
        return self._arrow.decode_good(values) if array is None else self._decoded(array, self._arrow.decode_good)

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return self._decoded_or_failed(values)

    def _decoded_or_failed(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return self._decoded(values, lambda rest: (self._arrow.decode(rest), []))[0]

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._decoded(values, self._arrow.decode_good)

    def reason(self, error: Exception) -> str:
        return self._arrow.reason(error)

    def _array(self, values: Values) -> pa.BinaryArray | None:
        """The values for the compiled reader; None if there is none for this schema, or if they are
        too long together for one array."""
        if native_json(self._schema) is None:
            return None
        array = pa.array(values, pa.binary())
        return array if isinstance(array, pa.BinaryArray) else None

    def _decoded(
        self, values: pa.BinaryArray, by_arrow: Callable[[Values], tuple[pa.RecordBatch, list[BadRecord]]]
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, in order, and the bad values. ``by_arrow`` decodes
        the values that are not left to the compiled reader; it may raise for a bad one."""
        native = native_json(self._schema) if isinstance(values, pa.BinaryArray) else None
        if native is None:
            return by_arrow(values.to_pylist())
        batch, unusual = native.read(values)
        if not len(unusual):
            return batch, []
        places = unusual.to_numpy()
        try:
            rest, bad = by_arrow(values.take(unusual).to_pylist())
        except UndecodableValueError as error:
            raise UndecodableValueError(int(places[error.index]), error.reason) from None
        bad_places = places[[each.index for each in bad]]
        bad = [BadRecord(int(place), each.reason) for place, each in zip(bad_places, bad, strict=True)]
        if not rest.num_rows:
            return batch, bad
        order = np.empty(len(values), np.int64)
        usual = np.ones(len(values), np.bool_)
        usual[places] = False
        order[usual] = np.arange(batch.num_rows)
        good = np.ones(len(values), np.bool_)
        good[bad_places] = False
        order[good & ~usual] = batch.num_rows + np.arange(rest.num_rows)
        return joined([batch, rest]).take(pa.array(order[good])), bad
