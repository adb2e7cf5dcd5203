"""Codecs that also encode: rows as the values of records, for ``KafkaSink(value_codec=...)``."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.topology import Fields
from framework.topology.arrow_columns import cast_column, column_of
from framework.topology.tuples import rows_of
from spouts.codecs.codec import Codec

#: Rows that become values at a time. Each is a piece of bytes per column for a moment, and such
#: pieces are many times as large as the columns.
_CHUNK_ROWS = 4_096


class EncodingCodec(Codec):
    """A codec that encodes rows one by one. Implement ``encode_row``.

    What it encodes, it decodes to the same row. A field of the codec that the rows do not have is
    null.
    """

    @abstractmethod
    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        """The value of a row. Raises ``ValueError`` with the reason if it cannot be encoded."""

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that the codec does not have, or has with another
        type. No I/O."""
        for name in fields:
            if name not in self.fields:
                raise TopologyError(
                    f"{type(self).__name__} has no field {name!r} (it has: {', '.join(self.fields.names)}): name the fields "
                    "to encode"
                )
            declared, wanted = fields.type_of(name), self.fields.type_of(name)
            if declared is not None and wanted is not None and nullable_type(declared) != nullable_type(wanted):
                raise TopologyError(
                    f"{type(self).__name__}: field {name!r} is {declared}, and it encodes {wanted}: cast one"
                )

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that cannot be encoded."""
        names = batch.schema.names
        return pa.array(
            [self._encoded(dict(zip(names, row, strict=True))) for row in rows_of(batch)], pa.large_binary()
        )

    def _encoded(self, row: Mapping[str, Any]) -> bytes:
        try:
            return self.encode_row(row)
        except (ValueError, TypeError, OverflowError) as error:
            raise refusal(self, error) from error


class ColumnWriter(Protocol):
    """Makes the values of rows, column by column."""

    def check(self, names: Sequence[str]) -> None:
        """Raises ``TopologyError`` for a field that rows with these fields do not have, although
        each value needs it."""

    def write(self, columns: Mapping[str, pa.Array], rows: int) -> Sequence[bytes]:
        """The value of each row. ``columns``: those that the rows have. Raises ``ValueError`` with
        the reason if a row cannot be encoded."""


class ColumnEncodingCodec(EncodingCodec):
    """A codec that encodes whole columns. Implement ``_new_writer``.

    ``names_its_fields``: whether records name the fields. Otherwise the codec has one field, and
    encodes the one field that it is given, whatever its name is.
    """

    names_its_fields = True
    #: Each process makes its own.
    _made_writer: ColumnWriter | None = None

    @abstractmethod
    def _new_writer(self) -> ColumnWriter:
        """The writer of the values."""

    @property
    def _row_writer(self) -> ColumnWriter:
        if self._made_writer is None:
            self._made_writer = self._new_writer()
        return self._made_writer

    def encode_columns(self, columns: Mapping[str, pa.Array], rows: int) -> Sequence[bytes]:
        """The value of each row. ``columns``: those that the rows have, in the codec's types; parts
        of them may be null that the codec declares not to be. Raises ``ValueError`` with the reason
        if a row cannot be encoded."""
        return self._row_writer.write(columns, rows)

    def check_encodable(self, fields: Fields) -> None:
        super().check_encodable(
            Fields.of({self._name_in_codec(fields.names, each): fields.type_of(each) for each in fields})
        )
        self._row_writer.check(fields.names)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made_writer": None}

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        columns = {self._name_in_codec(batch.schema.names, each): batch.column(each) for each in batch.schema.names}
        values = [
            pa.array(self._encoded_rows(columns, begin, min(_CHUNK_ROWS, batch.num_rows - begin)), pa.large_binary())
            for begin in range(0, batch.num_rows, _CHUNK_ROWS)
        ]
        return pa.concat_arrays(values) if values else pa.array([], pa.large_binary())

    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        names = [*row]
        columns = {
            self._name_in_codec(names, name): column_of([value], self.fields.type_of(self._name_in_codec(names, name)))
            for name, value in row.items()
        }
        return self.encode_columns(columns, 1)[0]

    def _encoded_rows(self, columns: Mapping[str, pa.Array], begin: int, rows: int) -> Sequence[bytes]:
        try:
            return self.encode_columns(
                {name: self._typed(name, column.slice(begin, rows)) for name, column in columns.items()}, rows
            )
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            raise refusal(self, error) from error

    def _typed(self, name: str, column: pa.Array) -> pa.Array:
        wanted = nullable_type(self.fields.type_of(name))
        if nullable_type(column.type) == wanted:
            return column
        try:
            return cast_column(column, wanted)
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(f"{name}: {error}") from error

    def _name_in_codec(self, names: Sequence[str], name: str) -> str:
        """The name that the codec has for a field of the rows. ``names``: all of theirs."""
        return name if self.names_its_fields or len(names) != 1 else self.fields.names[0]


def encoder(codec: Codec) -> Any:
    """The codec, which must encode. Raises ``TopologyError``."""
    if not hasattr(codec, "check_encodable"):
        raise TopologyError(f"{type(codec).__name__} decodes only")
    return codec


def refusal(codec: Codec, error: Exception) -> BadRecordError:
    """The error for a row that a codec cannot encode, for this reason."""
    return BadRecordError(f"{type(codec).__name__} cannot encode the row: {error}")


def nullable_type(declared: pa.DataType) -> pa.DataType:
    """The type with nulls allowed in every part, and its items called as Arrow calls them."""
    types = pa.types
    if types.is_struct(declared):
        return pa.struct([pa.field(each.name, nullable_type(each.type)) for each in declared])
    if types.is_map(declared):
        return pa.map_(nullable_type(declared.key_type), nullable_type(declared.item_type))
    if types.is_list(declared):
        return pa.list_(nullable_type(declared.value_type))
    return declared


class SchemaCodec(EncodingCodec):
    """A codec that writes the id of a registered schema into its values."""

    @abstractmethod
    def for_topics(self, part: str, topics: Sequence[str]) -> SchemaCodec:
        """A codec for the keys or values (``part``: "key" or "value") of these topics; none: the
        rows name them. Called on the driver, by the builder. Raises ``TopologyError`` if it needs
        to know topics. No I/O."""

    @abstractmethod
    def without_registry(self) -> SchemaCodec:
        """A codec that writes 0 for the id without a request, to find out which rows it encodes."""

    @abstractmethod
    def check_schema(self) -> None:
        """Called on the driver before a topology starts. Changes nothing. Raises ``ConfigError`` if
        the schema is not registered and may not be, or if it would be refused."""

    @abstractmethod
    def register_schema(self) -> None:
        """Called on the driver, by every new leader, before the first batch. Registers the schema,
        if it is to be. Raises ``ConfigError``."""


class WrappingCodec(Codec):
    """A codec around another one, which encodes if that one does. ``_codec``: the other one."""

    _codec: Codec

    def for_topics(self, part: str, topics: Sequence[str]) -> Codec:
        inner = self._schema_codec()
        return self if inner is None else self._around(inner.for_topics(part, topics))

    def without_registry(self) -> Codec:
        inner = self._schema_codec()
        return self if inner is None else self._around(inner.without_registry())

    def check_schema(self) -> None:
        if (inner := self._schema_codec()) is not None:
            inner.check_schema()

    def register_schema(self) -> None:
        if (inner := self._schema_codec()) is not None:
            inner.register_schema()

    def _schema_codec(self) -> SchemaCodec | WrappingCodec | None:
        return self._codec if isinstance(self._codec, (SchemaCodec, WrappingCodec)) else None

    def _around(self, codec: Codec) -> Codec:
        copied = copy.copy(self)
        copied._codec = codec
        return copied
