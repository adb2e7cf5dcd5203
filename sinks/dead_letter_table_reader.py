"""Dead letters as rows of a state: their columns, and their reader."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import MovedOnError
from framework.topology import Fields
from framework.topology.dead_letters import Letter, LetterReader, ListedLetter
from sinks.backend import Key, Value
from sinks.states import MapState

LETTER_KEY = ("topic_id", "partition", "offset")
LETTER_VALUE = Fields.of(
    {
        "topic": pa.string(),
        "timestamp_ms": pa.int64(),
        "error": pa.string(),
        "record_key": pa.binary(),
        "record_value": pa.binary(),
        "headers": pa.string(),
        "attempts": pa.int32(),
    }
)
#: How often the letters are read again because a driver changed them meanwhile.
_TRIES = 20


def row_of(letter: Mapping[str, Any]) -> tuple[Key, Value]:
    """Key and value of a row of ``DEAD_LETTER_FIELDS``."""
    value = (
        *(letter[name] for name in ("topic", "timestamp_ms", "error", "key", "value")),
        json.dumps([[each["key"], _text(each["value"])] for each in letter["headers"] or ()]),
        letter["attempts"] or 0,
    )
    return tuple(letter[name] for name in LETTER_KEY), value


def letter_of(key: Key, value: Value) -> Letter:
    """The reverse of ``row_of``."""
    topic, timestamp_ms, error, record_key, record_value, headers, attempts = value
    topic_id, partition, offset = key
    return Letter(
        topic_id=topic_id,
        partition=partition,
        offset=offset,
        topic=topic,
        timestamp_ms=timestamp_ms,
        error=error,
        key=record_key,
        value=record_value,
        headers=[(name, None if held is None else base64.b64decode(held)) for name, held in json.loads(headers)],
        attempts=attempts or 0,
        ref=list(key),
    )


class TableLetters(LetterReader):
    """Reads the letters in a state. ``state``: a copy with connections of its own."""

    def __init__(self, state: MapState, topology_id: str) -> None:
        self._state, self._topology_id = state, topology_id

    def letters(self, closed: Callable[[], int]) -> Iterator[ListedLetter]:
        for _ in range(_TRIES):
            txid = closed()
            try:
                with self._state.reading(self._topology_id) as reading:
                    pages = reading.rows(min(reading.header().done, txid))
                    listed = [each for page in pages for each in _listed(page)]
                break
            except MovedOnError as error:
                moved = error
        else:
            raise moved
        yield from listed

    def fetched(self, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
        keys = [tuple(each) for each in refs]
        found: list[Letter | None] = []
        for key, row in zip(keys, self._state.backend.multi_get(keys), strict=True):
            value = None if row is None else row.prev if row.stamp.txid == txid else row.value
            found.append(letter_of(key, value) if value is not None else None)
        return found

    def close(self) -> None:
        self._state.close()


def _listed(page: pa.RecordBatch) -> Iterator[ListedLetter]:
    for row in zip(*(page.column(name).to_pylist() for name in page.schema.names), strict=True):
        yield ListedLetter.of(letter_of(row[: len(LETTER_KEY)], row[len(LETTER_KEY) :]))


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
