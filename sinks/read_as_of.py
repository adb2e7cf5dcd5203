"""Reads rows of a backend as of one transaction, for ``read``, ``verify``, ``explain`` and
``replay``.

Every backend supports this. With a ``SnapshotBackend``, a driver may write meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import xxhash

from framework.errors import ConfigError, MovedOnError
from framework.topology import Header
from sinks.backend import Key, MapBackend, Row, Value


class SnapshotBackend(MapBackend):
    """A backend that can open its store for a process that only reads. Optional."""

    def for_reading(self) -> MapBackend:
        """A backend of the same rows for a reader: it creates nothing."""
        return self

    def check_held(self, topology_id: str) -> Header | None:
        """Check the existing store as ``prepare`` does, by reading only. Returns the header, or
        None if there is none yet. Raises as ``prepare``."""
        return _compared(self, topology_id)

    @contextmanager
    def at_one_moment(self) -> Iterator[MapBackend]:
        """A backend for reading with the header and rows as of one moment, if the store supports
        that. By default, rows may change between two reads, and ``items_as_of`` detects it. Used by
        one thread."""
        yield self.for_reading()


def for_reading(backend: MapBackend) -> MapBackend:
    """As ``SnapshotBackend.for_reading``."""
    return backend.for_reading() if isinstance(backend, SnapshotBackend) else backend


def at_one_moment(backend: MapBackend) -> AbstractContextManager[MapBackend]:
    """As ``SnapshotBackend.at_one_moment``."""
    return backend.at_one_moment() if isinstance(backend, SnapshotBackend) else nullcontext(backend)


def check_held(backend: MapBackend, topology_id: str) -> Header | None:
    """As ``SnapshotBackend.check_held``. For another backend, compares the owner, and raises as
    ``read_header`` if there is none."""
    return backend.check_held(topology_id) if isinstance(backend, SnapshotBackend) else _compared(backend, topology_id)


def _compared(backend: MapBackend, topology_id: str) -> Header | None:
    header = backend.check(topology_id) or backend.read_header()
    if header.topology_id != topology_id:
        raise ConfigError(f"{backend.location} belongs to topology {header.topology_id!r}, not {topology_id!r}")
    return header


def as_of(backend: MapBackend, rows: Sequence[Row | None], txid: int) -> list[tuple[bool, Value | None]]:
    """For each of these rows, which ``multi_get`` has just returned: whether it still contains its
    value as of transaction ``txid``, and that value."""
    absence = None in rows and backend.read_header().tells_absence(txid)  # read after the rows
    return [row.as_of(txid) if row is not None else (absence, None) for row in rows]


def items_as_of(backend: MapBackend, txid: int) -> Iterator[tuple[Key, Value]]:
    """Every key that had a value after transaction ``txid``, and that value, in any order. For a
    row that transaction ``txid + 1`` has changed, or is changing, this is the previous value.

    Raises ``MovedOnError`` when a row no longer contains the value, when a deleted row may have
    been purged, and when another leader, a roll-back or a reset intervened. This may happen at the
    very end: so use no item before the end."""
    before, seen = backend.read_header(), array("Q")
    for key, row in backend.scan():
        known, value = row.as_of(txid)
        if not known:
            raise MovedOnError(f"{backend.location}, key {key!r}: changed after transaction {txid + 1}")
        if backend.scan_may_repeat:
            seen.append(xxhash.xxh64_intdigest(repr(key).encode()))
        if value is not None:
            yield key, value
    _check_held_still(backend, before, txid)
    if seen and len(np.unique(np.frombuffer(seen, np.uint64))) < len(seen):
        raise MovedOnError(f"{backend.location}: the scan may have given a row twice; read it again")


def _check_held_still(backend: MapBackend, before: Header, txid: int) -> None:
    """Raise unless the rows read since ``before`` are as of ``txid``. Call it after the rows."""
    after = backend.read_header()
    if min(before.done, after.done) < txid:
        raise MovedOnError(f"{backend.location}: transaction {txid} is not done, or was taken back")
    if (before.incarnation, before.epoch) != (after.incarnation, after.epoch):
        raise MovedOnError(f"{backend.location}: another leader, or a reset, came while it was read")
    if after.open is not None and after.open.txid == txid and not before.same_attempt(after):
        raise MovedOnError(f"{backend.location}: transaction {txid} was repeated while it was read")
    if not after.tells_absence(txid):
        raise MovedOnError(f"{backend.location}: rows that were deleted after transaction {txid} may be purged")
