"""The headers of records: the source record's headers, kept or removed, and added ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.tuples import rows_of
from sinks.kafka.record_content import BYTES, RowDict, called, checked_field

#: The content of a header: the name of a field of text or bytes, bytes for every record, or a
#: function of the row. Null leaves the header out.
HeaderContent = Union[str, bytes, Callable[[RowDict], "bytes | None"]]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", BYTES)]))


class Headers:
    """The headers of the records of a ``KafkaSink``.

    * ``field``: a field that holds headers, such as the ``headers`` of a Kafka spout's metadata, or
      a map of text to text or bytes. They are kept, in order and with duplicate names.
    * ``remove``: names of headers in ``field`` to leave out.
    * ``add``: name -> a field of text or bytes, bytes for every record, or a function of the row
      that returns bytes; null leaves the header out. Added headers come last, so a reader that uses
      the last header of a name gets these.

    >>> Headers("headers", remove=["trace"], add={"region": "region", "by": b"ratchet"}).names
    ['headers', 'region']
    """

    def __init__(
        self, field: str | None = None, *, add: Mapping[str, HeaderContent] | None = None, remove: Iterable[str] = ()
    ) -> None:
        self._field, self._add = field, dict(add or {})
        if isinstance(remove, (str, bytes)):
            raise TopologyError(f"Headers: remove={remove!r}: give a list of names")
        self._remove = frozenset(remove)
        if field is not None and not isinstance(field, str):
            raise TopologyError(f"Headers: {field!r} is no name of a field: give the field that holds headers")
        if self._remove and field is None:
            raise TopologyError("Headers: remove= needs the field that holds the headers of the source")
        for name, content in self._add.items():
            if not isinstance(name, str) or not (isinstance(content, (str, bytes)) or callable(content)):
                raise TopologyError(
                    f"Headers: add={{{name!r}: {content!r}}}: give names of headers, each with a field, bytes, or a function"
                )

    @property
    def names(self) -> list[str]:
        """The fields that they use, except inside functions."""
        kept = [self._field] if self._field is not None else []
        return [*kept, *(each for each in self._add.values() if isinstance(each, str))]

    @property
    def field(self) -> str | None:
        """The field that holds headers."""
        return self._field

    def check(self, component_id: str, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that hold no headers."""
        for name in self.names:
            declared = checked_field(component_id, name, fields)
            if name == self._field and not _holds_headers(declared):
                raise TopologyError(
                    f"committer {component_id!r}: field {name!r} is {declared}, and headers are a list of structs of a text and "
                    "bytes, or a map of text to text or bytes"
                )
            if name != self._field and not _is_content(declared):
                raise TopologyError(
                    f"committer {component_id!r}: field {name!r} is {declared}, and a header holds text or bytes: cast it, or give "
                    "a function"
                )

    def column(self, batch: pa.RecordBatch, where: str) -> pa.Array:
        """``where``: the topic, for a message. Raises ``BadRecordError``."""
        kept = batch.column(self._field).to_pylist() if self._field is not None else [None] * batch.num_rows
        found = [
            [(name, _bytes(value)) for name, value in map(_pair, each or ()) if name not in self._remove]
            for each in kept
        ]
        rows: Sequence[RowDict] | None = None
        for name, content in self._add.items():
            if isinstance(content, bytes):
                column: Iterable[Any] = [content] * batch.num_rows
            elif isinstance(content, str):
                column = batch.column(content).to_pylist()
            else:
                if rows is None:
                    rows = [dict(zip(batch.schema.names, row, strict=True)) for row in rows_of(batch)]
                column = [called(content, row, f"{where}: header {name!r}") for row in rows]
            for headers, value in zip(found, column, strict=True):
                if value is not None:
                    headers.append((name, _bytes(value)))
        return pa.array([[{"key": name, "value": value} for name, value in each] for each in found], HEADERS)


def checked_headers(given: Headers | str | Mapping[str, HeaderContent] | None) -> Headers | None:
    """Convert a field that holds headers, or a mapping of headers to add, to ``Headers``."""
    if given is None or isinstance(given, Headers):
        return given
    if isinstance(given, str):
        return Headers(given)
    if isinstance(given, Mapping):
        return Headers(add=given)
    raise TopologyError(
        f"headers={given!r}: give a field that holds headers, a mapping of those to add, or Headers(...)"
    )


def _holds_headers(declared: pa.DataType | None) -> bool:
    types = pa.types
    if declared is None:
        return False
    if types.is_map(declared):
        return bool(types.is_string(declared.key_type)) and _is_content(declared.item_type)
    if not types.is_list(declared) or not types.is_struct(declared.value_type) or declared.value_type.num_fields != 2:
        return False
    name, value = declared.value_type
    return bool(types.is_string(name.type)) and _is_content(value.type)


def _is_content(declared: pa.DataType | None) -> bool:
    types = pa.types
    return declared is not None and any(
        each(declared) for each in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    )


def _pair(each: Any) -> tuple[str, Any]:
    name, value = each.values() if isinstance(each, dict) else each
    return name, value


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
