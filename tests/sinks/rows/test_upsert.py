"""A table holds the newest row of each key, whatever fails: against a plain-Python oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields, TransactionalTopologyBuilder, arrow_spill, submit
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import CommitFence, Input, TransactionAttempt
from framework.topology.groupings import FieldsGrouping, ShuffleGrouping
from framework.transactions import MemoryStore
from sinks import UpsertCommitter, key_hash_parts
from sinks.rows import postgres, transactional_table
from sinks.rows.condition_parser import Condition
from spouts import DebeziumCodec, MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.file_tables import granted, opened
from tests.kit.row_tables import Database
from tests.kit.targets import examples
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C41")
FIELDS = Fields(id=int, name=str, n=int, lsn=int, op=str, tombstone=bool, unavailable=pa.list_(pa.string()))
COLUMNS = ["id", "name", "n", "lsn"]


def change(
    key: int,
    name: str | None = None,
    n: int | None = None,
    lsn: int = 1,
    op: str = "u",
    dead: bool = False,
    left_out: Sequence[str] = (),
) -> Any:
    """``left_out``: the columns that the source does not send, because they are as they were."""
    row = {"id": key, "name": name, "n": n, "lsn": lsn, "op": op, "tombstone": dead}
    return {**row, **dict.fromkeys(left_out), "unavailable": list(left_out)}


class Writer:
    """Commits batches to a table as a driver and one task do."""

    def __init__(self, database: Database, *, stamp: str | None = None, prepared: bool = True, **options: Any) -> None:
        options.setdefault("columns", COLUMNS)
        self.committer = UpsertCommitter(database.table(stamp=stamp), ["id"], **options)
        self.committer.bind("rows", [Input("spout", "default", FIELDS, ShuffleGrouping())], 1)
        self.table = self.committer.table
        if prepared:
            self.table.prepare("topology")

    def fill(self, attempt: TransactionAttempt, changes: Any) -> None:
        self.committer.prepare({}, None, None, attempt)  # type: ignore[arg-type]
        for each in changes:
            self.committer.execute_arrow(pa.RecordBatch.from_pylist([each], schema=FIELDS.schema()))

    def begin(self, txid: int, changes: Any, attempt: int = 1) -> Any:
        header = opened(self.table, txid, attempt)
        self.fill(granted(header), changes)
        self.committer.finish_batch()
        return header

    def commit(self, txid: int, changes: Any, attempt: int = 1) -> None:
        header = self.begin(txid, changes, attempt)
        self.table.raise_header(header, header.finished(txid))


def test_the_newest_row_of_each_key_is_kept_and_a_tombstone_deletes_it(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [change(1, "a", 1), change(2, "b", 2), change(1, "c", None)])
    assert database.rows() == [(1, "c", None, 1), (2, "b", 2, 1)]
    writer.commit(2, [change(2, dead=True), change(3), change(1, dead=True), change(1, "d")])
    assert database.rows() == [(1, "d", None, 1), (3, None, None, 1)]


def test_a_replay_puts_back_what_an_earlier_attempt_changed(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [change(1, "a", 1), change(2, "b", 2)])
    writer.begin(2, [change(1, "x"), change(2, dead=True), change(3, "y")])
    assert database.rows(columns="id, name") == [(1, "x"), (3, "y")]
    opened(writer.table, 2, 2)
    assert database.rows() == [(1, "a", 1, 1), (2, "b", 2, 1)]
    writer.commit(2, [change(4, "z")], attempt=3)
    assert database.rows(columns="id, name") == [(1, "a"), (2, "b"), (4, "z")]
    header = writer.begin(3, [change(4, dead=True), change(1, "q")])
    assert writer.table.roll_back(header) == 2
    assert database.rows(columns="id, name") == [(1, "a"), (2, "b"), (4, "z")]


def test_before_images_hold_one_batch(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [change(each) for each in range(5)])
    writer.commit(2, [change(1, "x")])
    assert database.rows("events_before", "id, name, _ratchet_txid") == [(1, None, 2)]


def test_a_doubled_task_writes_once(database: Database) -> None:
    writer = Writer(database)
    header = writer.begin(1, [change(1, "a")])
    writer.fill(granted(header), [change(1, "a")])
    writer.committer.finish_batch()
    assert database.rows(columns="id, name") == [(1, "a")]


def test_one_step_is_a_whole_commit(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [change(1, "a")])
    for txid, changes in ((2, [change(1, "b")]), (3, [])):
        before = writer.table.read_header()
        writer.fill(
            TransactionAttempt(txid, 1, CommitFence("topology", 1, "digest", "rows:0", opens_from=before)), changes
        )
        writer.committer.finish_batch()
        assert writer.table.read_header().done == txid
    assert database.rows(columns="id, name") == [(1, "b")]


def test_a_change_with_a_lower_sequence_is_left_out_also_after_a_delete(database: Database) -> None:
    writer = Writer(database, sequence_by="lsn", delete_when="op = 'd'")
    writer.commit(1, [change(1, "new", lsn=5), change(1, "old", lsn=3), change(2, "x", lsn=9)])
    writer.commit(2, [change(1, "older", lsn=4), change(2, lsn=10, op="d")])
    writer.commit(3, [change(2, "late", lsn=8), change(1, "equal", lsn=5)])
    assert database.rows(columns="id, name") == [(1, "equal")]
    writer.begin(4, [change(1, lsn=20, op="d")])
    writer.commit(4, [change(1, "again", lsn=6)], attempt=2)
    writer.commit(5, [change(2, "back", lsn=10)])
    assert database.rows(columns="id, name") == [(1, "again"), (2, "back")]


def test_a_null_in_key_or_sequence_is_a_bad_record(database: Database) -> None:
    writer = Writer(database, sequence_by="lsn")
    for name in ("id", "lsn"):
        with pytest.raises(BadRecordError, match=f"'{name}' is null"):
            writer.fill(TransactionAttempt(1, 1), [{**change(1), name: None}])


@pytest.mark.each_value_once
@pytest.mark.parametrize("mode", ["add", "ignore"])
def test_a_column_that_the_table_lacks_is_added_by_the_transaction_or_ignored(database: Database, mode: Any) -> None:
    database.run("CREATE TABLE events (id integer PRIMARY KEY, name varchar(10))")
    with pytest.raises(ConfigError, match="ADD COLUMN"):
        Writer(database)
    writer = Writer(database, on_new_column=mode)
    columns = len(database.run("SELECT * FROM events LIMIT 1") or [()])
    assert columns == 1
    writer.commit(1, [change(1, "a", 7)])
    assert database.rows() == [(1, "a", 7, 1) if mode == "add" else (1, "a")]
    writer.begin(2, [change(1, "b", 8)])
    opened(writer.table, 2, 2)
    assert database.rows() == [(1, "a", 7, 1) if mode == "add" else (1, "a")]


def test_a_table_made_by_hand_keeps_what_is_the_users(database: Database) -> None:
    database.run(
        "CREATE TABLE events (id integer PRIMARY KEY, name varchar(10) CHECK (name <> 'bad'), n bigint, lsn bigint, "
        "twice bigint GENERATED ALWAYS AS (n * 2) STORED, place varchar(10) DEFAULT 'here')"
    )
    database.run("INSERT INTO events (id, name, n, place) VALUES (7, 'mine', 1, 'there')")
    database.run("CREATE TABLE parts (event integer NOT NULL REFERENCES events (id))")
    database.run("INSERT INTO parts VALUES (7)")
    writer = Writer(database)
    writer.commit(1, [change(7, "changed", 2), change(8, "b", 4)])
    expected = [(7, "changed", 2, 4, "there"), (8, "b", 4, 8, "here")]
    assert database.rows(columns="id, name, n, twice, place") == expected
    for refused in (change(9, "bad"), change(7, dead=True)):
        with pytest.raises(BadRecordError):
            writer.begin(2, [change(8, dead=True), refused], attempt=writer.table.read_header().stamp.attempt_id + 1)
        assert database.rows(columns="id, name, n, twice, place") == expected
    writer.begin(2, [change(8, dead=True), change(7, "x")], attempt=8)
    opened(writer.table, 2, 9)
    assert database.rows(columns="id, name, n, twice, place") == expected


def test_a_table_without_a_unique_key_is_refused(database: Database) -> None:
    database.run("CREATE TABLE events (id integer, name varchar(10), n bigint, lsn bigint)")
    with pytest.raises(ConfigError, match="ADD PRIMARY KEY|CREATE UNIQUE INDEX"):
        Writer(database)


@pytest.mark.each_value_once
@pytest.mark.parametrize("sequence", [None, "lsn"])
def test_a_value_that_is_left_out_keeps_what_is_stored(database: Database, sequence: str | None) -> None:
    writer = Writer(database, sequence_by=sequence, delete_when="op = 'd'")
    writer.commit(1, [change(1, "long", 1), change(2, "other", 2)])
    writer.commit(2, [change(1, n=5, lsn=2, left_out=["name"]), change(2, None, 6, lsn=2)])
    assert database.rows() == [(1, "long", 5, 2), (2, None, 6, 2)]
    # Two changes of a key in a batch: the first has the value, or both leave it out.
    writer.commit(3, [change(1, "new", 6, lsn=3), change(1, n=7, lsn=4, left_out=["name"])])
    writer.commit(4, [change(1, n=8, lsn=5, left_out=["name"]), change(1, lsn=6, left_out=["name", "n"])])
    assert database.rows()[0] == (1, "new", 8, 6)
    # An attempt that dies, and its replay with another change.
    writer.begin(5, [change(1, "lost", 0, lsn=7), change(2, lsn=7, op="d")])
    writer.commit(5, [change(1, n=9, lsn=7, left_out=["name"]), change(2, n=9, lsn=7, left_out=["name"])], attempt=2)
    assert database.rows() == [(1, "new", 9, 7), (2, None, 9, 7)]
    header = writer.begin(6, [change(1, n=10, lsn=8, left_out=["name"])])
    writer.table.roll_back(header)
    assert database.rows()[0] == (1, "new", 9, 7)


@pytest.mark.each_value_once
@pytest.mark.parametrize("sequence", [None, "lsn"])
def test_a_value_left_out_of_a_row_that_is_not_there_is_a_bad_record(database: Database, sequence: str | None) -> None:
    """The value is nowhere: also when a key changes, for the row with the old key may be gone."""
    writer = Writer(database, sequence_by=sequence, delete_when="op = 'd'")
    writer.commit(1, [change(1, "long", 1)])
    moved = [change(1, lsn=2, op="d"), change(2, n=1, lsn=2, op="c", left_out=["name"])]
    again = [change(1, lsn=2, op="d"), change(1, n=1, lsn=3, op="c", left_out=["name"]), change(1, "x", lsn=4)]
    for attempt, changes in enumerate((moved, again), 1):
        with pytest.raises(BadRecordError, match="REPLICA IDENTITY FULL") as refused:
            writer.begin(2, changes, attempt)
        assert refused.value.about.startswith("key id=")
        assert database.rows() == [(1, "long", 1, 1)]
    writer.commit(2, [moved[0], change(2, "long", 1, lsn=2), change(2, n=3, lsn=3, left_out=["name"])], attempt=3)
    assert database.rows() == [(2, "long", 3, 3)]


def test_changes_that_a_connector_repeats_after_a_deletion_are_no_bad_records(database: Database) -> None:
    writer = Writer(database, delete_when="op = 'd'")
    writer.commit(1, [change(1, "long", 1), change(2, "long", 1)])
    repeated = [change(1, n=2, op="u", left_out=["name"]), change(1, op="d")]
    writer.commit(2, repeated)
    writer.commit(3, [*repeated, *repeated, change(2, n=2, left_out=["name"])])
    assert database.rows(columns="id, name, n") == [(2, "long", 2)]


def test_a_record_of_debezium_keeps_the_values_that_postgresql_does_not_send(database: Database) -> None:
    """As a real Debezium wrote it for a table with values that are stored apart (TOAST)."""
    kept = Path(__file__).parents[2] / "spouts/codecs/data/postgres-usual-plain-long.jsonl"
    values = [json.loads(line)[1].encode() for line in kept.read_text().splitlines()]
    columns = Fields(id=int, words=str, raw=bytes, ints=pa.list_(pa.int64()), other=int)
    codec = DebeziumCodec(columns, metadata=["op", "lsn", "unavailable"])
    committer = UpsertCommitter(database.table(stamp=None), ["id"], sequence_by="lsn", delete_when="op = 'd'")
    committer.bind("rows", [Input("spout", "default", codec.fields, ShuffleGrouping())], 1)
    committer.table.prepare("topology")
    for txid, value in enumerate(values[:2], 1):
        header = opened(committer.table, txid, 1)
        committer.prepare({}, None, None, granted(header))  # type: ignore[arg-type]
        committer.execute_arrow(codec.decode([value]))
        committer.finish_batch()
        committer.table.raise_header(header, header.finished(txid))
    before = codec.decode(values[:1]).to_pylist()[0]
    ((words, raw, other),) = database.rows(columns="words, raw, other")
    assert (words, bytes(raw), other) == (before["words"], before["raw"], 2)
    assert len(words) > 1000


CHANGES = st.builds(
    change,
    st.integers(1, 3),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 4),
    st.sampled_from(["u", "u", "d"]),
    st.booleans() | st.just(False),
    st.sampled_from([[], [], [], ["name"], ["n"], ["name", "n"]]),
)
BATCHES = st.lists(st.tuples(st.lists(CHANGES, max_size=6), st.lists(CHANGES, max_size=4) | st.none()), max_size=5)


class Oracle:
    """One change after the other."""

    def __init__(self, *, sequenced: bool, ignore_nulls: bool) -> None:
        self.sequenced, self.ignore_nulls = sequenced, ignore_nulls
        self.held: dict[int, dict[str, Any]] = {}
        self.newest: dict[int, int] = {}

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted((tuple(row.values()) for row in self.held.values()), key=repr)

    def after(self, batch: Any) -> Oracle | None:
        """What the table holds after a batch; None if one of its changes is bad."""
        found = deepcopy(self)
        if not self.sequenced:  # what a later change deletes has no effect
            last = {each["id"]: place for place, each in enumerate(batch) if each["tombstone"] or each["op"] == "d"}
            batch = [each for place, each in enumerate(batch) if place >= last.get(each["id"], 0)]
        return found if all(map(found._apply, batch)) else None

    def _apply(self, each: Any) -> bool:
        key = each["id"]
        if self.sequenced and each["lsn"] < self.newest.get(key, 0):
            return True
        self.newest[key] = each["lsn"]
        if each["tombstone"] or each["op"] == "d":
            self.held.pop(key, None)
            return True
        if each["unavailable"] and key not in self.held:
            return False
        old = self.held.get(key, {})
        keeps = set(each["unavailable"]) | (
            {name for name in COLUMNS if each[name] is None} & {*COLUMNS * self.ignore_nulls}
        )
        self.held[key] = {name: old.get(name) if name in keeps else each[name] for name in COLUMNS}
        return True


@pytest.mark.each_value_once
@pytest.mark.slow_for("mysql")
@pytest.mark.parametrize("sequenced", [False, True])
@pytest.mark.parametrize("ignore_nulls", [False, True])
@settings(max_examples=examples(24))
@given(batches=BATCHES, divided=st.booleans())
def test_a_table_agrees_with_an_oracle(
    database: Database, sequenced: bool, ignore_nulls: bool, batches: Any, divided: bool
) -> None:
    """``divided``: the rows wait in a file, and are written by parts, as those of a large batch.
    Half of a part is loaded at a time."""
    with pytest.MonkeyPatch.context() as sizes:
        if divided:
            sizes.setattr(arrow_spill, "MEMORY_BYTES", 0)
            sizes.setattr(key_hash_parts, "PART_BYTES", 100)
            sizes.setattr(transactional_table, "LOADED_BYTES", 100)
            sizes.setattr(postgres, "_GIVEN_ROWS", 0)
        agrees_with_an_oracle(database, sequenced, ignore_nulls, batches)


def agrees_with_an_oracle(database: Database, sequenced: bool, ignore_nulls: bool, batches: Any) -> None:
    for name in ("events", "events_before", "events_deleted", "_ratchet_headers", "_ratchet_written"):
        database.run(f"DROP TABLE IF EXISTS {name}")
    options = {"sequence_by": "lsn"} if sequenced else {}
    writer = Writer(database, delete_when="op = 'd'", ignore_nulls=ignore_nulls, **options)
    oracle = Oracle(sequenced=sequenced, ignore_nulls=ignore_nulls)
    for txid, (batch, other) in enumerate(batches, 1):
        if other is not None:  # an attempt that died, with other changes
            if oracle.after(other) is None:
                with pytest.raises(BadRecordError):
                    writer.begin(txid, other)
            else:
                writer.begin(txid, other)
        after = oracle.after(batch)
        if after is None:
            with pytest.raises(BadRecordError):
                writer.begin(txid, batch, attempt=2)
            writer.commit(txid, [], attempt=3)
        else:
            writer.commit(txid, batch, attempt=2)
        oracle = after or oracle
    assert database.rows() == oracle.rows()


@pytest.mark.each_value_once
@pytest.mark.parametrize("spout", [MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout])
@pytest.mark.parametrize("tasks", [1, 3])
def test_a_topology_keeps_the_newest_row_of_each_key(database: Database, spout: Any, tasks: int) -> None:
    data = {part: [[part * 10 + number % 7, f"{number}", number % 5 == 4] for number in range(40)] for part in range(2)}
    fields = Fields(id=int, name=str, tombstone=bool)
    builder = TransactionalTopologyBuilder("rows", "spout", spout(data, fields, 6), 2)
    committer = UpsertCommitter(database.table(), ["id"])
    builder.set_bolt("rows", committer, tasks).fields_grouping("spout", Fields("id"))
    run = submit(builder.build(), store=MemoryStore(), executor="local")
    run.wait_until_caught_up(timeout_s=PATIENCE_S)
    run.stop(timeout_s=PATIENCE_S)
    assert run.status().attempts_failed == 0
    newest = {key: (key, name, dead) for rows in data.values() for key, name, dead in rows}
    assert database.rows(columns="id, name") == sorted(
        ((key, name) for key, name, dead in newest.values() if not dead), key=repr
    )


def test_several_tasks_need_a_grouping_by_the_key(database: Database) -> None:
    committer = UpsertCommitter(database.table(), ["id"])
    with pytest.raises(TopologyError, match="fields_grouping"):
        committer.bind("rows", [Input("spout", "default", FIELDS, ShuffleGrouping())], 2)
    committer.bind("rows", [Input("spout", "default", FIELDS, FieldsGrouping(Fields("id")))], 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("op = 'd'", [1]),
        ("op <> 'd'", [0, 3]),
        ("op IS NULL OR n >= 3", [2, 3]),
        ("NOT (op IN ('u', 'it''s')) AND n < 2.5", [1]),
        ('"op" is not null and dead', [3]),
        ("n = -1", []),
    ],
)
def test_a_condition_is_read_as_in_sql(text: str, found: list[int]) -> None:
    rows = pa.record_batch(
        {"op": ["u", "d", None, "it's"], "n": [0, 1, 2, 3], "dead": pa.array([False, None, True, True])}
    )
    assert [place for place, each in enumerate(Condition(text).rows(rows).to_pylist()) if each] == found


@pytest.mark.parametrize("text", ["", "op", "op =", "op = d", "op = 'd' op", "(op = 'd'", "op ~ 'd'", "IN (1)"])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    if text == "op":
        assert Condition(text).fields == ["op"]
        return
    with pytest.raises(TopologyError, match="no condition"):
        Condition(text)
