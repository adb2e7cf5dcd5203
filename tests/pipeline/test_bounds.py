"""Bounded topologies over a real broker: they end by themselves, at the end that was fixed at the
first start, whenever they died in between."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from structlog.testing import capture_logs

from framework import Config, Run, TopologyFailed
from framework.commands.exit_status import EXIT_MISUSED, exit_codes
from framework.coordination import MemoryStore, store_of
from framework.errors import ConfigError
from framework.inspect.topologies import read_topology
from framework.preflight import preflight
from framework.transactions import committed_txid
from integration import EmbeddedServers
from ratchet import Pipeline, Text, sqlite
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.pages import DOCS, snippets
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration

KINDS = pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "idempotent"])
SLOWLY = pytest.mark.parametrize(
    "opaque", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["opaque", "idempotent"]
)


@pytest.fixture(params=["opaque", pytest.param("transactional", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, topics: Topics, name: str, tmp_path: Path) -> KafkaRuns:
    return KafkaRuns(topics, tmp_path, name, opaque=request.param == "opaque")


def to_its_end(runs: KafkaRuns, config: Any = None, **options: Any) -> Run:
    """Run a bounded topology until it ends by itself."""
    with runs.start(config, **options) as run:
        assert run.join(PATIENCE_S)
    assert run.status().phase == "finished"
    return run


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.slow
@KINDS
def test_a_bounded_topology_ends_by_itself_and_goes_on_to_the_same_end_after_a_stop(
    topics: Topics, name: str, tmp_path: Path, opaque: bool
) -> None:
    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    topics.create(name, 3)
    for partition in range(3):
        topics.send(name, [b"old"] * 40, partition)
    with runs.start(end="latest", batch_records_max=30) as run:
        run.wait_for_commit(2, PATIENCE_S)
    assert run.status().phase == "stopped" and runs.counts()["old"] < 120
    for partition in range(3):
        topics.send(name, [b"new"] * 5, partition)
    topics.add_partitions(name, 5)
    topics.send(name, [b"other"] * 5, 4)

    ended = to_its_end(runs, end="latest")
    assert runs.counts() == {"old": 120}
    assert ended.status().lag == 0 and set(ended.status().partitions) == {f"{name}/{number}" for number in range(3)}
    found = read_topology(runs.store, name)
    assert found is not None and found.state == "finished"

    again = to_its_end(runs, end="latest")  # a restart says so, and reads nothing
    assert again.status().committed_txid == ended.status().committed_txid
    assert runs.counts() == {"old": 120}

    with runs.start() as free:  # without an end it goes on, with the partitions that it had left out
        runs.await_counts(free, {"old": 120, "new": 15, "other": 5})


@pytest.mark.slow
def test_an_end_by_time_and_another_one_later(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 2)
    topics.send(name, [b"monday"] * 5)
    time.sleep(0.05)
    tuesday = datetime.datetime.now(datetime.UTC)
    time.sleep(0.05)
    topics.send(name, [b"tuesday"] * 5)
    topics.send(name, [b"tuesday"] * 5, 1)
    time.sleep(0.05)
    wednesday = datetime.datetime.now(datetime.UTC)
    to_its_end(runs, end=tuesday)
    assert runs.counts() == {"monday": 5}
    topics.send(name, [b"wednesday"] * 5)
    to_its_end(runs, end=tuesday)
    to_its_end(runs, end=wednesday)
    assert runs.counts() == {"monday": 5, "tuesday": 10}
    to_its_end(runs, end={name: "latest"})
    assert runs.counts() == {"monday": 5, "tuesday": 10, "wednesday": 5}


def test_offsets_bound_both_ends_and_control_records_are_no_obstacle(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 2)
    topics.send(name, [b"%d" % number for number in range(20)])
    topics.send_in_kafka_txn(name, [b"sent"], 1, end=lambda producer: producer.commit_transaction(60))
    start = {f"{name}/0": 5, f"{name}/1": "earliest"}
    to_its_end(runs, start=start, end={name: {0: 8, 1: 2}})  # offset 1 of partition 1 is a control record
    assert runs.counts() == {"5": 1, "6": 1, "7": 1, "sent": 1}


def test_waiting_for_a_bounded_run_to_catch_up_waits_for_its_end(runs: KafkaRuns) -> None:
    runs.topics.create(runs.name)
    runs.topics.send(runs.name, [b"x"] * 10)
    run = runs.catch_up(end="latest")
    assert run.join(PATIENCE_S) and run.status().phase == "finished"
    assert runs.catch_up(end="latest").status().phase == "finished"
    assert runs.counts() == {"x": 10}


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("applied", [False, True], ids=["before a write", "after a write"])
def test_a_driver_that_dies_at_any_write_goes_on_to_the_same_end(
    topics: Topics, name: str, tmp_path: Path, opaque: bool, applied: bool
) -> None:
    """Between fixing the end, planning, committing and closing; while more is written, and
    partitions are added. The start, where the log ended, holds as well."""
    for number in itertools.count(1):
        topic = topics.create(f"{name}-{number}", 2)
        topics.send(topic, [b"before"] * 5)
        runs = KafkaRuns(topics, tmp_path / str(number), topic, opaque=opaque, start={topic: {0: 5, 1: 0, 2: 0, 3: 0}})
        runs.path.parent.mkdir()
        runs.store = store = Mortal(number, applied=applied)
        for partition in range(2):
            topics.send(topic, [b"old"] * 8, partition)
        options: Any = {"end": "latest", "batch_records_max": 4}
        config = {"topology.max.spout.pending": 1 + number % 2}
        try:
            to_its_end(runs, config, **options)
        except Death:
            pass
        else:
            break  # it has no more writes
        fixed = store.has_plan
        topics.send(topic, [b"new"] * 3)
        topics.add_partitions(topic, 4)
        topics.send(topic, [b"new"] * 3, 3)
        to_its_end(runs, config, **options)
        expected = {"old": 16} if fixed else {"old": 16, "new": 6}
        assert runs.counts() == expected, f"write {number}"
    assert number > 6


class Death(Exception):
    """The end of a driver."""


class Mortal(MemoryStore):
    """Whose leader dies once, at a write of its own."""

    def __init__(self, at: int, *, applied: bool) -> None:
        super().__init__()
        self.left, self.applied, self.has_plan = at, applied, False

    def _apply_as(self, leadership: Any, changes: Sequence[Any]) -> None:
        self.left -= 1
        if self.left == 0 and not self.applied:
            raise Death
        super()._apply_as(leadership, changes)
        self.has_plan = self.has_plan or any("/user/" in each.path for each in changes)
        if self.left == 0:
            raise Death


# --- the start ------------------------------------------------------------------------------------


def committed_to(topics: Topics, group: str, offsets: dict[tuple[str, int], int]) -> None:
    consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": group})
    try:
        consumer.commit(offsets=[TopicPartition(*tp, at) for tp, at in offsets.items()], asynchronous=False)
    finally:
        consumer.close()


@pytest.mark.slow
def test_a_group_says_once_where_a_new_topology_begins(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 3)
    for partition in range(3):
        topics.send(name, [b"p%d" % partition] * 10, partition)
    committed_to(topics, f"{name}-group", {(name, 0): 4, (name, 1): 10})
    with runs.start(start_group=f"{name}-group") as run:  # partition 2 begins at start=, the beginning
        run.wait_until_caught_up(PATIENCE_S)
        plan = run.transactions()[0].plan
    assert {each: meta["first_offset"] for each, meta in plan.items()} == {
        f"{name}/0": 4,
        f"{name}/1": 10,
        f"{name}/2": 0,
    }
    committed_to(topics, f"{name}-group", {(name, 0): 0})  # not looked at again
    topics.send(name, [b"new"], 1)
    runs.catch_up(start_group=f"{name}-group")
    assert runs.counts() == {"p0": 6, "p2": 10, "new": 1}


def test_a_group_and_a_start_for_the_rest(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 2)
    for partition in range(2):
        topics.send(name, [b"p%d" % partition] * 10, partition)
    committed_to(topics, f"{name}-group", {(name, 0): 4})
    to_its_end(runs, start_group=f"{name}-group", start="latest", end="latest")
    assert runs.counts() == {"p0": 6}


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ({"start_group": "none"}, "group 'none' has committed no offset of"),
        pytest.param({"start": {0: 1}}, "start is offset 1 of partition", marks=pytest.mark.slow),
        pytest.param({"end": "2999-01-01T00:00:00Z"}, "s in the future", marks=pytest.mark.slow),
    ],
)
def test_bounds_that_the_source_does_not_have_are_a_mistake_in_the_configuration(
    runs: KafkaRuns, bounds: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.topics.create(runs.name)
    found = [
        each.error for each in preflight(runs.topology(**bounds), Config.of({}), "local") if each.error is not None
    ]
    assert [type(each) for each in found] == [ConfigError] and re.search(problem, str(found[0]))
    with pytest.raises(SystemExit) as ended, exit_codes(), runs.start(**bounds) as run:
        run.join(PATIENCE_S)
    assert ended.value.code == EXIT_MISUSED
    assert re.search(problem, capsys.readouterr().err)


def test_an_offset_of_a_group_after_the_end_of_the_log_is_lost_data(
    runs: KafkaRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.planning.lost_records.BELIEVED_AFTER_S", 0.2)
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"x"] * 3)
    committed_to(topics, f"{name}-group", {(name, 0): 30})
    with pytest.raises(TopologyFailed, match="ends at offset 3"), runs.start(start_group=f"{name}-group") as run:
        run.join(PATIENCE_S)


# --- records behind an open kafka_txn -------------------------------------------------------------


@pytest.mark.slow
@SLOWLY
def test_catching_up_tells_of_records_behind_an_open_transaction_or_waits_for_them(
    topics: Topics, name: str, tmp_path: Path, opaque: bool
) -> None:
    topics.create(name, 2)
    topics.send(name, [b"seen"] * 10)
    hanging = topics.send_in_kafka_txn(name, [b"hanging"], 1, end=None)
    topics.send(name, [b"hidden"] * 5, 1)
    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    with capture_logs() as logs:
        runs.catch_up()
    (told,) = [each for each in logs if each["event"] == "run.hidden_records"]
    assert (told["partition"], told["records"], told["waits"]) == (f"{name}/1", 6, False)
    assert runs.counts() == {"seen": 10}

    waits = {"topology.open.transactions": "wait"}
    with runs.start(waits) as run:
        with pytest.raises(TimeoutError, match=f"records behind open kafka_txns: 6 of {name}/1"):
            run.wait_until_caught_up(0.9)
        hanging.commit_transaction(60)
        run.wait_until_caught_up(PATIENCE_S)
    assert runs.counts() == {"seen": 10, "hanging": 1, "hidden": 5}


@SLOWLY
def test_the_end_of_a_bounded_topology_is_before_an_open_transaction_or_behind_it(
    topics: Topics, name: str, tmp_path: Path, opaque: bool
) -> None:
    topics.create(name)
    topics.send(name, [b"seen"] * 10)
    hanging = topics.send_in_kafka_txn(name, [b"hanging"], end=None)
    told = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    with capture_logs() as logs:
        to_its_end(told, end="latest")
    (warning,) = [each for each in logs if each["event"] == "source.hidden_records"]
    assert (warning["partition"], warning["records"]) == (f"{name}/0", 1)
    assert told.counts() == {"seen": 10}

    (tmp_path / "other").mkdir()
    waiting = KafkaRuns(topics, tmp_path / "other", name, opaque=opaque)
    with waiting.start({"topology.open.transactions": "wait"}, end="latest") as run:
        waiting.await_counts(run, {"seen": 10})
        topics.send(name, [b"later"] * 3)
        wait_for(lambda: run.status().lag == 1)
        hanging.abort_transaction(60)
        assert run.join(PATIENCE_S) and run.status().phase == "finished"
    assert waiting.counts() == {"seen": 10}


# --- other ways to say it -------------------------------------------------------------------------


def test_a_pipeline_is_bounded_as_a_spout_is(topics: Topics, name: str, tmp_path: Path) -> None:
    topics.create(name, 2)
    topics.send(name, [b"a", b"b", b"c"])
    committed_to(topics, f"{name}-group", {(name, 0): 1})
    pipeline = Pipeline(name)
    lines = pipeline.read_kafka(
        name,
        value=Text("line"),
        bootstrap_servers=topics.bootstrap_servers,
        start_group=f"{name}-group",
        start={name: "latest"},
        end={f"{name}/0": 2, f"{name}/1": "latest"},
    )
    lines.append_into(sqlite(str(tmp_path / "lines.db"), "lines"))
    with pipeline.submit({}, MemoryStore(), "local") as run:
        assert run.join(PATIENCE_S)
    assert run.status().phase == "finished" and run.status().committed_rows == 1


PAGE = DOCS / "howto" / "backfill.md"


@pytest.mark.slow
def test_the_backfill_of_the_page_that_is_killed_and_repeated_ends_with_status_0(
    topics: Topics, name: str, tmp_path: Path, servers: EmbeddedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backfill.py").write_text(snippets(PAGE)[0].code.replace('        "orders",', f'        "{name}",'))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    topics.create(name, 2)
    for partition in range(2):
        topics.send(name, [b'{"order": %d, "cents": 5}' % number for number in range(1_000)], partition)
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "app.id": name,
        "app.kafka": topics.bootstrap_servers,
        "app.start": "earliest",
        "app.end": "latest",
        "app.database": tmp_path / "orders.db",
        "topology.rate.records.per.second": 500,
    }
    run = RunProcess(tmp_path / "run.log", "backfill:topology", settings, executor="local")
    store = store_of(Config.load(None, [f"transactional.zookeeper.servers={servers.zookeeper}"]))
    try:
        run.start()
        assert run.wait_for(lambda: committed_txid(store, name) > 0)
        run.kill()
        killed_at = committed_txid(store, name)
        topics.send(name, [b"not JSON"] * 3)
        topics.add_partitions(name, 3)
        run.start()
        assert run.finish(PATIENCE_S) == 0
        found = read_topology(store, name)
    finally:
        run.end()
        store.close()
    assert found is not None and found.state == "finished" and found.txid is not None and found.txid > killed_at
    with sqlite3.connect(tmp_path / "orders.db") as connection:
        assert connection.execute("SELECT count(*), sum(cents) FROM orders").fetchone() == (2_000, 10_000)
