"""A table for the records of closed transactions, in SQLite or PostgreSQL.

::

    incarnation, txid     the key: the topology's life, and the transaction
    until_txid            the txid; in a gap, the last transaction that is missing
    closed_at             when it was closed; null in a gap, and of one that was taken back
    attempts              how many there were
    plan_digest           of the plan that was committed
    record                everything, as JSON: as ``ratchet history --json`` shows it; null in a gap

The header of the table fences it as that of a state: ``done`` is the last txid that is held, and
the open attempt has the incarnation in the place of a plan's digest.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from framework.errors import ConfigError, CorruptStateError, StaleWriterError
from framework.observe.journal import TransactionRecord
from framework.topology import Fields, Header, OpenCommit
from framework.transactions.history_archive import HistoryTarget, KeptRecord
from sinks.backend import Key, MapBackend, Row
from sinks.read_as_of import for_reading
from sinks.sql.sqlite_backend import SqliteBackend

KEY = Fields(incarnation=str, txid=int)
VALUE = Fields.of(
    {
        "until_txid": pa.int64(),
        "closed_at": pa.timestamp("us", tz="UTC"),
        "attempts": pa.int64(),
        "plan_digest": pa.string(),
        "record": pa.string(),
    }
)
_WRITER = "history"
_NAME_MAX = 50


def history_table(url: str, topology_id: str) -> HistoryTarget:
    """The table at ``sqlite:PATH`` or at a libpq address ``postgresql://...``. A ``#NAME`` at the
    end is the table's name; by default it is ``history_`` and the id of the topology. Raises
    ``ConfigError``."""
    address, _, name = url.partition("#")
    if "@" in name:
        # the character was part of a password, which must not be shown as a table's name
        address = ""
    table = name or _table_of(topology_id)
    if address.startswith("sqlite:"):
        path = re.sub(r"^sqlite:(//(?=/))?", "", address)
        if path and not path.startswith("//"):
            return HistoryTable(SqliteBackend(path, table, KEY, VALUE))
    elif address.startswith(("postgresql://", "postgres://")):
        from sinks.sql.postgres_backend import PostgresBackend  # an optional extra

        return HistoryTable(PostgresBackend(address, table, KEY, VALUE))
    raise ConfigError(
        "topology.history.table is no address of a table: write sqlite:PATH or postgresql://USER@HOST/DATABASE, and #NAME "
        "after it for another name than history_ and the id of the topology; in a password, write %23 for #"
    )


def _table_of(topology_id: str) -> str:
    """
    >>> _table_of("word-count")
    'history_word_count'
    """
    plain = re.sub(r"[^A-Za-z0-9_]", "_", topology_id)
    if len(plain) > _NAME_MAX:
        plain = f"{plain[: _NAME_MAX - 9]}_{hashlib.blake2b(topology_id.encode(), digest_size=4).hexdigest()}"
    return f"history_{plain}"


class HistoryTable(HistoryTarget):
    """Records as rows of a backend."""

    def __init__(self, backend: MapBackend) -> None:
        self._backend = backend
        self._header: Header | None = None
        self._incarnation, self._epoch = "", 0

    @property
    def location(self) -> str:
        return self._backend.location

    def check(self, topology_id: str) -> None:
        self._backend.check(topology_id)

    def begin(self, topology_id: str, incarnation: str, epoch: int) -> int:
        header = self._backend.prepare(topology_id)
        same = header.open is not None and header.open.plan_digest == incarnation
        if same and header.epoch > epoch:
            raise StaleWriterError(f"{self.location}: the leader of epoch {header.epoch} writes it", header.epoch)
        self._header, self._incarnation, self._epoch = header, incarnation, epoch
        return header.done if same else 0

    def write(self, kept: Sequence[KeptRecord]) -> None:
        before, self._header = self._header, None  # unknown until all records are written
        if before is None:
            raise StaleWriterError(f"{self.location}: begin again")
        txid = kept[-1].until_txid
        attempt = before.open.attempt_id + 1 if before.open is not None and before.open.txid == txid else 1
        if before.open is not None and before.open.plan_digest != self._incarnation:
            begun = replace(before, done=0)  # ``done`` belonged to another incarnation
            self._backend.raise_header(before, begun)
            before = begun
        opened = before.opened(self._epoch, OpenCommit(txid, attempt, self._incarnation))
        self._backend.raise_header(before, opened)
        keys: list[Key] = [(self._incarnation, each.txid) for each in kept]
        found = self._backend.multi_get(keys)
        expected = [row.stamp if row is not None else None for row in found]
        rows = [Row(_value(each), opened.stamp, None, _WRITER) for each in kept]
        self._backend.multi_put(opened, keys, expected, rows)
        finished = opened.finished(txid)
        self._backend.raise_header(opened, finished)
        self._header = finished

    def read(self, incarnation: str, txid: int) -> KeptRecord | None:
        (row,) = for_reading(self._backend).multi_get([(incarnation, txid)])
        if row is None or row.value is None:
            return None
        until_txid, *_, text = row.value
        try:
            record = TransactionRecord.from_document(json.loads(text)) if text is not None else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptStateError(f"{self.location}: transaction {txid} is not a record ({error})") from error
        return KeptRecord(txid, until_txid, record)

    def close(self) -> None:
        self._backend.close()


def _value(kept: KeptRecord) -> tuple[object, ...]:
    record = kept.record
    if record is None:
        return (kept.until_txid, None, None, None, None)
    closed = record.closed_at
    moment = datetime.datetime.fromtimestamp(closed, datetime.UTC) if closed is not None else None
    text = json.dumps(record.document())
    return (kept.until_txid, moment, record.attempts_total, record.plan_digest, text)
