"""How Kafka's records become rows: the codecs, and the metadata fields of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from framework.topology import RECORD_FIELDS, TOMBSTONE, Fields
from spouts.codecs.codec import Codec

METADATA_TYPES = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp_ms": pa.int64(),
    "key": pa.binary(),
    "value": pa.binary(),
    TOMBSTONE: pa.bool_(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


class Parts(NamedTuple):
    """The parts of a record to read, beside its value and its offset."""

    keys: bool = True
    headers: bool = True
    timestamps: bool = True
    epochs: bool = False


EVERYTHING = Parts()


def metadata_fields(names: tuple[str, ...]) -> dict[str, pa.DataType]:
    """The types of these metadata fields of a record. Raises ``KeyError`` for an unknown field."""
    return {name: RECORD_FIELDS[name] if name in RECORD_FIELDS else METADATA_TYPES[name] for name in names}


class RecordFilter(Protocol):
    """Which records become rows, by ``fields`` that are not of the value. Can be pickled."""

    @property
    def fields(self) -> Sequence[str]: ...

    def kept(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        """Whether each record, of which ``batch`` has these fields, becomes a row. None: all do."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How records become rows: the codec of the value, the codec of the key (None: the key is not
    decoded), one codec per header, and the metadata fields of the record, which come last.
    ``where``: the records whose value is decoded; None: all."""

    value: Codec
    key: Codec | None = None
    headers: Mapping[str, Codec] | None = None
    metadata: tuple[str, ...] = ()
    where: RecordFilter | None = None

    def fields(self) -> Fields:
        """All fields, in the order value, key, headers, metadata. Raises ``ValueError``, which
        names the field, if two of them have the same field."""
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
        """(the part of a record as error messages name it, its codec), in order."""
        found: list[tuple[str, Codec]] = [("value", self.value)]
        if self.key is not None:
            found.append(("key", self.key))
        return found + [(f"header {name}", codec) for name, codec in (self.headers or {}).items()]
