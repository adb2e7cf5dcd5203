"""``ratchet replay``: a transaction again, in this process, compared with what the sinks hold."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    BaseBatchBolt,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.errors import ConfigError, RetryableError
from framework.inspect.replay import ReplayReport, Watch, differences, plan_to_replay, replay
from framework.topology import Change, Committer, FencedState, InspectableState
from framework.topology.inspectable import inspectable
from framework.transactions import CoordinationStore, MemoryStore
from integration import EmbeddedServers
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MapState,
    MemoryBackend,
    MySqlBackend,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueKafkaTransactionalSpout, OpaqueMemoryTransactionalSpout, TextCodec
from tests.kit.command import Answer, call
from tests.kit.processes import ROOT
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)
#: Batches of ten rows: keys that come in each batch, and one that comes in the second only.
DATA = {0: [[f"w{each % 4}", each] if each != 15 else ["once", 15] for each in range(40)]}


class Twice(BaseBasicBolt):
    """Emits each row, and one that has the number 13 twice when it is told to."""

    deterministic = True

    def __init__(self, wrong: bool = False, fails_at: int | None = None) -> None:
        self.wrong, self.fails_at = wrong, fails_at

    def execute(self, tup: Any, collector: Any) -> None:
        number = tup["n"]
        if number == self.fails_at:
            raise ValueError(f"number {number}")
        collector.emit([tup["word"], number])
        if self.wrong and number == 13:
            collector.emit([tup["word"], number])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


WRITTEN: list[int] = []


class Elsewhere(BaseBatchBolt, Committer):
    """Writes to a place that Ratchet does not see."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.rows = 0

    def execute(self, tup: Any) -> None:
        self.rows += 1

    def finish_batch(self) -> None:
        WRITTEN.append(self.rows)


def topology(folder: Path, bolt: BaseBasicBolt | None = None, state: type[MapState] = OpaqueMapState) -> Topology:
    """Counts and sums per word in SQLite, rows in files, and a committer that writes elsewhere."""
    kind = MemoryTransactionalSpout if state is TransactionalMapState else OpaqueMemoryTransactionalSpout
    builder = TransactionalTopologyBuilder("replayed", "spout", kind(DATA, FIELDS, 10), 1, at_least_once=True)
    builder.set_bolt("twice", bolt or Twice(), 2).shuffle_grouping("spout")
    words = StateCommitter(
        state(SqliteBackend(folder / "x.db", "words")), ["word"], {"count": Count(), "total": Sum("n")}
    )
    builder.set_bolt("words", words, 2).fields_grouping("twice", Fields("word"))
    builder.set_bolt("parquet", AppendCommitter(ParquetTable(folder / "parquet"))).shuffle_grouping("twice")
    builder.set_bolt("elsewhere", Elsewhere()).global_grouping("twice")
    return builder.build()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def run(built: Topology, store: CoordinationStore) -> None:
    with submit(built, store=store, executor="local") as running:
        running.wait_until_caught_up(PATIENCE_S)


def replayed(built: Topology, store: CoordinationStore, txid: int, watch: Watch | None = None) -> ReplayReport:
    return replay(built, store, planned=plan_to_replay(store, built, txid), watch=watch)


def sql(folder: Path, statement: str) -> list[Any]:
    with sqlite3.connect(folder / "x.db") as connection:
        return connection.execute(statement).fetchall()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*.parquet")}


@pytest.mark.parametrize("state", [OpaqueMapState, TransactionalMapState])
def test_the_last_transaction_agrees_with_the_sinks_key_by_key(
    tmp_path: Path, store: MemoryStore, state: type[MapState]
) -> None:
    built = topology(tmp_path, state=state)
    run(built, store)
    report = replayed(built, store, 4)
    assert report.committed and report.agrees and report.failure is None
    words, parquet = report.states
    check_words(words.changes)
    assert [each.agrees for each in parquet.changes] == [True] * 10
    assert report.rows["twice->words"] == report.rows["spout->twice"] == 10


def check_words(changes: list[Change]) -> None:
    """What the last transaction makes of the counts, by arithmetic of the test's own."""
    rows = DATA[0]
    for each in changes:
        before = [n for word, n in rows[:30] if word == each.key]
        after = [n for word, n in rows if word == each.key]
        assert (each.before, each.after) == ((len(before), sum(before)), (len(after), sum(after)))
        assert each.held == each.after and each.agrees is True
    assert {each.key for each in changes} == {word for word, _ in rows[30:]}


def test_a_wrong_figure_is_named_with_what_it_should_be(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path)
    run(built, store)
    sql(tmp_path, "UPDATE words SET total = total + 1 WHERE word = 'w2'")
    report = replayed(built, store, 4)
    assert not report.agrees
    (wrong,) = report.states[0].differing()
    assert wrong.key == "w2" and wrong.held == (wrong.after[0], wrong.after[1] + 1)


def test_an_older_transaction_is_compared_where_the_sink_still_tells(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path)
    run(built, store)
    words, parquet = replayed(built, store, 2).states
    told = {each.key: each.agrees for each in words.changes}
    assert told == {"w0": None, "w1": None, "w2": None, "w3": None, "once": True}
    (once,) = [each for each in words.changes if each.key == "once"]
    assert (once.before, once.after, once.held) == (None, (1, 15), (1, 15))
    assert all(each.agrees for each in parquet.changes) and len(parquet.changes) == 10


def test_nothing_is_written(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path)
    run(built, store)

    def everything() -> Any:
        nodes: dict[str, Any] = {}
        places = ["replayed"]
        while places:
            place = places.pop()
            nodes[place] = store.get(place)
            places += [f"{place}/{each}" for each in store.children(place)]
        return sql(tmp_path, "SELECT * FROM words ORDER BY word"), files_in(tmp_path), nodes, list(WRITTEN)

    before = everything()
    assert "elsewhere" in replayed(built, store, 4).left_out
    assert everything() == before


def test_the_rows_of_edges_are_shown_also_those_into_a_sink_that_is_left_out(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = topology(tmp_path)
    run(built, store)
    seen: list[tuple[str, Any]] = []
    watch = Watch(
        edges=["twice->elsewhere"], components=["parquet"], row=lambda edge, row: seen.append((edge, dict(row)))
    )
    replayed(built, store, 2, watch)
    expected = [{"word": word, "n": n} for word, n in DATA[0][10:20]]
    for edge in ("twice->elsewhere", "twice->parquet"):
        assert sorted((row for at, row in seen if at == edge), key=lambda row: row["n"]) == expected
    assert {at for at, _ in seen} == {"twice->elsewhere", "twice->parquet"}
    with pytest.raises(ConfigError, match="there is no edge 'a->b'; there are spout->twice, "):
        replayed(built, store, 2, Watch(edges=["a->b"]))
    with pytest.raises(ConfigError, match="there is no component 'c'; there are spout, "):
        replayed(built, store, 2, Watch(components=["c"]))


def test_a_batch_that_fails_tells_where_and_hands_its_error_over(tmp_path: Path, store: MemoryStore) -> None:
    run(topology(tmp_path), store)
    errors: list[BaseException] = []
    failing = topology(tmp_path, Twice(fails_at=13))
    report = replayed(failing, store, 2, Watch(error=lambda failure, error: errors.append(error)))
    assert report.failure is not None and "ValueError: number 13" in str(report.failure)
    assert report.failure.component_id == "twice" and not report.states
    (error,) = errors
    assert error.__traceback__ is not None


def test_changed_code_is_compared_with_the_code_of_now(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path, Twice(wrong=True))
    run(built, store)
    mended = topology(tmp_path)
    now, new = replayed(built, store, 2), replayed(mended, store, 2)
    found = {(each.component_id, each.key): (each.now, each.new) for each in differences(now, new)}
    # Of the records 10 to 19, "w1" has 13 and 17; before them no value is known any more.
    assert found == {("words", "w1"): ((3, 43), (2, 30)), ("parquet", ("w1", 13)): (2, 1)}
    assert not differences(now, now)


def test_a_state_that_keeps_no_previous_values_is_replayed_and_not_compared(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path, state=NonTransactionalMapState)
    run(built, store)
    report = replayed(built, store, 4)
    assert report.agrees and report.states[0].unknown() == len(report.states[0].changes) > 0


def test_delta_tables_are_compared_by_the_rows_of_the_transaction(tmp_path: Path, store: MemoryStore) -> None:
    builder = TransactionalTopologyBuilder("delta", "spout", MemoryTransactionalSpout(DATA, FIELDS, 10), 1)
    builder.set_bolt("delta", AppendCommitter(DeltaLakeTable(tmp_path / "delta"))).shuffle_grouping("spout")
    built = builder.build()
    run(built, store)
    for txid in (1, 3, 4):
        (state,) = replayed(built, store, txid).states
        assert [(each.after, each.held, each.agrees) for each in state.changes] == [(1, 1, True)] * 10


def test_a_state_that_has_no_scratch_copy_is_left_out_by_name(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = topology(tmp_path)
    run(built, store)

    def refuse(state: FencedState, *, purpose: str) -> InspectableState:
        if isinstance(state, ParquetTable):
            raise ConfigError(f"{state.location} cannot {purpose}: it has no scratch copy")
        return inspectable(state, purpose=purpose)

    monkeypatch.setattr("sinks.append.inspectable", refuse)
    report = replayed(built, store, 4)
    assert report.agrees and [each.component_id for each in report.states] == ["words"]
    assert "has no scratch copy" in report.left_out["parquet"]
    assert report.rows["twice->parquet"] == 10


def test_what_cannot_be_replayed_is_said(tmp_path: Path, store: MemoryStore) -> None:
    built = topology(tmp_path)
    with pytest.raises(ConfigError, match="has no plan of transaction 1"):
        replayed(built, store, 1)
    run(built, store)
    with pytest.raises(
        ConfigError, match="has no plan of transaction 5: it has not been emitted yet, is long over, or"
    ):
        replayed(built, store, 5)
    spout = built.spout.instance
    assert isinstance(spout, OpaqueMemoryTransactionalSpout)
    spout.expire("0", 35)
    with pytest.raises(RetryableError, match="transaction 4 cannot be "):
        replayed(built, store, 4)


def test_values_that_sqlite_cannot_keep_are_replayed(store: MemoryStore) -> None:
    nan = float("nan")
    data = {0: [["a", 1.0], ["b", nan], ["c", 2.0], ["a", nan], ["b", 3.0], ["c", 4.0]]}
    spout = OpaqueMemoryTransactionalSpout(data, Fields(word=str, x=float), 3)
    builder = TransactionalTopologyBuilder("nan", "spout", spout, 1)
    kept = [StateCommitter(OpaqueMapState(MemoryBackend(each)), ["word"], {"x": Sum("x")}) for each in ("one", "two")]
    for number, each in enumerate(kept):
        builder.set_bolt(f"kept{number}", each).global_grouping("spout")
    built = builder.build()
    run(built, store)
    report = replayed(built, store, 2)
    assert report.failure is None and report.agrees
    for state in report.states:
        assert {each.key: (each.before, each.after) for each in state.changes} == {
            "a": (1.0, pytest.approx(nan, nan_ok=True)),
            "b": (pytest.approx(nan, nan_ok=True), pytest.approx(nan, nan_ok=True)),
            "c": (2.0, 6.0),
        }


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["postgres", "redis", pytest.param("mysql", marks=pytest.mark.slow)])
def test_the_value_before_comes_from_any_store(
    kind: str, store: MemoryStore, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue({"postgres": "postgres", "redis": "redis_server", "mysql": "mariadb"}[kind])
    name = name.replace("-", "_")
    backend = {"postgres": PostgresBackend, "redis": RedisBackend, "mysql": MySqlBackend}[kind](
        server.url if kind == "redis" else server.dsn, name
    )
    spout = OpaqueMemoryTransactionalSpout(DATA, FIELDS, 10)
    builder = TransactionalTopologyBuilder(name, "spout", spout, 1)
    words = StateCommitter(OpaqueMapState(backend), ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("words", words, 2).fields_grouping("spout", Fields("word"))
    built = builder.build()
    run(built, store)
    held = dict(backend.scan())
    (state,) = replayed(built, store, 4).states
    check_words(state.changes)
    assert dict(backend.scan()) == held
    backend.close()


# --- from Kafka, by the command line --------------------------------------------------------------


class Number(BaseBasicBolt):
    """Takes the number out of a text."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        word, text = tup["value"].split("=")
        collector.emit([word, int(text)])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class Patient(Number):
    """Takes what is no number as 0."""

    def execute(self, tup: Any, collector: Any) -> None:
        word, text = tup["value"].split("=")
        collector.emit([word, int(text) if text.isdigit() else 0])


def kafka_topology(app: Any, bolt: BaseBasicBolt | None = None) -> Topology:
    """The topology, for the command line."""
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), batch_records_max=4
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout, 1)
    builder.set_bolt("number", bolt or Number()).shuffle_grouping("spout")
    state = OpaqueMapState(SqliteBackend(app["app.database"], "words"))
    builder.set_bolt("words", StateCommitter(state, ["word"], {"total": Sum("n")})).global_grouping("number")
    return builder.build()


def patient_topology(app: Any) -> Topology:
    """A mended version, for ``--code``."""
    return kafka_topology(app, Patient())


@pytest.mark.slow
@pytest.mark.integration
def test_replay_from_the_command_line_shows_the_record_that_fails_and_what_mended_code_does(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    topic = topics.create(name)
    topics.send(topic, [f"w{each % 2}={each}".encode() for each in range(4)])
    settings = {
        "app.topic": topic,
        "app.kafka": servers.bootstrap_servers,
        "app.database": str(tmp_path / "x.db"),
        "transactional.zookeeper.servers": servers.zookeeper,
    }
    config = {"transactional.zookeeper.servers": servers.zookeeper, "topology.max.attempts": 1}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    this = "tests.pipeline.test_replay"

    def command(*more: str) -> Answer:
        return call("ratchet", "replay", f"{this}:kafka_topology", *options, *more)

    with submit(kafka_topology(settings), config, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    right = command("--txid", "1", "--show", "number->words", "--limit", "3")
    assert right.returncode == 0, right.stderr
    assert "number->words: {'word': 'w1', 'n': 1}" in right.stdout
    assert "number->words: more rows than --limit 3" in right.stdout
    assert "2 keys changed, as the sink holds them" in right.stdout and "'w1': None -> 4" in right.stdout

    topics.send(topic, [b"w0=4", b"w1=x"])
    with submit(kafka_topology(settings), config, executor="local") as run, pytest.raises(TopologyFailed):
        run.wait_until_caught_up(PATIENCE_S)
    failing = command("--code", f"{this}:patient_topology")  # by default the batch that is due
    assert failing.returncode == 3, failing.stderr
    assert "transaction 2 of topology" in failing.stdout and "invalid literal for int()" in failing.stdout
    assert "with value='w1=x'" in failing.stdout
    assert f"{this}:patient_topology does not fail on it" in failing.stdout and "'w0': 2 -> 6" in failing.stdout
    report = json.loads(command("--json").stdout.splitlines()[-1])
    assert (report["txid"], report["committed"], report["agrees"]) == (2, False, None)
    assert "invalid literal" in report["failure"]

    words = [sys.executable, "-m", "ratchet", "replay", f"{this}:kafka_topology", *options, "--pdb"]
    debugged = subprocess.run(
        words,
        input="p 'the text is ' + text\nq\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert debugged.returncode == 1, debugged.stderr
    assert "the text is x" in debugged.stdout

    with submit(patient_topology(settings), config, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    again = command("--txid", "2")
    assert again.returncode == 1 and "it fails:" in again.stdout
