"""JSON objects that name their JSON Schema in a Schema Registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.json import JsonCodec
from spouts.codecs.json_schema import schema_of_json_schema
from spouts.codecs.registry import RegistryCodec, references_of
from spouts.codecs.registry_client import RegistryClient


class RegistryJsonCodec(RegistryCodec):
    """JSON objects that name their JSON Schema in a Schema Registry; ``RegistryCodec`` says more.

    Give either ``fields``, as for ``JsonCodec``; or ``subject``: then they are those of its latest
    JSON Schema when the codec is created, as of ``JsonCodec.from_json_schema``, and the schemas
    that it refers to. A writer's schema is not enforced: it only has to be one, and of
    ``writer_subjects`` where those are given.
    """

    kind = "JSON"

    def __init__(
        self,
        registry: str | Mapping[str, Any],
        *,
        subject: str | None = None,
        fields: Fields | pa.Schema | None = None,
        writer_subjects: Sequence[str] | None = None,
    ) -> None:
        super().__init__(registry, writer_subjects)
        if (subject is None) == (fields is None):
            raise TopologyError("RegistryJsonCodec needs subject= or fields=, one of them: what objects are decoded to")
        declared = fields if fields is not None else self.latest(str(subject), self._read)
        self._declared = str(declared if isinstance(declared, pa.Schema) else declared.schema())
        self._values = JsonCodec(declared)
        self.fields = self._values.fields

    def _read(self, found: Any) -> pa.Schema:
        return schema_of_json_schema(found.schema_str, dict(references_of(self._registry, found)))

    def reader_key(self) -> str:
        return self._declared

    def tombstones(self) -> JsonCodec:
        return self._values

    def decoder(self, schema: Any, registry: RegistryClient) -> JsonCodec:
        return self._values
