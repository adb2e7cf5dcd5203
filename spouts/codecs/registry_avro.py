"""Avro values that name their schema in a Schema Registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.avro import AvroDecoder
from spouts.codecs.avro_arrow_schema import arrow_schema
from spouts.codecs.avro_schema import Schema, loaded, parsed, schema_of_text
from spouts.codecs.avro_writer import RowWriter
from spouts.codecs.registry_client import new_schema
from spouts.codecs.registry_codec import RegistryCodec, references_of
from spouts.codecs.writer_subjects import Find, SubjectNameStrategy


class RegistryAvroCodec(RegistryCodec):
    """Avro values that name their schema in a Schema Registry; ``RegistryCodec`` says more.

    Values are resolved from the writer's schema to one reader's schema, which gives the codec's
    fields. It is ``schema``, or else the latest one of ``subject`` when the codec is created. A
    value whose schema does not resolve to it is a bad record. Rows are encoded with it, as by
    ``AvroCodec``.
    """

    kind = "AVRO"

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        schema: Schema | Path | None = None,
        writer_subjects: Sequence[str] | None = None,
        subject_name_strategy: SubjectNameStrategy = "topic",
        register: bool = False,
        normalize: bool = False,
    ) -> None:
        super().__init__(registry, writer_subjects)
        if subject is None and schema is None:
            raise TopologyError("RegistryAvroCodec needs subject= or schema=: what values are resolved to")
        self._named: dict[str, Schema] = {}  # what the reader's schema refers to
        self._reader = loaded(schema) if schema is not None else self.latest(str(subject), self._read)
        reader = parsed(self._reader, self._named)
        self._target = arrow_schema(reader)
        self.fields = Fields.of_schema(self._target)
        self.names_its_fields = reader.kind == "record"
        self.write_to(
            subject, subject_name_strategy, reader.name or reader.kind, register=register, normalize=normalize
        )

    def _read(self, found: Any) -> Schema:
        self._named = {name: schema_of_text(text) for name, text in references_of(self._registry, found)}
        return schema_of_text(found.schema_str)

    def reader_key(self) -> str:
        return json.dumps([self._reader, self._named])

    def tombstones(self) -> AvroDecoder:
        reader = parsed(self._reader, self._named)
        return AvroDecoder(reader, reader, self._target)

    def decoder(self, schema: Any, references: Mapping[str, str]) -> AvroDecoder:
        named = {name: schema_of_text(text) for name, text in references.items()}
        writer = parsed(schema_of_text(schema.schema_str), named)
        return AvroDecoder(writer, parsed(self._reader, self._named), self._target)

    def writer_schema(self, find: Find) -> Any:
        return new_schema(json.dumps(self._reader), self.kind)

    def _new_writer(self) -> RowWriter:
        return RowWriter(parsed(self._reader, self._named))
