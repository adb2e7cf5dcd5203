"""The builder refuses bad topologies, each with one line that names the culprit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    Fields,
    OutputFieldsDeclarer,
    Topology,
    TransactionalTopologyBuilder,
    submit,
)
from framework.errors import ConfigError, TopologyError
from framework.topology.bolts import OWN_COLUMNS
from sinks import (
    Count,
    MemoryBackend,
    Min,
    NonTransactionalMapState,
    OpaqueMapState,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.bolts import BatchCount, Relay, UpdateGlobalCount

Builder = TransactionalTopologyBuilder
WORDS = Fields(word=str)


def builder(opaque: bool = False, **options: Any) -> Builder:
    spout_class = OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout
    return Builder("words", "spout", spout_class({0: [["dog"]]}, WORDS, 1), 2, **options)


def committer(state: Any, **aggregates: Any) -> StateCommitter:
    return StateCommitter(state, key=["word"], aggregates=aggregates or {"count": Count()})


def wrong(case: str, tmp_path: Path) -> Callable[[], Topology]:
    """Bad topologies by the name of what is wrong with them."""
    b = builder(opaque=case.startswith("opaque"))
    if case == "duplicate id":
        b.set_bolt("a", Relay()).shuffle_grouping("spout")
        return lambda: b.set_bolt("a", Relay()).shuffle_grouping("spout") and b.build()  # type: ignore[func-returns-value]
    if case == "spout's id":
        return lambda: b.set_bolt("spout", Relay()) and b.build()  # type: ignore[return-value]
    if case == "unknown component":
        b.set_bolt("a", Relay()).shuffle_grouping("nobody")
    if case == "unknown stream":
        b.set_bolt("a", Relay()).shuffle_grouping("spout", stream="errors")
    if case == "unknown field":
        b.set_bolt("a", Relay()).fields_grouping("spout", Fields("letter"))
    if case == "cycle":
        b.set_bolt("a", Relay()).shuffle_grouping("b")
        b.set_bolt("b", Relay()).shuffle_grouping("a")
    if case == "no input":
        b.set_bolt("a", Relay())
    if case == "twice":
        return lambda: b.set_bolt("a", Relay()).shuffle_grouping("spout").global_grouping("spout") and b.build()  # type: ignore[return-value]
    if case == "basic committer":
        return lambda: b.set_committer_bolt("a", Relay()) and b.build()  # type: ignore[return-value]
    if case == "not a bolt":
        return lambda: b.set_bolt("a", "bolt") and b.build()  # type: ignore[arg-type,return-value]
    if case == "parallelism":
        return lambda: b.set_bolt("a", Relay(), 0) and b.build()  # type: ignore[return-value]
    if case == "shared state":
        state = TransactionalMapState(MemoryBackend("shared"))
        b.set_bolt("a", committer(state)).global_grouping("spout")
        b.set_bolt("b", committer(state)).global_grouping("spout")
    if case == "opaque spout, transactional state":
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend()))).global_grouping("spout")
    if case == "non-transactional state":
        b.set_bolt("a", committer(NonTransactionalMapState(MemoryBackend()))).global_grouping("spout")
    if case == "not deterministic":
        b.set_bolt("mood", type("Mood", (Relay,), {"deterministic": False})()).shuffle_grouping("spout")
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend()))).global_grouping("mood")
    if case == "state without commit":

        class Idle(BatchCount):
            def __init__(self) -> None:
                self.state = OpaqueMapState(MemoryBackend())

        b.set_bolt("a", Idle()).shuffle_grouping("spout")
    if case == "shuffled committer":
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend())), 2).shuffle_grouping("spout")
    if case == "missing field":
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend()), n=Sum("amount"))).global_grouping("spout")
    if case == "sum of text":
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend()), n=Sum("word"))).global_grouping("spout")
    if case == "column name":
        state = TransactionalMapState(SqliteBackend(tmp_path / "x.db", "t"))
        b.set_bolt("a", committer(state, **{"drop table": Count()})).global_grouping("spout")
    if case == "untyped key":
        b = Builder("words", "spout", MemoryTransactionalSpout({0: []}, Fields("word"), 1))
        b.set_bolt("a", committer(TransactionalMapState(MemoryBackend()))).global_grouping("spout")
    return b.build


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("duplicate id", "component id 'a' is used twice"),
        ("spout's id", "component id 'spout' is used twice"),
        ("unknown component", "'a' subscribes to 'nobody', which does not exist .*spout"),
        ("unknown stream", "stream 'errors' of 'spout'.*declared: default"),
        ("unknown field", "groups 'spout' by field 'letter'.*it has: word"),
        ("cycle", "cycle through a, b"),
        ("no input", "bolt 'a' subscribes to nothing"),
        ("twice", "'a' subscribes to stream 'default' of 'spout' twice"),
        ("basic committer", "'a' cannot commit"),
        ("not a bolt", "bolt 'a' is a str"),
        ("parallelism", "'a': parallelism must be 1 to"),
        pytest.param(
            "shared state", "bolts 'a' and 'b' both write to memory backend 'shared'", marks=pytest.mark.rule("C12")
        ),
        pytest.param(
            "opaque spout, transactional state",
            "spout 'spout' is opaque.*'a' skips.*use an opaque state",
            marks=pytest.mark.rule("C5"),
        ),
        pytest.param(
            "non-transactional state", "'a' writes to .* without transaction ids", marks=pytest.mark.rule("C4")
        ),
        pytest.param(
            "not deterministic",
            "component 'mood' is not declared deterministic.*'a'",
            marks=pytest.mark.rule("C5"),
        ),
        ("state without commit", "'a' holds the state .* but never commits"),
        pytest.param(
            "shuffled committer", "'a' has 2 tasks, and ShuffleGrouping from 'spout'", marks=pytest.mark.rule("C12")
        ),
        ("missing field", "'a' needs field 'amount', which 'spout' does not emit"),
        ("sum of text", r"Sum\('word'\) needs a number"),
        ("column name", "'drop table' is not usable in SQL"),
        ("untyped key", "key field 'word' of 'spout' has no type"),
    ],
)
def test_build_bad_topology_is_refused_by_name(case: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=message):
        wrong(case, tmp_path)()


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a..b", "a\0b", "x" * 129, "-a", "ä", "$checkpoint"])
def test_build_unsafe_ids_are_refused(bad: str) -> None:
    spout = MemoryTransactionalSpout({0: []}, WORDS, 1)
    with pytest.raises(TopologyError, match="topology id"):
        Builder(bad, "spout", spout)
    with pytest.raises(TopologyError, match="bolt id"):
        builder().set_bolt(bad, Relay())


@pytest.mark.parametrize("stream", ["default", "signals"])
def test_a_stream_without_fields_is_refused(stream: str) -> None:
    declarer = OutputFieldsDeclarer("bolt")
    with pytest.raises(TopologyError, match=f"'bolt' declares stream '{stream}' without fields"):
        declarer.declare(Fields(), stream)


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_a_field_is_not_called_as_a_column_of_the_framework_s_own(name: str) -> None:
    """Rows of a core topology would have two columns of one name, and no bolt could get them."""
    declarer = OutputFieldsDeclarer("bolt", attempts=False)
    with pytest.raises(TopologyError, match=f"component 'bolt', stream 'default': field '{name}' is a column of"):
        declarer.declare(Fields("word", name))
    OutputFieldsDeclarer("bolt").declare(Fields("word", name))  # rows of transactional topologies have none


def test_build_at_least_once_accepts_states_that_may_count_twice() -> None:
    b = builder(opaque=True, at_least_once=True)
    b.set_bolt("a", committer(NonTransactionalMapState(MemoryBackend()))).global_grouping("spout")
    assert b.build().at_least_once


def test_build_committers_by_marker_and_by_declaration() -> None:
    b = builder()
    b.set_bolt("marked", UpdateGlobalCount(OpaqueMapState(MemoryBackend()))).global_grouping("plain")
    b.set_committer_bolt("declared", BatchCount()).shuffle_grouping("spout")
    b.set_bolt("plain", BatchCount()).shuffle_grouping("spout")
    topology = b.build()
    assert {each.id for each in topology.components if each.committer} == {"marked", "declared"}
    assert next(each.id for each in topology.components) == "spout"


def test_build_fields_grouping_on_part_of_the_key_is_enough() -> None:
    b = Builder("t", "spout", MemoryTransactionalSpout({0: []}, Fields(a=str, b=str, n=int), 1), 2)
    state = TransactionalMapState(MemoryBackend())
    both = StateCommitter(state, key=["a", "b"], aggregates={"least": Min("n")})
    b.set_bolt("c", both, 3).fields_grouping("spout", Fields("a"))
    assert b.build()["c"].streams["default"] == Fields(a=str, b=str, least=int)


@pytest.mark.rule("C13")
def test_submit_unpicklable_bolt_is_refused_by_name() -> None:
    bolt = Relay()
    bolt.failures = threading.Lock()  # type: ignore[assignment]
    b = builder()
    b.set_bolt("leaky", bolt).shuffle_grouping("spout")
    with pytest.raises(TopologyError, match="component 'leaky' cannot be sent to a task"):
        submit(b.build(), executor="local")


def test_build_a_factory_is_called_for_the_bolt() -> None:
    made: list[BaseBasicBolt] = []

    def factory() -> BaseBasicBolt:
        made.append(Relay())
        return made[-1]

    b = builder()
    b.set_bolt("a", factory).shuffle_grouping("spout")
    assert b.build()["a"].instance is made[0]


def test_outline_changes_with_the_topology() -> None:
    first, second = builder(), builder()
    first.set_bolt("a", Relay()).shuffle_grouping("spout")
    second.set_bolt("a", Relay(), 2).shuffle_grouping("spout")
    assert first.build().digest() != second.build().digest()


@pytest.mark.parametrize(
    ("backend", "master", "message"),
    [
        ("memory", "local[2]", "lives in one process, and Spark's tasks run in others"),
        ("sqlite", "spark://host:7077", "can be written from one host only, and spark.master is 'spark://host:7077'"),
        ("memory", "local-cluster[2,1,1024]", "lives in one process, and Spark's tasks run in others"),
    ],
)
@pytest.mark.rule("C23")
def test_submit_states_that_tasks_cannot_reach_are_refused(
    backend: str, master: str, message: str, tmp_path: Path
) -> None:
    made = MemoryBackend("here") if backend == "memory" else SqliteBackend(tmp_path / "x.db", "t")
    b = builder()
    b.set_bolt("a", committer(TransactionalMapState(made))).global_grouping("spout")
    with pytest.raises(ConfigError, match=message):
        submit(b.build(), {"spark.master": master})


def test_methods_that_nobody_calls_and_decorated_ones_may_have_any_signature() -> None:
    """A mixin's method that is overridden; a decorator that gives an argument."""

    def connected(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any) -> None:
            method(self, *arguments, {})

        return call

    class Mixin:
        def execute(self, something: Any, quite: Any, different: Any) -> None:
            raise AssertionError

    class Both(Mixin, BaseBasicBolt):
        @connected
        def execute(self, tup: Any, collector: Any, connection: Any) -> None:  # type: ignore[override]
            pass

    class Behind(BaseBasicBolt, Mixin):  # type: ignore[misc]
        def execute(self, tup: Any, collector: Any) -> None:  # type: ignore[override]
            pass

    b = builder()
    b.set_bolt("both", Both()).shuffle_grouping("spout")
    b.set_bolt("behind", Behind()).shuffle_grouping("spout")
    b.build()
