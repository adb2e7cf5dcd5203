"""JSON objects that name their JSON Schema in a Schema Registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.json import JsonCodec
from spouts.codecs.json_arrow_schema import loaded_schema, schema_of_json_schema
from spouts.codecs.json_schema_writer import ObjectWriter
from spouts.codecs.registry_client import new_schema
from spouts.codecs.registry_codec import RegistryCodec, references_of
from spouts.codecs.writer_subjects import Find, SubjectNameStrategy


class RegistryJsonCodec(RegistryCodec):
    """JSON objects that name their JSON Schema in a Schema Registry; ``RegistryCodec`` says more.

    The fields are those of ``schema``, a JSON Schema, as of ``JsonCodec.from_json_schema``; or else
    those of the latest JSON Schema of ``subject`` when the codec is created, and of the schemas
    that it refers to; or ``fields``, as for ``JsonCodec``: then it decodes only. A writer's schema
    is not enforced: it only has to be one, and of ``writer_subjects`` where those are given.

    Rows are encoded as objects that the JSON Schema validates, with all of its keywords; other rows
    are errors. A null field that the schema does not require is left out.
    """

    kind = "JSON"

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        schema: Mapping[str, Any] | str | Path | None = None,
        fields: Fields | pa.Schema | None = None,
        writer_subjects: Sequence[str] | None = None,
        subject_name_strategy: SubjectNameStrategy = "topic",
        register: bool = False,
        normalize: bool = False,
    ) -> None:
        super().__init__(registry, writer_subjects)
        if (fields is None) == (subject is None and schema is None):
            raise TopologyError(
                "RegistryJsonCodec needs subject= or schema=, or fields= alone: what objects are decoded to"
            )
        self._document: Mapping[str, Any] | None = None
        self._others: dict[str, str] = {}  # what the document refers to
        if schema is not None:
            self._document = loaded_schema(schema)
        elif subject is not None:
            self._document = self.latest(subject, self._read)
        if self._document is not None:
            fields = schema_of_json_schema(self._document, self._others)
            title = self._document.get("title")
            record = title if isinstance(title, str) else None
            self.write_to(subject, subject_name_strategy, record, register=register, normalize=normalize)
        elif register:
            raise TopologyError("RegistryJsonCodec: register=True registers a JSON Schema: give schema=")
        self._values = JsonCodec(fields)
        self._declared = str(fields if isinstance(fields, pa.Schema) else fields.schema())  # type: ignore[union-attr]
        self.fields = self._values.fields

    def _read(self, found: Any) -> Mapping[str, Any]:
        self._others = dict(references_of(self._registry, found))
        return loaded_schema(found.schema_str)

    def reader_key(self) -> str:
        return f"{self._declared} {json.dumps([self._document, self._others])}"

    def tombstones(self) -> JsonCodec:
        return self._values

    def decoder(self, schema: Any, references: Mapping[str, str]) -> JsonCodec:
        return self._values

    def writer_schema(self, find: Find) -> Any:
        return new_schema(json.dumps(self._document), self.kind)

    def _new_writer(self) -> ObjectWriter:
        return ObjectWriter(self._document or {}, self._others)
