"""A commit of a map state in progress."""

from __future__ import annotations

from framework.errors import InvariantViolation, StaleWriterError
from framework.topology import CommitFence, Header, Stamp, TransactionAttempt
from sinks.backend import SWEPT, Key, MapBackend, Row, Value
from sinks.values import value_before

STANDALONE = "standalone"


class MapCommit:
    """One commit in progress: the values read, and the values to write."""

    def __init__(
        self, attempt: TransactionAttempt, header: Header, fence: CommitFence | None, backend: MapBackend
    ) -> None:
        if header.open is None:
            raise InvariantViolation("a commit needs an open header")
        self.backend = backend
        self.attempt = attempt
        self.header = header
        self.writer = fence.writer if fence is not None else STANDALONE
        self.standalone = fence is None
        self.stamp = Stamp(attempt.txid, header.epoch, attempt.attempt_id)
        self.found: dict[Key, Row | None] = {}
        self.written: dict[Key, Row] = {}
        #: Whether the store has merged deltas. If the commit is one step of the store, this was it.
        self.merged = False


def row_after(row: Row | None, commit: MapCommit, value: Value | None) -> Row:
    """The row with this value, and with the value before the commit's transaction as ``prev``."""
    if row is None:
        return Row(value, commit.stamp, None, commit.writer)
    before = value_before(commit.stamp.txid, row.stamp.txid, row.value, row.prev)
    return Row(value, commit.stamp, before, commit.writer)


def refuse_newer(key: Key, row: Row, commit: MapCommit) -> None:
    """Raise ``StaleWriterError`` if a later attempt has written the row, and
    ``InvariantViolation`` if another writer of the same attempt has."""
    if row.stamp > commit.stamp:
        raise StaleWriterError(
            f"{commit.backend.location}, key {key!r}: stamp {row.stamp}, this writer has {commit.stamp}",
            row.stamp.epoch,
        )
    if row.stamp == commit.stamp and row.writer not in (commit.writer, SWEPT):
        raise InvariantViolation(
            f"{commit.backend.location}, key {key!r}: written in the same attempt by {row.writer} and by {commit.writer} "
            "(C12): one key has one writer; group the input by the key"
        )
