"""Checkpoints of topologies in one process: hooks, recovery, rescaling, and both guarantees."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    Config,
    CoreTopology,
    CoreTopologyFailed,
    Fields,
    TopologyBuilder,
    Tuple,
    submit,
)
from framework.coordination.transactional_state import TransactionalState
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import CHECKPOINT, _RecordLog, forget_state, read_record, restore_state
from framework.core.rescaling import Entry
from framework.errors import ConfigError, CorruptStateError, RetryableError, TopologyError
from framework.observe.metrics import CoreRunCollector
from framework.state.lmdb import LmdbStore
from framework.transactions import MemoryStore
from tests.kit.state_parts import (
    Count,
    Log,
    Source,
    Split,
    SteppedState,
    checkpointed,
    committed,
    counting,
    journal,
    lmdb,
    steps_of,
)
from tests.kit.waiting import PATIENCE_S

WORDS = ["the", "cow", "jumped", "over", "the", "moon", "and", "the", "cow", "came", "back"]


@pytest.fixture
def key() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


@pytest.mark.behaviour("5.1", "5.3", "5.4")
def test_the_hooks_of_a_stateful_bolt_are_called_in_order(key: str) -> None:
    topology = counting(key, Source(key, WORDS), counters=1)
    with submit(topology, {"topology.state.checkpoint.interval.ms": 20}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        status = run.status().checkpoint
        assert status is not None
        assert (status.guarantee, status.phase, status.recoveries) == ("at-least-once", "COMMITTED", 0)
        assert f"checkpoint {status.txid} (at-least-once)" in run.status().progress_line(0.0)
        assert run.status().document()["checkpoint"]["txid"] == status.txid
        collected = CoreRunCollector(key, run.status, run._driver.figures).collect()
        metrics = {sample.name: sample.value for each in collected for sample in each.samples}
        assert (metrics["ratchet_checkpoint"], metrics["ratchet_recoveries_total"]) == (status.txid, 0)
        assert metrics["ratchet_checkpoint_seconds_count"] >= 1
        assert abs(metrics["ratchet_last_checkpoint_timestamp_seconds"] - time.time()) < 600
        assert (metrics["ratchet_leading"], metrics["ratchet_standby"], metrics["ratchet_trees"]) == (1, 0, 0)
        assert status.txid >= 1
    steps = steps_of(key)
    assert steps[:2] == ["prepare", "init_state 0"]
    assert steps[-1] == "cleanup"
    hooks = steps[2:-1]
    assert hooks == [
        f"{hook} {txid}" for txid in range(1, len(hooks) // 2 + 1) for hook in ("pre_prepare", "pre_commit")
    ]
    assert journal(key).results == Counter(WORDS)


class Tally(Count):
    """Counts its tuples, and writes down their number at each checkpoint."""

    def pre_prepare(self, txid: int) -> None:
        total = sum(count for _, count in self.counts.items())
        journal(self.key).steps.append((self.context.component_id, txid, str(total)))


@pytest.mark.behaviour("5.3")
@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
def test_a_checkpoint_reaches_every_bolt_after_the_same_tuples_on_all_inputs(key: str, exact: bool) -> None:
    """Two paths of different lengths, one through a bolt without state, meet in a stateful bolt.

    At each checkpoint it has executed exactly the tuples that the bolts before it have executed.
    """
    builder = TopologyBuilder(key)
    builder.set_spout("long", Log(key, [WORDS * 40]))
    builder.set_spout("short", Log(key, [WORDS * 40]))
    builder.set_bolt("first", Tally(key), 2).fields_grouping("long", Fields("word"))
    builder.set_bolt("plain", Split(key), 3).shuffle_grouping("first")
    builder.set_bolt("other", Tally(key), 2).fields_grouping("short", Fields("word"))
    builder.set_bolt("last", Tally(key), 2).fields_grouping("plain", Fields("word")).fields_grouping(
        "other", Fields("word")
    )
    conf = {
        "topology.state.checkpoint.interval.ms": 1,
        "topology.max.spout.pending": 13,
        "topology.state.exactly.once": exact,
    }
    with submit(builder.build(), conf, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    totals: Counter[tuple[int, str]] = Counter()
    for component_id, txid, total in journal(key).steps:
        if total.isdigit():
            totals[(txid, component_id)] += int(total)
    txids = {txid for txid, _ in totals}
    assert len(txids) > 5
    for txid in txids:
        assert totals[(txid, "first")] + totals[(txid, "other")] == totals[(txid, "last")]
    assert totals[(max(txids), "last")] == 80 * len(WORDS)


@pytest.mark.behaviour("5.1", "5.2", "5.4")
@pytest.mark.parametrize("spout", [Source, Log])
def test_a_topology_that_is_started_again_goes_on_from_its_state(key: str, tmp_path: Path, spout: Any) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path)
    source = spout(key, WORDS) if spout is Source else Log(key, [WORDS])
    for _ in range(3):
        with submit(counting(key, source), conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
        assert checkpointed(conf, store, key) == Counter(WORDS)
    assert len(journal(key).emitted) == len(WORDS)
    record = read_record(store, key)
    assert record is not None
    assert f"init_state {record.txid}" in steps_of(key)[-2:-1] + steps_of(key)


@pytest.mark.behaviour("5.3")
def test_an_ack_waits_for_the_checkpoint_where_the_spout_cannot_go_back(key: str) -> None:
    seen: list[int] = []
    journal(key).on["pre_prepare"] = lambda txid: seen.append(len(journal(key).acked))
    with submit(
        counting(key, Source(key, WORDS)), {"topology.state.checkpoint.interval.ms": 200}, executor="local"
    ) as run:
        run.wait_until_idle(PATIENCE_S)
    assert seen[0] == 0
    assert sorted(journal(key).acked) == list(range(len(WORDS)))


def checked(key: str, words: list[list[str]], conf: Mapping[str, Any], **parallelism: int) -> MemoryStore:
    """Run a log to its end, with exactly-once state, and check the counts."""
    store = MemoryStore()
    with submit(counting(key, Log(key, words), **parallelism), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().checkpoint.guarantee == "exactly-once"  # type: ignore[union-attr]
    assert checkpointed(conf, store, key) == Counter(word for each in words for word in each)
    return store


@pytest.mark.each_value_once
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("where", ["split", "execute", "pre_prepare", "pre_commit"])
@pytest.mark.parametrize("tracked", [True, False])
def test_state_is_exactly_once_whatever_dies(key: str, tmp_path: Path, where: str, tracked: bool) -> None:
    """User code raises now and then: everything goes back, and each word counts once."""
    happened = 0

    def sometimes(value: Any) -> None:
        nonlocal happened
        happened += 1
        if happened in ((5, 8) if where.startswith("pre_") else (3, 40, 41, 100)):
            raise RuntimeError(f"died at {value}")

    journal(key).on[where] = sometimes
    words = [WORDS * 15, WORDS * 7]
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.state.checkpoint.interval.ms": 1})
    conf["topology.max.spout.pending"] = 7
    topology = counting(key, Log(key, words, tracked=tracked), spouts=2)
    with submit(topology, conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().checkpoint.recoveries >= 2  # type: ignore[union-attr]
    assert checkpointed(conf, store, key) == Counter(word for each in words for word in each)
    assert journal(key).seeks
    assert journal(key).failed == []


@pytest.mark.behaviour("5.5")
def test_state_is_at_least_once_with_a_spout_that_cannot_go_back(key: str, tmp_path: Path) -> None:
    happened = 0

    def sometimes(value: Any) -> None:
        nonlocal happened
        happened += 1
        if happened in (5, 30):
            raise RuntimeError("died")

    journal(key).on["execute"] = sometimes
    store, conf = MemoryStore(), lmdb(tmp_path)
    words = WORDS * 10
    with submit(counting(key, Source(key, words)), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().checkpoint.recoveries >= 1  # type: ignore[union-attr]
    found = checkpointed(conf, store, key)
    assert all(found[word] >= count for word, count in Counter(words).items())
    assert set(found) == set(words)
    assert sorted(journal(key).acked) == list(range(len(words)))


@pytest.mark.behaviour("5.5")
def test_at_least_once_goes_on_from_an_exactly_once_checkpoint_and_the_other_way(key: str, tmp_path: Path) -> None:
    """Nothing is lost when the guarantee changes, though the spout
    is further than the checkpoint.
    """
    store, words = MemoryStore(), list(WORDS)
    for exact in (True, False, True):
        conf = lmdb(tmp_path, **{"topology.state.exactly.once": exact})
        with submit(counting(key, Log(key, [words])), conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
        found = checkpointed(conf, store, key)
        assert all(found[word] >= count for word, count in Counter(words).items())
        if exact and len(words) == len(WORDS):
            assert found == Counter(words)
        words = [*words, "more"]
    assert journal(key).seeks[0] == [{"0": len(WORDS)}]


@pytest.mark.behaviour("5.5")
def test_a_run_stopped_midway_ends_with_a_checkpoint_of_all_that_it_did(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.state.checkpoint.interval.ms": 20_000})
    words = [WORDS * 500]
    with submit(counting(key, Log(key, words)), conf, store=store, executor="local") as run:
        while run.status().rows_done() < 300:
            time.sleep(0.01)
    done = len(journal(key).emitted)
    assert sum(checkpointed(conf, store, key).values()) == done
    with submit(counting(key, Log(key, words)), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key) == Counter(words[0])
    assert len(journal(key).emitted) == len(words[0])  # nothing came twice


@pytest.mark.dies("state 3")
@pytest.mark.behaviour("5.4")
def test_a_component_that_always_fails_ends_the_topology_and_is_named(key: str) -> None:
    def always(value: Any) -> None:
        raise RuntimeError(f"cannot do {value}")

    journal(key).on["split"] = always
    with (
        pytest.raises(CoreTopologyFailed, match=r"split\[\d\]: RuntimeError: cannot do the"),
        submit(counting(key, Log(key, [WORDS])), {"topology.max.attempts": 3}, executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)


@pytest.mark.behaviour("5.5")
def test_states_in_memory_that_are_lost_begin_anew_with_the_input(key: str) -> None:
    from framework.core.local import LocalRounds

    words = [WORDS * 20]
    topology = counting(key, Log(key, words))
    conf = {"topology.state.checkpoint.interval.ms": 1, "topology.max.spout.pending": 5}
    with submit(topology, conf, executor="local") as run:
        rounds = run._executor
        assert isinstance(rounds, LocalRounds)
        lost = False

        def lose(txid: int) -> None:
            nonlocal lost
            if txid == 4 and not lost:
                lost = True
                assert rounds._worker._provider is not None
                rounds._worker._provider._stores.clear()  # type: ignore[attr-defined]
                raise RuntimeError("its process is gone")

        journal(key).on["pre_prepare"] = lose
        run.wait_until_idle(PATIENCE_S)
        assert lost
        assert "read again from its beginning" in str(run.status().checkpoint.last_failure)  # type: ignore[union-attr]
    assert journal(key).results == Counter(words[0])


@pytest.mark.dies("state 5")
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2)])
def test_keys_move_with_the_number_of_tasks(key: str, tmp_path: Path, before: int, after: int) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path)
    words = [WORDS, WORDS]
    with submit(counting(key, Log(key, words), counters=before), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    words = [[*each, "again", "the"] for each in words]
    with submit(counting(key, Log(key, words), spouts=2, counters=after), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key) == Counter(words[0] + words[1])
    record = read_record(store, key)
    assert record is not None
    assert record.layouts["count"].tasks == after
    assert len(list((tmp_path / key / "count").iterdir())) == 1  # the old namespaces are gone


class ByLength(Count):
    """Its keys do not follow from the words by which its input is grouped."""

    def execute(self, tup: Tuple) -> None:
        length = len(tup["word"])
        self.counts.put(length, (self.counts.get(length) or 0) + 1)
        self.collector.ack(tup)


@pytest.mark.dies("state 5")
@pytest.mark.rule("C39")
def test_keys_that_do_not_follow_from_the_grouping_refuse_another_number_of_tasks(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path)

    def lengths(words: list[str], tasks: int) -> CoreTopology:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Log(key, [words]))
        builder.set_bolt("count", ByLength(key), tasks).fields_grouping("words", Fields("word"))
        return builder.build()

    words = ["a" * length for length in range(1, 20)]
    with submit(lengths(words, 2), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    with (
        pytest.raises(TopologyError, match=r"has key \d+ of its state in task \d, and by its grouping .* must stay 2"),
        submit(lengths(words, 3), conf, store=store, executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)
    words.append("b")
    with submit(lengths(words, 2), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    record = read_record(store, key)
    assert record is not None and record.layouts["count"].tasks == 2


class Letters(BaseBasicBolt):
    """Emits a word, the same word again, and its first letter."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        collector.emit([tup["word"], tup["word"], tup["word"][0]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, same=str, letter=str))


@pytest.mark.rule("C39")
@pytest.mark.dies("state 6")
@pytest.mark.parametrize("tasks", [2, 3])
def test_a_state_whose_input_is_grouped_differently_is_refused_unless_it_is_restored(
    key: str, tmp_path: Path, tasks: int
) -> None:
    """Grouped by letter, a word goes to another task than the one with its count;
    the key does not show that.
    """
    store, conf = MemoryStore(), lmdb(tmp_path)

    def grouped(words: list[str], field: str, tasks: int = 2) -> CoreTopology:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Log(key, [words]))
        builder.set_bolt("letters", Letters()).shuffle_grouping("words")
        builder.set_bolt("count", Count(key), tasks).fields_grouping("letters", Fields(field))
        return builder.build()

    with submit(grouped(WORDS, "word"), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    before, more = read_record(store, key), [*WORDS, *WORDS]
    assert before is not None
    for field in ("letter", "same"):
        with (
            pytest.raises(TopologyError, match=rf"by FieldsGrouping\({field}\), .* came by FieldsGrouping\(word\)"),
            submit(grouped(more, field, tasks), conf, store=store, executor="local") as run,
        ):
            run.wait_until_idle(PATIENCE_S)
    after = read_record(store, key)
    assert after is not None and after.layouts == before.layouts
    with TopologyState(grouped(WORDS, "word"), Config.of(conf), store) as state:
        entries = [("count", each) for each in state.entries("count")]
    restore_state(
        grouped(more, "same", tasks),
        Config.of(conf),
        store,
        document=before.document(),
        entries=lambda: iter(entries),
        where="saved",
    )
    with submit(grouped(more, "same", tasks), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key) == Counter(more)


@pytest.mark.rule("C39")
def test_a_state_whose_inputs_are_grouped_by_different_numbers_of_fields_is_refused(key: str) -> None:
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("split", Count(key)).global_grouping("words")
    bolt = builder.set_bolt("count", Count(key), 2)
    bolt.fields_grouping("words", Fields("word")).fields_grouping("split", Fields("word", "count"))
    with pytest.raises(TopologyError, match="takes 'words' by word, 'split' by word, count: what has the same key"):
        builder.build()


class Gone(BaseException):
    """The driver's process dies, and its task workers with it."""


def grown(key: str, words: list[list[str]], counters: Mapping[str, int]) -> CoreTopology:
    """Words, counted by each of several bolts. ``counters``: bolt -> its number of tasks."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, words))
    for name, tasks in counters.items():
        builder.set_bolt(name, Count(key), tasks).fields_grouping("words", Fields("word"))
    return builder.build()


@pytest.mark.dies("state 2", "state 5")
@pytest.mark.rule("C39")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize("prepared", [1, 2])
@pytest.mark.parametrize(
    "after",
    [{"count": 2, "more": 2}, {"count": 3}, {"count": 1}, {"other": 1}, {"count": 2}],
    ids=["one more bolt", "more tasks", "fewer tasks", "another bolt", "the same"],
)
def test_a_checkpoint_that_is_prepared_is_finished_under_its_own_layout(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: int, after: Mapping[str, int]
) -> None:
    """The driver dies between *prepared* and *committed*; then a changed topology starts."""
    store, conf = MemoryStore(), lmdb(tmp_path)
    real = _RecordLog.save

    def save(log: _RecordLog, record: CheckpointRecord) -> None:
        real(log, record)
        if record.prepared and record.pending == prepared:
            raise Gone

    monkeypatch.setattr(_RecordLog, "save", save)
    run = submit(grown(key, [WORDS], {"count": 2}), conf, store=store, executor="local")
    with pytest.raises(Gone):
        run.join(PATIENCE_S)
    monkeypatch.undo()
    words = [*WORDS, "more"]
    with submit(grown(key, [words], after), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    begun = words if prepared == 1 else ["more"]  # what a new bolt has seen
    for name in after:
        assert checkpointed(conf, store, key, name) == Counter(words if name == "count" else begun)


@pytest.mark.behaviour("5.2")
def test_a_bolt_that_is_gone_and_comes_back_begins_empty(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path)
    spout = Log(key, [WORDS])
    with submit(counting(key, spout), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [[*WORDS, "more"]]))
    builder.set_bolt("others", Count(key)).fields_grouping("words", Fields("word"))
    with submit(builder.build(), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key, "others") == {"more": 1}
    with submit(counting(key, Log(key, [[*WORDS, "more", "and", "more"]])), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key) == {"and": 1, "more": 1}


@pytest.mark.behaviour("5.4")
def test_a_store_that_was_replaced_is_noticed(key: str, tmp_path: Path) -> None:
    store = MemoryStore()
    with submit(counting(key, Log(key, [WORDS])), lmdb(tmp_path / "a"), store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    with (
        pytest.raises(
            CorruptStateError, match=r"the state of count\[\d\] holds checkpoint 0, and the record .* says \d"
        ),
        submit(counting(key, Log(key, [WORDS])), lmdb(tmp_path / "b"), store=store, executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)


class Briefly(Count):
    """The same component, but its values expire after an hour."""

    state_ttl_s = 3600.0


@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize(("bolt", "tasks"), [(Count, 3), (Briefly, 2)], ids=["more tasks", "values that expire"])
def test_a_store_that_was_replaced_is_noticed_before_keys_are_moved_out_of_it(
    key: str, tmp_path: Path, bolt: type[Count], tasks: int
) -> None:
    store = MemoryStore()
    with submit(grown(key, [WORDS], {"count": 2}), lmdb(tmp_path / "a"), store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    before = read_record(store, key)
    builder = TopologyBuilder(key)
    builder.set_spout("words", Log(key, [WORDS]))
    builder.set_bolt("count", bolt(key), tasks).fields_grouping("words", Fields("word"))
    with (
        pytest.raises(
            CorruptStateError, match=r"the state of count\[0\] holds checkpoint 0, and the record .* says \d"
        ),
        submit(builder.build(), lmdb(tmp_path / "b"), store=store, executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)
    after = read_record(store, key)
    assert before is not None and after is not None and after.layouts == before.layouts


@pytest.mark.rule("C27")
def test_a_store_that_goes_back_to_before_a_commit_under_a_running_topology_is_noticed(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis does when it is restored, or a replica is promoted, without the last second."""
    back: list[int] = []
    real = LmdbStore.txid

    def went_back(store: LmdbStore) -> int:
        found = real(store)
        if found == 3 and not back:  # checkpoint 3 was committed; now the store goes back to 2
            back.append(found)
            store.write({}, 2)
            return found
        return found

    monkeypatch.setattr(LmdbStore, "txid", went_back)
    spout = Log(key, [WORDS * 50])
    conf = lmdb(tmp_path, **{"topology.max.spout.pending": 3, "topology.state.checkpoint.interval.ms": 1})
    with (
        pytest.raises(CorruptStateError, match=r"holds checkpoint 2, and the record of this topology says 3"),
        submit(counting(key, spout, counters=1), conf, store=MemoryStore(), executor="local") as run,
    ):
        run.wait_until_idle(PATIENCE_S)
    assert back


@pytest.mark.behaviour("5.4")
def test_a_driver_that_no_longer_leads_writes_nothing_and_leads_again(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 3})
    words = [WORDS * 30]
    deposed = []

    def depose(txid: int) -> None:
        if txid in (3, 6) and txid not in deposed:
            deposed.append(txid)
            store.depose(key)

    journal(key).on["pre_commit"] = depose
    conf["topology.state.checkpoint.interval.ms"] = 1
    with submit(counting(key, Log(key, words)), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert deposed == [3, 6]
    assert checkpointed(conf, store, key) == Counter(words[0])


class Away(MemoryStore):
    """Does not answer at first."""

    asked = 0

    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> Any:
        self.asked += 1
        if self.asked < 3:
            raise RetryableError("ZooKeeper is away")
        return super().lead(path, identity, timeout_s)


def test_a_store_that_is_away_at_the_start_is_waited_for(key: str, tmp_path: Path) -> None:
    store, conf = Away(), lmdb(tmp_path)
    with submit(counting(key, Log(key, [WORDS])), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().last_error == "ZooKeeper is away"
    assert checkpointed(conf, store, key) == Counter(WORDS)


def test_a_second_driver_stands_by_and_takes_over(key: str, tmp_path: Path) -> None:
    store, conf = MemoryStore(), lmdb(tmp_path)
    with submit(counting(key, Log(key, [WORDS])), conf, store=store, executor="local") as first:
        first.wait_until_idle(PATIENCE_S)
        second = submit(counting(key, Log(key, [[*WORDS, "more"]])), conf, store=store, executor="local")
        while second.status().phase != "standby":
            time.sleep(0.01)
    with second:
        second.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key) == Counter([*WORDS, "more"])
    assert len(journal(key).emitted) == len(WORDS) + 1


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"topology.state.checkpoint.interval.ms": 30_000}, "it must be less than topology.message.timeout.secs"),
        ({"topology.acker.executors": 0}, "without ackers nobody knows"),
        ({"topology.state.provider": "framework.state.Nope"}, "topology.state.provider: there is no"),
        (
            {
                "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
                "topology.state.provider.config": '{"path": "/tmp"}',
            },
            "transactional.zookeeper.servers is not set",
        ),
        (
            {"topology.state.provider": "framework.state.LmdbKeyValueStateProvider"},
            "topology.state.provider.config.path: Field required",
        ),
        ({"topology.state.provider.config": "{"}, "is not JSON"),
    ],
)
def test_an_impossible_state_setting_is_refused_before_anything_starts(
    key: str, conf: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(counting(key, Source(key, WORDS)), conf, executor="local")


@pytest.mark.rule("C35")
def test_a_spout_without_a_position_in_the_restored_snapshot_begins_anew(key: str, tmp_path: Path) -> None:
    """Positions that it keeps elsewhere are ahead of the restored states."""
    store, conf = MemoryStore(), lmdb(tmp_path)

    def topology(*spouts: str) -> CoreTopology:
        builder = TopologyBuilder(key)
        for name in spouts:
            builder.set_spout(name, Journaled(key, [WORDS]))
        count = builder.set_bolt("count", Count(key))
        for name in spouts:
            count.fields_grouping(name, Fields("word"))
        return builder.build()

    with submit(topology("first"), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    record, counts = read_record(store, key), checkpointed(conf, store, key)
    assert record is not None
    with submit(topology("first", "second"), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, key)["the"] == 6
    journal(key).steps.clear()
    entries = [("count", Entry(word, count, None, 0)) for word, count in counts.items()]
    restore_state(
        topology("first", "second"),
        Config.of(conf),
        store,
        document=record.document(),
        entries=lambda: iter(entries),
        where="the snapshot",
    )
    for _ in range(2):
        with submit(topology("first", "second"), conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
    begun = [(name, what) for name, _, what in journal(key).steps if what in ("sought", "begun anew")]
    assert begun == [("first", "sought"), ("second", "begun anew"), ("first", "sought"), ("second", "sought")]


@pytest.mark.parametrize("command", ["forget", "restore"])
def test_a_command_without_a_provider_does_not_change_the_state_of_another_provider(
    key: str, tmp_path: Path, command: str
) -> None:
    """As without the ``--config`` of the run: states in memory are readable in their process only,
    and the record belongs to another provider.
    """
    store, conf = MemoryStore(), lmdb(tmp_path)
    topology = counting(key, Log(key, [WORDS]))
    with submit(topology, conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    record = read_record(store, key)
    assert record is not None
    with pytest.raises(ConfigError, match="in the memory of its own processes: .* give the --config of the run"):
        if command == "forget":
            forget_state(topology, Config.of({}), store)
        else:
            restore_state(
                topology,
                Config.of({}),
                store,
                document=record.document(),
                entries=lambda: iter(()),
                where="the snapshot",
            )
    assert read_record(store, key) == record
    assert checkpointed(conf, store, key) == Counter(WORDS)


@pytest.mark.rule("C39")
@pytest.mark.parametrize("command", ["restore", "forget", "other tasks"])
def test_a_number_of_a_layout_is_recorded_before_its_use_and_not_used_again(
    key: str, tmp_path: Path, command: str
) -> None:
    """The driver that took it dies before its first checkpoint. What it has under way may still
    write to those namespaces.
    """
    store, conf = MemoryStore(), lmdb(tmp_path)
    state = TransactionalState(store, key)
    snapshot = SteppedState(counting(key, Log(key, [WORDS])), tmp_path).settle()
    state.set_data(CHECKPOINT, snapshot.record.document())
    forget_state(counting(key, Log(key, [WORDS])), Config.of(conf), store)
    driver = SteppedState(counting(key, Log(key, [WORDS]), counters=3), tmp_path, read_record(store, key))
    driver.step()
    taken = driver.record.assigned["count"].number
    assert (driver.record.txid, driver.record.layouts) == (0, {})
    assert taken > driver.record.last
    state.set_data(CHECKPOINT, driver.record.document())
    if command == "restore":
        restore_state(
            counting(key, Log(key, [WORDS])),
            Config.of(conf),
            store,
            document=snapshot.record.document(),
            entries=lambda: iter([("count", Entry("the", 5, None, 0))]),
            where="the snapshot",
        )
        with TopologyState(counting(key, Log(key, [WORDS])), Config.of(conf), store) as found:
            assert [(each.key, each.value) for each in found.entries("count")] == [("the", 5)]
    elif command == "forget":
        forget_state(counting(key, Log(key, [WORDS])), Config.of(conf), store)
    next_one = SteppedState(counting(key, Log(key, [WORDS])), tmp_path, read_record(store, key))
    next_one.step()
    assert next_one.record.assigned["count"].number > taken


class Grouped(Log):
    """Keeps its positions in a group, which is in the journal, as a Kafka consumer does.

    Partitions in ``away`` have no leader: it is not known where they begin.
    """

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        self.mine, self.offsets = list(self.offsets), {}
        self.group, self.away = (journal(self.key).results.setdefault(each, {}) for each in ("group", "away"))
        self.anew = False

    def begin_anew(self) -> None:
        journal(self.key).steps.append(("words", 0, "begun anew"))
        self.anew = True

    def begin(self) -> None:
        for each in self.mine:
            if each not in self.offsets and each not in self.away:
                self.offsets[each] = self.group[each] = 0 if self.anew else self.group.get(each, 0)

    def next_tuple(self) -> None:
        self.begin()
        if journal(self.key).results.get("dies"):
            raise RuntimeError(journal(self.key).results.pop("dies"))
        super().next_tuple()

    def position(self) -> Any:
        self.begin()
        if len(self.offsets) < len(self.mine):
            raise RetryableError("a partition has no leader")
        return super().position()

    def ack(self, message_id: Any) -> None:
        super().ack(message_id)
        partition, offset = message_id
        self.group[partition] = offset + 1


@pytest.mark.rule("C35")
@pytest.mark.parametrize("what", ["driver", "spout"])
def test_at_least_once_a_forgotten_spout_begins_anew_until_all_its_partitions_have(
    key: str, tmp_path: Path, what: str
) -> None:
    """Its group still has old positions of the others: what was forgotten would be skipped."""
    away, group = {1: True}, {0: 2, 1: 2}
    journal(key).results.update(away=away, group=group)
    topology = counting(key, Grouped(key, [["a", "b"], ["c", "d"]]))
    run = SteppedState(topology, tmp_path, CheckpointRecord(last=7, forgotten=["words"]), exact=False).settle()
    assert run.record.txid > 7 and run.record.forgotten == ["words"]
    if what == "driver":
        run.close()
        run = SteppedState(topology, tmp_path, run.record, exact=False)
    else:
        journal(key).results["dies"] = "it dies"
        run.step(3)
    away.clear()
    run.settle()
    assert run.record.forgotten == []
    assert steps_of(key, "words") == ["begun anew"] * 2
    run.close()
    again = SteppedState(topology, tmp_path, run.record, exact=False).settle()
    assert steps_of(key, "words") == ["begun anew"] * 2
    again.close()
    found = committed(str(tmp_path), again.record, key, "count")
    assert found == {"a": 2, "b": 2, "c": 1, "d": 1}


class Journaled(Log):
    """Writes down the calls of ``begin_anew`` and ``seek``."""

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        self.component_id = context.component_id

    def begin_anew(self) -> None:
        journal(self.key).steps.append((self.component_id, 0, "begun anew"))

    def seek(self, positions: Any) -> None:
        super().seek(positions)
        journal(self.key).steps.append((self.component_id, 0, "sought"))
