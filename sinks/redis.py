"""Stamped rows in Redis: one hash per state, one JSON document per row, written by Lua scripts
under the header.

::

    {words}            hash: key of the row -> document (below)
    {words}:header     the owner, the attempt that may write, the last txid done
    {words}:columns    names and types of the columns
    {words}:touched    keys written by the open transaction: what a sweep reads
    {words}:deleted    keys of tombstones: what a purge reads
    {words}:due        sorted set: keys of rows with a value, by the column of ``order_by``, if any
    {words}:count      how many rows there are, and how many keys are listed as touched and as due

    {"s":[txid,epoch,attempt],"w":writer,"v":[values],"p":[previous values]}

The field of a row is its key: one text column as it is, any other single column as JSON, several
columns as a JSON array. ``v`` is null in a tombstone. ``p`` is absent if there was no value before.
Each script compares the count first. Otherwise rows that another program has removed, or that Redis
has expired or evicted, would silently restart from empty values (ADR 79).

Numbers are merged in Python, because all numbers of Lua are floats. A script compares stamps and
writes, in one atomic step for up to ``ROWS_PER_STEP`` rows.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from framework.bounded_pages import rows_that_fit
from framework.clients.redis_errors import VALUE_BYTES_MAX, evicts, leave_replica, passes, redirects, server_information
from framework.config import resolved_address, shown_host
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    RetryableError,
    StaleWriterError,
    TopologyError,
)
from framework.topology import FORMER, REBUILT, Fields, Header, Reach, Stamp
from sinks.backend import Key, Row
from sinks.external_row_sorter import PAGE_BYTES
from sinks.path_checks import somebody_elses
from sinks.read_as_of import SnapshotBackend
from sinks.rebuild_exchange import ExchangeBackend
from sinks.redis_scripts import (
    CLEAR,
    COUNT,
    COUNTED_PARTS,
    CREATE,
    DUE,
    EXCHANGE,
    PROBE,
    PROBE_ORDER,
    PURGE,
    PUT,
    RAISE,
    SHA,
)
from sinks.value_encoding import JsonColumns

try:
    import orjson
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:  # redis is an optional extra
    raise ConfigError("RedisBackend needs the package redis: pip install 'ratchet-pipelines[redis]'") from error

_ADDRESS = "the address of a RedisBackend"
#: The Redis keys of a state, besides its own name, and their types.
_TYPES = {
    "header": b"string",
    "": b"hash",
    "touched": b"list",
    "deleted": b"set",
    "columns": b"string",
    "due": b"zset",
    "count": b"hash",
}
#: The keys of scripts that write rows.
_WRITTEN = ("header", "", "touched", "deleted", "due", "count")
#: Rows per script. While a script runs, Redis answers no other client.
ROWS_PER_STEP = 5_000
#: Names of due rows per script. The rows themselves are read together, so fewer than above.
DUE_NAMES = 1_000
#: The rows of the first page of a scan, which determine the number of the next ones, and the most.
_SCAN_FIRST, _SCAN_MOST = 16, 1_000
#: The number of names of a page by which the next page finds its beginning, because another task
#: may have removed some.
_ANCHORS = 200
TIMEOUT_S = 15.0
#: The most characters of a damaged text that an error shows.
_SHOWN = 200
#: The upper bound of numbers in stamps.
_STAMP_MAX = 2**63 - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class _Clients:
    """The clients of this process, by address."""

    def __init__(self) -> None:
        self._clients: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    def get(self, url: str) -> Any:  # Any, because the client's types also allow awaitables
        with self._lock:
            key = (os.getpid(), url)  # a forked worker opens its own
            if key not in self._clients:
                self._clients[key] = redis.Redis.from_url(
                    url,
                    socket_timeout=TIMEOUT_S,
                    socket_connect_timeout=TIMEOUT_S,
                    socket_keepalive=True,
                    # a write whose answer was lost must not be sent again
                    retry=Retry(NoBackoff(), 0),
                    health_check_interval=0,
                )
            return self._clients[key]

    def close(self, url: str) -> None:
        with self._lock:
            client = self._clients.pop((os.getpid(), url), None)
        if client is not None:
            client.close()


_clients = _Clients()


class RedisBackend(SnapshotBackend, ExchangeBackend):
    """A hash of a Redis server, version 6 or newer.

    * ``url``: ``redis://user:password@host:6379/0``, or ``rediss://`` for TLS. ``${NAME}`` in it
      stands for an environment variable.
    * ``name``: the hash is called ``{name}``.
    * ``key``, ``value``: the typed columns; by default, a ``StateCommitter`` takes them from its
      input.

    Refuses a replica, and a server that may evict keys (``maxmemory`` with a policy other than
    ``noeviction``). Detects when a server has lost writes in a crash, because it has no append-only
    file or a replica replaced it: during a commit the attempt is repeated, otherwise the topology
    stops.
    """

    reach = Reach.NETWORK
    scan_may_repeat = True
    commits_in_one_step = True

    def __init__(self, url: str, name: str, key: Fields | None = None, value: Fields | None = None) -> None:
        self._url = resolved_address(_ADDRESS, url, "/?#")
        try:
            found = redis.connection.parse_url(self._url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            shown = error if "@" not in self._url else "check its form, redis://user:password@host:6379/0"
            raise ConfigError(f"{_ADDRESS} does not parse: {shown}") from None
        host = shown_host(str(found.get("host") or found.get("path") or "localhost"))
        self._where = f"{host}:{found.get('port', 6379)}/{found.get('db', 0)}"
        if not _NAME.fullmatch(name):
            raise TopologyError(
                f"the name {name!r} of a RedisBackend is not usable: letters, digits, '_', '.', ':' and '-'"
            )
        self._name = name
        self._place = ""  # of a state next to the rows of that name
        self._ordered_by = ""
        self._fields: tuple[Fields, Fields] | None = None
        self._made: tuple[JsonColumns, JsonColumns] | None = None
        if key is not None and value is not None:
            self.bind(key, value)

    def __repr__(self) -> str:
        return f"RedisBackend({self.location})"

    @property
    def location(self) -> str:
        return f"hash {self._key('')!r} of Redis at {self._where}"

    def bind(self, key: Fields, value: Fields) -> None:
        if self._fields is not None and self._fields != (key, value):
            raise TopologyError(
                f"{self.location} was declared with {self._fields[0]} -> {self._fields[1]}, and its committer writes {key} -> "
                f"{value}: leave key and value out, or make them equal"
            )
        if not len(key) or not len(value):
            raise TopologyError(f"{self.location} needs at least one key column and one value column")
        self._fields = (key, value)
        self._made = None
        _ = self._columns  # check the types now, not in a task

    @property
    def _columns(self) -> tuple[JsonColumns, JsonColumns]:
        if self._made is None:
            key, value = self.fields
            self._made = JsonColumns(key, "Redis"), JsonColumns(value, "Redis")
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}

    @property
    def fields(self) -> tuple[Fields, Fields]:
        if self._fields is None:
            raise TopologyError(
                f"{self.location} has no columns: give key=Fields(...) and value=Fields(...), or use it in a StateCommitter"
            )
        return self._fields

    # --- header -----------------------------------------------------------------------------------

    def check(self, topology_id: str) -> Header | None:
        with self._named(writes=False):
            self._probe()
            client = _clients.get(self._url)
            header, columns = client.get(self._key("header")), client.get(self._key("columns"))
        return self._check_owned(header, columns or b"no columns", topology_id) if header is not None else None

    def check_held(self, topology_id: str) -> Header | None:
        return self.check(topology_id)

    def prepare(self, topology_id: str) -> Header:
        header = self._prepared(topology_id)
        with self._named(writes=False):
            self._checked(self._script(COUNT, ["header", "", "touched", "due", "count"], []), header)
        return header

    def _prepared(self, topology_id: str) -> Header:
        """As ``prepare``, but rows may be missing."""
        new = Header(topology_id, uuid.uuid4().hex)
        with self._named(writes=False):
            self._probe()
        with self._named():
            arguments = [_header_text(new), self._columns_text(), self._ordered_by]
            answer = self._script(CREATE, ["header", "columns", "", "touched", "count"], arguments)
        if not answer:
            raise ConfigError(
                f"{self.location} has rows and no header in '{{{self._name}}}:header': restore the header"
            )
        return self._check_owned(answer[0], answer[1], topology_id)

    def _columns_text(self) -> bytes:
        return orjson.dumps([[[name, str(each.type_of(name))] for name in each] for each in self.fields])

    def _check_owned(self, header_text: bytes, found: bytes, topology_id: str) -> Header:
        """Return the present header. Raises ``ConfigError`` when it belongs to another topology, or
        has other columns."""
        header, columns = self._header_in(header_text), self._columns_text()
        if header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one owner; use "
                "another name"
            )
        if found != columns:
            raise ConfigError(
                f"{self.location} has other columns than this topology writes (it has {_shown(found)}, and "
                f"{columns.decode()} is written): use another name, or remove what starts with '{{{self._name}}}'"
            )
        return header

    def _probe(self) -> None:
        """Run a commit's commands before the first batch, so that missing permissions are reported
        now.
        """
        client = _clients.get(self._url)
        found = server_information(client)
        if found is None:
            self._may_lose_writes(
                "the user may not ask the server whether it is a replica, evicts keys, or was replaced by another one",
                "allow the user INFO if the service can",
            )
            found = {}
        if found.get("role", "master") != "master":
            raise ConfigError(
                f"{self.location} cannot be written: the server is a replica; give the address of the primary"
            )
        if eviction := evicts(found):
            raise ConfigError(f"{self.location} could lose rows: {eviction}")
        if found:
            self._warn_of_losses(client, found)
        if other := self._other_type():
            raise ConfigError(f"{self.location}: {other}: somebody else's; use another name")
        self._script(PROBE, ["probe"], [])
        if self._ordered_by:
            self._script(PROBE_ORDER, ["probe"], [])
            self._script(DUE, ["probe"], [0.0, 1.0, 1])

    def _other_type(self) -> str:
        """The first key of a wrong type, if there is one."""
        client = _clients.get(self._url)
        for suffix, wanted in _TYPES.items():
            kind = client.type(self._key(suffix))
            if kind not in (b"none", wanted):
                return f"the key {self._key(suffix)!r} is a {kind.decode()}, not a {wanted.decode()}"
        return ""

    def _warn_of_losses(self, client: Any, information: dict[str, Any]) -> None:
        """Log the settings with which the server can lose acknowledged writes."""
        if not information.get("aof_enabled"):
            self._may_lose_writes("the server has no append-only file", "set appendonly yes, appendfsync always")
        else:
            found = "unknown"
            with suppress(redis.exceptions.ResponseError):  # the user may lack the permission
                found = client.config_get("appendfsync").get("appendfsync", found)
            if found != "always":
                self._may_lose_writes(f"appendfsync is {found}", "set appendfsync always")
        replicas = information.get("connected_slaves", 0)
        if replicas:
            which = "1 replica that follows" if replicas == 1 else f"{replicas} replicas that follow"
            self._may_lose_writes(
                f"the server has {which} later than it acknowledges",
                "promote one only when the primary's data is gone for good, and expect the topology to stop then",
            )

    def read_header(self) -> Header:
        with self._named(writes=False):
            return self._header_in(_clients.get(self._url).get(self._key("header")))

    def raise_header(self, expected: Header, new: Header) -> None:
        other = expected.open is None or new.open is None or expected.open.txid != new.open.txid
        arguments = [_header_text(expected), _header_text(new), b"1" if other else b"0", self._must_be(expected, new)]
        with self._named():
            answer = self._checked(self._script(RAISE, ["header", "", "touched", "due", "count"], arguments), expected)
        if answer[0] == -2:
            raise self._another_store(expected)
        self._opened_in = answer[1].decode()

    # --- rows -------------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        names = self._names(keys)
        return self._rows(names, self._texts(names))

    def scan(self) -> Iterator[tuple[Key, Row]]:
        cursor, count, exchanged = 0, _SCAN_FIRST, self._exchanged()
        while True:
            with self._named(writes=False):
                cursor, page = _clients.get(self._url).hscan(self._key(""), cursor, count=count)
            for name, text in page.items():
                yield self._key_of(name), self._row(name, text)
            if cursor == 0:
                break
            size = sum(len(name) + len(text) for name, text in page.items())
            count = rows_that_fit(count, size, PAGE_BYTES, min(4 * count, _SCAN_MOST))
        if self._exchanged() != exchanged:
            raise MovedOnError(f"{self.location}: its rows were exchanged for rebuilt ones while they were read")

    def order_by(self, column: str) -> None:
        self._ordered_by = column

    def due(self, column: str, after: int, upto: int, *, txid: int | None) -> Iterator[tuple[Key, Row]]:
        with self._named(writes=False):
            ordered = _clients.get(self._url).hget(self._key("count"), "order")
        if ordered != column.encode():  # the rows were written without that order
            yield from super().due(column, after, upto, txid=txid)
            return
        held = self.column(column)
        for page in self._due_names(after, upto, touched=txid is not None):
            for name, row in zip(page, self._rows(page, self._texts(page)), strict=True):
                if row is None:
                    continue
                key = self._key_of(name)
                if row.stamp.txid == txid or (row.value is not None and after < held(key, row.value) <= upto):
                    yield key, row

    def _due_names(self, after: int, upto: int, *, touched: bool) -> Iterator[list[bytes]]:
        """Pages of the names of rows that are due, and, with ``touched``, of those that the open
        transaction has touched. The numbers of the sorted set are floats, so a few more may be
        among them. The list of touched names only grows while the transaction is open."""
        last: list[bytes] = []
        while True:
            arguments = [float(after), float(upto), DUE_NAMES, *last]
            with self._named(writes=False):
                found = self._script(DUE, ["due"], arguments)
            if not found:
                break
            yield found[::2]
            places = range(len(found) - 2, max(len(found) - 2 - 2 * _ANCHORS, -1), -2)
            last = [each for at in places for each in found[at : at + 2]]
        for start in itertools.count(0, DUE_NAMES) if touched else ():
            with self._named(writes=False):
                names = _clients.get(self._url).lrange(self._key("touched"), start, start + DUE_NAMES - 1)
            if not names:
                break
            yield list(dict.fromkeys(names))

    def _exchanged(self) -> bytes | None:
        """The header of the rows that the last rebuild replaced: each rebuild replaces it."""
        with self._named(writes=False):
            found: bytes | None = _clients.get(self._url).get(f"{self._key(FORMER)}:header")
        return found

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        expected = [b"" if stamp is None else _stamp_text(stamp) for stamp in expected_stamps]
        put, opens_from = list(zip(self._names(keys), expected, rows, strict=True)), self._opens_from
        if opens_from is None or len(rows) <= ROWS_PER_STEP:
            self._put(header, put, opens_from)
            return
        self.raise_header(opens_from, header)
        self._put(header, put)
        self.raise_header(header, header.done_as_open())

    def _put(self, header: Header, rows: Sequence[tuple[bytes, bytes, Row]], opens_from: Header | None = None) -> None:
        """Write rows, ``ROWS_PER_STEP`` at a time. ``opens_from``: the whole commit is one step."""
        order = self._ordered_by
        held, in_key = (self.column(order), order in self.fields[0]) if order else (None, False)
        headers = [_header_text(header), b"", b""]
        if opens_from is not None:
            headers = [*map(_header_text, (opens_from, header, header.done_as_open()))]
        calls = []
        for start in range(0, max(len(rows), opens_from is not None), ROWS_PER_STEP):
            part = sorted(rows[start : start + ROWS_PER_STEP], key=lambda each: each[2].value is not None)
            deleted = sum(row.value is None for _, _, row in part)
            arguments: list[Any] = [headers[0], len(part), deleted, *headers[1:]]
            for (name, expected, _), row in zip(part, self._row_texts([row for _, _, row in part]), strict=True):
                arguments += (name, expected, row)
            if held is not None:
                arguments += [
                    float(held(self._key_of(name) if in_key else (), row.value))
                    for name, _, row in part
                    if row.value is not None
                ]
            calls.append(arguments)
        with self._named():
            for arguments in calls:
                self._checked(self._script(PUT, _WRITTEN, arguments), opens_from or header)

    def sweep(self, header: Header) -> int:
        stamp = header.stamp
        return self._restore(
            header, lambda row: row.stamp.txid == stamp.txid and row.stamp < stamp, lambda row: row.restored(stamp)
        )

    def roll_back(self, header: Header) -> int:
        stamp = header.stamp
        return self._restore(header, lambda row: row.stamp.txid == stamp.txid, lambda row: row.rolled_back(stamp))

    def _restore(self, header: Header, wanted: Callable[[Row], bool], put_back: Callable[[Row], Row]) -> int:
        """Restore the wanted rows among those that the open transaction has touched."""
        with self._named():
            self._checked(self._script(PUT, _WRITTEN, [_header_text(header), 0, 0, b"", b""]), header)
        with self._named(writes=False):
            touched = list(dict.fromkeys(_clients.get(self._url).lrange(self._key("touched"), 0, -1)))
        changes = []
        for name, row in zip(touched, self._rows(touched, self._texts(touched)), strict=True):
            if row is not None and wanted(row):
                changes.append((name, _stamp_text(row.stamp), put_back(row)))
        self._put(header, changes)
        return len(changes)

    def purge(self, header: Header, before_txid: int) -> int:
        with self._named(writes=False):
            listed = list(_clients.get(self._url).smembers(self._key("deleted")))
        removed = 0
        calls: list[list[bytes]] = [[]]
        for name, row in zip(listed, self._rows(listed, self._texts(listed)), strict=True):
            if row is not None and row.value is None and row.stamp.txid >= before_txid:
                continue
            if len(calls[-1]) >= 2 * ROWS_PER_STEP:
                calls.append([])
            calls[-1] += [name, _stamp_text(row.stamp) if row is not None and row.value is None else b""]
        with self._named():
            for arguments in calls:
                answer = self._script(PURGE, _WRITTEN, [_header_text(header), *arguments])
                removed += self._checked(answer, header)[1]
        return removed

    def clear(self, topology_id: str) -> Header:
        found = self._prepared(topology_id)
        header = Header(topology_id, uuid.uuid4().hex, epoch=found.epoch)
        with self._named():
            arguments = [_header_text(found), _header_text(header), self._ordered_by]
            self._checked(self._script(CLEAR, _WRITTEN, arguments), found)
        return header

    def beside(self, place: str) -> RedisBackend:
        other = copy.copy(self)
        other._place = place
        return other

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        three, parts = ("", REBUILT, FORMER), ("header", "", "touched", "deleted")
        keys = [":".join(filter(None, (place, part))) for place in three for part in parts]
        keys += [":".join(filter(None, (place, part))) for part in ("columns", "count", "due") for place in three]
        taken = replace(expected, incarnation=rebuilt.incarnation)
        arguments = [_header_text(each) for each in (expected, new, rebuilt, taken)]
        self.beside(FORMER)._check_ours(expected.topology_id)
        with self._named():
            answer = self._checked(self._script(EXCHANGE, keys, arguments), expected)
        if answer[0] == -2:
            raise StaleWriterError(f"{self.beside(REBUILT).location}: its header is no longer {rebuilt}")
        if answer[0] == -3:
            raise CorruptStateError(
                f"{self.location}: a part of it or of {self.beside(REBUILT).location} is gone; restore it, or make the rows anew "
                "after ratchet rebuild --clean"
            )

    def check_exchange(self, topology_id: str) -> None:
        for place in (REBUILT, FORMER):
            self.beside(place)._check_ours(topology_id)

    def remove(self, topology_id: str) -> bool:
        if not self._place:
            raise InvariantViolation(f"{self.location} does not stand beside another hash")
        self._check_ours(topology_id)
        with self._named():
            removed = _clients.get(self._url).unlink(*map(self._key, _TYPES))
        return bool(removed)

    def _check_ours(self, topology_id: str) -> None:
        """Raise ``ConfigError`` when the keys belong to another program or another topology."""
        with self._named(writes=False):
            client = _clients.get(self._url)
            there, text = client.exists(*map(self._key, _TYPES)), client.get(self._key("header"))
        if there and (text is None or self._header_in(text).topology_id != topology_id):
            raise somebody_elses(self.location)

    def close(self) -> None:
        _clients.close(self._url)

    # --- inside -----------------------------------------------------------------------------------

    def _key(self, suffix: str) -> str:
        return ":".join(filter(None, (f"{{{self._name}}}", self._place, suffix)))

    def _script(self, source: str, suffixes: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
        client = _clients.get(self._url)
        keys = [self._key(suffix) for suffix in suffixes]
        try:
            found = client.evalsha(SHA[source], len(keys), *keys, *arguments)
        # the server does not know the script yet, or was restarted
        except redis.exceptions.NoScriptError:
            found = client.eval(source, len(keys), *keys, *arguments)
        answer: list[Any] = found
        return answer

    def _checked(self, answer: list[Any], expected: Header) -> list[Any]:
        if answer[0] == 0:
            found = self._header_in(answer[1])
            raise found.refused(expected, self.location)
        if answer[0] == -1:
            raise StaleWriterError(f"{self.location}, key {_shown(answer[1])}: its stamp is not the one that was read")
        if answer[0] == -4:
            what, written = COUNTED_PARTS[answer[3] - 1], answer[1][:_SHOWN].decode(errors="replace")
            raise CorruptStateError(
                f"{self.location} has {answer[2].decode()} {what}, and {written or 'an unknown number'} were written: "
                "another program has removed some (DEL, HDEL), or they expired or were evicted, or some were added; restore the "
                "server's data, run ratchet rebuild, or begin again with ratchet reset --everything"
            )
        return answer

    def _texts(self, names: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._named(writes=False):
            for start in range(0, len(names), ROWS_PER_STEP):
                found += _clients.get(self._url).hmget(self._key(""), names[start : start + ROWS_PER_STEP])
        return found

    def _header_in(self, text: bytes | None) -> Header:
        if text is None:
            raise CorruptStateError(f"{self.location}: its header is gone; restore the server's data")
        try:
            return Header.of_document(orjson.loads(text), self.location)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptStateError(
                f"{self.location}: '{{{self._name}}}:header' is not a header ({error}); restore the server's data"
            ) from error

    def _names(self, keys: Sequence[Key]) -> list[bytes]:
        """The field names of the hash for these keys."""
        columns, _ = self._columns
        single, textual = len(columns.textual) == 1, columns.textual[0]
        names = []
        key: Key = ()
        try:
            for key in keys:
                if None in key:
                    raise ValueError("a null key cannot be stored; filter it out upstream")
                parts = columns.encode(key)
                names.append(parts[0].encode() if single and textual else _json(parts[0] if single else parts))
        except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
            raise BadRecordError(f"{self.location}, key {key!r}: {error}") from error
        return names

    def _key_of(self, name: bytes) -> Key:
        columns, _ = self._columns
        try:
            parts = orjson.loads(name) if len(columns.textual) > 1 or not columns.textual[0] else name.decode()
            return columns.decode(parts if len(columns.textual) > 1 else [parts])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptStateError(f"{self.location}: {_shown(name)} is not a key of it ({error})") from error

    def _row_texts(self, rows: Sequence[Row]) -> list[bytes]:
        _, columns = self._columns
        texts = []
        row: Row | None = None
        try:
            for row in rows:
                document: dict[str, Any] = {
                    "s": list(row.stamp),
                    "w": row.writer,
                    "v": columns.encode(row.value) if row.value is not None else None,
                }
                if row.prev is not None:
                    document["p"] = columns.encode(row.prev)
                text = _json(document)
                if len(text) > VALUE_BYTES_MAX:
                    raise BadRecordError(
                        f"{self.location}: a row has {len(text):,} bytes, more than {VALUE_BYTES_MAX:,}"
                    )
                texts.append(text)
        except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
            value = row.value if row is not None else None
            raise BadRecordError(f"{self.location} cannot hold {value!r}: {error}") from error
        return texts

    def _rows(self, names: Sequence[bytes], texts: Sequence[bytes | None]) -> list[Row | None]:
        return [None if text is None else self._row(name, text) for name, text in zip(names, texts, strict=True)]

    def _row(self, name: bytes, text: bytes) -> Row:
        _, columns = self._columns
        try:
            if len(text) > VALUE_BYTES_MAX:
                raise ValueError(f"it has {len(text):,} bytes, more than {VALUE_BYTES_MAX:,}")
            found = orjson.loads(text)
            value, prev, stamp, writer = found["v"], found.get("p"), Stamp(*found["s"]), found["w"]
            if not (type(writer) is str and all(type(each) is int and abs(each) <= _STAMP_MAX for each in stamp)):
                raise ValueError("its stamp or its writer is of another form")
            return Row(
                columns.decode(value) if value is not None else None,
                stamp,
                columns.decode(prev) if prev is not None else None,
                writer,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptStateError(
                f"{self.location}, key {_shown(name)}: not a row ({error}); restore it, or make the rows again by ratchet rebuild"
            ) from error

    @contextmanager
    def _named(self, *, writes: bool = True) -> Iterator[None]:
        """Convert the client's errors to Ratchet's error classes by recovery."""
        try:
            yield
        except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise ConfigError(f"{self.location}: {error}; check user, password and the user's rights") from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            if writes and not isinstance(error.__cause__, ConnectionRefusedError):
                raise CommitOutcomeUnknown(f"{self.location}: {error}") from error
            raise RetryableError(f"{self.location}: {error}") from error
        except redis.exceptions.ResponseError as error:
            text = str(error)
            if where := redirects(error):
                raise ConfigError(f"{self.location}: {where}") from error
            if "WRONGTYPE" in text:
                with suppress(redis.exceptions.RedisError):
                    text = self._other_type() or text
                raise CorruptStateError(
                    f"{self.location}: {text}: another program has written it; restore the server's data, or begin again with "
                    "ratchet reset --everything"
                ) from error
            if any(sign in text for sign in ("NOPERM", "permission", "NOAUTH", "can't run this command")):
                raise ConfigError(f"{self.location}: {text}; check the user's rights") from error
            if passes(error):
                leave_replica(_clients.get(self._url), error)
                raise RetryableError(f"{self.location}: {text}") from error
            raise self._lasting(error) from error
        except redis.exceptions.RedisError as error:
            raise self._lasting(error) from error

    def _lasting(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.location}: {error}; this does not pass by itself: look at the server, then run the topology again"
        )


def _json(value: Any) -> bytes:
    """A value as JSON, in memory of its size. A result of orjson keeps the rest of its buffer from
    other use, so many results would take 4 KiB each."""
    return b"".join((orjson.dumps(value), b""))


def _header_text(header: Header) -> bytes:
    return orjson.dumps(asdict(header), option=orjson.OPT_SORT_KEYS)


def _shown(text: bytes) -> str:
    found = text[:_SHOWN].decode(errors="replace")
    return repr(found) if len(text) <= _SHOWN else f"{found!r}... ({len(text):,} bytes)"


def _stamp_text(stamp: Stamp) -> bytes:
    """The beginning of the text of a row with this stamp."""
    return b'{"s":[%d,%d,%d],' % (stamp.txid, stamp.epoch, stamp.attempt_id)
