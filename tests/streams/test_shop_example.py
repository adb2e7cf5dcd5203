"""The six jobs of ``examples/shop_pipeline.py``: over lists, with failures in between, and with the
servers that its configuration names."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework import Config, submit
from framework.commands.loading import load_transactional
from framework.errors import ConfigError, TopologyError
from framework.testing import crash, fail_attempt, replay
from framework.transactions import MemoryStore
from integration import PostgresServer, RegistryServer
from ratchet import Pipeline, RegistryAvroCodec
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

EXAMPLE = "examples.shop_pipeline"


def at(hour: int, minute: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, hour, minute, tzinfo=datetime.UTC)


def order(name: str, cents: int, time: datetime.datetime) -> dict[str, Any]:
    return {"order": name, "shop": "x", "cents": cents, "at": time}


ORDERS = [
    order("a", 5, at(10, 1)),
    order("b", 200_000, at(10, 4)),
    order("b", 200_000, at(10, 4)),
    order("a", 7, at(10, 2)),
    order("c", 1, at(10, 58)),
    order("d", 2, at(11, 40)),
    order("e", 3, at(10, 30)),
]
#: The timestamps of their records.
SENT = [at(12, minute) for minute in range(len(ORDERS))]
PAYMENTS = [({"order": "a", "paid": 7}, at(12, 1)), ({"order": "z", "paid": 1}, at(13, 0))]
PAYMENT = {
    "type": "record",
    "name": "Payment",
    "fields": [{"name": "order", "type": "string"}, {"name": "paid", "type": "long"}],
}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        server.register("payments-value", PAYMENT)
        yield server


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is loaded again, where the environment has none of its addresses."""
    for name in ("POSTGRES", "MYSQL", "REGISTRY"):
        monkeypatch.delenv(f"RATCHET_{name}_URL", raising=False)
    monkeypatch.delitem(sys.modules, EXAMPLE, raising=False)


def example() -> Pipeline:
    found = importlib.import_module(EXAMPLE).p
    assert isinstance(found, Pipeline)
    return found


def check(tables: dict[str, list[Any]]) -> None:
    """Check what each of the six jobs has written: rows of values."""
    assert sorted(tables["raw"]) == sorted(tuple(row.values()) for row in ORDERS)
    assert tables["orders"] == [("a", 7), ("b", 200_000), ("c", 1), ("d", 2), ("e", 3)]
    assert tables["per-hour"] == [(at(10, 0), 6, 400_016), (at(11, 0), 1, 2)]
    # The order of 10:30 comes when its window has closed.
    assert tables["closed"] == [(at(10, 0), 400_012), (at(10, 55), 1)]
    assert tables["lake"] == [("a", 7, 7)]
    assert tables["large"] == ["b"]


@pytest.mark.quick_for("crash")
@pytest.mark.parametrize(
    "faults", [[], [replay(2), crash(3)], [crash(1, when="written"), fail_attempt(2)]], ids=["none", "replay", "crash"]
)
def test_each_of_six_jobs_gives_its_rows_once(
    faults: list[Any], registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_REGISTRY_URL", registry.url)
    records = {
        "orders": [{**row, "timestamp_ms": sent} for row, sent in zip(ORDERS, SENT, strict=True)],
        "payments": [{**row, "timestamp_ms": sent} for row, sent in PAYMENTS],
    }
    shop = example().test(records, take=2, faults=list(faults))
    check(
        {
            "raw": [tuple(row.values()) for row in shop["raw"]],
            "orders": sorted((row["order"], row["cents"]) for row in shop["orders"]),
            "per-hour": [(row["window_start"], row["orders"], row["cents"]) for row in shop["per-hour"]],
            "closed": [(row["window_start"], row["cents"]) for row in shop["closed"]],
            "lake": [(row["order"], row["cents"], row["paid"]) for row in shop["lake"]],
            "large": [row["order"] for row in shop["large"]],
        }
    )


@pytest.mark.slow
@pytest.mark.integration
def test_the_six_jobs_run_with_the_servers_of_the_configuration(
    registry: RegistryServer,
    topics: Topics,
    own_postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    addresses = {"kafka.bootstrap.servers": topics.bootstrap_servers, "postgres.url": own_postgres.dsn}
    config = Config.load(None, [f"{key}={each}" for key, each in (addresses | {"registry.url": registry.url}).items()])
    names = ["orders", "payments", "closed", "large"]
    for name in names:
        topics.create(name)
    try:
        send_payments(topics, registry)
        send_orders(topics, 0, 6)
        run = submit(load_transactional(f"{EXAMPLE}:p", config), config, MemoryStore(), "local")
        try:
            run.wait_until_caught_up(PATIENCE_S)
            send_orders(topics, 6, 7)  # its window has closed
            run.wait_until_caught_up(PATIENCE_S)
        finally:
            run.stop()
        check(written(topics, own_postgres))
    finally:
        for each in topics.admin.delete_topics(names).values():
            each.result(PATIENCE_S)


def send_orders(topics: Topics, start: int, end: int) -> None:
    values = [json.dumps({**row, "at": row["at"].isoformat()}).encode() for row in ORDERS]
    send(topics, "orders", values[start:end], SENT[start:end])


def send_payments(topics: Topics, registry: RegistryServer) -> None:
    rows, sent = zip(*PAYMENTS, strict=True)
    codec = RegistryAvroCodec(registry.url, subject="payments-value")
    columns = {name: pa.array([row[name] for row in rows]) for name in ("order", "paid")}
    send(topics, "payments", codec.encode_columns(columns, len(rows)), sent)


def send(topics: Topics, topic: str, values: Sequence[bytes], sent: Sequence[datetime.datetime]) -> None:
    producer = topics.producer()
    for value, moment in zip(values, sent, strict=True):
        producer.produce(topic, value, timestamp=int(moment.timestamp() * 1_000))
    producer.arrived()


def written(topics: Topics, postgres: PostgresServer) -> dict[str, list[Any]]:
    sent: dict[str, list[Any]] = {"closed": [], "large": []}
    for name, rows in sent.items():
        read_topics(
            topics.bootstrap_servers, [name], lambda message, rows=rows: rows.append(json.loads(message.value()))
        )
    with psycopg.connect(postgres.dsn) as connection:
        return {
            "raw": connection.execute('SELECT "order", shop, cents, at FROM raw_orders').fetchall(),
            "orders": connection.execute('SELECT "order", cents FROM orders ORDER BY 1').fetchall(),
            "per-hour": connection.execute(
                "SELECT window_start, orders, cents FROM per_hour_live ORDER BY 1"
            ).fetchall(),
            "closed": [(datetime.datetime.fromisoformat(row["window_start"]), row["cents"]) for row in sent["closed"]],
            "lake": [(row["order"], row["cents"], row["paid"]) for row in pq.read_table("matched").to_pylist()],
            "large": [row["order"] for row in sent["large"]],
        }


# --- where there is no address, or one that is not right ------------------------------------------


def test_without_an_address_nothing_is_built(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        TopologyError,
        match=r"shop_pipeline.py:\d+: RegistryAvro\('payments-value'\): there is no address: set registry.url",
    ):
        example()
    monkeypatch.setenv("RATCHET_REGISTRY_URL", registry.url)
    shop = example()
    assert "table 'raw_orders' of PostgreSQL at address-not-set.invalid" in shop.describe()
    for make in (shop.build, lambda: shop.builder, shop.run):
        with pytest.raises(
            TopologyError,
            match=r"shop_pipeline.py:25: postgres\('raw_orders'\): there is no address: set postgres.url in the configuration, or "
            r"RATCHET_POSTGRES_URL in the environment, or write postgres\('postgresql://user@host/database', 'raw_orders'\)",
        ):
            make()
    with pytest.raises(ConfigError, match="postgres.url comes too late.*set RATCHET_POSTGRES_URL"):
        shop.run({"postgres.url": "postgresql://db/shop"})
    with pytest.raises(ConfigError, match="registry.url comes too late"):
        shop.run({"registry.url": "http://other:8081"})


def test_a_bad_address_is_told_where_it_is_used(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_REGISTRY_URL", registry.url)
    monkeypatch.setenv("RATCHET_POSTGRES_URL", "mysql://me:secret@db/shop")
    with pytest.raises(TopologyError, match="postgres.url, or RATCHET_POSTGRES_URL: .* does not parse") as error:
        example()
    assert "secret" not in str(error.value) and "shop_pipeline.py:25: append_into(" in str(error.value)
