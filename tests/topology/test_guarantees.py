"""The README's table of guarantees is what the builder does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.errors import TopologyError
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    KafkaSink,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    TransactionalMapState,
)
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec

pytestmark = pytest.mark.behaviour("3.7")
README = Path(__file__).parent.parent.parent / "README.md"
SPOUTS = {each.__name__: each for each in (KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout)}
STATES = {each.__name__: each for each in (TransactionalMapState, OpaqueMapState, NonTransactionalMapState)}


def rows() -> list[tuple[str, str, str, str]]:
    """(spout, sink, can undo, result) of every row of the table."""
    table = README.read_text(encoding="utf-8").split("| spout | sink |")[1].split("\n\n")[0]
    found = []
    for line in table.splitlines()[2:]:
        spout, sink, _, undo, result = (cell.strip() for cell in line.strip("|").split("|"))
        found += [(name, sink.strip("`"), undo, result) for name in SPOUTS if spout.strip("`") in (name, "any")]
    return found


def committer(sink: str, folder: Path) -> Any:
    if sink in STATES:
        return StateCommitter(STATES[sink](SqliteBackend(folder / "x.db", "rows")), ["word"], {"n": Count()})
    files = {each.__name__: each for each in (ParquetTable, DeltaLakeTable)}
    if sink in files:
        return AppendCommitter(files[sink](folder / "table"))
    return KafkaSink("topic", at_least_once="at_least_once" in sink)


def build(spout: str, sink: str, folder: Path, *, at_least_once: bool = False) -> Topology:
    source = SPOUTS[spout](["topic"], bootstrap_servers="127.0.0.1:1", codec=TextCodec("word"))
    builder = TransactionalTopologyBuilder("t", "spout", source, 2, at_least_once=at_least_once)
    builder.set_bolt("sink", committer(sink, folder)).fields_grouping("spout", Fields("word"))
    return builder.build()


def test_the_table_of_guarantees_has_every_pair_of_spout_and_sink() -> None:
    assert len(rows()) == 4 + 2 * 5


@pytest.mark.rule("C4", "C5")
@pytest.mark.parametrize(("spout", "sink", "undo", "result"), rows(), ids=lambda each: re.sub(r"\W+", "-", each)[:30])
def test_the_builder_does_what_each_row_of_the_table_says(
    spout: str, sink: str, undo: str, result: str, tmp_path: Path
) -> None:
    if result.startswith("refused"):
        with pytest.raises(TopologyError, match="at_least_once=True"):
            build(spout, sink, tmp_path)
        assert build(spout, sink, tmp_path, at_least_once=True).irreversible() == []
        return
    assert result.startswith("exactly-once")
    topology = build(spout, sink, tmp_path)
    assert (topology.irreversible() == []) == (undo == "yes")


def test_sinks_that_skip_replayed_rows_are_listed_by_name(tmp_path: Path) -> None:
    """Such sinks need a source whose ranges keep their records (C5)."""
    spout = "KafkaTransactionalSpout"
    assert build(spout, "OpaqueMapState", tmp_path).skips_replays() == []
    assert build(spout, "KafkaSink", tmp_path).skips_replays() == []
    assert build(spout, "TransactionalMapState", tmp_path, at_least_once=True).skips_replays() == []
    (skipping,) = build(spout, "TransactionalMapState", tmp_path).skips_replays()
    assert "'sink'" in skipping and "transactional" in skipping
    builder = TransactionalTopologyBuilder("t", "spout", SPOUTS[spout](["topic"], codec=TextCodec("word")))
    builder.set_bolt("sink", KafkaSink("topic"), 2).fields_grouping("spout", Fields("word"))
    assert builder.build().skips_replays() == ["bolt 'sink', whose tasks are committed one by one"]
