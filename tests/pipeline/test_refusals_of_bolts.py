"""What becomes of a record that a committer of rows refuses: as that committer says, in place of
the spout."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology.spouts import ON_REFUSED, REFUSED
from framework.transactions import MemoryStore
from sinks import AppendCommitter, DeadLetterTable, OpaqueMapState, SqliteBackend, SqliteTable, UpsertCommitter
from spouts import JsonCodec, KafkaTransactionalSpout, MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.refusing import refused
from tests.kit.row_tables import Database, SqliteDatabase
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S
from tests.pipeline.test_refused_records import Picky
from tests.sinks.rows.conftest import database  # noqa: F401 - a fixture

pytestmark = pytest.mark.rule("C51")

FIELDS = Fields(word=str, n=int)
CREATE = "CREATE TABLE events (word varchar(20) NOT NULL, n integer PRIMARY KEY CHECK (n <> 5))"
ROWS: list[list[Any]] = [["a", 1], ["b", 2], ["a", 5], ["c", 3], [None, 4], ["d", 6]]
KINDS: Any = {"append": AppendCommitter, "upsert": lambda table, **options: UpsertCommitter(table, ["n"], **options)}


def caught_up(builder: TransactionalTopologyBuilder, store: MemoryStore) -> Any:
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return run


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opaque", [True, False])
def test_a_committer_skips_what_its_table_refuses_under_a_spout_that_fails(
    database: Database,  # noqa: F811
    kind: str,
    opaque: bool,
) -> None:
    database.run(CREATE)
    store = MemoryStore()
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: ROWS}, FIELDS, 4)
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    committer = KINDS[kind](database.table(stamp=None if kind == "upsert" else "_txid"), on_bad_record="skip")
    builder.set_bolt("rows", committer).global_grouping("spout")
    caught_up(builder, store)
    assert database.rows(columns="word, n") == [("a", 1), ("b", 2), ("c", 3), ("d", 6)]
    found = refused(store)
    assert set(found) == {("0", 2), ("0", 4)} and all(each.startswith("rows: ") for each in found.values())


def test_what_another_bolt_refuses_goes_the_way_of_the_spout(tmp_path: Path) -> None:
    table = SqliteTable(tmp_path / "x.db", "events")
    builder = TransactionalTopologyBuilder("rows", "spout", MemoryTransactionalSpout({0: [["bad", 1]]}, FIELDS, 4))
    builder.set_bolt("picky", Picky()).shuffle_grouping("spout")
    builder.set_bolt("rows", AppendCommitter(table, on_bad_record="skip")).global_grouping("picky")
    with pytest.raises(BadRecordError, match="the word 'bad' is refused"):
        caught_up(builder, MemoryStore())


def spout(**options: Any) -> Any:
    return KafkaTransactionalSpout(["t"], bootstrap_servers="127.0.0.1:1", codec=JsonCodec(FIELDS), **options)


def test_what_a_bolt_and_its_spout_say_must_go_together(tmp_path: Path) -> None:
    letters = DeadLetterTable(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "letters")))

    def build(policy: Any, **options: Any) -> Any:
        builder = TransactionalTopologyBuilder("rows", "spout", spout(**options))
        table = SqliteTable(tmp_path / "x.db", "events")
        builder.set_bolt("rows", AppendCommitter(table, on_bad_record=policy)).global_grouping("spout")
        return builder.build()

    with pytest.raises(
        TopologyError, match="bolt 'rows': on_bad_record must be 'fail', 'skip' or 'dead_letter', not 'x'"
    ):
        build("x")
    with pytest.raises(TopologyError, match="spout 'spout' names no committer for them: give it dead_letters="):
        build("dead_letter", on_bad_record="skip")
    with pytest.raises(TopologyError, match="spout 'spout' has dead_letters=, and no record comes there"):
        build("skip", dead_letters=letters)
    with pytest.raises(ConfigError, match="needs dead_letters="):
        build("fail", on_bad_record="dead_letter")
    for policy, of_spout in (("dead_letter", "fail"), ("dead_letter", "skip"), ("skip", "dead_letter")):
        assert "spout-dead-letters" in build(policy, on_bad_record=of_spout, dead_letters=letters).parallelisms()


@pytest.mark.integration
@pytest.mark.parametrize(("policy", "of_spout"), [("dead_letter", "fail"), ("skip", "dead_letter")])
def test_the_policy_of_the_committer_decides_about_dead_letters_and_is_in_the_plan(
    topics: Topics, name: str, tmp_path: Path, policy: str, of_spout: str
) -> None:
    values = [json.dumps(dict(zip(FIELDS, row, strict=True))).encode() for row in ROWS]
    topics.send(topics.create(name), [*values, b"not JSON"] if of_spout == "dead_letter" else values)
    events = SqliteDatabase(tmp_path / "x.db")
    events.run(CREATE)
    runs = KafkaRuns(topics, tmp_path, name, opaque=False)
    letters = DeadLetterTable(runs.state("letters"))
    source = runs.spout(codec=JsonCodec(FIELDS), on_bad_record=of_spout, dead_letters=letters)
    builder = TransactionalTopologyBuilder(name, "spout", source)
    committer: Any = UpsertCommitter(events.table(), ["n"], on_bad_record=policy)  # type: ignore[arg-type]
    builder.set_bolt("rows", committer).global_grouping("spout")
    store = MemoryStore()
    run = caught_up(builder, store)
    assert events.rows(columns="word, n") == [("a", 1), ("b", 2), ("c", 3), ("d", 6)]
    with sqlite3.connect(runs.path) as connection:
        found = connection.execute("SELECT offset, error FROM letters WHERE NOT _deleted ORDER BY offset").fetchall()
    if policy == "dead_letter":
        assert [offset for offset, _ in found] == [2, 4] and all(error.startswith("rows: ") for _, error in found)
    else:
        assert [offset for offset, _ in found] == [6]  # the spout's own decision
    entries = [meta for each in run.transactions() for meta in each.plan.values() if REFUSED in meta]
    refused = [offset for each in entries for offset in each[REFUSED]]
    assert refused == ["2", "4"] and {each[ON_REFUSED] for each in entries} == {policy}
    assert run.status().bad_records == len(refused) + (of_spout == "dead_letter")
