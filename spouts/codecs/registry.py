"""Avro in the Schema Registry's wire format: a zero byte, the id of the writer's schema in four
bytes, and the value.

Source: Confluent Schema Registry, wire format. The client is that of confluent-kafka.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.config import is_secret, without_password
from framework.errors import ConfigError, RetryableError, TopologyError
from framework.topology import Fields
from spouts.codecs.avro import AvroDecoder
from spouts.codecs.avro_schema import Schema, arrow_schema, loaded, parsed
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values, joined

_HEADER = struct.Struct(">bI")
#: The clients of this process, by their settings. Each caches the schemas it has seen.
_clients: dict[str, Any] = {}
_clients_lock = threading.Lock()


class RegistryAvroCodec(PerValueCodec):
    """Avro values that name their schema in a Schema Registry.

    ``registry``: its address, or a mapping of settings for confluent-kafka's
    ``SchemaRegistryClient`` (``url``, ``basic.auth.user.info``, ``ssl.ca.location`` ...).

    Values are resolved from the writer's schema to one reader's schema, which gives the codec's
    fields. Give either ``schema``, the reader's schema itself, or ``subject``: then the reader's
    schema is the latest one of this subject when the codec is created.

    A value with a schema id that the registry does not know is a bad record. If the registry does
    not answer, decoding raises ``RetryableError``.
    """

    def __init__(
        self, registry: str | Mapping[str, Any], *, subject: str | None = None, schema: Schema | Path | None = None
    ) -> None:
        self._settings = {"url": registry} if isinstance(registry, str) else dict(registry)
        if not self._settings.get("url"):
            raise ConfigError("a Schema Registry needs a url")
        self._where = without_password(str(self._settings["url"]))
        if (subject is None) == (schema is None):
            raise TopologyError("RegistryAvroCodec needs subject= or schema=, one of them: what values are resolved to")
        self._named: dict[str, Schema] = {}  # what the reader's schema refers to
        self._reader = loaded(schema) if schema is not None else self._latest(str(subject))
        parsed(self._reader, self._named)
        self._target = arrow_schema(self._reader, self._named)
        self.fields = Fields.of_schema(self._target)
        self._decoders: dict[int | None, AvroDecoder] = {}  # by the writer's schema id

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        bodies: dict[int | None, list[bytes | None]] = {}  # by schema id; None: tombstones
        places: dict[int | None, list[int]] = {}
        bad: list[BadRecord] = []
        unknown: dict[int, str] = {}  # unusable ids; each is asked for once per call
        for index, value in enumerate(values):
            try:
                schema_id, body = _opened(value)
                if schema_id in unknown:
                    raise ValueError(unknown[schema_id])
                if schema_id is not None:
                    self._check_known(schema_id, unknown)
            except ValueError as error:
                bad.append(BadRecord(index, str(error)))
                continue
            bodies.setdefault(schema_id, []).append(body)
            places.setdefault(schema_id, []).append(index)
        batches: list[pa.RecordBatch] = []
        order: list[int] = []  # for each decoded row, the index of its value
        for schema_id, its in bodies.items():
            batch, undecodable = self._any_decoder(schema_id).decode_good(its)
            gone = {each.index for each in undecodable}
            bad += [BadRecord(places[schema_id][each.index], each.reason) for each in undecodable]
            order += [place for position, place in enumerate(places[schema_id]) if position not in gone]
            batches.append(batch)
        bad.sort(key=lambda each: each.index)
        if len(batches) == 1:
            return batches[0], bad
        whole = joined([*batches, self._none.decode_good([])[0]])
        return whole.take(pa.array(sorted(range(len(order)), key=order.__getitem__), pa.int64())), bad

    def _check_known(self, schema_id: int, unknown: dict[int, str]) -> None:
        try:
            self._decoder(schema_id)
        except ValueError as error:
            unknown[schema_id] = str(error)
            raise

    def _any_decoder(self, schema_id: int | None) -> AvroDecoder:
        return self._none if schema_id is None else self._decoder(schema_id)

    def _decoder(self, schema_id: int) -> AvroDecoder:
        decoder = self._decoders.get(schema_id)
        if decoder is None:
            found = self._asked(lambda client: client.get_schema(schema_id), f"schema id {schema_id}")
            if (found.schema_type or "AVRO") != "AVRO":
                raise ValueError(f"schema id {schema_id} is {found.schema_type}, not Avro")
            named: dict[str, Schema] = {}
            self._add_references(found, named)
            try:
                writer = json.loads(found.schema_str)
                decoder = AvroDecoder(writer, self._reader, self._target, named, self._named)
                self._decoders[schema_id] = decoder
            except TopologyError as error:
                raise ValueError(f"schema id {schema_id}: {error}") from error
        return decoder

    def _latest(self, subject: str) -> Schema:
        try:
            found = self._asked(lambda client: client.get_latest_version(subject), f"subject {subject!r}").schema
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._add_references(found, self._named)
        schema: Schema = json.loads(found.schema_str)
        return schema

    def _add_references(self, schema: Any, named: dict[str, Schema]) -> None:
        """Add the types that a schema refers to. A type comes after the types that it refers to.
        Each schema has its own versions of them."""
        for reference in schema.references or ():
            if reference.name in named:
                continue
            what = f"{reference.subject!r} version {reference.version}"
            found = self._asked(lambda client, it=reference: client.get_version(it.subject, it.version), what).schema
            self._add_references(found, named)
            named[reference.name] = json.loads(found.schema_str)

    def _asked(self, question: Any, what: str) -> Any:
        """Ask the registry. Raises ``ValueError`` for what it does not have, ``ConfigError`` if it
        refuses the credentials, and ``RetryableError`` if it does not answer."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question(self._client())
        except SchemaRegistryError as error:
            if error.http_status_code == 404:
                raise ValueError(f"the Schema Registry does not know {what}") from error
            if error.http_status_code in (401, 403):
                raise ConfigError(
                    f"the Schema Registry at {self._where} refuses {what} ({error.http_status_code}): check its "
                    "credentials"
                ) from None
            raise RetryableError(f"the Schema Registry at {self._where}, {what}: {error}") from None
        except OSError as error:
            raise RetryableError(f"the Schema Registry at {self._where} does not answer: {error}") from None
        except Exception as error:
            if type(error).__module__.split(".")[0].startswith("httpx"):
                raise RetryableError(f"the Schema Registry at {self._where} does not answer: {error}") from None
            raise

    def _client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigError(
                f"the Schema Registry's client lacks {error.name}: pip install 'ratchet-pipelines[registry]'"
            ) from error
        key = repr(sorted(self._settings.items()))
        with _clients_lock:
            if key not in _clients:
                try:
                    _clients[key] = SchemaRegistryClient(dict(self._settings))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"Schema Registry settings: {error}") from None
            return _clients[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_decoders": {}}

    @property
    def _none(self) -> AvroDecoder:
        """The decoder for values without a schema: tombstones, and an empty list of values."""
        if None not in self._decoders:
            self._decoders[None] = AvroDecoder(self._reader, None, self._target, writer_named=self._named)
        return self._decoders[None]

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) or "auth" in key else value for key, value in self._settings.items()}
        return f"RegistryAvroCodec({ {**shown, 'url': self._where} })"


def _opened(value: bytes | None) -> tuple[int | None, bytes | None]:
    """The schema id and the body of a value. Raises ``ValueError`` if the value is not in the wire
    format."""
    if value is None:
        return None, None
    if len(value) < _HEADER.size:
        raise ValueError(f"{len(value)} bytes are too few for the Schema Registry's wire format")
    magic, schema_id = _HEADER.unpack_from(value)
    if magic != 0:
        raise ValueError(f"the first byte is {magic & 0xFF}, not 0: not in the Schema Registry's wire format")
    return schema_id, value[_HEADER.size :]
