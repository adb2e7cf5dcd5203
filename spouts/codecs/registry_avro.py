"""Avro values that name their schema in a Schema Registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.avro import AvroDecoder
from spouts.codecs.avro_arrow import arrow_schema
from spouts.codecs.avro_schema import Schema, loaded, parsed, schema_of_text
from spouts.codecs.registry import RegistryCodec, references_of
from spouts.codecs.registry_client import RegistryClient


class RegistryAvroCodec(RegistryCodec):
    """Avro values that name their schema in a Schema Registry; ``RegistryCodec`` says more.

    Values are resolved from the writer's schema to one reader's schema, which gives the codec's
    fields. Give either ``schema``, the reader's schema itself, or ``subject``: then the reader's
    schema is the latest one of this subject when the codec is created. A value whose schema does
    not resolve to the reader's is a bad record.
    """

    kind = "AVRO"

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        schema: Schema | Path | None = None,
        writer_subjects: Sequence[str] | None = None,
    ) -> None:
        super().__init__(registry, writer_subjects)
        if (subject is None) == (schema is None):
            raise TopologyError("RegistryAvroCodec needs subject= or schema=, one of them: what values are resolved to")
        self._named: dict[str, Schema] = {}  # what the reader's schema refers to
        self._reader = loaded(schema) if schema is not None else self.latest(str(subject), self._read)
        self._target = arrow_schema(parsed(self._reader, self._named))
        self.fields = Fields.of_schema(self._target)

    def _read(self, found: Any) -> Schema:
        self._named = {name: schema_of_text(text) for name, text in references_of(self._registry, found)}
        return schema_of_text(found.schema_str)

    def reader_key(self) -> str:
        return json.dumps([self._reader, self._named])

    def tombstones(self) -> AvroDecoder:
        reader = parsed(self._reader, self._named)
        return AvroDecoder(reader, reader, self._target)

    def decoder(self, schema: Any, registry: RegistryClient) -> AvroDecoder:
        named = {name: schema_of_text(text) for name, text in references_of(registry, schema)}
        writer = parsed(schema_of_text(schema.schema_str), named)
        return AvroDecoder(writer, parsed(self._reader, self._named), self._target)
