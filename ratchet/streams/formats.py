"""The formats of a record's bytes, as columns: ``Json``, ``Text``, ``Bytes``, ``Avro``,
``Protobuf``, ``Debezium``, ``MessagePack``, ``Csv``, ``CloudEvents``, ``Compressed``, and those of
a Schema Registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.call_site import Call, called, options_of
from framework.config import default_address
from framework.errors import ConfigError, TopologyError
from framework.topology import Fields
from framework.topology.fields import FieldType
from framework.user_call_argument_checks import checks_call
from ratchet.streams.server_addresses import Server, not_set
from spouts import (
    AvroCodec,
    BytesCodec,
    CloudEventsCodec,
    Codec,
    CompressedCodec,
    CsvCodec,
    DebeziumCodec,
    FiniteCodec,
    JsonCodec,
    MessagePackCodec,
    ProtobufCodec,
    RegistryAvroCodec,
    RegistryJsonCodec,
    RegistryProtobufCodec,
    TextCodec,
)
from spouts.codecs.compressed import Compression
from spouts.codecs.json_arrow_schema import schema_of_json_schema


class Format(ABC):
    """Columns, and a codec that decodes the used ones."""

    schema: pa.Schema
    #: The server of the columns, if there is one.
    server: Server | None = None

    @abstractmethod
    def codec(self, used: Sequence[str]) -> Codec:
        """``used``: names of ``schema``, in its order; at least one."""


class Whole(Format):
    """A format whose codec decodes all columns."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        schema = codec.fields.schema()
        if schema is None:
            raise TopologyError(f"the fields of {type(codec).__name__} have no types: declare them")
        self.schema = schema

    def codec(self, used: Sequence[str]) -> Codec:
        return self._codec


class Json(Format):
    """JSON objects with these fields: ``Json(order=str, cents=int, at=datetime)``, or with the
    fields of a JSON Schema or an Arrow schema.

    A field that the pipeline does not use is not decoded, so a value of a wrong type in it is not
    detected. With ``extra="capture"``, a column ``extra`` contains the undeclared fields as JSON,
    as in ``spouts.JsonCodec``. With ``non_finite=True``, floats may be ``"NaN"``, ``"Infinity"``
    and ``"-Infinity"``.

    >>> Json(order=str, cents=int).schema.names
    ['order', 'cents']
    """

    def __init__(
        self,
        schema: Mapping[str, Any] | str | Path | pa.Schema | Fields | None = None,
        /,
        **types: FieldType | str | bool,
    ) -> None:
        call = called("Json", **types)
        extra: Any = types.pop("extra") if isinstance(types.get("extra"), str) else "ignore"
        self._non_finite = isinstance(types.get("non_finite"), bool) and bool(types.pop("non_finite"))
        columns: Any = types
        if (schema is None) == (not types):
            raise call.mistake("give fields, as in Json(order=str, cents=int), or one schema")
        try:
            declared: pa.Schema | None
            if isinstance(schema, pa.Schema):
                declared = schema
            elif schema is None or isinstance(schema, Fields):
                declared = (schema or Fields.of(columns)).schema()
            else:
                declared = schema_of_json_schema(schema)
            if declared is None:
                raise TopologyError("every field needs a type")
            self._declared = declared
            self._whole = JsonCodec(declared, extra=extra, non_finite=self._non_finite)
            found = self._whole.fields.schema()
        except TopologyError as error:
            raise call.mistake(error) from None
        self.schema = pa.schema(found)

    def codec(self, used: Sequence[str]) -> Codec:
        if any(name not in self._declared.names for name in used):
            return self._whole  # a codec that knows all declared names
        schema = pa.schema([self._declared.field(name) for name in used])
        return JsonCodec(schema, non_finite=self._non_finite)


@checks_call
def Text(field: str = "value") -> Format:
    """UTF-8 text in one column."""
    return Whole(TextCodec(field))


@checks_call
def Bytes(field: str = "value") -> Format:
    """The unchanged bytes, in one column."""
    return Whole(BytesCodec(field))


@checks_call
def Avro(schema: Any, reader_schema: Any = None) -> Format:
    """Avro values, all written with one schema, as of ``spouts.AvroCodec``."""
    return Whole(AvroCodec(schema, reader_schema))


def RegistryAvro(subject: str, registry: str | Mapping[str, Any] | None = None, **options: Any) -> Format:
    """Avro values that name their schema in a Schema Registry, resolved to the latest schema of
    ``subject``. ``registry``: its address, or its settings; by default ``registry.url`` of the
    configuration, or ``RATCHET_REGISTRY_URL`` of the environment. ``options``: of
    ``spouts.RegistryAvroCodec``."""
    return _of_registry(RegistryAvroCodec, subject, registry, options)


@checks_call
def Protobuf(message: Any, descriptor_set: bytes | str | Path | None = None) -> Format:
    """Protobuf messages of one type, as of ``spouts.ProtobufCodec``."""
    return Whole(ProtobufCodec(message, descriptor_set))


def RegistryProtobuf(subject: str, registry: str | Mapping[str, Any] | None = None, **options: Any) -> Format:
    """Protobuf messages that name their schema in a Schema Registry, of the type of the latest
    schema of ``subject``. ``registry``: as of ``RegistryAvro``. ``options``: of
    ``spouts.RegistryProtobufCodec``."""
    return _of_registry(RegistryProtobufCodec, subject, registry, options)


def RegistryJson(subject: str, registry: str | Mapping[str, Any] | None = None, **options: Any) -> Format:
    """JSON objects that name their schema in a Schema Registry, with the fields of the latest
    schema of ``subject``. ``registry``: as of ``RegistryAvro``. ``options``: of
    ``spouts.RegistryJsonCodec``."""
    return _of_registry(RegistryJsonCodec, subject, registry, options)


def _of_registry(codec: Callable[..., Codec], subject: str, registry: Any, options: Mapping[str, Any]) -> Format:
    name = codec.__name__.removesuffix("Codec")
    call = called(name, subject)
    call.check_options(options, ["registry", *options_of(codec)])
    key = "registry.url"
    address = registry if registry is not None else default_address(key)
    if address is None:
        raise not_set(call, key, f"{name}({subject!r}, 'http://registry:8081')")
    server = Server(address, key if registry is None else None)
    try:
        made = Whole(server.reached(lambda address: codec(address, subject=subject, **options)))
    except (ConfigError, TopologyError) as error:
        raise call.mistake(error) from None
    made.server = server
    return made


@checks_call
def MessagePack(**types: FieldType) -> Format:
    """MessagePack maps with these fields: ``MessagePack(order=str, cents=int)``."""
    return Whole(MessagePackCodec(Fields.of(types)))


@checks_call
def Csv(*, delimiter: str = ",", quote: str = '"', null: str = "", **types: FieldType) -> Format:
    """A row of CSV with these cells, in this order: ``Csv(order=str, cents=int)``. The options are
    those of ``spouts.CsvCodec``."""
    return Whole(CsvCodec(Fields.of(types), delimiter=delimiter, quote=quote, null=null))


class CloudEvents(Whole):
    """CloudEvents whose data is encoded in the format ``data``. ``options``: those of
    ``spouts.CloudEventsCodec``."""

    def __init__(self, data: Format | Codec, **options: Any) -> None:
        called("CloudEvents", data, **options).check_options(options, options_of(CloudEventsCodec))
        events = CloudEventsCodec(_codec(data), **options)
        super().__init__(events)
        #: For ``headers=`` of ``read_kafka`` and of ``to_kafka``, as in the codec.
        self.header_codecs, self.headers = events.header_codecs, events.headers


@checks_call
def Compressed(inside: Format | Codec, compression: Compression, **options: Any) -> Format:
    """Values that are compressed one by one: "gzip", "zstd", "lz4", "snappy" or "bz2". ``options``:
    of ``spouts.CompressedCodec``."""
    called("Compressed", inside, compression, **options).check_options(options, options_of(CompressedCodec))
    return Whole(CompressedCodec(_codec(inside), compression, **options))


@checks_call
def Finite(inside: Format | Codec) -> Format:
    """A format in which a value with a NaN or infinite float is bad, as in ``spouts.FiniteCodec``.
    ``Json`` refuses such values by default."""
    return Whole(FiniteCodec(_codec(inside)))


def _codec(given: Format | Codec) -> Codec:
    return given.codec(given.schema.names) if isinstance(given, Format) else given


@checks_call
def Debezium(fields: Fields | pa.Schema, **options: Any) -> Format:
    """Change records of Debezium: the row after each change, and what ``metadata`` names.
    ``options``: of ``spouts.DebeziumCodec``."""
    called("Debezium", fields, **options).check_options(options, options_of(DebeziumCodec))
    return Whole(DebeziumCodec(fields, **options))


def format_of(call: Call, what: str, given: Format | Codec) -> Format:
    """Accepts a format, or a codec of the user's own. ``what``: the argument. Raises
    ``TopologyError``."""
    if isinstance(given, Format):
        return given
    if isinstance(given, type) or not (hasattr(given, "fields") and hasattr(given, "decode")):
        named = given.__name__ if isinstance(given, type) else f"{given!r}, a {type(given).__name__}"
        example = "Text('order')" if what == "key" else "Json(order=str, cents=int)"
        raise call.mistake(f"{what} is {named}: give a format with its columns, such as {example}")
    return Whole(given)
