"""The pace of a topology that reads a broker: counts of transactions, while ``ratchet set`` changes
it (C45)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import TransactionalTopologyBuilder, submit
from integration import EmbeddedServers
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.command import call
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.rule("C45")]

INTERVAL, RECORDS, BYTES, RATE = (
    "topology.commit.interval",
    "topology.commit.records.min",
    "topology.commit.bytes.min",
    "topology.rate.records.per.second",
)


class Paced:
    """A topology over a topic with 10 records, one transaction an hour, and the commands about
    it."""

    def __init__(self, servers: EmbeddedServers, topics: Topics, name: str, folder: Path) -> None:
        self.name, self._topics = name, topics
        self._stores = {
            "transactional.zookeeper.servers": servers.zookeeper,
            "transactional.zookeeper.root": f"/{name}",
        }
        topics.create(name)
        self.send(10)
        spout = OpaqueKafkaTransactionalSpout([name], bootstrap_servers=servers.bootstrap_servers, codec=TextCodec())
        builder = TransactionalTopologyBuilder(name, "lines", spout)
        counts = StateCommitter(OpaqueMapState(SqliteBackend(folder / "x.db", "counts")), ["value"], {"n": Count()})
        builder.set_bolt("counts", counts).global_grouping("lines")
        self._topology = builder.build()

    def running(self) -> Any:
        """A driver in this process."""
        return submit(self._topology, {**self._stores, INTERVAL: "1 h"}, executor="local")

    def send(self, records: int) -> None:
        """Send records of 100 bytes. Readers see either none of them or all."""
        values = [b"x" * 100] * records
        self._topics.send_in_kafka_txn(self.name, values, end=lambda producer: producer.commit_transaction(PATIENCE_S))

    def ask(self, command: str, *words: str) -> str:
        options = [part for key, value in self._stores.items() for part in ("--set", f"{key}={value}")]
        answer = call("ratchet", command, self.name, *words, *options)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout + answer.stderr


@pytest.fixture
def paced(servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path) -> Iterator[Paced]:
    yield Paced(servers, topics, name, tmp_path)


def sizes(run: Any) -> list[int]:
    """The records of each closed transaction."""
    return [each.attempts[-1].source_rows for each in run.transactions() if each.closed_at is not None]


@pytest.mark.slow
def test_an_interval_ends_early_when_enough_records_or_bytes_are_there(paced: Paced) -> None:
    with paced.running() as run:
        run.wait_for_commit(1, PATIENCE_S)
        paced.send(90)
        wait_for(lambda: (run.status().lag or 0) >= 90, what="the records to be seen")
        wait_for(lambda: f"{INTERVAL} = 3600" in paced.ask("status"), what="the pace in the status")
        assert "next plan" in paced.ask("status")

        paced.ask("set", f"{RECORDS}=100")
        wait_for(lambda: f"{RECORDS} = 100" in paced.ask("status"), what="the change in the status")
        assert run.status().committed_txid == 1  # ten records are missing
        paced.send(20)
        run.wait_for_commit(2, PATIENCE_S)

        paced.ask("set", f"{RECORDS}=off", f"{BYTES}=5000")
        wait_for(lambda: f"{BYTES} = 5000" in paced.ask("status") and RECORDS not in run.status().pace)
        paced.send(9)
        wait_for(lambda: (run.status().lag or 0) >= 9, what="the records to be seen")
        assert run.status().committed_txid == 2  # four kilobytes are missing
        paced.send(60)
        run.wait_for_commit(3, PATIENCE_S)

        paced.ask("set", f"{BYTES}=off", f"{INTERVAL}=off")
        wait_for(lambda: run.status().pace == {}, what="the change to be seen")
        paced.send(7)
        run.wait_for_commit(4, PATIENCE_S)
        assert sizes(run) == [10, 110, 69, 7]


def test_a_rate_holds_while_it_runs_and_after_a_restart(paced: Paced) -> None:
    with paced.running() as run:
        run.wait_for_commit(1, PATIENCE_S)
        paced.ask("set", f"{INTERVAL}=off", f"{RATE}=20")
        wait_for(lambda: f"{RATE} = 20" in paced.ask("status"), what="the change in the status")
        assert f"end {INTERVAL} early: set it" in paced.ask("set", f"{RECORDS}=5")
        assert "early" not in paced.ask("set", f"{RECORDS}=default")
        since_s = time.monotonic()
        paced.send(100)
        wait_for(lambda: sum(sizes(run)) >= 40, what="some of the records")
    before = sum(sizes(run))
    began_s = time.monotonic()
    with paced.running() as run:
        run.wait_until_caught_up(PATIENCE_S)
        ended_s = time.monotonic()
    # These are longer on a slow machine. A bucket begins empty, or holds a second's records.
    assert before - 10 <= 20 * (began_s - since_s + 1)
    assert 110 - before <= 20 * (ended_s - began_s)
    assert len(sizes(run)) > 1
