"""Tables that are copied from one PostgreSQL to another: Debezium, Kafka and a mirror between them,
while rows and columns change and all of them are killed.

``python -m tests.kit.mirrored --kills 50`` prints what was killed and how many changes there were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from framework import Topology
from integration import ConnectWorker, EmbeddedServers, PostgresServer, ServerError
from integration.folder_permissions import open_folder
from integration.server import Server
from ratchet import Pipeline, postgres
from tests.kit.debezium import JSON_WITH_SCHEMAS, change_source
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for

KINDS = ("driver", "connect", "broker", "source", "target")
TABLES = (
    "create table accounts (id int primary key, owner varchar(40) not null, balance numeric(12,2),"
    " seen timestamptz, day date, active boolean, secret bytea, note text)",
    "create table notes (id int, part int, body text, read int not null, primary key (id, part))",
)
_COLUMNS = ("id", "owner", "balance", "seen", "day", "active", "secret", "note")
_KEYS = 200
_COLUMNS_MAX = 3
_NAMES = ", ".join(_COLUMNS)
_UPSERT = (
    f"insert into accounts ({_NAMES}) values ({', '.join(['%s'] * len(_COLUMNS))}) on conflict (id) do update set "
    + ", ".join(f"{each} = excluded.{each}" for each in _COLUMNS[1:])
)
_NOTE = "insert into notes values (%s, %s, %s, 0) on conflict (id, part) do update set read = notes.read + 1"


def topology(app: Mapping[str, Any]) -> Topology:
    copy = Pipeline("mirror")
    copy.mirror(pattern=r"pg\.public\..*", into=postgres(app["app.target"]), bootstrap_servers=app["app.kafka"])
    return copy.build()


class Load:
    """Changes rows of the source until it is stopped. A change that fails is left out: whether the
    database has it is the database's to say."""

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.changes: Counter[str] = Counter()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True) as connection:
                    while not self._stop.wait(0.02):
                        self._change(connection)
            except psycopg.errors.UniqueViolation:
                continue  # a key changed to one that is there
            except psycopg.OperationalError:
                self._stop.wait(0.2)

    def _change(self, connection: psycopg.Connection[Any]) -> None:
        chance = self._chance
        kind = chance.choices(("upsert", "delete", "key", "many", "note", "column"), (60, 12, 4, 4, 20, 0.1))[0]
        key, other = chance.randrange(_KEYS), chance.randrange(_KEYS)
        if kind == "upsert":
            connection.execute(_UPSERT.encode(), self._row(key))
        elif kind == "delete":
            connection.execute("delete from accounts where id = %s", [key])
        elif kind == "key":
            connection.execute("update accounts set id = %s where id = %s", [other, key])
        elif kind == "note":  # large values are stored outside of the row, and not sent when they stay as they are
            connection.execute(_NOTE, [key % 20, other % 3, chance.randbytes(10_000).hex()])
        elif kind == "column":
            if self.changes["column"] >= _COLUMNS_MAX:
                return
            name = f"added_{self.changes['column']}"
            connection.execute(f"alter table accounts add column if not exists {name} int default {key}".encode())
            connection.execute(f"update accounts set {name} = null where id = %s".encode(), [other])
        else:
            with connection.transaction():
                for each in sorted(chance.sample(range(_KEYS), 20)):
                    connection.execute(_UPSERT.encode(), self._row(each))
        self.changes[kind] += 1

    def _row(self, key: int) -> list[Any]:
        chance = self._chance
        return [
            key,
            chance.choice(("ann", "bo", "grüße 😀", "")),
            chance.choice((None, chance.randrange(-(10**12) + 1, 10**12) / 100)),
            f"2024-02-{chance.randrange(1, 30):02} 12:34:56.{chance.randrange(10**6):06}Z",
            f"{chance.randrange(1600, 9999)}-06-07",
            chance.choice((None, True, False)),
            chance.randbytes(chance.randrange(20)),
            chance.choice((None, 'a"b\\c\n', "x" * 3000)),
        ]


def run(folder: Path, order: Sequence[str], seed: int) -> dict[str, Any]:
    """Kill what ``order`` says, one after the other, each after the mirror has got further. Raises
    ``TimeoutError`` unless the mirror has the rows of the source in the end."""
    chance = random.Random(seed)
    seen: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(open_folder())
        servers = stack.enter_context(EmbeddedServers(folder / "servers"))
        source = stack.enter_context(PostgresServer(where / "source", settings={"wal_level": "logical"}))
        target = stack.enter_context(PostgresServer(where / "target"))
        worker = stack.enter_context(ConnectWorker(where / "connect", bootstrap_servers=servers.bootstrap_servers))
        _execute(source.dsn, *TABLES)
        # The row that does not count: with it, Debezium has something to say from the start.
        _execute(source.dsn, "insert into accounts (id, owner) values (-1, 'first')")
        for table in ("accounts", "notes"):
            Topics(servers.bootstrap_servers).create(f"pg.public.{table}")
        worker.put("source", _connector(source))
        load = stack.enter_context(Load(source.dsn, seed))
        wait_for(lambda: any("messageType" in each for each in worker.offsets("source")), what="stored offsets")
        settings = {
            "app.kafka": servers.bootstrap_servers,
            "app.target": target.dsn,
            "transactional.zookeeper.servers": servers.zookeeper,
            "topology.message.timeout.secs": 30,
        }
        process = RunProcess(folder / "run.log", "tests.kit.mirrored:topology", settings, executor="local")
        stack.callback(process.end)

        def kill_driver() -> None:
            if not process.kill():
                raise RuntimeError(f"the driver had ended by itself; its log ends:\n{process.tail()}")
            process.start()

        kinds: dict[str, Callable[[], object]] = {
            "driver": kill_driver,
            "connect": lambda: _restarted(worker, chance),
            "broker": lambda: _restarted(servers.kafka, chance),
            "source": lambda: _restarted(source, chance),
            "target": lambda: _restarted(target, chance),
        }

        def both() -> tuple[list[Any], list[Any]]:
            return _rows(source.dsn, source.dsn), _rows(target.dsn, source.dsn)

        def same() -> bool:
            expected, found = both()
            return expected == found != []

        process.start()
        for kind in [*order, None]:
            before = _progress(target.dsn)
            if not process.wait_for(lambda: _runs(worker) and _progress(target.dsn) > before, pause_s=0.2):  # noqa: B023
                raise RuntimeError(f"the driver ended by itself; its log ends:\n{process.tail()}")
            if kind is not None:
                time.sleep(chance.uniform(0.0, 1.0))  # a random moment is the point
                process.note(f"kill {seen.total() + 1} of {len(order)}: {kind}")
                kinds[kind]()
                seen[kind] += 1
        load.stop()
        process.wait_for(lambda: _runs(worker) and same(), pause_s=0.5)
        expected, found = both()
        process.signal(signal.SIGTERM)
        process.finish()
    wrong = [pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]]
    if len(expected) != len(found) or wrong:
        raise RuntimeError(f"{len(expected)} rows, {len(found)} in the mirror; the first that differ: {wrong[:2]}")
    return {"kills": dict(seen), "changes": dict(load.changes), "rows": len(found)}


def _connector(source: Server) -> dict[str, str]:
    settings = change_source(source, "pg", table_include_list="public.accounts,public.notes")  # type: ignore[arg-type]
    return {
        **settings,
        "retriable.restart.connector.wait.ms": "500",
        "slot.retry.delay.ms": "500",
        **JSON_WITH_SCHEMAS,
    }


def _runs(worker: ConnectWorker) -> bool:
    """Whether the connector runs. One that has failed, because the database was away, is started
    again, as its operator would."""
    try:
        return worker.runs("source")
    except ServerError:
        with contextlib.suppress(ServerError):
            worker.restart("source")
        return False


def _restarted(server: Server, chance: random.Random) -> None:
    server.kill()
    time.sleep(chance.uniform(0.0, 2.0))
    server.start()


def _execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for each in statements:
            connection.execute(each.encode())


def _progress(dsn: str) -> int:
    """The last transaction that changed the copy; 0 while it does not answer."""
    found = list(_asked(dsn, "select coalesce(max(changed_in), 0) from ratchet_mirror"))
    return int(found[0][0]) if found else 0


def _rows(dsn: str, source_dsn: str) -> list[tuple[Any, ...]]:
    """The rows of all tables, each with the columns that the source has."""
    found: list[tuple[Any, ...]] = []
    for table in ("accounts", "notes"):
        query = f"select column_name from information_schema.columns where table_name = '{table}' order by column_name"
        names = ", ".join(name for (name,) in _asked(source_dsn, query)) or "*"
        found += [(table, *row) for row in _asked(dsn, f"select {names} from {table}")]
    return sorted(found, key=repr)


def _asked(dsn: str, query: str) -> Iterator[tuple[Any, ...]]:
    missing = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn)
    with contextlib.suppress(psycopg.OperationalError, *missing), psycopg.connect(dsn) as connection:
        yield from connection.execute(query.encode()).fetchall()


def order_of(kills: int, seed: int) -> list[str]:
    """Every kind in turn, shuffled."""
    found = [KINDS[number % len(KINDS)] for number in range(kills)]
    random.Random(seed).shuffle(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-mirror-") as folder:
        print(json.dumps(run(Path(folder), order_of(arguments.kills, arguments.seed), arguments.seed), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
