"""A table that comes by a topic is read to its end before the stream, on a first start: known
customers are known to the first order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from framework import Config, TopologyFailed, submit
from framework.coordination import store_of
from framework.inspect.verify import verify
from framework.transactions import CoordinationStore, MemoryStore, committed_txid
from framework.transactions.documents import read_transaction
from framework.transactions.undo import undo
from integration import EmbeddedServers
from tests.kit import enriched
from tests.kit.enriched import UNKNOWN, Enriched, topology
from tests.kit.processes import RunProcess
from tests.kit.replays import only
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

KINDS = pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "idempotent"])
ALL = range(300)


def names(numbers: range) -> dict[int, str]:
    return {number: f"name {number}" for number in numbers}


@pytest.fixture(autouse=True)
def nothing_dies() -> Iterator[None]:
    yield
    enriched.dies_at["txid"] = None


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def catch_up(shop: Enriched, store: CoordinationStore) -> None:
    with submit(shop.topology, {"topology.max.spout.pending": 1}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)


def die_at(shop: Enriched, store: CoordinationStore, txid: int) -> None:
    enriched.dies_at["txid"] = txid
    with pytest.raises((TopologyFailed, ValueError), match="dies in the middle"):
        catch_up(shop, store)
    enriched.dies_at["txid"] = None
    assert committed_txid(store, shop.topology.id) == txid - 1


def read_by(shop: Enriched, store: CoordinationStore, txid: int, topic: str) -> int:
    """How many records of a topic a transaction has."""
    record = read_transaction(store, shop.topology.id, txid)
    assert record is not None and record.plan
    return sum(
        meta["next_offset"] - meta["first_offset"]
        for partition, meta in record.plan.items()
        if partition.startswith(topic + "/")
    )


@pytest.mark.slow
@KINDS
def test_every_customer_is_known_to_the_first_order(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque)
    shop.add_orders(ALL)
    shop.add_customers(ALL)
    catch_up(shop, store)
    assert shop.read() == names(ALL)

    shop.add_orders(range(300, 310))
    catch_up(shop, store)  # a later start waits for nothing
    shop.add_customers(range(300, 310))
    shop.add_orders(range(310, 320))
    catch_up(shop, store)
    assert [shop.read()[number] for number in range(300, 310)] == [UNKNOWN] * 10
    assert shop.read("customers") == names(range(310))

    report = verify(shop.topology, store)
    assert report.right and report.recorded_batches, report.lines()


@pytest.mark.slow
@KINDS
def test_without_the_option_the_first_orders_meet_strangers(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque, read_first=False)
    shop.add_customers(ALL)
    topics.send(shop.orders, [json.dumps({"order": "0", "customer": "299"}).encode()])
    catch_up(shop, store)
    assert shop.read() == {0: UNKNOWN}


@pytest.mark.slow
def test_verify_reads_tables_first_where_the_plans_are_no_longer_kept(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Enriched(topics, name, tmp_path)
    shop.add_orders(ALL)
    shop.add_customers(ALL)
    catch_up(shop, store)
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only([]))
    monkeypatch.setattr("framework.inspect.full_recomputation.RECORDS_PER_BATCH", 20)
    report = verify(shop.topology, store)
    assert report.right and not report.recorded_batches, report.lines()


@pytest.mark.slow
@KINDS
def test_a_run_that_ends_in_the_middle_of_a_table_goes_on_with_the_table(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque)
    shop.add_orders(ALL)
    shop.add_customers(ALL)
    die_at(shop, store, 3)
    shop.add_customers(range(300, 400))  # after the first start: not waited for
    topics.add_partitions(shop.customers, 4)
    die_at(shop, store, 6)
    assert undo(shop.topology, store) == 5
    catch_up(shop, store)
    assert shop.read() == names(ALL)
    assert shop.read("customers") == names(range(400))
    found = [read_by(shop, store, txid, shop.orders) for txid in range(1, committed_txid(store, name) + 1)]
    assert found[:7] == [0] * 7 and sum(found) == 300
    assert verify(shop.topology, store).right


@pytest.mark.slow
@KINDS
def test_the_stream_begins_where_start_says_and_the_table_at_its_beginning(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque, start="latest")
    shop.add_orders(range(100))
    shop.add_customers(ALL)
    die_at(shop, store, 3)
    shop.add_orders(range(100, 300))  # while the table is being read
    catch_up(shop, store)
    assert shop.read() == names(range(100, 300))


@pytest.mark.slow
@KINDS
def test_the_end_of_a_table_is_the_end_of_what_may_be_read(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    """An open kafka_txn at its end holds nothing up: nobody knows whether it will be committed. Nor
    do a beginning that retention has moved, and an end that has only control records."""
    shop = Enriched(topics, name, tmp_path, opaque=opaque)
    shop.add_orders(ALL)
    shop.add_customers(ALL)
    stranger = json.dumps({"customer": "7", "name": "a stranger"}).encode()
    topics.send_in_kafka_txn(shop.customers, [stranger] * 5, 0, end=lambda producer: producer.abort_transaction(60))
    hanging = topics.send_in_kafka_txn(
        shop.customers, [json.dumps({"customer": "1000", "name": "name 1000"}).encode()], 1, end=None
    )
    where = TopicPartition(shop.customers, 2, 100)  # all of this partition
    topics.admin.delete_records([where])[where].result(PATIENCE_S)
    catch_up(shop, store)
    assert shop.read() == {n: UNKNOWN if n % 3 == 2 else f"name {n}" for n in ALL}
    hanging.commit_transaction(60)
    catch_up(shop, store)
    assert shop.read("customers")[1000] == "name 1000"


@KINDS
def test_an_empty_table_holds_nothing_up(
    topics: Topics, name: str, tmp_path: Path, store: MemoryStore, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque)
    shop.add_orders(range(10))
    catch_up(shop, store)
    assert set(shop.read().values()) == {UNKNOWN}


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "idempotent"])
def test_a_driver_that_is_killed_in_the_middle_of_a_table_goes_on_with_the_table(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, opaque: bool
) -> None:
    shop = Enriched(topics, name, tmp_path, opaque=opaque, records=4)
    shop.add_orders(ALL)
    shop.add_customers(ALL)
    config: dict[str, Any] = {"transactional.zookeeper.servers": servers.zookeeper}
    settings = {**shop.app, **config, "app.opaque": json.dumps(opaque)}
    driver = RunProcess(tmp_path / "run.log", "tests.kit.enriched:topology", settings, executor="local")
    store = store_of(Config.of(config))
    try:
        for txid in (2, 20, 60, 80):
            driver.start()
            assert driver.wait_for(lambda least=txid: committed_txid(store, name) >= least), driver.tail()
            driver.kill()
            driver.end()
        with submit(topology(shop.app), config, store, "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        assert shop.read() == names(ALL)
        found = [read_by(shop, store, txid, shop.orders) for txid in range(1, committed_txid(store, name) + 1)]
        assert found[:75] == [0] * 75 and sum(found) == 300
        assert verify(shop.topology, store).right
    finally:
        driver.end()
        store.close()
