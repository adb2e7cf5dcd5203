"""The rows of a map state as of a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from framework.bounded_pages import PAGE_KEYS, pages_within
from framework.errors import ConfigError, MovedOnError
from framework.topology import Header, StateReading
from framework.value_size import size_of
from sinks.backend import Key, MapBackend, Value
from sinks.external_row_sorter import PAGE_BYTES
from sinks.read_as_of import as_of, items_as_of


class MapReading(StateReading):
    """The rows of a map state. A row contains its value and the previous one, so a reading is as of
    the newest transaction of the state, or of the one before it. ``key_of``: parses the text of a
    key."""

    def __init__(self, backend: MapBackend, key_of: Callable[[str], Key]) -> None:
        self._backend, self._key_of = backend, key_of

    @property
    def schema(self) -> pa.Schema:
        key, value = (each.schema() for each in self._backend.fields)
        if key is None or value is None:
            raise ConfigError(
                f"{self._backend.location} has columns without a type: declare them, as in Fields(word=str)"
            )
        return pa.schema([*key, *value])

    def header(self) -> Header:
        return self._backend.read_header()

    def rows(self, txid: int, keys: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        found = items_as_of(self._backend, txid) if keys is None else self._named(keys, txid)
        for page, _ in pages_within(found, PAGE_KEYS, PAGE_BYTES, size_of):
            columns = zip(*((*key, *value) for key, value in page), strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _named(self, keys: Sequence[str], txid: int) -> Iterator[tuple[Key, Value]]:
        wanted = list(dict.fromkeys(map(self._key_of, keys)))
        answers = as_of(self._backend, self._backend.multi_get(wanted), txid)
        for key, (known, value) in zip(wanted, answers, strict=True):
            if not known:
                raise MovedOnError(f"{self._backend.location}, key {key!r}: changed after transaction {txid + 1}")
            if value is not None:
                yield key, value
