"""What a simulation leaves out, refuses and repeats."""

from __future__ import annotations

import smtplib
import socket
import sqlite3
import uuid
from pathlib import Path
from typing import Any, ClassVar

import confluent_kafka
import pytest

from framework import (
    BaseBasicBolt,
    BaseTransactionalBolt,
    Committer,
    DataFrameBolt,
    FailedException,
    Fields,
    Topology,
    TransactionalTopologyBuilder,
)
from framework.errors import ConfigError
from framework.testing import Broken, Outside, SimulationFailed, simulate
from framework.testing.simulation.external_effects import guarded, install_guard, struck
from framework.testing.simulation.sample_records import read_sample, sample_of
from framework.testing.simulation.schedule import drawn
from framework.transactions.run import TopologyFailed
from sinks import Count, NonTransactionalMapState, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.thread_identifiers import NEW_THREADS, another_thread, run_in_new_threads
from tests.testing.mistakes import FIELDS, NOWHERE, RECORDS, Newest, Own, RunningCount, Stamped, Words, counting


class Elsewhere(BaseTransactionalBolt, Committer):
    """A committer that writes where Ratchet does not see it."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None: ...

    def execute(self, tup: Any) -> None: ...

    def finish_batch(self) -> None:
        raise AssertionError("nobody stands for what it writes to")


class Touches(Own):
    """Does something outside in its commit."""

    how: ClassVar[Any] = None

    def finish_batch(self) -> None:
        type(self).how()


class Appends(Touches):
    how = staticmethod(lambda: NOWHERE.with_suffix(".txt").write_text("x"))


class Mails(Touches):
    how = staticmethod(lambda: smtplib.SMTP("127.0.0.1", 1))


class Inserts(Touches):
    how = staticmethod(lambda: sqlite3.connect(NOWHERE))


class Deletes(Touches):
    how = staticmethod(NOWHERE.unlink)


class Asks(BaseBasicBolt):
    """Looks something up in a service."""

    def execute(self, tup: Any, collector: Any) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 1))
        collector.emit([tup["word"], tup["n"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class Sql(DataFrameBolt):
    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class Fails(Words):
    def execute(self, tup: Any, collector: Any) -> None:
        raise ValueError("always")


def beside(bolt: Any) -> Topology:
    """A bolt, with a committer below it where it emits, beside one that can be simulated."""
    builder = TransactionalTopologyBuilder("beside", "spout", OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 1))
    builder.set_bolt("bolt", bolt).global_grouping("spout")
    tables = ["words"]
    if not isinstance(bolt, Committer):
        tables.append("below")
    for table in tables:
        state = OpaqueMapState(SqliteBackend(NOWHERE, table))
        committer = StateCommitter(state, ["word"], {"count": Count()})
        builder.set_bolt(table, committer).global_grouping("bolt" if table == "below" else "spout")
    return builder.build()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bolt", "why"),
    [
        (Elsewhere(), "it writes where nothing can be compared: give it an Outside"),
        (Appends(), "it writes to /nonexistent/real.txt, at "),
        (Mails(), "it sends mail (smtplib.connect"),
        (Inserts(), "it opens the database /nonexistent/real.db"),
        (Deletes(), "it changes /nonexistent/real.db (os.remove)"),
        (Asks(), "it connects to another process (socket.connect: ('127.0.0.1', 1), which `connect` allows)"),
        (Sql(), "Spark SQL is not simulated"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_would_change_something_outside_is_left_out_and_named(bolt: Any, why: str) -> None:
    report = simulate(beside(bolt), RECORDS, schedules=3)
    assert report.left_out["bolt"].startswith(why)
    expected = {"bolt"} if isinstance(bolt, Committer) else {"bolt", "below"}
    assert set(report.left_out) == expected
    assert f"not simulated: bolt 'bolt': {report.left_out['bolt']}" in list(report.lines())


def test_a_thread_of_the_user_is_held_back_with_the_identifier_of_an_ended_thread(tmp_path: Path) -> None:
    with another_thread():
        install_guard()
    refused = []

    def write() -> None:
        try:
            (tmp_path / "outside").write_text("x")
        except ConfigError as error:
            refused.append(str(error))

    with guarded(tmp_path / "own", connect=False):
        run_in_new_threads(write)
    assert len(refused) == NEW_THREADS and "outside" in str(struck())


def produce(word: str) -> None:
    confluent_kafka.Producer({"bootstrap.servers": "127.0.0.1:1"}).produce(word)


class Produces(Own):
    """Writes to Kafka by a function of its module."""

    def finish_batch(self) -> None:
        for word, _ in self.rows:
            produce(word)


@pytest.mark.slow
def test_what_uses_a_library_that_cannot_be_held_back_does_not_run() -> None:
    report = simulate(beside(Produces()), RECORDS, schedules=3)
    assert report.left_out["bolt"].startswith("its code uses confluent_kafka, which a simulation cannot hold back")


@pytest.mark.slow
def test_a_lookup_may_connect_where_that_is_allowed() -> None:
    assert simulate(beside(Asks()), RECORDS, schedules=3, connect=True).left_out == {}


def test_a_topology_of_which_nothing_can_be_simulated_is_refused() -> None:
    builder = TransactionalTopologyBuilder("alone", "spout", OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 1))
    builder.set_bolt("bolt", Elsewhere()).global_grouping("spout")
    with pytest.raises(ConfigError, match="nothing of topology 'alone' can be simulated: bolt 'bolt': it writes where"):
        simulate(builder.build(), RECORDS)


def test_a_topology_that_fails_without_trouble_is_no_finding() -> None:
    with pytest.raises(TopologyFailed, match="ValueError: always"):
        simulate(counting(Fails()), RECORDS, schedules=3)


@pytest.mark.slow
def test_the_states_of_the_topology_are_not_touched(tmp_path: Path) -> None:
    state = OpaqueMapState(SqliteBackend(tmp_path / "real.db", "words", Fields(word=str), Fields(n=int)))
    committer = Own()
    committer.state = state
    simulate(counting(Words(), opaque=True, committer=committer), RECORDS, schedules=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_and_outside_are_as_before_when_a_simulation_is_over() -> None:
    RunningCount.counts.clear()
    RunningCount.counts["before"] = 7
    try:
        with pytest.raises(SimulationFailed):
            simulate(counting(RunningCount()), RECORDS, schedules=10)
        assert RunningCount.counts == {"before": 7}
    finally:
        RunningCount.counts.clear()


def test_the_schedule_of_a_seed_is_always_the_same() -> None:
    places = tuple(("0", place) for place in range(9))
    assert drawn(7, places) == drawn(7, places)
    assert len({drawn(seed, places) for seed in range(50)}) == 50


@pytest.mark.slow
def test_the_seed_of_a_finding_shows_it_again_alone() -> None:
    stories = []
    for _ in range(2):
        with pytest.raises(SimulationFailed) as caught:
            simulate(counting(Stamped()), RECORDS, schedules=30, seed=11)
        (finding,) = caught.value.report.findings
        with pytest.raises(SimulationFailed) as again:
            simulate(counting(Stamped()), RECORDS, schedules=1, seed=finding.seed)
        assert again.value.report.findings == [finding]
        stories.append(finding)
    assert stories[0] == stories[1]


@pytest.mark.slow
def test_a_finding_tells_a_stranger_what_happened() -> None:
    topology = counting(Words(), opaque=True, committer=Newest(Outside("table")))
    with pytest.raises(SimulationFailed) as caught:
        simulate(topology, {0: [("ant", 1), ("ant", 2)]}, schedules=60)
    (finding,) = caught.value.report.findings
    assert finding.broken is Broken.OUTSIDE
    assert finding.details == ("'ant': it holds 1; one commit of each batch gives 2",)
    assert list(finding.story) == [
        'transaction 1 is planned: 1 record: {"word": "ant", "n": 1}',
        "attempt 1 at transaction 1 processes the batch",
        "FAULT: a commit task hangs and is given up; it runs late ('commit' of attempt 1)",
        "attempt 2 at transaction 1 processes the same batch again, days later",
        "attempt 2 at transaction 1 commits: 'commit'",
        "transaction 1 is closed",
        'transaction 2 is planned: 1 record: {"word": "ant", "n": 2}',
        "attempt 1 at transaction 2 processes the batch",
        "attempt 1 at transaction 2 commits: 'commit'",
        "transaction 2 is closed",
        "the late commit task ('commit') of attempt 1 at transaction 1 runs now: nothing refuses it",
    ]


@pytest.mark.slow
def test_a_batch_that_fails_by_itself_now_and_then_is_no_mistake() -> None:
    Flaky.tries = 0
    simulate(counting(Flaky(), opaque=True), RECORDS, schedules=20)


class Flaky(Words):
    """Asks for a replay now and then, as a bolt does whose service is away."""

    tries: ClassVar[int] = 0

    def execute(self, tup: Any, collector: Any) -> None:
        Flaky.tries += 1
        if Flaky.tries % 23 == 0:
            raise FailedException("away")
        super().execute(tup, collector)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], "there is no sample of input: no record was given"),
        ([{"word": "ant"}], "record 0 has no field 'n'; the spout emits word, n"),
        ([("ant",)], "record 0 has 1 values, and the spout emits word, n"),
        ([("ant", "x")], "'x' does not fit into field 'n', which is int64"),
    ],
)
def test_a_record_that_does_not_fit_is_named(records: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sample_of(counting(Words()), records)


def test_a_sample_is_read_from_json_lines_and_from_csv(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"word": "ant", "n": 1}\n\n["bee", 2]\n')
    (tmp_path / "a.csv").write_text("n,word\n1,ant\n2,bee\n")
    topology = counting(Words(), tasks=1)
    for name in ("a.jsonl", "a.csv"):
        sample = read_sample(topology, tmp_path / name)
        assert [row.to_pylist() for _, row in sample["0"]] == [[{"word": "ant", "n": 1}], [{"word": "bee", "n": 2}]]
    (tmp_path / "d.jsonl").write_text('\ufeff{"word": "a\u2028b\x85c", "n": 1}\r\n', "utf-8")
    (tmp_path / "d.csv").write_text('\ufeffword,n\n"a\u2028b\x85c",1\n', "utf-8")
    (tmp_path / "e.csv").write_text('word,n\n"two\nlines",1\n')
    for name, word in ("d.jsonl", "a\u2028b\x85c"), ("d.csv", "a\u2028b\x85c"), ("e.csv", "two\nlines"):
        sample = read_sample(topology, tmp_path / name)
        assert [row.to_pylist() for _, row in sample["0"]] == [[{"word": word, "n": 1}]]
    (tmp_path / "b.jsonl").write_text('{"word": "ant", "n": 1}\n{"word"\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2: .*; write one JSON object per line"):
        read_sample(topology, tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=r"c\.jsonl does not exist"):
        read_sample(topology, tmp_path / "c.jsonl")


def local_class() -> Topology:
    seen: dict[str, int] = {}

    class Local(Words):
        def execute(self, tup: Any, collector: Any) -> None:
            seen[tup["word"]] = seen.get(tup["word"], 0) + 1
            collector.emit([tup["word"], seen[tup["word"]]])

    return counting(Local())


@pytest.mark.slow
def test_a_class_that_no_module_names_keeps_nothing_from_one_schedule_to_the_next() -> None:
    topology = local_class()
    with pytest.raises(SimulationFailed) as caught:
        simulate(topology, RECORDS, schedules=40)
    (finding,) = caught.value.report.findings
    assert (finding.broken, finding.component, len(finding.schedule.faults)) == (Broken.ROWS, "bolt", 1)


@pytest.mark.slow
def test_a_state_that_counts_twice_by_its_type_is_not_compared() -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 1)
    builder = TransactionalTopologyBuilder("twice", "spout", spout, at_least_once=True)
    state = NonTransactionalMapState(SqliteBackend(NOWHERE, "twice"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
    report = simulate(builder.build(), RECORDS, schedules=20)
    assert report.notes == [
        "table 'twice' of /nonexistent/real.db is not compared: it counts a replayed batch twice, as its type says"
    ]


class Stamps(Own):
    """Writes a random number with each value, and promises nothing."""

    def add(self, word: str, n: int) -> None:
        self.state.multi_put([word], [uuid.uuid4().int % 1000])


@pytest.mark.slow
def test_random_values_of_a_committer_are_repeated_with_its_attempt() -> None:
    report = simulate(counting(Words(), opaque=True, committer=Stamps()), RECORDS, schedules=30)
    assert report.notes == []
