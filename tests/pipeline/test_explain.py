"""``ratchet explain``: the transactions that changed a key, and the records that did it."""

from __future__ import annotations

import datetime
import json
import math
import sqlite3
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    BaseBasicBolt,
    BaseBatchBolt,
    Fields,
    Topology,
    TransactionalTopologyBuilder,
    submit,
)
from framework.commands.explain import _cause, app
from framework.errors import ConfigError, RetryableError
from framework.inspect.comparison import hold
from framework.inspect.explain import Cause, Explanation, explain
from framework.inspect.full_recomputation import Unverifiable
from framework.topology import SourceRecord
from framework.transactions import CoordinationStore, MemoryStore
from framework.transactions import documents as documents_module
from framework.transactions.reset import reset_positions
from framework.transactions.spout_planners import shown_row
from integration import EmbeddedServers
from sinks import (
    AppendCommitter,
    Count,
    Last,
    MapState,
    Max,
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
from spouts import (
    JsonCodec,
    MemoryTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
)
from tests.kit.replays import OverKafka, Sums, command, only, run, state_at, topology_of
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)
#: Four batches of ten rows. "once" comes in the second, "twice" in the first and the fourth.
ROWS = {0: [[{15: "once", 3: "twice", 37: "twice"}.get(each, f"w{each % 4}"), each] for each in range(40)]}


class Doubled(BaseBasicBolt):
    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], tup["n"] * 2])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def counted(
    folder: Path,
    state: type[MapState] = OpaqueMapState,
    backend: Any = None,
    data: Any = None,
    bolt: Any = None,
) -> Topology:
    """Doubles the numbers; counts and sums per word, and keeps the rows in files."""
    kind = MemoryTransactionalSpout if state is TransactionalMapState else OpaqueMemoryTransactionalSpout
    builder = TransactionalTopologyBuilder("explained", "spout", kind(data or ROWS, FIELDS, 10), 1, at_least_once=True)
    builder.set_bolt("doubled", Doubled(), 2).shuffle_grouping("spout")
    aggregates = {"count": Count(), "total": Sum("n")}
    words = bolt or StateCommitter(state(backend or SqliteBackend(folder / "x.db", "words")), ["word"], aggregates)
    builder.set_bolt("words", words, 2).fields_grouping("doubled", Fields("word"))
    builder.set_bolt("parquet", AppendCommitter(ParquetTable(folder / "parquet"))).shuffle_grouping("doubled")
    return builder.build()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def of(built: Topology, store: CoordinationStore, key: str, state: str = "words", **options: Any) -> Explanation:
    return explain(built, store, state=state, key=key, **options)


@pytest.mark.parametrize("state", [OpaqueMapState, TransactionalMapState])
def test_each_change_of_a_key_is_named_with_its_values_and_its_records(
    tmp_path: Path, store: MemoryStore, state: type[MapState]
) -> None:
    built = counted(tmp_path, state)
    run(built, store)
    found = of(built, store, "twice")
    assert [(each.first_txid, each.txid, each.before, each.after) for each in found.steps] == [
        (1, 1, None, {"count": 1, "total": 6}),
        (4, 4, {"count": 1, "total": 6}, {"count": 2, "total": 80}),
    ]
    recorded = found.steps[1].recorded
    assert recorded is not None and (recorded.txid, recorded.attempts[-1].attempt_id) == (4, 1)
    assert found.agrees and found.is_independent and found.held == {"count": 2, "total": 80}
    assert [[each.rows for each in step.causes] for step in found.steps] == [
        [({"word": "twice", "n": 3},)],
        [({"word": "twice", "n": 37},)],
    ]


def test_a_record_that_changes_the_key_again_is_another_cause_and_more_than_wanted_are_said_to_be(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = counted(tmp_path)
    run(built, store)
    found = of(built, store, "w1", last=2, causes_max=2)
    assert (found.step_count, [each.txid for each in found.steps]) == (4, [3, 4])
    assert [[each.rows[0]["n"] for each in step.causes] for step in found.steps] == [[21, 25], [33]]
    assert [each.has_more for each in found.steps] == [True, False]
    assert of(built, store, "w1", causes_max=0).steps[0].causes == []


def test_what_is_no_longer_recorded_one_by_one_is_one_step_for_each_batch_that_is_read(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(tmp_path)
    run(built, store)
    last_two = documents_module.read_history(store, built.id)[2:]
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only(last_two))
    found = of(built, store, "twice")
    assert found.agrees
    assert [(each.first_txid, each.txid, each.after) for each in found.steps] == [
        (1, 2, {"count": 1, "total": 6}),
        (4, 4, {"count": 2, "total": 80}),
    ]
    assert found.steps[0].causes[0].rows == ({"word": "twice", "n": 3},)
    monkeypatch.setattr("framework.inspect.full_recomputation.RECORDS_PER_BATCH", 5)
    assert [(each.first_txid, each.txid) for each in of(built, store, "w1").steps] == [*[(1, 2)] * 4, (3, 3), (4, 4)]


def test_recorded_begins_where_the_records_do_and_says_so(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {0: list(ROWS[0])}
    built = counted(tmp_path, data=data)
    run(built, store)
    last_two = documents_module.read_history(store, built.id)[2:]
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only(last_two))
    built.spout.instance.expire("0", 20)  # type: ignore[attr-defined]
    with pytest.raises(Unverifiable, match="has lost what the sinks were made of"):
        of(built, store, "twice")
    found = of(built, store, "twice", recorded_only=True)
    assert (found.since_txid, found.agrees, found.held) == (3, None, {"count": 2, "total": 80})
    assert [(each.txid, each.before, each.after) for each in found.steps] == [(4, None, {"count": 1, "total": 74})]


def test_input_from_before_a_reset_is_not_made_up(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(tmp_path)
    run(built, store)
    reset_positions(built, store)
    run(built, store)
    assert [each.txid for each in of(built, store, "once").steps] == [2, 6]
    last = documents_module.read_history(store, built.id)[-1:]
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only(last))
    with pytest.raises(Unverifiable, match="its positions were reset"):
        of(built, store, "once")


def test_a_number_that_was_changed_by_hand_is_not_what_the_source_gives(tmp_path: Path, store: MemoryStore) -> None:
    built = counted(tmp_path)
    run(built, store)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE words SET total = 81 WHERE word = 'twice'")
        connection.execute("DELETE FROM words WHERE word = 'once'")
    found = of(built, store, "twice")
    assert (found.agrees, found.held, found.computed) == (False, {"count": 2, "total": 81}, {"count": 2, "total": 80})
    gone = of(built, store, "once")
    assert (gone.agrees, gone.held, gone.computed) == (False, None, {"count": 1, "total": 30})
    never = of(built, store, "never")
    assert (never.agrees, never.held, never.steps) == (True, None, [])


def test_explaining_writes_nothing(tmp_path: Path, store: MemoryStore) -> None:
    built = counted(tmp_path)
    run(built, store)

    def everything() -> Any:
        with sqlite3.connect(tmp_path / "x.db") as connection:
            tables = [list(connection.execute(f"SELECT * FROM {each}")) for each in ("words", "_ratchet_headers")]
        return tables, sorted(map(str, tmp_path.rglob("*.parquet")))

    before = everything()
    of(built, store, "w1")
    assert everything() == before


def test_a_committer_of_ones_own_is_explained_by_its_own_code_with_deletions(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = topology_of(
        [["k", 1], ["a", 5], ["k", -1], ["b", 5], ["k", 7], ["k", 8]], Sums(state_at(tmp_path)), batch=2
    )
    run(built, store)
    found = of(built, store, "k", state="bolt")
    assert [(each.before, each.after) for each in found.steps] == [
        (None, {"v": 1}),
        ({"v": 1}, None),
        (None, {"v": 15}),
    ]
    assert [[each.rows[0]["n"] for each in step.causes] for step in found.steps] == [[1], [-1], [7, 8]]
    assert found.agrees and not found.is_independent


class AtLeastTwo(BaseBatchBolt):
    """Emits a word that comes twice in its batch."""

    deterministic = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.seen = collector, dict[str, int]()

    def execute(self, tup: Any) -> None:
        self.seen[tup["word"]] = self.seen.get(tup["word"], 0) + 1

    def finish_batch(self) -> None:
        for word, count in self.seen.items():
            if count > 1:
                self.collector.emit([word, count])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def test_records_that_change_a_key_only_together_are_shown_as_their_range(tmp_path: Path, store: MemoryStore) -> None:
    rows = {0: [["a", 1], ["b", 2], ["k", 3], ["c", 4], ["d", 5], ["k", 6], ["e", 7], ["f", 8]]}
    builder = TransactionalTopologyBuilder("pairs", "spout", OpaqueMemoryTransactionalSpout(rows, FIELDS, 8))
    builder.set_bolt("pairs", AtLeastTwo()).global_grouping("spout")
    words = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "w")), ["word"], {"most": Max("n")})
    builder.set_bolt("words", words).global_grouping("pairs")
    built = builder.build()
    run(built, store)
    (step,) = of(built, store, "k").steps
    assert step.after == {"most": 2}
    (cause,) = step.causes
    assert [row["n"] for row in cause.rows] == [1, 2, 3]  # the first rows of the range
    split = TransactionalTopologyBuilder(
        "split", "spout", OpaqueMemoryTransactionalSpout({0: [["k", 1]], 1: [["k", 2]], 2: [["a", 3]]}, FIELDS, 8)
    )
    split.set_bolt("pairs", AtLeastTwo()).global_grouping("spout")
    words = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "s")), ["word"], {"most": Max("n")})
    split.set_bolt("words", words).global_grouping("pairs")
    both = split.build()
    store = MemoryStore()
    run(both, store)
    (step,) = of(both, store, "k").steps
    assert [each.partition for each in step.causes] == ["0", "1", "2"]


class Seen(Sums):
    """Counts every word, and keeps one only from the third time on, or only the first time."""

    def __init__(self, *kept: MapState, wanted: int) -> None:
        super().__init__(*kept)
        self.wanted = wanted

    def take(self, state: MapState, word: str, number: int) -> None:
        (count,) = state.multi_get([f"count of {word}"])
        state.multi_put([f"count of {word}"], [(count or 0) + 1])
        is_first = self.wanted == 1 and count is None
        if is_first or (self.wanted > 1 and (count or 0) + 1 >= self.wanted):
            state.multi_put([word], [number])


@pytest.mark.parametrize(
    ("wanted", "shown"), [(1, [("0", 5), ("1", 1)]), (3, [("0", 0)])], ids=["the first time", "from the third time on"]
)
def test_a_record_counts_if_it_changes_the_key_when_nothing_but_it_was_ever_processed(
    tmp_path: Path, store: MemoryStore, wanted: int, shown: list[tuple[str, int]]
) -> None:
    """A committer that looks at what it has: what an earlier probe wrote is not there any more."""
    other = [["x", each] for each in range(8)]
    rows = {0: [*other[:5], ["k", 5], *other[6:]], 1: [other[0], ["k", 1], *other[2:]]}
    if wanted == 3:
        rows = {0: [["k", 0], ["k", 1], ["x", 2], ["k", 3]]}
    builder = TransactionalTopologyBuilder("seen", "spout", OpaqueMemoryTransactionalSpout(rows, FIELDS, 8))
    builder.set_bolt("bolt", Seen(state_at(tmp_path), wanted=wanted)).global_grouping("spout")
    built = builder.build()
    run(built, store)
    (step,) = of(built, store, "k", state="bolt").steps
    assert [(each.partition, each.meta["first"]) for each in step.causes] == shown
    assert [each.meta["next"] - each.meta["first"] for each in step.causes] == ([1, 1] if wanted == 1 else [4])


def test_numbers_in_a_key_keep_their_digits(store: MemoryStore) -> None:
    fields = Fields.of({"d": pa.decimal128(38, 2), "t": pa.string(), "n": pa.int64()})
    key = [Decimal("12345678901234567.89"), "1.10"]
    builder = TransactionalTopologyBuilder(
        "digits", "spout", OpaqueMemoryTransactionalSpout({0: [[*key, 1]]}, fields, 1)
    )
    kept = StateCommitter(OpaqueMapState(MemoryBackend("digits")), ["d", "t"], {"count": Count()})
    builder.set_bolt("kept", kept).global_grouping("spout")
    built = builder.build()
    run(built, store)
    assert of(built, store, "[12345678901234567.89, 1.10]", state="kept").held == {"count": 1}


def test_a_topology_that_goes_back_meanwhile_is_no_difference(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(tmp_path)
    run(built, store)

    def after_an_undo(state: Any, keys: Any) -> Any:
        txid, held = hold(state, keys)
        return txid - 1, held

    monkeypatch.setattr("framework.inspect.explain.hold", after_an_undo)
    with pytest.raises(RetryableError, match="went back to transaction 3 meanwhile: ask again"):
        of(built, store, "twice")


def test_rows_that_python_cannot_show_are_shown_by_their_type(tmp_path: Path, store: MemoryStore) -> None:
    fields = Fields.of({"word": pa.string(), "at": pa.timestamp("s")})
    far = pa.scalar(10**12, pa.timestamp("s"))
    batch = pa.record_batch({"word": ["k"], "at": pa.array([far])})
    assert shown_row(batch, 0) == {"word": "k", "at": "<timestamp[s]>"}
    assert list(fields) == ["word", "at"]


@pytest.mark.parametrize(
    ("timestamp_ms", "shown"),
    [(1_700_000_000_123, "2023-11-14T22:13:20.123+00:00"), (1_700_000_000_000_000, "1700000000000000 ms")],
)
def test_a_record_is_shown_with_its_time_and_without_what_a_terminal_would_obey(timestamp_ms: int, shown: str) -> None:
    record = SourceRecord("t/0", 7, timestamp_ms, b"k\x1b[2J", b"a\nb\xff")
    line = _cause(Cause("t/0", {"first_offset": 7, "next_offset": 8}, record))
    assert line == f"t/0 offset 7, {shown}: k\\x1b[2J  a\\nb\\xff"


NIGHT = datetime.datetime(2024, 10, 27, 0, 30, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("kind", "values", "written", "key"),
    [
        (pa.int64(), [7, 70], "7", (7,)),
        (pa.string(), ["7", "70"], "7", ("7",)),
        (pa.string(), ["[1]", "x"], "[1]", ("[1]",)),
        (pa.float64(), [0.0, -0.0, 1.0], "-0.0", (0.0,)),
        (pa.float64(), [math.nan, 1.0], "nan", (math.nan,)),
        (pa.decimal128(9, 2), [Decimal("1.50"), Decimal(2)], "1.5", (Decimal("1.50"),)),
        (pa.bool_(), [True, False], "true", (True,)),
        (pa.date32(), [NIGHT.date()], "2024-10-27", (NIGHT.date(),)),
        (pa.timestamp("us", tz="UTC"), [NIGHT], "2024-10-27T00:30:00Z", (NIGHT,)),
        (pa.binary(), [b"ab", b"c"], "ab", (b"ab",)),
        (pa.dictionary(pa.int32(), pa.string()), ["x", "y"], "x", ("x",)),
    ],
)
def test_a_key_of_any_type_is_written_as_text(
    store: MemoryStore, kind: pa.DataType, values: list[Any], written: str, key: tuple[Any, ...]
) -> None:
    fields = Fields.of({"k": kind, "n": pa.int64()})
    spout = OpaqueMemoryTransactionalSpout({0: [[each, 1] for each in values]}, fields, 1)
    builder = TransactionalTopologyBuilder("typed", "spout", spout)
    kept = StateCommitter(OpaqueMapState(MemoryBackend("typed")), ["k"], {"count": Count()})
    builder.set_bolt("kept", kept).global_grouping("spout")
    built = builder.build()
    run(built, store)
    found = of(built, store, written, state="kept")
    assert repr(found.key) == repr(key)
    expected = sum(each == key[0] or each != each != (key[0] == key[0]) for each in values)
    assert found.agrees and found.held == {"count": expected} and len(found.steps) == expected
    assert all(len(each.causes) == 1 for each in found.steps)


def test_a_key_of_several_columns_is_a_json_array(store: MemoryStore, tmp_path: Path) -> None:
    builder = TransactionalTopologyBuilder("pairs", "spout", OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10))
    kept = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "p")), ["word", "n"], {"count": Count()})
    builder.set_bolt("kept", kept).global_grouping("spout")
    built = builder.build()
    run(built, store)
    found = of(built, store, '["twice", 37]', state="kept")
    assert (found.key, found.held, [each.txid for each in found.steps]) == (("twice", 37), {"count": 1}, [4])
    for wrong in ("twice", '["twice"]', '["twice", 37, 1]', '{"word": "twice"}'):
        with pytest.raises(ConfigError, match=r"write a JSON array of its columns \(word, n\)"):
            of(built, store, wrong, state="kept")
    with pytest.raises(ConfigError, match="'many' cannot be read as int64, which column 'n' of"):
        of(built, store, '["twice", "many"]', state="kept")
    with pytest.raises(ConfigError, match="no key of .*: none of its columns can be null"):
        of(built, store, "[null, 37]", state="kept")


def test_a_state_is_named_by_its_bolt_or_its_place_and_others_are_refused(tmp_path: Path, store: MemoryStore) -> None:
    built = counted(tmp_path)
    with pytest.raises(ConfigError, match="has committed no transaction yet"):
        of(built, store, "w1")
    run(built, store)
    location = built["words"].states[0].location
    assert of(built, store, "once", state=location).agrees
    assert of(built, store, "once", state=location[-5:]).agrees
    with pytest.raises(ConfigError, match=r"has no state 'counts': name one of words \(.*\), parquet \("):
        of(built, store, "w1", state="counts")
    with pytest.raises(ConfigError, match="has no keys, so no number in it can be explained"):
        of(built, store, "w1", state="parquet")


def test_a_state_that_may_count_twice_is_shown_and_not_judged(tmp_path: Path, store: MemoryStore) -> None:
    built = counted(tmp_path, NonTransactionalMapState)
    run(built, store)
    found = of(built, store, "twice")
    assert (found.agrees, found.computed, found.step_count) == (None, {"count": 2, "total": 80}, 2)


def test_a_running_topology_is_followed(tmp_path: Path, store: MemoryStore) -> None:
    built = counted(tmp_path, data={0: [["k", 0]]})
    done = threading.Event()

    def feed() -> None:
        number = 0
        while not done.wait(0.05):
            number += 1
            built.spout.instance.append("0", ["k", number])  # type: ignore[attr-defined]

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        with submit(built, store=store, executor="local") as running:
            running.wait_for_commit(5, PATIENCE_S)
            for _ in range(3):
                found = of(built, store, "k", last=3, causes_max=1)
                assert found.agrees and found.txid >= 5 and found.step_count >= 5
    finally:
        done.set()
        feeder.join()


def test_rows_of_other_keys_are_not_kept(tmp_path: Path) -> None:
    aggregates = {"count": Count(), "last": Last("n")}
    committer = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "w")), ["word"], aggregates)
    builder = TransactionalTopologyBuilder("narrow", "spout", OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10))
    builder.set_bolt("words", committer).global_grouping("spout")
    builder.build()
    made = committer.recounting(tmp_path / "scratch")
    made.narrow(("twice",))
    words = pa.array(["twice", "other", None, "twice"])
    made.execute_arrow(pa.record_batch({"word": words, "n": pa.array([1, 2, 3, 4])}))  # type: ignore[attr-defined]
    assert [each.to_pydict() for each in made._batches] == [{"word": ["twice"] * 2, "n": [1, 4]}]  # type: ignore[attr-defined]


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["postgres", "redis", pytest.param("mysql", marks=pytest.mark.slow)])
def test_a_number_in_any_store_is_explained(
    kind: str, store: MemoryStore, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue({"postgres": "postgres", "redis": "redis_server", "mysql": "mariadb"}[kind])
    name = name.replace("-", "_")
    backend = {"postgres": PostgresBackend, "redis": RedisBackend, "mysql": MySqlBackend}[kind](
        server.url if kind == "redis" else server.dsn, name
    )
    built = counted(tmp_path, backend=backend)
    run(built, store)
    found = of(built, store, "twice")
    assert found.agrees and found.held == {"count": 2, "total": 80}
    backend.close()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_tells_the_story_and_ends_with_3_where_the_sink_is_wrong(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(tmp_path)
    run(built, store)
    right = command(monkeypatch, store, "words", "twice", app=app, topology=built)
    assert right.exit_code == 0, right.output
    lines = right.output.splitlines()
    assert lines[0].startswith("'twice' in ") and lines[0].endswith("(bolt 'words'), as of transaction 4")
    assert lines[1].startswith("  transaction 1, attempt 1 of epoch 1, closed 20")
    assert lines[1].endswith(": nothing -> count=1, total=6")
    assert lines[2] == "    0, a part that cannot be split: {'word': 'twice', 'n': 3}"
    assert lines[5] == "the sink holds count=2, total=80, the source gives count=2, total=80: equal"
    assert lines[6].startswith("computed from ") and lines[6].endswith("arithmetic of its own")
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE words SET total = 81 WHERE word = 'twice'")
    wrong = command(monkeypatch, store, "words", "twice", "--last", "1", app=app, topology=built)
    assert wrong.exit_code == 3 and "1 changes before these" in wrong.output and "THEY DIFFER" in wrong.output
    told = command(monkeypatch, store, "words", "twice", "--json", app=app, topology=built)
    document = json.loads(told.output)
    assert (told.exit_code, document["type"], document["agrees"], document["changes"]) == (3, "explain", False, 2)
    assert document["steps"][1]["causes"][0]["rows"] == [{"word": "twice", "n": 37}]
    built.spout.instance.expire("0", 5)  # type: ignore[attr-defined]
    gone = command(monkeypatch, store, "words", "twice", app=app, topology=built)
    assert gone.exit_code == 1 and "--recorded begins with the oldest" in gone.output


def test_where_nothing_can_be_compared_the_command_says_why(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = counted(tmp_path, NonTransactionalMapState)
    run(twice, store)
    told = command(monkeypatch, store, "words", "twice", app=app, topology=twice)
    assert told.exit_code == 0
    assert (
        "the source gives count=2, total=80; the sink may have counted a batch twice, so it is not compared"
        in told.output
    )
    store, again = MemoryStore(), counted(tmp_path / "again")
    run(again, store)
    last = documents_module.read_history(store, again.id)[-1:]
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only(last))
    part = command(monkeypatch, store, "words", "twice", "--recorded", app=app, topology=again)
    assert part.exit_code == 0
    assert "values count from transaction 4 on: what came before is left out" in part.output
    assert "the sink holds count=2, total=80, which counts what came before, too: it is not compared" in part.output


def kafka_topology(app: Any) -> Topology:
    """The topology, for the command line."""
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=JsonCodec(FIELDS), batch_records_max=40
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout, 2)
    builder.set_bolt("doubled", Doubled(), 2).shuffle_grouping("spout")
    state = OpaqueMapState(SqliteBackend(app["app.database"], "words"))
    words = StateCommitter(state, ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("words", words, 2).fields_grouping("doubled", Fields("word"))
    return builder.build()


@pytest.mark.slow
@pytest.mark.integration
def test_records_of_kafka_are_shown_as_the_broker_holds_them(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    topic = topics.create(name, 2)
    values = [json.dumps({"word": f"w{each % 7}", "n": each}).encode() for each in range(200)]
    topics.send(topic, values[:100], 0)
    topics.send_in_kafka_txn(topic, values[100:150], 0, end=lambda producer: producer.abort_transaction(PATIENCE_S))
    topics.send_in_kafka_txn(topic, values[150:], 0, end=lambda producer: producer.commit_transaction(PATIENCE_S))
    topics.send(topic, [json.dumps({"word": "rare", "n": 21}).encode(), *values[:60]], 1)
    words = OverKafka("tests.pipeline.test_explain:kafka_topology", servers, topic, tmp_path / "x.db")
    words.catch_up(kafka_topology(words.settings))
    answer = words.ratchet("explain", "words", "rare", "--json")
    assert answer.returncode == 0, answer.stderr
    (step,) = json.loads(answer.stdout)["steps"]
    (cause,) = step["causes"]
    assert (cause["partition"], cause["first_offset"], cause["next_offset"]) == (f"{topic}/1", 0, 1)
    assert cause["record"]["value"] == '{"word": "rare", "n": 21}' and cause["record"]["offset"] == 0
    assert cause["record"]["timestamp_ms"] > 1_700_000_000_000
    in_kafka_txn = words.ratchet("explain", "words", "w3", "--last", "1000", "--records", "1000", "--json")
    document = json.loads(in_kafka_txn.stdout)
    assert document["agrees"] is True
    found = [
        each["record"]["offset"]
        for step in document["steps"]
        for each in step["causes"]
        if each["partition"] == f"{topic}/0"
    ]
    # offset 150 is the marker of the abort
    assert found == [each + (each >= 150) for each in range(200) if each % 7 == 3 and not 100 <= each < 150]
    shown = words.ratchet("explain", "words", "rare").stdout
    assert f"{topic}/1 offset 0, 20" in shown and '{"word": "rare", "n": 21}' in shown
