"""The messages to viewers: first the whole view, then its changes.

Invariants:

1. A document is encoded once, for all viewers.
2. No messages are queued for a viewer. A slow one gets fewer, newer messages.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any

from framework.ui.documents import ROW, View, row


class Encoded:
    """A view in encoded form. Used from the event loop only."""

    def __init__(self, number: int, view: View) -> None:
        self.number = number
        self.parts = {name: _event(name, document) for name, document in view.parts.items()}
        self._closed = view.closed
        self._txids = [each.txid for each in view.closed]
        self._since: dict[int, bytes] = {}

    @property
    def last_txid(self) -> int:
        return self._txids[-1] if self._txids else 0

    @property
    def first_txid(self) -> int:
        return self._txids[0] if self._txids else 0

    def transactions_since(self, txid: int, known_first: int = 0) -> bytes:
        """The event with the transactions after ``txid``. It has all of them, and ``anew``, when
        the viewer's older transactions, from ``known_first`` on, are no longer valid. Empty when
        there is nothing new."""
        anew = not self.first_txid - 1 <= txid <= self.last_txid or self.first_txid < known_first
        begin = 0 if anew else bisect_right(self._txids, txid)
        if begin == len(self._txids) and not anew:
            return b""
        known = self._since.get(begin if not anew else -1)
        if known is None:
            rows = [row(each) for each in self._closed[begin:]]
            known = _event("transactions", {"anew": anew, "columns": ROW, "rows": rows})
            self._since[begin if not anew else -1] = known
        return known


class Viewer:
    """The data that one viewer has."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}
        self._first, self._last = 0, -2

    def news(self, encoded: Encoded) -> bytes:
        """The parts of a view that this viewer lacks. They count as delivered."""
        changed = [event for name, event in encoded.parts.items() if self._parts.get(name) != event]
        changed.append(encoded.transactions_since(self._last, self._first))
        self._parts, self._first, self._last = encoded.parts, encoded.first_txid, encoded.last_txid
        return b"".join(changed)


def encode(document: Any) -> bytes:
    """JSON on one line, in ASCII. Values without a JSON form become text or null."""
    try:
        text = json.dumps(document, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document), separators=(",", ":"), default=str)
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value


def _event(name: str, document: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), encode(document))
