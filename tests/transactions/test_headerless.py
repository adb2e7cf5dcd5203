"""Committers without a header of their own: only ZooKeeper knows which commit was opened (C24)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseTransactionalBolt,
    Committer,
    FailedException,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.coordination.store import Change, Delete, Leadership
from framework.coordination.transactional_state import TransactionalState
from framework.errors import ConfigError, CorruptStateError
from framework.topology.fencing import ROLLED_BACK, OpenCommit
from framework.topology.spouts import PartitionPlanner
from framework.transactions import MemoryStore, coordinator
from framework.transactions.coordinator import OpenedRows, Persist, Recovered
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import INCARNATION, OPEN, OPENED_ROWS
from framework.transactions.plans import plan_digest
from framework.transactions.reset import reset_positions
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MemoryBackend,
    OpaqueMapState,
    ParquetTable,
    StateCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.rule("C24")

FIELDS = Fields(n=int)
ROWS = {0: [[n] for n in range(60)], 1: [[100 + n] for n in range(60)]}


class Happenings:
    """What the bolts did and have to do; kept outside of them, because bolts are copied."""

    def __init__(self) -> None:
        self.written: dict[int, list[int]] = {}
        self.parts: dict[tuple[str, int], list[int]] = {}
        self.failures_left = 0
        self.stops_left = 0
        self.planned = 0


happened = Happenings()


@pytest.fixture(autouse=True)
def nothing_happened() -> Iterator[None]:
    happened.__init__()  # type: ignore[misc]
    yield


class Outside(BaseTransactionalBolt, Committer):
    """Writes each txid once, to a place that Ratchet does not see."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.txid, self.rows = batch_id.txid, []

    def execute(self, tup: Any) -> None:
        self.rows.append(tup["n"])

    def finish_batch(self) -> None:
        happened.written.setdefault(self.txid, self.rows)
        if happened.stops_left:
            happened.stops_left -= 1
            raise ConfigError("as asked, after writing")


class FailsWhenAllArePlanned(BaseTransactionalBolt):
    """Fails the first batch as soon as four batches are planned."""

    deterministic = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.txid, self.collector = batch_id.txid, collector

    def execute(self, tup: Any) -> None:
        self.collector.emit([tup["n"]])

    def finish_batch(self) -> None:
        if self.txid == 1 and happened.failures_left:
            wait_for(lambda: happened.planned == 4)
            happened.failures_left -= 1
            raise FailedException("as asked")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class ScriptedSpout(OpaqueMemoryTransactionalSpout):
    """``takes``: per plan, how many rows of each partition it takes; after the last of them,
    nothing is planned.
    """

    takes: Sequence[tuple[int, int]] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "takes": ()}

    def planner(self, conf: Any, context: Any) -> PartitionPlanner:
        planner = super().planner(conf, context)
        left, made = list(self.takes), planner.plan_smaller

        def scripted(previous: Any, divisor: int) -> Any:
            if not left:
                return None
            for partition, take in enumerate(left.pop(0)):
                self.set_take(take, partition)
            happened.planned += 1
            return made(previous, divisor)

        planner.plan_smaller = scripted  # type: ignore[method-assign]
        return planner


def topology(spout: Any, name: str = "outside", *, state: bool = False) -> Topology:
    builder = TransactionalTopologyBuilder(name, "spout", spout, 2)
    builder.set_bolt("fails", FailsWhenAllArePlanned()).global_grouping("spout")
    builder.set_bolt("outside", Outside()).global_grouping("fails")
    if state:
        counts = StateCommitter(OpaqueMapState(MemoryBackend(f"{name}-counts")), ["n"], {"count": Count()})
        builder.set_bolt("counts", counts).global_grouping("fails")
    return builder.build()


def test_a_plan_that_was_dropped_is_not_replayed_after_a_restart() -> None:
    """The first batch fails, and is planned anew with more rows of one partition and none of the
    other.

    So the batches that were planned after it would begin at wrong offsets.
    """
    spout = ScriptedSpout(ROWS, FIELDS, 10)
    built, store = topology(spout), MemoryStore()
    happened.failures_left = 1
    spout.takes = [(10, 10)] * 4 + [(20, 0)]
    with submit(built, {"topology.max.spout.pending": 4}, store=store, executor="local") as run:
        wait_for(lambda: run.status().committed_txid == 1)
    assert happened.written == {1: list(range(20))}
    spout.takes = [(10, 10)] * 20
    with submit(built, {"topology.max.spout.pending": 4}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert Counter(n for rows in happened.written.values() for n in rows) == Counter(
        n for rows in ROWS.values() for (n,) in rows
    )


def test_a_plan_whose_commit_was_opened_is_replayed_as_it_was() -> None:
    spout = ScriptedSpout(ROWS, FIELDS, 10)
    built, store = topology(spout), MemoryStore()
    happened.stops_left = 1
    spout.takes = [(10, 10)]
    with submit(built, store=store, executor="local") as run, pytest.raises(TopologyFailed, match="after writing"):
        run.wait_until_caught_up(PATIENCE_S)
    spout.takes = [(7, 3)] * 30
    with submit(built, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert len(happened.written[1]) == 20
    assert Counter(n for rows in happened.written.values() for n in rows) == Counter(
        n for rows in ROWS.values() for (n,) in rows
    )


def test_positions_are_not_forgotten_while_a_commit_is_open_that_cannot_be_undone() -> None:
    spout = ScriptedSpout(ROWS, FIELDS, 10)
    built, store = topology(spout), MemoryStore()
    happened.stops_left = 1
    spout.takes = [(10, 10)] * 20
    with submit(built, store=store, executor="local") as run, pytest.raises(TopologyFailed, match="after writing"):
        run.wait_until_caught_up(PATIENCE_S)
    with pytest.raises(ConfigError, match=r"txid 1 was opened, and cannot be undone \(bolt 'outside'\): run topology"):
        reset_positions(built, store)
    with submit(built, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert reset_positions(built, store) == 7


class Parts(BaseTransactionalBolt):
    """Sends numbers below a limit to one stream, and the others to another one."""

    deterministic = True

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector

    def execute(self, tup: Any) -> None:
        self.collector.emit([tup["n"]], stream="low" if tup["n"] < self.limit else "high")

    def finish_batch(self) -> None: ...

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS, stream="low")
        declarer.declare(FIELDS, stream="high")


class Part(Outside):
    """Writes to a place of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def finish_batch(self) -> None:
        happened.parts.setdefault((self.name, self.txid), self.rows)
        if self.name == "first" and happened.stops_left:
            happened.stops_left -= 1
            raise ConfigError("as asked, after writing")


def parted(spout: Any, limit: int, *, deterministic: bool = True) -> Topology:
    builder = TransactionalTopologyBuilder("parted", "spout", spout)
    parts = Parts(limit)
    parts.deterministic = deterministic  # type: ignore[misc]
    builder.set_bolt("parts", parts).global_grouping("spout")
    builder.set_bolt("first", Part("first")).global_grouping("parts", "low")
    builder.set_bolt("second", Part("second")).global_grouping("parts", "high")
    return builder.build()


@pytest.mark.rule("C11")
def test_an_opened_commit_is_not_repeated_by_code_that_divides_its_rows_differently() -> None:
    """The changed code would give a row to one committer that the other one has written."""
    spout, store = OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10), MemoryStore()
    happened.stops_left = 1
    with submit(parted(spout, 7), store=store, executor="local") as run, pytest.raises(TopologyFailed, match="after"):
        run.wait_until_caught_up(PATIENCE_S)
    words = r"txid 1 was opened with \d+ rows for 'first', and a repetition has \d+"
    with submit(parted(spout, 5), store=store, executor="local") as run, pytest.raises(TopologyFailed, match=words):
        run.wait_until_caught_up(PATIENCE_S)
    with submit(parted(spout, 7), store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert Counter(n for rows in happened.parts.values() for n in rows) == Counter(
        n for rows in ROWS.values() for (n,) in rows
    )


@pytest.mark.rule("C11")
def test_rows_of_a_delta_table_which_skips_what_it_holds_are_compared_too(tmp_path: Path) -> None:
    """The table has committed the first plan, and the other committer has not."""

    def topology(limit: int) -> Topology:
        builder = TransactionalTopologyBuilder("parted", "spout", spout)
        builder.set_bolt("parts", Parts(limit)).global_grouping("spout")
        table = AppendCommitter(DeltaLakeTable(tmp_path / "low"))
        builder.set_bolt("table", table).global_grouping("parts", "low")
        builder.set_bolt("first", Part("first")).global_grouping("parts", "high")
        return builder.build()

    spout, store = OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10), MemoryStore()
    happened.stops_left = 1
    with submit(topology(7), store=store, executor="local") as run, pytest.raises(TopologyFailed, match="after"):
        run.wait_until_caught_up(PATIENCE_S)
    words = r"txid 1 was opened with 7 rows for 'table', and a repetition has 5"
    with submit(topology(5), store=store, executor="local") as run, pytest.raises(TopologyFailed, match=words):
        run.wait_until_caught_up(PATIENCE_S)
    with submit(topology(7), store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)


def test_rows_are_compared_where_a_table_skips_what_it_holds_and_depend_on_the_plan_alone(tmp_path: Path) -> None:
    for table, compared in ((DeltaLakeTable(tmp_path / "a"), ["table"]), (ParquetTable(tmp_path / "b"), [])):
        builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10))
        builder.set_bolt("table", AppendCommitter(table)).global_grouping("spout")
        builder.set_bolt("copies", Outside(), 2).all_grouping("spout")
        state = OpaqueMapState(MemoryBackend("below"))
        counts = StateCommitter(state, ["n"], {"count": Count()})
        builder.set_bolt("counts", counts).global_grouping("spout")
        builder.set_bolt("below", Outside()).global_grouping("counts")
        assert list(builder.build().repeatable_inputs()) == compared


def test_a_plan_that_was_dropped_before_its_table_was_opened_is_no_contradiction(tmp_path: Path) -> None:
    """A leader dies between the rows of the commit and the header, and the next one plans anew."""
    spout, store = OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10), MemoryStore()
    builder = TransactionalTopologyBuilder("t", "spout", spout)
    builder.set_bolt("table", AppendCommitter(DeltaLakeTable(tmp_path / "a"))).global_grouping("spout")
    built = builder.build()
    leader = store.lead("t", "test")
    assert leader is not None
    documents = TopologyDocuments(store, leader, built)
    documents.claim({})
    documents.save(Persist({1: 1}, {1: (1, PLAN)}, opened_rows=OpenedRows(1, plan_digest(PLAN), {"table": 10})))
    documents.save(Persist({1: 2}, {1: (2, OTHER)}))
    recovered, _ = documents.recover()
    assert (recovered.opened, recovered.opened_rows) == (False, {})
    leader.resign()


def test_rows_below_a_bolt_that_may_repeat_itself_differently_are_not_compared() -> None:
    spout = OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10)
    assert parted(spout, 7).repeatable_inputs() == {"first": ["parts/low->first"], "second": ["parts/high->second"]}
    assert parted(spout, 7, deterministic=False).repeatable_inputs() == {}


class CountingStore(MemoryStore):
    """Counts the writes of leaders: each is one multi in ZooKeeper."""

    def __init__(self) -> None:
        super().__init__()
        self.multis = 0

    def _apply_as(self, leadership: Any, changes: Sequence[Change]) -> None:
        self.multis += 1
        super()._apply_as(leadership, changes)


def multis(kind: str) -> int:
    """The number of multis for six transactions."""
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10))
    if kind != "outside":
        counts = StateCommitter(OpaqueMapState(MemoryBackend(f"{kind}-counts")), ["n"], {"count": Count()})
        builder.set_bolt("counts", counts).global_grouping("spout")
    if kind != "state":
        builder.set_bolt("outside", Outside()).global_grouping("spout")
    store = CountingStore()
    with submit(builder.build(), store=store, executor="local") as run:
        wait_for(lambda: sum(each.kind == "committing" for each in run.events()) == 6)
        run.stop()
        assert run.status().committed_txid == 6
    return store.multis


def test_the_header_costs_one_multi_per_transaction_and_none_where_nobody_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One multi claims the topology; then there is one per transaction, or two with the header, and
    one that closes the last one.
    """
    monkeypatch.setattr(coordinator, "CLOSE_AFTER_MS", 10**9)
    assert (multis("state"), multis("outside"), multis("both")) == (1 + 6 + 1, 1 + 6 * 2 + 1, 1 + 6 * 2 + 1)


# --- the document ---------------------------------------------------------------------------------

PLAN, OTHER = {"0": {"first": 0, "next": 10}}, {"0": {"first": 0, "next": 20}}


class Documents:
    """Documents of a topology that has opened, or is about to open, txid 1 with ``PLAN``."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.leader: Leadership | None = None
        first = self.next_leader()
        first.claim({})
        first.save(Persist({1: 1, 2: 1}, {1: (1, PLAN), 2: (1, OTHER)}))

    def next_leader(self) -> TopologyDocuments:
        if self.leader is not None:
            self.leader.resign()
        self.leader = self.store.lead("outside", "test")
        assert self.leader is not None
        return TopologyDocuments(self.store, self.leader, topology(OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 10)))

    def opened(self) -> bool:
        return self.recovered().opened

    def recovered(self) -> Recovered:
        recovered, _ = self.next_leader().recover()
        return recovered


@pytest.fixture
def documents() -> Documents:
    return Documents()


def test_a_stored_plan_counts_as_opened_only_when_the_header_says_so(documents: Documents) -> None:
    assert not documents.opened()
    documents.next_leader().save(Persist({1: 1}, opens=OpenCommit(1, 1, plan_digest(PLAN))))
    assert documents.opened()
    documents.next_leader().save(Persist({}, currtx=2))
    assert not documents.opened()


def test_the_rows_of_an_opened_commit_are_those_of_its_stored_plan(documents: Documents) -> None:
    rows = OpenedRows(1, plan_digest(PLAN), {"outside": 20})
    documents.next_leader().save(Persist({1: 1}, opens=OpenCommit(1, 1, plan_digest(PLAN)), opened_rows=rows))
    assert documents.recovered().opened_rows == {"outside": 20}
    documents.next_leader().save(Persist({1: 2}, {1: (2, OTHER)}, opens=OpenCommit(1, 1, ROLLED_BACK)))
    assert documents.recovered().opened_rows == {}
    documents.next_leader().save(Persist({1: 2}, {1: (2, PLAN)}))
    assert documents.recovered().opened_rows == {"outside": 20}
    documents.next_leader().save(Persist({}, currtx=2))
    assert documents.recovered().opened_rows == {}


def test_damaged_rows_of_an_opened_commit_are_named(documents: Documents) -> None:
    document = {"txid": 1, "plan_digest": plan_digest(PLAN), "rows": {"outside": "many"}}
    TransactionalState(documents.store, "outside").set_data(OPENED_ROWS, document)
    with pytest.raises(CorruptStateError, match="outside/coordinator/opened_rows: not the rows of a commit"):
        documents.recovered()


def test_a_rolled_back_commit_counts_as_not_opened(documents: Documents) -> None:
    documents.next_leader().save(Persist({1: 1}, opens=OpenCommit(1, 1, plan_digest(PLAN))))
    documents.next_leader().save(Persist({1: 2}, opens=OpenCommit(1, 2, ROLLED_BACK), dropped=frozenset({1})))
    assert not documents.opened()


def test_a_dropped_plan_is_gone_with_the_next_write(documents: Documents) -> None:
    documents.next_leader().save(Persist({1: 2}, {1: (2, OTHER)}, dropped=frozenset({2})))
    recovered, _ = documents.next_leader().recover()
    assert recovered.plans == {1: OTHER}


def test_forgotten_positions_leave_no_header_of_a_plan_that_is_gone(documents: Documents) -> None:
    documents.next_leader().save(Persist({1: 1}, opens=OpenCommit(1, 1, plan_digest(PLAN))))
    documents.next_leader().forget_positions()
    assert not documents.opened()


def test_state_of_the_previous_version_follows_the_rule_of_that_version(documents: Documents) -> None:
    """It recorded neither an incarnation nor what it opened, so a stored plan counts as opened; but
    only until the first header is written.
    """
    documents.store.apply([Delete(f"outside/{INCARNATION}")])
    assert documents.opened()
    documents.next_leader().save(Persist({1: 1}, opens=OpenCommit(1, 1, plan_digest(PLAN))))
    documents.next_leader().save(Persist({}, currtx=2))
    assert not documents.opened()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"txid": 1, "attempt_id": 1, "plan_digest": "x"}, "txid 1 was opened with plan x, and the stored plan of 1"),
        ({"txid": 9, "attempt_id": 1, "plan_digest": "x"}, "txid 9 was opened with plan x.*restore"),
        ({"txid": 1}, "outside/coordinator/open: not the header of a commit"),
        ([1], "outside/coordinator/open: not the header of a commit"),
    ],
)
def test_a_header_that_contradicts_its_neighbours_is_named(documents: Documents, document: Any, words: str) -> None:
    TransactionalState(documents.store, "outside").set_data(OPEN, document)
    with pytest.raises(CorruptStateError, match=words):
        documents.opened()
