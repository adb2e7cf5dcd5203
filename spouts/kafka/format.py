"""How Kafka's records become rows: which codecs, and which of a record's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.topology import Fields
from spouts.codecs.codec import Codec

METADATA_TYPES = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp_ms": pa.int64(),
    "key": pa.binary(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def metadata_fields(names: tuple[str, ...]) -> dict[str, pa.DataType]:
    """The types of the record's own fields that a spout may add. Raises ``KeyError`` for an unknown one."""
    return {name: METADATA_TYPES[name] for name in names}


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How records become rows: the value's codec, the key's (None: the key is not decoded), one per header, and which of
    the record's own fields come last."""

    value: Codec
    key: Codec | None = None
    headers: Mapping[str, Codec] | None = None
    metadata: tuple[str, ...] = ()

    def fields(self) -> Fields:
        """In their order: value, key, headers, metadata. Raises ``ValueError`` naming a field that two of them have."""
        types: dict[str, Any] = {}
        parts: list[tuple[str, Mapping[str, Any]]] = [
            (what, {name: codec.fields.type_of(name) for name in codec.fields}) for what, codec in self.codecs()
        ]
        for what, part in (*parts, ("metadata", metadata_fields(self.metadata))):
            for name, declared in part.items():
                if name in types:
                    raise ValueError(f"{name!r} is both a field of the {what} and one before it: rename one of them")
                types[name] = declared
        return Fields.of(types)

    def codecs(self) -> list[tuple[str, Codec]]:
        """What each codec decodes, as messages name it, and the codec."""
        found: list[tuple[str, Codec]] = [("value", self.value)]
        if self.key is not None:
            found.append(("key", self.key))
        return found + [(f"header {name}", codec) for name, codec in (self.headers or {}).items()]
