"""The targets of streams and tables: ``sqlite``, ``postgres``, ``mysql``, ``redis``, ``parquet``,
``delta``."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from framework.call_site import Call, called, options_of
from framework.durations import Duration
from framework.errors import TopologyError
from framework.streams.ports import Target
from framework.topology import Bolt
from framework.user_call_argument_checks import checks_place
from ratchet.streams.formats import Format
from ratchet.streams.server_addresses import Server, is_address, server_of
from sinks import (
    AppendCommitter,
    DeadLetterTable,
    DeadLetterTopic,
    ExpiringCommitter,
    KafkaSink,
    MapBackend,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    UpsertCommitter,
)
from sinks.lake.file_table_base import FileTable
from sinks.rows.transactional_table import RowTable


class Store(Target):
    """Rows per key. ``server``: the server of the rows, if there is one."""

    def __init__(self, shown: str, name: str, backend: Callable[[], MapBackend], server: Server | None = None) -> None:
        self.name = _name(name)
        self._shown, self._backend, self.server = shown, backend, server
        self.lacks = server.lacks if server is not None else None

    def aggregates(self, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        return StateCommitter(OpaqueMapState(self._backend()), key, aggregates)

    def expiring(self, key: Sequence[str], aggregates: Mapping[str, Any], on: str, ttl: Duration) -> Bolt:
        return ExpiringCommitter(self.state(), key=key, aggregates=aggregates, on=on, ttl=ttl)

    def state(self) -> OpaqueMapState:
        """A state that a step keeps in this store."""
        return OpaqueMapState(self._backend())

    def dead_letters(self) -> Bolt:
        """The committer for records that cannot be decoded."""
        if self.lacks is not None:
            raise self.lacks
        return DeadLetterTable(OpaqueMapState(self._backend()))

    def __str__(self) -> str:
        return self._shown


class Database(Store):
    """A table of a database, for aggregates, newest rows and appended rows. Without a table: the
    whole database, for a copy of another one."""

    def __init__(
        self,
        shown: str,
        table: str | None,
        backend: Callable[[str], MapBackend],
        rows: Callable[[str], RowTable],
        server: Server | None = None,
    ) -> None:
        named = table if table is not None else "database"
        super().__init__(shown, named, lambda: backend(self._named()), server)
        self._table, self.table_of = table, rows

    def newest(self, key: Sequence[str], sequence_by: str | None) -> Bolt:
        return UpsertCommitter(self.table_of(self._named()), key, sequence_by=sequence_by)

    def append(self) -> Bolt:
        return AppendCommitter(self.table_of(self._named()))

    def _named(self) -> str:
        if self._table is None:
            raise TopologyError(f"{self} names no table, which only mirror(into=...) can do without: name one")
        return self._table


class Topic(Target):
    """A topic of Kafka, or those that rows name. ``options``: of ``KafkaSink``, with formats as
    codecs."""

    def __init__(self, call: Call, topic: str | None, options: Mapping[str, Any]) -> None:
        known = [each for each in inspect.signature(KafkaSink).parameters if each not in ("topic", "at_least_once")]
        call.check_options(options, known)
        for name in ("key", "value", "headers", "topic_from", "timestamp", "partition"):
            given = options.get(name)
            if isinstance(given, (Format, type)):
                shown = given.__name__ if isinstance(given, type) else type(given).__name__
                raise call.mistake(
                    f"{name} is the format {shown}: write {name}_codec={shown}(...), with the columns in {name}="
                    if name in ("key", "value")
                    else f"{name} is {shown}: give the name of a column"
                )
            if callable(given) and name in ("topic_from", "timestamp", "partition"):
                raise call.mistake(f"{name} is a function: make a column by with_columns(...), and give its name")
        self.name = topic or str(options.get("topic_from"))
        self._topic = topic
        self._options: dict[str, Any] = {
            name: given.codec(given.schema.names) if isinstance(given, Format) else given
            for name, given in options.items()
        }

    def append(self) -> Bolt:
        return KafkaSink(self._topic, **self._options)

    def __str__(self) -> str:
        return f"topic {self.name!r}" if self._topic is not None else f"the topics of column {self.name!r}"


class Files(Target):
    """A table of files, which rows are appended to."""

    def __init__(self, shown: str, name: str, table: Callable[[], FileTable]) -> None:
        self.name = _name(name)
        self._shown, self._table = shown, table

    def append(self) -> Bolt:
        return AppendCommitter(self._table())

    def __str__(self) -> str:
        return self._shown


@checks_place
def sqlite(path: str | os.PathLike[str], table: str | None = None) -> Database:
    """A table of a SQLite file; without ``table``, all of it, for ``mirror``."""
    named = f"sqlite({_path(path)!r}{_and(table)})"
    return Database(named, table, lambda name: SqliteBackend(path, name), lambda name: SqliteTable(path, name))


@checks_place
def postgres(dsn: str | None = None, table: str | None = None, *, schema: str | None = None) -> Database:
    """A table of a PostgreSQL database: ``postgres("postgresql://user@host/shop", "orders")``, by a
    libpq address. ``postgres("orders")`` is a table of the database at ``postgres.url`` of the
    configuration, or ``RATCHET_POSTGRES_URL`` of the environment. Without ``table``, it is the
    schema, for ``mirror``. Raises ``TopologyError`` for a table with a dot, which would be part of
    its name."""
    call, dsn, table = _address_and_name("postgres", dsn, table)
    if table is not None and "." in table:
        first, _, last = table.rpartition(".")
        raise call.mistake(
            f"give the schema by name: postgres({'..., ' if dsn is not None else ''}{last!r}, schema={first!r})"
        )
    server = server_of(call, "postgres", dsn, f"postgres('postgresql://user@host/database'{_and(table)})")

    def backend(name: str) -> MapBackend:
        from sinks import PostgresBackend  # an extra

        return server.reached(lambda address: PostgresBackend(address, name, schema=schema))

    def rows(name: str) -> RowTable:
        from sinks import PostgresTable  # an extra

        return server.reached(lambda address: PostgresTable(address, name, schema=schema))

    return Database(call.text, table, backend, rows, server)


@checks_place
def mysql(dsn: str | None = None, table: str | None = None) -> Database:
    """A table of a MariaDB or MySQL database at ``mysql://user:password@host:3306/database``;
    ``mysql("orders")`` is a table of the database at ``mysql.url`` of the configuration, or
    ``RATCHET_MYSQL_URL`` of the environment. Without ``table``, it is the database, for ``mirror``.
    Raises ``TopologyError`` for a table with a dot, which would be part of its name."""
    call, dsn, table = _address_and_name("mysql", dsn, table)
    if table is not None and "." in table:
        first, _, last = table.rpartition(".")
        raise call.mistake(
            f"the address names the database: mysql('mysql://user:password@host:3306/{first}', {last!r})"
        )
    server = server_of(call, "mysql", dsn, f"mysql('mysql://user@host:3306/database'{_and(table)})")

    def backend(name: str) -> MapBackend:
        from sinks import MySqlBackend  # an extra

        return server.reached(lambda address: MySqlBackend(address, name))

    def rows(name: str) -> RowTable:
        from sinks import MySqlTable  # an extra

        return server.reached(lambda address: MySqlTable(address, name))

    return Database(call.text, table, backend, rows, server)


@checks_place
def redis(url: str | None, name: str | None = None) -> Store:
    """Hashes of a Redis server whose keys begin with ``name``: ``redis("redis://host:6379/0",
    "totals")``. ``redis("totals")`` is at ``redis.url`` of the configuration, or
    ``RATCHET_REDIS_URL`` of the environment."""
    call, url, name = _address_and_name("redis", url, name)
    if name is None:
        raise call.mistake("name what the keys begin with: redis('redis://host:6379/0', 'totals')")
    server = server_of(call, "redis", url, f"redis('redis://host:6379/0', {name!r})")

    def backend() -> MapBackend:
        from sinks import RedisBackend  # an extra

        return server.reached(lambda address: RedisBackend(address, name))

    return Store(call.text, name, backend, server)


@checks_place
def parquet(path: str | os.PathLike[str], *, partition_by: Sequence[str] | None = None) -> Files:
    """A folder of Parquet files."""
    place = _path(path)
    return Files(f"parquet({place!r})", os.path.basename(place), lambda: ParquetTable(place, partition_by=partition_by))


@checks_place
def delta(path: str | os.PathLike[str], *, partition_by: Sequence[str] | None = None) -> Files:
    """A Delta Lake table."""
    place = _path(path)

    def table() -> FileTable:
        from sinks import DeltaLakeTable  # an extra

        return DeltaLakeTable(place, partition_by=partition_by)

    return Files(f"delta({place!r})", os.path.basename(place), table)


@checks_place
def dead_letters(target: Store | str, **options: Any) -> Bolt:
    """The destination of records that cannot be decoded: a database, or the name of a Kafka topic,
    with the options of ``sinks.DeadLetterTopic``. For ``read_kafka(on_bad_record=...)``."""
    if isinstance(target, Store):
        return target.dead_letters()
    if isinstance(target, Target):
        raise TopologyError(f"{target}: dead letters can be in a database or a Kafka topic only")
    if not isinstance(target, str):
        raise TopologyError(f"{target!r} is a {type(target).__name__}: give a database, or the name of a Kafka topic")
    called("dead_letters", target).check_options(options, options_of(DeadLetterTopic))
    return DeadLetterTopic(target, **options)


def _address_and_name(place: str, first: str | None, second: str | None) -> tuple[Call, str | None, str | None]:
    """The call of a place, its address, and its name. The address may be left out. Messages do not
    show it, because it may contain a password. Raises ``TopologyError``."""
    for each in (first, second):
        if not isinstance(each, str | None):
            raise called(place, each).mistake(
                f"{each!r} is a {type(each).__name__}: give a name, or an address and a name"
            )
    if first is not None and not is_address(first):
        if second is not None:
            raise called(place, first, second).mistake(
                f"{first!r} is no address, such as {place}://user@host/database: write {place}({second!r}) for the address of the "
                "configuration"
            )
        first, second = None, first
    arguments = [*(["..."] if first is not None else []), *([repr(second)] if second is not None else [])]
    return replace(called(place), text=f"{place}({', '.join(arguments)})"), first, second


def _path(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TopologyError(f"{path!r} is a {type(path).__name__}: give the path of a file or a folder")
    return os.fspath(path)


def _and(table: str | None) -> str:
    return f", {table!r}" if table is not None else ""


def _name(name: str) -> str:
    """The name as the id of a component."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", name).strip("-._") or "sink"
