"""The value logic of the state types, pure: the content of a row, and its update by a transaction.

Invariants:

1. Transactional: an update by the txid that the row already has changes nothing.
2. Opaque: an update by the txid that the row already has starts again from ``prev``.
3. An update by a txid below that of the row is refused.

Source: ``org.apache.storm.trident.state.TransactionalValue`` and ``OpaqueValue``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from framework.errors import StaleWriterError


@dataclass(frozen=True, slots=True)
class TransactionalValue:
    """A value and the transaction that last changed it.

    >>> TransactionalValue(1, 10).update(2, 15)
    TransactionalValue(txid=2, value=15)
    >>> TransactionalValue(2, 15).update(2, 99)
    TransactionalValue(txid=2, value=15)
    """

    txid: int
    value: Any

    def get(self, txid: int) -> Any:
        """The value that transaction ``txid`` reads."""
        _refuse_older(self.txid, txid)
        return self.value

    def update(self, txid: int, value: Any) -> TransactionalValue:
        _refuse_older(self.txid, txid)
        return self if txid == self.txid else TransactionalValue(txid, value)


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """A value, the transaction that last changed it, and the value before that.

    >>> OpaqueValue(3, 5, 4).get(3), OpaqueValue(3, 5, 4).get(4)
    (4, 5)
    >>> OpaqueValue(3, 5, 4).update(3, 6)
    OpaqueValue(txid=3, value=6, prev=4)
    >>> OpaqueValue(3, 5, 4).update(4, 6)
    OpaqueValue(txid=4, value=6, prev=5)
    """

    txid: int
    value: Any
    prev: Any = None

    def get(self, txid: int) -> Any:
        """The value that transaction ``txid`` starts from: ``prev`` if it wrote the row last."""
        return value_before(txid, self.txid, self.value, self.prev)

    def update(self, txid: int, value: Any) -> OpaqueValue:
        """The row after ``txid`` writes ``value``, which was computed from ``get(txid)``."""
        return OpaqueValue(txid, value, self.get(txid))


def value_before(txid: int, row_txid: int, value: Any, prev: Any) -> Any:
    """``OpaqueValue(row_txid, value, prev).get(txid)``, without an object for each row."""
    _refuse_older(row_txid, txid)
    return prev if txid == row_txid else value


def _refuse_older(row_txid: int, txid: int) -> None:
    if txid < row_txid:
        raise StaleWriterError(f"txid {txid} would update a row that txid {row_txid} has written")
