"""Reads Debezium's transaction metadata: the transaction of a change, and the changes of a
transaction.

Source: Debezium's documentation, "Transaction metadata" (``provide.transaction.metadata``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_OF_A_CHANGE = re.compile(rb'"transaction"\s*:\s*(?=\{)')
#: The form of PostgreSQL's ids: the transaction, and the place of this change or end in the log.
_WITH_POSITION = re.compile(r"(\d+):\d+")
#: The planner keeps the ids of all records that it has read ahead. No source has longer ones.
_ID_CHARACTERS_MAX = 1_000
_DECODER = json.JSONDecoder()
#: Errors that JSON of another shape raises.
_BAD = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class ChangeOrder(NamedTuple):
    """A change as a part of its transaction. ``order``: 1 for the first change of its table."""

    transaction: str
    order: int


class TransactionEnd(NamedTuple):
    """The end of a transaction. ``changes``: for each table, as in ``public.orders``, how many
    changes there are."""

    transaction: str
    changes: Mapping[str, int]


def change_order(value: bytes | None) -> ChangeOrder | None:
    """The place of a change in its transaction; None for a record without a transaction, such as a
    tombstone or a row of a snapshot. The value is JSON, with or without a schema.

    >>> change_order(b'{"op":"c","transaction":{"id":"7:9","data_collection_order":2}}')
    ChangeOrder(transaction='7', order=2)
    >>> change_order(b'{"op":"r","transaction":null}')
    """
    if value is None:
        return None
    places = [each.end() for each in _OF_A_CHANGE.finditer(value)]
    if not places:
        return None
    try:
        said, _ = _DECODER.raw_decode(value[places[-1] :].decode())  # a column of this name stands before it
        return ChangeOrder(_name(said["id"]), int(said["data_collection_order"]))
    except _BAD:
        return None


def transaction_end(value: bytes | None) -> TransactionEnd | None:
    """The end in a record of the topic of transactions; None for the beginning of a transaction,
    and for a record that is not Debezium's.

    >>> transaction_end(
    ...     b'{"status":"END","id":"7:9","event_count":2,'
    ...     b'"data_collections":[{"data_collection":"public.orders","event_count":2}]}'
    ... )
    TransactionEnd(transaction='7', changes={'public.orders': 2})
    """
    try:
        said = _marker(value)
        if said["status"] != "END":
            return None
        tables = said.get("data_collections") or ()
        return TransactionEnd(
            _name(said["id"]), {str(each["data_collection"]): int(each["event_count"]) for each in tables}
        )
    except _BAD:
        return None


def is_marker(value: bytes | None) -> bool:
    """Whether a record is the beginning or the end of a transaction, rather than a change of a
    table that is named ``transaction``.

    >>> is_marker(b'{"status":"BEGIN","id":"7:9"}'), is_marker(b'{"op":"c","after":null}')
    (True, False)
    """
    try:
        return _marker(value)["status"] in ("BEGIN", "END")
    except _BAD:
        return False


def _marker(value: bytes | None) -> Any:
    """The payload of a record of the topic of transactions, with or without a schema. Raises one of
    ``_BAD`` for other values."""
    said = json.loads(value or b"null")
    return said.get("payload", said)


def _name(transaction: object) -> str:
    """The part of a transaction's id that all of its records have in common. Raises ``ValueError``
    for an id that no source has."""
    text = str(transaction)
    if len(text) > _ID_CHARACTERS_MAX:
        raise ValueError(f"an id of {len(text):,} characters")
    found = _WITH_POSITION.fullmatch(text)
    return found[1] if found is not None else text
