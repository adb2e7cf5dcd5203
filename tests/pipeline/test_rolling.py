"""A new version of a topology takes over from the old one by way of a standby: no record counts
twice or is lost, and the gap is short. The gap is printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from framework.config import Config
from framework.coordination import store_of
from framework.coordination.presence import read_drivers
from framework.transactions.documents import read_history
from integration import EmbeddedServers, PostgresServer
from tests.kit.processes import ROOT
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]

START_S = 300.0
PIPELINE = """
from framework import BaseBasicBolt, Fields, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec


class Marked(BaseBasicBolt):
    def execute(self, tup, collector):
        collector.emit(["VERSION", tup["value"]])

    def declare_output_fields(self, declarer):
        declarer.declare(Fields(version=str, word=str))


def topology(app):
    spout = OpaqueKafkaTransactionalSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec())
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout)
    builder.set_bolt("marked", Marked()).shuffle_grouping("spout")
    state = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"]))
    counts = StateCommitter(state, ["version", "word"], {"n": Count()})
    builder.set_bolt("counts", counts).fields_grouping("marked", Fields("version", "word"))
MORE    return builder.build()
"""
#: A change of the topology's shape: another table of the same records.
MORE = """
    other = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"] + "_more"))
    builder.set_bolt("more", StateCommitter(other, ["word"], {"n": Count()})).fields_grouping("marked", Fields("word"))
"""


def version(folder: Path, name: str, more: str = "") -> Path:
    """The folder of a version of the user's code."""
    (folder / name).mkdir()
    (folder / name / "pipeline.py").write_text(PIPELINE.replace("VERSION", name).replace("MORE", more))
    return folder / name


@contextmanager
def driver(folder: Path, settings: dict[str, str], executor: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "ratchet", "run", "pipeline:topology", "--executor", executor, *options]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)


class Sender:
    """Sends numbered records, about twenty a second, until it is closed."""

    def __init__(self, topics: Topics, topic: str) -> None:
        self.sent = 0
        self._topics, self._topic, self._closed = topics, topic, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(0.05):
            self._topics.send(self._topic, [f"w{self.sent % 7}".encode()])
            self.sent += 1

    def close(self) -> None:
        self._closed.set()
        self._thread.join(PATIENCE_S)


@pytest.mark.slow_for("local-another shape")
@pytest.mark.parametrize("more", ["", MORE], ids=["other code", "another shape"])
@pytest.mark.parametrize("executor", ["local", pytest.param("spark", marks=[pytest.mark.slow, pytest.mark.spark])])
def test_a_new_version_takes_over_from_a_standby(
    executor: str,
    more: str,
    servers: EmbeddedServers,
    postgres: PostgresServer,
    topics: Topics,
    name: str,
    tmp_path: Path,
) -> None:
    topics.create(name)
    table = name.replace("-", "_")
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.start.timeout.secs": str(START_S),
        "spark.master": "local[1]",
        "app.kafka": servers.bootstrap_servers,
        "app.database": postgres.dsn,
        "app.topic": name,
        "app.table": table,
    }
    store = store_of(Config.of({"transactional.zookeeper.servers": [servers.zookeeper]}))
    first, second = version(tmp_path, "old"), version(tmp_path, "new", more)
    change = ["--accept-changed-topology"] if more else []

    def committed(versions: str) -> int:
        with psycopg.connect(postgres.dsn) as connection:
            found = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
            if found is None or found[0] is None:
                return 0
            rows = connection.execute(f"SELECT coalesce(sum(n), 0) FROM {table} WHERE version = %s", (versions,))
            return int(rows.fetchone()[0])  # type: ignore[index]

    sender = Sender(topics, name)
    try:
        with driver(first, settings, executor) as leader:
            wait_for(lambda: committed("old") > 0, START_S)
            with driver(second, settings, executor, "--standby", *change) as standby:
                wait_for(lambda: any(each.phase == "standby" for each in read_drivers(store, name)), START_S)
                leader.send_signal(signal.SIGTERM)
                leader.wait(START_S)
                wait_for(lambda: committed("new") > 0, START_S)
                sender.close()
                wait_for(lambda: committed("old") + committed("new") >= sender.sent, START_S)
                standby.send_signal(signal.SIGTERM)
                assert standby.wait(START_S) in (0, 130), (second / "log").read_text()[-4_000:]
    finally:
        sender.close()
        records = read_history(store, name)
        store.close()
    assert committed("old") + committed("new") == sender.sent
    assert committed("old") > 0 and committed("new") > 0
    by_epoch = {each.attempts[-1].epoch: each for each in reversed(records)}  # the first of each leader
    (taken_over,) = [each for epoch, each in by_epoch.items() if epoch == max(by_epoch)]
    before = [each for each in records if each.txid == taken_over.txid - 1]
    gap_s = (taken_over.closed_at or 0) - (before[0].closed_at or 0)
    print(json.dumps({"executor": executor, "shape": bool(more), "gap_s": round(gap_s, 2), "records": sender.sent}))
