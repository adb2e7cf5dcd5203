"""Codecs: the values of Kafka records as Arrow columns.

A codec decodes many values at once, with vectorised code, or says which one it cannot decode. A null value (a tombstone)
is no error: all of its fields are null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from framework.errors import TopologyError
from framework.topology import Fields

Values = Sequence[bytes | None]
#: Arrow's JSON reader works best on blocks of this size; a longer record gets a block of its own length.
_BLOCK_BYTES = 1 << 20


class UndecodableValueError(Exception):
    """The value at ``index`` of those given cannot be decoded, and why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"value {index}: {reason}")
        self.index = index
        self.reason = reason


class Codec(ABC):
    """Decodes values into the columns named by ``fields``. Travels to tasks; keeps nothing between calls."""

    fields: Fields

    @abstractmethod
    def decode(self, values: Values) -> pa.RecordBatch:
        """One row per value, in order. Raises ``UndecodableValueError`` for the first one that cannot be decoded."""


class BytesCodec(Codec):
    """The value as it is, in one binary field.

    >>> BytesCodec().decode([b"a", None]).to_pydict()
    {'value': [b'a', None]}
    """

    def __init__(self, field: str = "value") -> None:
        self.fields = Fields.of({field: pa.binary()})

    def decode(self, values: Values) -> pa.RecordBatch:
        return pa.record_batch([pa.array(values, pa.binary())], names=list(self.fields))


class TextCodec(Codec):
    """The value as UTF-8 text, in one string field. Invalid UTF-8 is an error.

    >>> TextCodec("line").decode([b"a", None]).to_pydict()
    {'line': ['a', None]}
    """

    def __init__(self, field: str = "value") -> None:
        self.fields = Fields.of({field: pa.string()})

    def decode(self, values: Values) -> pa.RecordBatch:
        binary = pa.array(values, pa.binary())
        try:
            text = binary.cast(pa.string())  # checks the encoding
        except pa.ArrowInvalid:
            raise _first_invalid_utf8(values) from None
        return pa.record_batch([text], names=list(self.fields))


class JsonCodec(Codec):
    """JSON objects with a declared schema: each value one object, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. Other keys of the objects are ignored; a missing one is null. A value of
    another type, an integer beyond 64 bits, NaN, a number beyond a double, invalid UTF-8, and anything that is not one
    object are errors.

    >>> JsonCodec(Fields(word=str, amount=int)).decode([b'{"word": "a", "amount": 7, "x": 1}']).to_pylist()
    [{'word': 'a', 'amount': 7}]
    """

    def __init__(self, fields: Fields | pa.Schema) -> None:
        self.fields = fields if isinstance(fields, Fields) else Fields.of_schema(fields)
        schema = self.fields.schema()
        if schema is None or not len(schema):
            raise TopologyError("JsonCodec needs a type for every field, as in JsonCodec(Fields(word=str, amount=int))")
        self._schema = schema
        self._floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        self._checked = [field.name for field in schema if not _is_plain(field.type)]
        try:
            self._parse([b"{}"])
        except pa.ArrowException as error:
            raise TopologyError(f"JsonCodec cannot decode into {schema.to_string()}: {error}") from error

    def decode(self, values: Values) -> pa.RecordBatch:
        present = [b"{}" if value is None else value for value in values] if None in values else values
        try:
            return self._parse(present)
        except (pa.ArrowException, ValueError):
            # Whitespace around an object is legal and rare; whoever sends it pays for the second look.
            stripped = [value.strip() if value is not None else b"{}" for value in present]
            try:
                return self._parse(stripped)
            except (pa.ArrowException, ValueError):
                raise self._first_bad(stripped) from None

    def _parse(self, values: Sequence[bytes | None]) -> pa.RecordBatch:
        """All values in one call of Arrow's reader. Raises ``ValueError`` when they are not one object each."""
        binary = pa.array(values, pa.binary())
        if not values:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self._schema], schema=self._schema)
        # With every value running from { to }, as many rows as values means one object each: an object cannot end in
        # one value and go on in the next, because no comma stands between them.
        if not (pc.all(pc.starts_with(binary, "{")).as_py() and pc.all(pc.ends_with(binary, "}")).as_py()):
            raise ValueError("not a JSON object")
        joined = b"\n".join(values)  # type: ignore[arg-type]
        lines = joined.count(b"\n") + 1
        longest = pc.max(pc.binary_length(binary)).as_py()
        table = pj.read_json(
            pa.BufferReader(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(_BLOCK_BYTES, 2 * longest + 2)),
            parse_options=pj.ParseOptions(
                explicit_schema=self._schema,
                unexpected_field_behavior="ignore",
                newlines_in_values=lines != len(values),
            ),
        )
        if table.num_rows != len(values):
            raise ValueError("not one JSON object per value")
        table = table.select(self._schema.names).combine_chunks()
        for name in self._checked:
            table.column(name).validate(full=True)  # Arrow's reader does not check UTF-8
        for name in self._floats:
            if not pc.all(pc.is_finite(table.column(name))).as_py() and table.column(name).null_count < len(table):
                raise ValueError(f"{name} is not a finite number")
        return table.to_batches()[0]

    def _first_bad(self, values: Sequence[bytes]) -> UndecodableValueError:
        """Halve until one value is left."""
        low, high = 0, len(values)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self._parse(values[low:middle])
                low = middle
            except (pa.ArrowException, ValueError):
                high = middle
        try:
            self._parse(values[low:high])
        except (pa.ArrowException, ValueError) as error:
            return UndecodableValueError(low, str(error).removeprefix("JSON parse error: "))
        return UndecodableValueError(low, "the values cannot be decoded together")


def _is_plain(declared: pa.DataType) -> bool:
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(check(declared) for check in checks)


def _first_invalid_utf8(values: Values) -> UndecodableValueError:
    for index, value in enumerate(values):
        try:
            (value or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            return UndecodableValueError(index, f"invalid UTF-8 at byte {error.start}")
    return UndecodableValueError(0, "invalid UTF-8")
