"""A table that is copied from one PostgreSQL to another: Debezium, Kafka and a topology between
them, while rows change and all of them are killed.

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
import pyarrow as pa

from framework import BaseTransactionalBolt, Committer, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import RetryableError, StaleWriterError
from integration import ConnectWorker, EmbeddedServers, PostgresServer, ServerError
from integration.folders import open_folder
from integration.server import Server
from spouts import DebeziumCodec, KafkaTransactionalSpout
from tests.kit.debezium import change_source
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for

KINDS = ("driver", "connect", "broker", "source", "target")
TABLE = (
    "create table accounts (id int primary key, owner varchar(40) not null, balance numeric(12,2),"
    " seen timestamptz, day date, active boolean, secret bytea, note text)"
)
COLUMNS = pa.schema(
    [
        ("id", pa.int32()),
        ("owner", pa.string()),
        ("balance", pa.decimal128(12, 2)),
        ("seen", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("active", pa.bool_()),
        ("secret", pa.binary()),
        ("note", pa.string()),
    ]
)
_KEYS = 200
_NAMES = ", ".join(COLUMNS.names)
_UPSERT = (
    f"insert into accounts ({_NAMES}) values ({', '.join(['%s'] * len(COLUMNS))}) on conflict (id) do update set "
    + ", ".join(f"{each} = excluded.{each}" for each in COLUMNS.names[1:])
)


class Copied(BaseTransactionalBolt, Committer):
    """Applies changes to the table, in their order, and notes the transaction in the same
    commit."""

    deterministic = True
    needs_deterministic_input = True

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt = batch_id
        self.writer = f"{context.component_id}/{context.task_index}"
        self.changes: list[tuple[str, list[Any]]] = []

    def execute(self, tup: Any) -> None:
        self.changes.append((tup["op"], [tup[name] for name in COLUMNS.names]))

    def finish_batch(self) -> None:
        try:
            with psycopg.connect(self.dsn) as connection:
                self._write(connection)
        except psycopg.OperationalError as error:
            raise RetryableError(f"the mirror does not answer: {error}") from error

    def _write(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("insert into progress values (%s, 0, 0) on conflict do nothing", [self.writer])
        found = connection.execute("select txid, epoch from progress where writer = %s for update", [self.writer])
        txid, epoch = found.fetchone() or (0, 0)
        if epoch > self.attempt.fence.epoch:
            raise StaleWriterError("a newer driver writes to the mirror", epoch)
        if txid >= self.attempt.txid:
            return
        for op, row in self.changes:
            if op == "d":
                connection.execute("delete from accounts where id = %s", [row[0]])
            else:
                connection.execute(_UPSERT.encode(), row)
        connection.execute(
            "update progress set txid = %s, epoch = %s where writer = %s",
            [self.attempt.txid, self.attempt.fence.epoch, self.writer],
        )


def topology(app: Mapping[str, Any]) -> Topology:
    spout = KafkaTransactionalSpout(
        [app["app.topic"]],
        bootstrap_servers=app["app.kafka"],
        codec=DebeziumCodec(COLUMNS, metadata=["op", "lsn"]),
    )
    builder = TransactionalTopologyBuilder("mirror", "changes", spout, 1)
    builder.set_bolt("table", Copied(app["app.target"]), 2).fields_grouping("changes", Fields("id"))
    return builder.build()


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
                    while not self._stop.wait(0.005):
                        self._change(connection)
            except psycopg.errors.UniqueViolation:
                continue  # a key changed to one that is there
            except psycopg.OperationalError:
                self._stop.wait(0.2)

    def _change(self, connection: psycopg.Connection[Any]) -> None:
        chance = self._chance
        kind = chance.choices(("upsert", "delete", "key", "many"), (80, 12, 4, 4))[0]
        key, other = chance.randrange(_KEYS), chance.randrange(_KEYS)
        if kind == "upsert":
            connection.execute(_UPSERT.encode(), self._row(key))
        elif kind == "delete":
            connection.execute("delete from accounts where id = %s", [key])
        elif kind == "key":
            connection.execute("update accounts set id = %s where id = %s", [other, key])
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
        _execute(source.dsn, TABLE)
        _execute(target.dsn, TABLE, "create table progress (writer text primary key, txid bigint, epoch bigint)")
        # The row that does not count: with it, Debezium has something to say from the start.
        _execute(source.dsn, "insert into accounts (id, owner) values (-1, 'first')")
        Topics(servers.bootstrap_servers).create("pg.public.accounts")
        worker.put("source", _connector(source))
        load = stack.enter_context(Load(source.dsn, seed))
        wait_for(lambda: any("messageType" in each for each in worker.offsets("source")), what="stored offsets")
        settings = {
            "app.topic": "pg.public.accounts",
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
        process.wait_for(lambda: _runs(worker) and _rows(source.dsn) == _rows(target.dsn) != [], pause_s=0.5)
        expected, found = _rows(source.dsn), _rows(target.dsn)
        process.signal(signal.SIGTERM)
        process.finish()
    wrong = [pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]]
    if len(expected) != len(found) or wrong:
        raise RuntimeError(f"{len(expected)} rows, {len(found)} in the mirror; the first that differ: {wrong[:2]}")
    return {"kills": dict(seen), "changes": dict(load.changes), "rows": len(found)}


def _connector(source: Server) -> dict[str, str]:
    settings = change_source(source, "pg", table_include_list="public.accounts")  # type: ignore[arg-type]
    return {**settings, "retriable.restart.connector.wait.ms": "500", "slot.retry.delay.ms": "500"}


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
    """The sum of the transactions that the mirror's tasks have written; 0 while it does not
    answer."""
    found = list(_asked(dsn, "select coalesce(sum(txid), 0) from progress"))
    return int(found[0][0]) if found else 0


def _rows(dsn: str) -> list[tuple[Any, ...]]:
    return list(_asked(dsn, f"select {_NAMES} from accounts order by id"))


def _asked(dsn: str, query: str) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn) as connection:
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
