"""The keys and values of records: columns of bytes, made from the columns of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Union, runtime_checkable

import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.topology import Fields
from framework.topology.tuples import rows_of
from sinks.value_encoding import JsonColumns

RowDict = Mapping[str, Any]
#: A batch may have more than 2 GB.
BYTES = pa.large_binary()
#: The source of a key or a value: one field unchanged, several fields as a JSON object, or a
#: function of the row.
Content = Union[str, Sequence[str], Callable[[RowDict], "bytes | None"]]


@runtime_checkable
class Encoder(Protocol):
    """A codec that can also encode, such as the codecs of ``spouts``."""

    def check_encodable(self, fields: Fields) -> None:
        """Called once, on the driver, by the builder. Raises ``TopologyError`` for fields that the
        codec cannot encode. No I/O."""

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value of ``large_binary`` for each row. Raises ``BadRecordError`` for a row that
        cannot be encoded. Called in tasks."""


@runtime_checkable
class SchemaEncoder(Encoder, Protocol):
    """An encoder that writes the id of a registered schema into the values: the registry codecs of
    ``spouts`` are such, and codecs around them."""

    def for_topics(self, part: str, topics: Sequence[str]) -> SchemaEncoder:
        """The encoder for the keys or values (``part``) of these topics; none: the rows name them.
        Called on the driver, by the builder. Raises ``TopologyError``."""

    def without_registry(self) -> SchemaEncoder:
        """An encoder that asks no registry, to find out which rows it encodes."""

    def check_schema(self) -> None:
        """Called on the driver, before a topology starts. Changes nothing. Raises ``ConfigError``
        for a schema that is missing, or would be refused."""

    def register_schema(self) -> None:
        """Called on the driver, before the first batch. Raises ``ConfigError``."""


class Part:
    """The key or the value of the records. ``what``: "key" or "value"."""

    def __init__(self, what: str, content: Content | None, codec: Encoder | None) -> None:
        if codec is not None and (callable(content) or not isinstance(codec, Encoder)):
            given = f"{what}_codec=" if not isinstance(codec, Encoder) else f"{what}="
            raise TopologyError(
                f"KafkaSink: {given} cannot be {codec if given.startswith(f'{what}_') else content!r}: a codec encodes the "
                "fields that are named, or all of them"
            )
        self._what, self._content, self._codec = what, content, codec

    def for_topics(self, topics: Sequence[str]) -> Part:
        """The same for these topics; none: the rows name them. Raises ``TopologyError``."""
        codec = self._codec
        if not isinstance(codec, SchemaEncoder):
            return self
        try:
            return Part(self._what, self._content, codec.for_topics(self._what, topics))
        except TopologyError as error:
            raise TopologyError(f"KafkaSink: {self._what}_codec: {error}") from None

    def without_registry(self) -> Part:
        """The same, to find out which rows can be encoded, without a question to a registry."""
        codec = self._codec
        return Part(self._what, self._content, codec.without_registry()) if isinstance(codec, SchemaEncoder) else self

    def check_schema(self) -> None:
        """Find out whether the schema is registered, or may be. Changes nothing. Raises
        ``ConfigError``."""
        if isinstance(self._codec, SchemaEncoder):
            self._codec.check_schema()

    def register_schema(self) -> None:
        """Register the schema, if it is to be. Raises ``ConfigError``."""
        if isinstance(self._codec, SchemaEncoder):
            self._codec.register_schema()

    def names(self, fields: Fields) -> Sequence[str]:
        """The fields that it uses; all of them if that is unknown."""
        if callable(self._content):
            return fields.names
        return (self._content,) if isinstance(self._content, str) else self._content or ()

    def check(self, component_id: str, fields: Fields) -> None:
        """Raises ``TopologyError`` for unsuitable fields."""
        content = self._content
        if content is None or callable(content):
            return
        for name in self.names(fields):
            checked_field(component_id, name, fields)
        if self._codec is not None:
            try:
                self._codec.check_encodable(fields.select(self.names(fields)))
            except TopologyError as error:
                raise TopologyError(f"committer {component_id!r}: {self._what}: {error}") from None
        elif isinstance(content, str):
            kind = fields.type_of(content)
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
                raise TopologyError(
                    f"committer {component_id!r}: field {content!r} is {kind}, and a record holds text or bytes: give a list, "
                    f"[{content!r}], for JSON, or a function"
                )
        else:
            JsonColumns(fields.select(content), "JSON", only_written=True)

    def column(self, fields: Fields, batch: pa.RecordBatch, where: str) -> pa.Array:
        """``where``: the topic, for a message. Raises ``BadRecordError``."""
        content = self._content
        if content is None:
            return pa.nulls(batch.num_rows, BYTES)
        if callable(content):
            rows = (dict(zip(batch.schema.names, row, strict=True)) for row in rows_of(batch))
            return pa.array([called(content, row, where) for row in rows], BYTES)
        if self._codec is not None:
            try:
                return self._codec.encode(batch.select([*self.names(fields)]))
            except BadRecordError as error:
                raise BadRecordError(f"{where}: {self._what}: {error}") from error
        if isinstance(content, str):
            return batch.column(content).cast(pa.binary()).cast(BYTES)
        chosen = fields.select(content)
        columns = JsonColumns(chosen, "JSON", only_written=True)
        encoded = map(columns.encode, rows_of(batch.select([*chosen])))
        return pa.array([_json(dict(zip(chosen, row, strict=True)), where) for row in encoded], BYTES)


def checked_field(component_id: str, name: str, fields: Fields) -> pa.DataType | None:
    """The type of a field. Raises ``TopologyError`` if there is none of this name."""
    if name not in fields:
        raise TopologyError(
            f"committer {component_id!r} needs field {name!r}, which its input does not have (it has: "
            f"{', '.join(fields.names)})"
        )
    return fields.type_of(name)


def called(function: Callable[[RowDict], bytes | None], row: RowDict, where: str) -> bytes | None:
    """The result of a function for a row. Raises ``BadRecordError`` for any result but bytes."""
    made = function(row)
    if made is not None and not isinstance(made, bytes):
        raise BadRecordError(
            f"{where}: the function given for key or value returned a {type(made).__name__}, not bytes"
        )
    return made


def _json(document: RowDict, where: str) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise BadRecordError(f"{where}: {dict(document)!r} cannot be written as JSON: {error}") from error
