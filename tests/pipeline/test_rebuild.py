"""``ratchet rebuild``: a state is made anew beside the one that the topology writes to, and takes
its place, whatever dies meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sqlite3
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from framework import Config, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.commands.rebuild import app
from framework.coordination import store_of
from framework.coordination.store import Delete
from framework.errors import ConfigError, InvariantViolation, RetryableError
from framework.inspect import full_recomputation
from framework.inspect import rebuild as rebuild_module
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.rebuild import RebuildProgress, RebuildReport, clean, rebuild
from framework.inspect.verify import verify
from framework.transactions import MemoryStore, committed_txid
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import read_transaction
from framework.transactions.reset import reset_everything, reset_positions
from framework.transactions.undo import undo
from integration import EmbeddedServers
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MapState,
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
from sinks.lake import folder_documents as folders_module
from sinks.lake import parquet_table as parquet_module
from sinks.read_as_of import as_of
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.command import call
from tests.kit.processes import RunProcess
from tests.kit.replays import FIELDS, OverKafka, Same, Sums, command, kafka_topology, run, state_at, topology_of
from tests.kit.targets import Often
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.pipeline.test_undo import held

ROWS = [["a", 1], ["b", 2], ["a", 3], ["c", 4], ["a", 5], ["d", 6]]
RIGHT = {"a": (3, 9), "b": (1, 2), "c": (1, 4), "d": (1, 6)}


class Wrong(Same):
    """The bolt with the bug: numbers above 3 are lost, and "b" is taken for "a"."""

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["n"] <= 3:
            collector.emit(["a" if tup["word"] == "b" else tup["word"], tup["n"]])


class InSteps(StateCommitter):
    """A subclass commits in several steps of the store, so a commit can die between them."""


def counting(
    folder: Path,
    bolt: Any = None,
    *,
    spout: Any = None,
    state: type[MapState] = OpaqueMapState,
    backend: Any = None,
    words: type[StateCommitter] = StateCommitter,
) -> Topology:
    """Counts and sums per word, two rows per batch; the rows go to files too."""
    kind = MemoryTransactionalSpout if state is TransactionalMapState else OpaqueMemoryTransactionalSpout
    twice = state is NonTransactionalMapState
    builder = TransactionalTopologyBuilder("anew", "spout", spout or kind({0: ROWS}, FIELDS, 2), at_least_once=twice)
    builder.set_bolt("same", bolt or Same()).shuffle_grouping("spout")
    kept = state(backend or SqliteBackend(folder / "x.db", "words"))
    committer = words(kept, ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("words", committer, 2).fields_grouping("same", Fields("word"))
    builder.set_bolt("rows", AppendCommitter(ParquetTable(folder / "rows"))).global_grouping("same")
    return builder.build()


def expected(rows: Sequence[Sequence[Any]]) -> dict[Any, Any]:
    counts, sums = Counter(word for word, _ in rows), Counter[str]()
    for word, number in rows:
        sums[word] += number
    return {word: (counts[word], sums[word]) for word in counts}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("state", [OpaqueMapState, TransactionalMapState])
def test_a_state_of_a_mended_bolt_is_made_anew_and_takes_over(
    tmp_path: Path, store: MemoryStore, state: type[MapState]
) -> None:
    run(counting(tmp_path, Wrong(), state=state), store)
    wrong = {"a": (3, 6)}
    mended = counting(tmp_path, state=state)
    assert held(mended) == wrong
    found = rebuild(mended, store, state="words", take_over=False)
    assert found.difference is not None and found.former is None
    assert (found.txid, found.difference.compared, found.difference.difference_count) == (3, 4, 4)
    assert "'b': the sink has no row, the source gives (1, 2)" in map(str, found.difference.differences)
    assert held(mended) == wrong
    found = rebuild(mended, store, state="words", take_over=True)
    assert found.former == f"table 'words__former' of {tmp_path / 'x.db'}"
    assert held(mended) == RIGHT
    former = OpaqueMapState(
        SqliteBackend(tmp_path / "x.db", "words__former", *mended["words"].states[0].backend.fields)
    )  # type: ignore[attr-defined]
    assert former.get("a") == (3, 6) and former.get("b") is None
    assert clean(mended, store, "words") == [f"table 'words__former' of {tmp_path / 'x.db'}"]
    assert clean(mended, store, "words") == []
    with sqlite3.connect(tmp_path / "x.db") as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type != 'index'")}
    assert names == {"_ratchet_headers", "words", "words_live"}
    assert not verify(mended, store).right  # the files are as they were
    assert {report.location.split()[0]: report.difference_count for report in verify(mended, store).states}["table"]


def test_the_topology_goes_on_from_the_rebuilt_rows(tmp_path: Path, store: MemoryStore) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [*ROWS]}, FIELDS, 2)
    run(counting(tmp_path, Wrong(), spout=spout), store)
    mended = counting(tmp_path, spout=spout)
    rebuild(mended, store, state="words", take_over=True)
    more = [["b", 10], ["e", 1], ["a", 1]]
    for row in more:
        spout.append("0", row)
    run(mended, store)
    assert held(mended) == expected([*ROWS, *more])
    assert undo(mended, store) == 5
    assert held(mended) == expected([*ROWS, *more[:2]])


def test_the_newest_transaction_is_taken_back_from_rebuilt_rows(tmp_path: Path, store: MemoryStore) -> None:
    run(counting(tmp_path, Wrong()), store)
    mended = counting(tmp_path)
    rebuild(mended, store, state="words", take_over=True)
    assert undo(mended, store) == 3
    assert held(mended) == expected(ROWS[:4])
    run(mended, store)
    assert held(mended) == RIGHT


def test_transactions_that_are_no_longer_recorded_are_read_in_large_batches(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several batches for each stretch, under the txids of its last transactions."""
    rows = [[f"w{number % 7}", number] for number in range(80)]
    built = counting(tmp_path, spout=OpaqueMemoryTransactionalSpout({0: rows[:50], 1: rows[50:]}, FIELDS, 2))
    run(built, store)
    last = committed_txid(store, built.id)
    for txid in range(1, last - 2):
        store.apply([Delete(f"anew/history/{txid:03d}")])
    monkeypatch.setattr(full_recomputation, "RECORDS_PER_BATCH", 10)
    monkeypatch.setattr(rebuild_module, "RECORDS_PER_BATCH", 10)
    found = rebuild(built, store, state="words", take_over=True)
    assert found.difference is not None and found.difference.difference_count == 0
    assert found.records == 80 and 6 < found.batches < last
    assert held(built) == expected(rows)
    assert undo(built, store) == last
    run(built, store)
    assert held(built) == expected(rows)


# --- a topology that runs -------------------------------------------------------------------------


class Feed:
    """Rows that come for as long as it is open, no faster than a slow machine commits them: a
    backlog would have to be committed, and recomputed, before the test ends.
    """

    def __init__(self, spout: OpaqueMemoryTransactionalSpout) -> None:
        self.rows: list[list[Any]] = []
        self._spout, self._over = spout, threading.Event()
        self._thread = threading.Thread(target=self._feed)

    def _feed(self) -> None:
        while not self._over.wait(0.1):
            for number in range(len(self.rows), len(self.rows) + 5):
                self.rows.append([f"w{number % 11}", number])
                self._spout.append("0", self.rows[-1])

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow
def test_a_topology_goes_on_while_its_state_is_rebuilt_and_exchanged(
    tmp_path: Path, store: MemoryStore, often: Often
) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 5)
    with submit(counting(tmp_path, spout=spout), store=store, executor="local") as running:
        with Feed(spout) as feed:
            running.wait_for_commit(20, PATIENCE_S)
            copy = counting(tmp_path, spout=spout)
            for _ in range(often(2, 5)):
                before = committed_txid(store, "anew")
                found = rebuild(copy, store, state="words", take_over=True)
                assert found.txid >= before and found.former is not None
                assert found.difference is not None and found.difference.difference_count == 0
                running.wait_for_commit(found.txid + 3, PATIENCE_S)
        running.wait_until_caught_up(PATIENCE_S)
    assert held(copy) == expected(feed.rows)
    assert verify(copy, store).right


#: What ``Exchanges`` does in the midst of a commit: objects that do not travel to tasks.
IN_COMMIT: dict[int, Callable[[], object]] = {}


class Exchanges(StateCommitter):
    """Has something else done when it has written, once for each transaction."""

    def finish_batch(self) -> Any:
        found = super().finish_batch()
        if self._attempt is not None:
            IN_COMMIT.pop(self._attempt.txid, lambda: None)()
        return found


def test_a_commit_that_is_open_when_the_rows_are_exchanged_is_repeated(tmp_path: Path, store: MemoryStore) -> None:
    """Its first task has written to the former rows already."""
    exchanged: list[RebuildReport] = []
    built = counting(tmp_path, words=Exchanges)
    IN_COMMIT[3] = lambda: exchanged.append(rebuild(counting(tmp_path), store, state="words", take_over=True))
    run(built, store)
    assert [each.txid for each in exchanged] == [2]
    assert held(built) == RIGHT and verify(built, store).right
    record = read_transaction(store, "anew", 3)
    assert record is not None and [each.outcome for each in record.attempts] == ["failed", "committed"]
    assert "open for" in record.attempts[0].reason


def test_two_rebuilds_of_a_state_do_not_meet(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    refused: list[str] = []

    def second(progress: RebuildProgress) -> None:
        with pytest.raises(ConfigError, match="another rebuild of 'words' in topology 'anew' runs") as error:
            rebuild(built, store, state="words", take_over=True, timeout_s=0.01)
        refused.append(str(error.value))

    rebuild(built, store, state="words", take_over=False, told=second)
    assert len(refused) == 3


# --- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class Dies:
    """Lets the ``at``-th call of the patched functions die, before or after it has worked."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.calls, self.at, self.after = 0, at, after

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            mine = self.calls == self.at
            if mine and not self.after:
                raise Crash
            answer = function(*arguments, **named)
            if mine:
                raise Crash
            return answer

        return called


@pytest.mark.slow
def test_a_rebuild_that_dies_anywhere_goes_on_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: Often, seed: int
) -> None:
    """``make test-all`` dies at every call; ``make test`` at a part of them, which depends on the
    seed.
    """
    every, went_on = often(3, 1), 0
    for at in itertools.count(1 + seed % every, every):
        for after in (False, True):
            folder, store = tmp_path / f"{at}{after}", MemoryStore()
            folder.mkdir()
            run(counting(folder, Wrong(), words=InSteps), store)
            mended, dies = counting(folder, words=InSteps), Dies(at, after=after)
            with monkeypatch.context() as patch:
                patch.setattr(MemoryStore, "_apply_as", dies.wrap(MemoryStore._apply_as))
                for name in ("raise_header", "apply", "exchange", "remove", "prepare"):
                    patch.setattr(SqliteBackend, name, dies.wrap(getattr(SqliteBackend, name)))
                try:
                    rebuild(mended, store, state="words", take_over=True)
                except Crash:
                    pass
                else:
                    assert at > 20 and went_on > 5 // every, (at, went_on)
                    return
            assert held(mended) in ({"a": (3, 6)}, RIGHT)
            run(mended, store)
            found = rebuild(mended, store, state="words", take_over=True)
            went_on += found.resumed_at > 0
            assert (found.txid, held(mended)) == (3, RIGHT)
            assert undo(mended, store) == 3
            assert held(mended) == expected(ROWS[:4])


def test_another_version_of_the_code_begins_anew(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    rebuild(counting(tmp_path, Wrong()), store, state="words", take_over=False)
    lineage = rebuild_module.lineage_of
    monkeypatch.setattr(rebuild_module, "lineage_of", lambda topology: {**lineage(topology), "code": "other"})
    found = rebuild(built, store, state="words", take_over=False)
    assert (found.resumed_at, found.batches, found.has_other_code) == (0, 3, True)
    assert found.difference is not None and found.difference.difference_count == 0
    assert rebuild(built, store, state="words", take_over=False).resumed_at == 3


def test_a_copy_is_not_used_after_the_topology_began_anew(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    rebuild(built, store, state="words", take_over=False)
    reset_everything(built, store)
    run(built, store)
    found = rebuild(built, store, state="words", take_over=True)
    assert (found.resumed_at, held(built)) == (0, RIGHT)


def test_a_copy_is_not_used_after_a_transaction_of_it_was_taken_back(tmp_path: Path, store: MemoryStore) -> None:
    """The topology makes another batch of it, and goes on."""
    spout = OpaqueMemoryTransactionalSpout({0: [*ROWS]}, FIELDS, 2)
    built = counting(tmp_path, spout=spout)
    run(built, store)
    rebuild(built, store, state="words", take_over=False)
    undo(built, store, leave_out={"0": [4]})
    run(built, store)
    spout.append("0", ["e", 1])
    run(built, store)
    rows = [*ROWS[:4], ROWS[5], ["e", 1]]
    assert held(built) == expected(rows)
    found = rebuild(built, store, state="words", take_over=True)
    assert (found.resumed_at, held(built)) == (0, expected(rows))
    assert found.difference is not None and found.difference.difference_count == 0


@pytest.mark.parametrize("what", [undo, reset_everything])
def test_nothing_is_exchanged_if_the_topology_went_back_meanwhile(
    tmp_path: Path, store: MemoryStore, what: Callable[[Topology, MemoryStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    compared = rebuild_module._Rebuild._compared

    def went_back(self: Any) -> Any:
        found = compared(self)
        what(built, store)
        run(built, store)
        return found

    monkeypatch.setattr(rebuild_module._Rebuild, "_compared", went_back)
    with pytest.raises(RetryableError, match="was reset, or a transaction of it was taken back"):
        rebuild(built, store, state="words", take_over=True)
    assert held(built) == RIGHT
    monkeypatch.undo()
    assert rebuild(built, store, state="words", take_over=True).resumed_at == 0
    assert held(built) == RIGHT


def test_an_exchange_is_taken_for_one_that_happened_only_where_its_rows_took_the_place(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older exchange as of the same transaction has left former rows, and the rebuilt ones are
    gone: the command was killed before the next exchange, and again when it began anew.
    """
    run(counting(tmp_path, Wrong()), store)
    mended = counting(tmp_path)
    rebuild(counting(tmp_path, Wrong()), store, state="words", take_over=True)
    with monkeypatch.context() as patch:
        patch.setattr(SqliteBackend, "exchange", Dies(1, after=False).wrap(SqliteBackend.exchange))
        with pytest.raises(Crash):
            rebuild(mended, store, state="words", take_over=True)
    beside = SqliteBackend(tmp_path / "x.db", "words", Fields(word=str), Fields(count=int, total=int)).beside("rebuilt")
    assert beside.remove("anew")
    found = rebuild(mended, store, state="words", take_over=True)
    assert (found.resumed_at, found.batches, held(mended)) == (0, 3, RIGHT)


def test_an_exchange_that_other_code_has_made_is_recorded_and_its_rows_are_made_anew(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(counting(tmp_path, Wrong()), store)
    with monkeypatch.context() as patch:
        patch.setattr(SqliteBackend, "exchange", Dies(1, after=True).wrap(SqliteBackend.exchange))
        with pytest.raises(Crash):
            rebuild(counting(tmp_path, Wrong()), store, state="words", take_over=True)
    lineage = rebuild_module.lineage_of
    monkeypatch.setattr(rebuild_module, "lineage_of", lambda topology: {**lineage(topology), "code": "mended"})
    mended = counting(tmp_path)
    rebuild(mended, store, state="words", take_over=True)
    assert held(mended) == RIGHT
    (exchange,) = rebuild_module.read_exchanges(store, "anew")
    assert exchange.made_by["code"] == "mended"


def test_another_configuration_begins_anew(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    rebuild(built, store, {"app.factor": 1}, state="words", take_over=False)
    assert rebuild(built, store, {"app.factor": 2}, state="words", take_over=False).resumed_at == 0
    assert rebuild(built, store, {"app.factor": 2}, state="words", take_over=False).resumed_at == 3


def test_the_newest_transaction_keeps_its_own_rows_where_it_alone_is_not_recorded(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = counting(tmp_path)
    run(built, store)
    for txid in (1, 2, 3):
        store.apply([Delete(f"anew/history/{txid:03d}")])
    found = rebuild(built, store, state="words", take_over=True)
    assert (found.batches, found.txid, held(built)) == (2, 3, RIGHT)
    backend = built["words"].states[0].backend  # type: ignore[attr-defined]
    assert as_of(backend, backend.multi_get([("a",)]), 2) == [(True, (2, 4))]


def test_rows_of_a_state_that_may_count_twice_are_begun_anew_where_a_batch_was_begun(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path, state=NonTransactionalMapState, words=InSteps)
    run(built, store)
    for after in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(SqliteBackend, "apply", Dies(2, after=after).wrap(SqliteBackend.apply))
            with pytest.raises(Crash):
                rebuild(built, store, state="words", take_over=True)
        assert rebuild(built, store, state="words", take_over=True).resumed_at == 0
        assert held(built) == RIGHT


@pytest.mark.parametrize("state", ["words", "rows"])
def test_each_attempt_that_meets_an_exchange_is_repeated(tmp_path: Path, store: MemoryStore, state: str) -> None:
    """The next attempt has the same header as the fence that was closed for it."""
    met: list[int] = []

    def exchange() -> None:
        met.append(rebuild(counting(tmp_path), store, state=state, take_over=True).txid)
        if len(met) < 3:
            IN_COMMIT[3] = exchange

    built = counting(tmp_path, words=Exchanges)
    IN_COMMIT[3] = exchange
    run(built, store)
    assert met == [2] * 3
    assert held(built) == RIGHT and verify(built, store).right
    assert rows_in(ParquetTable(tmp_path / "rows")) == sorted(map(tuple, ROWS))


def test_rows_are_not_made_where_another_state_is(tmp_path: Path, store: MemoryStore) -> None:
    builder = TransactionalTopologyBuilder("beside", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2))
    for name in ("sums", "sums__rebuilt"):
        builder.set_bolt(name, Sums(state_at(tmp_path, name))).global_grouping("spout")
    built = builder.build()
    run(built, store)
    with pytest.raises(ConfigError, match="its rows would be made in table 'sums__rebuilt' .*, which is another state"):
        rebuild(built, store, state="sums", take_over=False)
    assert state_at(tmp_path, "sums__rebuilt").get("a") == 9


def test_a_partition_may_be_called_like_a_manifest(tmp_path: Path, store: MemoryStore) -> None:
    fields = Fields(_manifest_no=str, n=int)
    spout = OpaqueMemoryTransactionalSpout({0: [["a", 1], ["b", 2], ["a", 3]]}, fields, 1)
    builder = TransactionalTopologyBuilder("named", "spout", spout)
    table = ParquetTable(tmp_path / "rows", partition_by=["_manifest_no"])
    builder.set_bolt("rows", AppendCommitter(table)).global_grouping("spout")
    built = builder.build()
    run(built, store)
    for _ in range(3):
        rebuild(built, store, state="rows", take_over=True)
        assert sorted(table.to_table().column("n").to_pylist()) == [1, 2, 3]
    reset_everything(built, store)
    assert not list(table.path.glob("_ratchet/former-*")) and len(list(table.path.glob("_manifest.*"))) == 1
    run(built, store)
    assert sorted(table.to_table().column("n").to_pylist()) == [1, 2, 3]


def test_a_state_is_rebuilt_after_a_record_was_left_out(tmp_path: Path, store: MemoryStore) -> None:
    """Before the next run, too."""
    built = counting(tmp_path)
    run(built, store)
    undo(built, store, leave_out={"0": [4]})
    rebuild(built, store, state="words", take_over=True)
    run(built, store)
    assert held(built) == expected([*ROWS[:4], ROWS[5]])
    rebuild(built, store, state="words", take_over=True)
    assert held(built) == expected([*ROWS[:4], ROWS[5]])


def test_a_state_of_another_topology_and_what_is_not_ratchets_are_left_alone(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = counting(tmp_path)
    run(built, store)
    other = TransactionalTopologyBuilder("other", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2))
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    words = StateCommitter(state, ["word"], {"count": Count(), "total": Sum("n")})
    other.set_bolt("words", words).global_grouping("spout")
    with pytest.raises(ConfigError, match="belongs to topology 'anew', not 'other'"):
        rebuild(other.build(), store, state="words", take_over=True)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE words__former (mine TEXT)")
    for refused in (lambda: rebuild(built, store, state="words", take_over=True), lambda: clean(built, store, "words")):
        with pytest.raises(ConfigError, match="'words__former' of .* is not Ratchet's"):
            refused()
    assert held(built) == RIGHT


def test_rebuilt_rows_that_somebody_has_removed_or_changed_are_made_anew(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    for statement in ("DROP TABLE words__rebuilt", "ALTER TABLE words__rebuilt ADD COLUMN more TEXT"):
        rebuild(built, store, state="words", take_over=False)
        with sqlite3.connect(tmp_path / "x.db") as connection:
            connection.execute(statement)
        found = rebuild(built, store, state="words", take_over=False)
        assert found.resumed_at == 0 and found.difference is not None and found.difference.difference_count == 0


def test_a_driver_that_died_before_it_closed_a_transaction_has_to_close_it_first(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    with monkeypatch.context() as patch:
        save = TopologyDocuments.save

        def stuck(self: Any, change: Any, record: Any = None) -> None:
            if change.currtx == 4:
                raise ConfigError("pulled")
            save(self, change, record)

        patch.setattr(TopologyDocuments, "save", stuck)
        with pytest.raises(Exception, match="pulled"):
            run(built, store)
    with pytest.raises(ConfigError, match="transaction 3 was being closed when the last driver .* ended: run"):
        rebuild(built, store, state="words", take_over=True)
    run(built, store)
    assert rebuild(built, store, state="words", take_over=True).txid == 3


# --- what is refused ------------------------------------------------------------------------------


class Pairs(Sums):
    """Gives rows to the next committer."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self.collector = collector

    def finish_batch(self) -> None:
        super().finish_batch()
        for word, number in self.rows:
            self.collector.emit([word, number])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def test_states_that_depend_on_each_other_are_rebuilt_from_the_top_down(tmp_path: Path, store: MemoryStore) -> None:
    def built(bolt: Any) -> Topology:
        builder = TransactionalTopologyBuilder("anew", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2))
        builder.set_bolt("same", bolt).global_grouping("spout")
        builder.set_bolt("first", Pairs(state_at(tmp_path, "first"))).global_grouping("same")
        builder.set_bolt("second", Sums(state_at(tmp_path, "second"))).global_grouping("first")
        return builder.build()

    run(built(Wrong()), store)
    mended = built(Same())
    with pytest.raises(
        ConfigError, match="'second' gets rows from 'first', and 4 keys .* differ .*; rebuild 'first' first"
    ):
        rebuild(mended, store, state="second", take_over=True)
    assert rebuild(mended, store, state="first", take_over=True).below == ["second"]
    found = rebuild(mended, store, state="second", take_over=True)
    assert found.former is not None and [each.difference_count for each in found.above] == [0]
    assert verify(mended, store).right


def test_a_bolt_with_two_states_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    two = topology_of(ROWS, Sums(state_at(tmp_path, "one"), state_at(tmp_path, "two")))
    with pytest.raises(ConfigError, match="bolt 'bolt' keeps 2 states"):
        rebuild(two, store, state="one' of " + str(tmp_path / "x.db"), take_over=False)


def test_a_state_that_cannot_exchange_its_content_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    with pytest.raises(ConfigError, match="has committed no transaction yet"):
        rebuild(built, store, state="words", take_over=False)
    run(built, store)
    delta = TransactionalTopologyBuilder("delta", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2))
    delta.set_bolt("rows", AppendCommitter(DeltaLakeTable(tmp_path / "delta"))).global_grouping("spout")
    with pytest.raises(ConfigError, match="delta cannot be rebuilt: it cannot exchange its content"):
        rebuild(delta.build(), store, state="rows", take_over=False)
    long = counting(tmp_path, backend=SqliteBackend(tmp_path / "x.db", "w" * 60))
    with pytest.raises(Exception, match="would be too long; give the table one of 54 letters"):
        rebuild(long, store, state="words", take_over=False)


def test_a_source_that_does_not_reach_back_is_said_before_anything_is_done(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    reset_positions(built, store)
    run(built, store)
    store.apply([Delete("anew/history/001")])
    with pytest.raises(Unverifiable, match="its positions were reset"):
        rebuild(built, store, state="words", take_over=True)
    assert held(built) == {word: (2 * count, 2 * total) for word, (count, total) in RIGHT.items()}


def test_a_topology_that_moves_on_too_fast_keeps_its_rows(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    monkeypatch.setattr(rebuild_module, "TAKE_OVER_TIMEOUT_S", -1.0)
    monkeypatch.setattr(rebuild_module._Rebuild, "_exchanged", lambda self, *rest: False)
    with pytest.raises(RetryableError, match="moves on faster than its copy follows"):
        rebuild(built, store, state="words", take_over=True)
    monkeypatch.undo()
    assert rebuild(built, store, state="words", take_over=True).resumed_at == 3


# --- tables of files ------------------------------------------------------------------------------


def test_only_the_files_beside_a_table_are_removed_for_a_rebuild(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    table = ParquetTable(tmp_path / "rows")
    with pytest.raises(InvariantViolation, match="no table beside another one"):
        table.remove(built.id)
    assert rows_in(table)


def rows_in(table: ParquetTable) -> list[Any]:
    return sorted(zip(*(table.to_table().column(name).to_pylist() for name in ("word", "n")), strict=True))


@pytest.mark.parametrize("partition_by", [(), ("word",)])
def test_a_table_of_files_is_made_anew_and_takes_over(
    tmp_path: Path, store: MemoryStore, partition_by: tuple[str, ...]
) -> None:
    def made(bolt: Any) -> Topology:
        builder = TransactionalTopologyBuilder("filed", "spout", spout)
        builder.set_bolt("same", bolt).shuffle_grouping("spout")
        rows = AppendCommitter(ParquetTable(tmp_path / "rows", partition_by=partition_by))
        builder.set_bolt("rows", rows).global_grouping("same")
        return builder.build()

    spout = OpaqueMemoryTransactionalSpout({0: [*ROWS]}, FIELDS, 2)
    table, right = ParquetTable(tmp_path / "rows"), sorted(map(tuple, ROWS))
    run(made(Wrong()), store)
    wrong = rows_in(table)
    mended = made(Same())
    found = rebuild(mended, store, state="rows", take_over=False)
    assert found.difference is not None and found.difference.difference_count == 5
    assert rows_in(table) == wrong == [("a", 1), ("a", 2), ("a", 3)]
    found = rebuild(mended, store, state="rows", take_over=True)
    assert found.former == f"table {tmp_path / 'rows'}, as it was before a rebuild"
    assert rows_in(table) == right and verify(mended, store).right
    former = ParquetTable(tmp_path / "rows")
    former.become_beside("former")
    assert rows_in(former) == wrong
    assert table.vacuum(older_than_s=0) == 0 and rows_in(former) == wrong
    for row in (["e", 7], ["f", 8], ["g", 9]):
        spout.append("0", row)
    run(mended, store)
    assert undo(mended, store) == 5
    assert rows_in(table) == sorted([*right, ("e", 7), ("f", 8)])
    run(mended, store)
    assert verify(mended, store).right
    table.compact()
    assert rows_in(table) == sorted([*right, ("e", 7), ("f", 8), ("g", 9)])
    assert clean(mended, store, "rows") == [found.former] and clean(mended, store, "rows") == []
    table.vacuum(older_than_s=0)
    assert rows_in(table) == sorted([*right, ("e", 7), ("f", 8), ("g", 9)])
    on_disk = {path.relative_to(table.path) for path in (table.path / "_ratchet" / "files").iterdir()}
    left = on_disk - {Path(each.path) for each in table.files()}
    assert {path.name.split("-")[1] for path in left} <= {"5"}  # of the attempt that was taken back
    assert not (tmp_path / "rows__rebuilt").exists()


def test_the_newest_transaction_is_taken_back_from_rebuilt_files(tmp_path: Path, store: MemoryStore) -> None:
    run(counting(tmp_path, Wrong()), store)
    mended, table = counting(tmp_path), ParquetTable(tmp_path / "rows")
    for state in ("rows", "words"):
        rebuild(mended, store, state=state, take_over=True)
    assert verify(mended, store).right
    assert undo(mended, store) == 3
    assert rows_in(table) == sorted(map(tuple, ROWS[:4])) and held(mended) == expected(ROWS[:4])
    run(mended, store)
    assert verify(mended, store).right and rows_in(table) == sorted(map(tuple, ROWS))


@pytest.mark.slow
def test_a_topology_goes_on_while_its_files_are_exchanged(tmp_path: Path, store: MemoryStore, often: Often) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 20)
    with submit(counting(tmp_path, spout=spout), store=store, executor="local") as running:
        with Feed(spout) as feed:
            running.wait_for_commit(5, PATIENCE_S)
            copy = counting(tmp_path, spout=spout)
            for _ in range(often(2, 3)):
                found = rebuild(copy, store, state="rows", take_over=True)
                running.wait_for_commit(found.txid + 3, PATIENCE_S)
        running.wait_until_caught_up(PATIENCE_S)
    assert rows_in(ParquetTable(tmp_path / "rows")) == sorted(map(tuple, feed.rows))
    assert verify(copy, store).right


@pytest.mark.slow
def test_an_exchange_of_files_that_dies_anywhere_is_whole_or_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: Often, seed: int
) -> None:
    """``make test-all`` dies at every call; ``make test`` at a part of them, which depends on the
    seed. Of an odd number, so that it dies before calls and after calls.
    """
    every = often(7, 1)
    for at in itertools.count(1 + seed % every, every):
        folder, store = tmp_path / str(at), MemoryStore()
        folder.mkdir()
        run(counting(folder, Wrong()), store)
        mended, table, dies = counting(folder), ParquetTable(folder / "rows"), Dies(at, after=at % 2 == 0)
        with monkeypatch.context() as patch:
            for name in ("write_once", "make_folder", "sync"):
                for module in (folders_module, parquet_module):
                    patch.setattr(module, name, dies.wrap(getattr(module, name)))
            patch.setattr(os, "link", dies.wrap(os.link))
            try:
                rebuild(mended, store, state="rows", take_over=True)
            except Crash:
                pass
            else:
                assert at > 60
                return
        assert rows_in(table) in ([("a", 1), ("a", 2), ("a", 3)], sorted(map(tuple, ROWS)))
        run(mended, store)
        rebuild(mended, store, state="rows", take_over=True)
        assert rows_in(table) == sorted(map(tuple, ROWS)), at


# --- what others have attached --------------------------------------------------------------------


def test_indexes_and_views_of_a_sqlite_table_stay_and_a_trigger_is_in_the_way(
    tmp_path: Path, store: MemoryStore
) -> None:
    run(counting(tmp_path, Wrong()), store)
    mended = counting(tmp_path)
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    connection.execute('CREATE INDEX "by total" ON words (total)')
    connection.execute("CREATE VIEW large AS SELECT word FROM words WHERE total > 5")
    connection.execute("CREATE TRIGGER told AFTER UPDATE ON words BEGIN SELECT 1; END")
    with pytest.raises(ConfigError, match="would stay with the former table: trigger told; drop it"):
        rebuild(mended, store, state="words", take_over=True)
    connection.execute("DROP TRIGGER told")
    rebuild(mended, store, state="words", take_over=True)
    assert held(mended) == RIGHT
    assert connection.execute("SELECT word FROM large ORDER BY word").fetchall() == [("a",), ("d",)]
    assert connection.execute("SELECT count(*) FROM words_live").fetchall() == [(4,)]
    assert connection.execute("SELECT tbl_name FROM sqlite_master WHERE name = 'by total'").fetchall() == [("words",)]
    connection.close()


@pytest.mark.integration
def test_rights_indexes_and_views_of_a_postgres_table_stay(tmp_path: Path, store: MemoryStore, postgres: Any) -> None:
    table, reader = f"words_{uuid.uuid4().hex[:8]}", f"reader_{uuid.uuid4().hex[:8]}"
    run(counting(tmp_path, Wrong(), backend=PostgresBackend(postgres.dsn, table)), store)
    mended = counting(tmp_path, backend=PostgresBackend(postgres.dsn, table))
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f'CREATE INDEX ON "{table}" (total)')
        connection.execute(f'CREATE ROLE "{reader}"')
        connection.execute(f'GRANT SELECT ON "{table}" TO "{reader}" WITH GRANT OPTION')
        connection.execute(f'CREATE VIEW "{table}_two" AS SELECT word FROM "{table}_live"')
        connection.execute(f'CREATE VIEW "{table}_three" AS SELECT word FROM "{table}"')
        with pytest.raises(ConfigError, match=f"would stay with the former table: view {table}_three"):
            rebuild(mended, store, state="words", take_over=True)
        assert held(mended) == {"a": (3, 6)}
        connection.execute(f'DROP VIEW "{table}_three"')
        rebuild(mended, store, state="words", take_over=True)
        assert held(mended) == RIGHT
        assert connection.execute(f'SELECT count(*) FROM "{table}_two"').fetchone() == (4,)
        right = "SELECT has_table_privilege(%s, %s, 'SELECT WITH GRANT OPTION')"
        assert connection.execute(right, (reader, table)).fetchone() == (True,)
        found = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = %s", (table,)).fetchall()
        assert any("(total)" in definition for (definition,) in found)
        clean(mended, store, "words")
        connection.execute(f'DROP TABLE "{table}" CASCADE')
        connection.execute(f'DROP ROLE "{reader}"')
    mended["words"].states[0].close()


@pytest.mark.integration
def test_what_would_stay_with_a_postgres_table_is_named_before_anything_is_done(
    tmp_path: Path, store: MemoryStore, postgres: Any
) -> None:
    table, role = f"words_{uuid.uuid4().hex[:8]}", f"role_{uuid.uuid4().hex[:8]}"
    built = counting(tmp_path, backend=PostgresBackend(postgres.dsn, table))
    run(built, store)
    live = f"{table}_live"
    ways = {
        f"view {live}": (
            f'CREATE OR REPLACE VIEW "{live}" AS SELECT word, count, total FROM "{table}" WHERE NOT _deleted AND count > 1',
            f'DROP VIEW "{live}"',
        ),
        "rule told": (f'CREATE RULE told AS ON DELETE TO "{table}" DO ALSO NOTHING', f'DROP RULE told ON "{table}"'),
        "row level security": (
            f'ALTER TABLE "{table}" ENABLE ROW LEVEL SECURITY',
            f'ALTER TABLE "{table}" DISABLE ROW LEVEL SECURITY',
        ),
        "its replica identity": (
            f'ALTER TABLE "{table}" REPLICA IDENTITY FULL',
            f'ALTER TABLE "{table}" REPLICA IDENTITY DEFAULT',
        ),
        "its storage parameters": (
            f'ALTER TABLE "{table}" SET (fillfactor = 50)',
            f'ALTER TABLE "{table}" RESET (fillfactor)',
        ),
        f"its owner, {role}": (
            f'ALTER TABLE "{table}" OWNER TO "{role}"',
            f'ALTER TABLE "{table}" OWNER TO CURRENT_USER',
        ),
    }
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f'CREATE ROLE "{role}"')
        for named, (statement, undone) in ways.items():
            connection.execute(statement)
            with pytest.raises(ConfigError, match=f"cannot be exchanged, because of .*{named}"):
                rebuild(built, store, state="words", take_over=True)
            connection.execute(undone)
        connection.execute(f'COMMENT ON TABLE "{table}" IS $$it\'s mine$$')
        connection.execute(f'GRANT SELECT ON "{table}" TO "{role}"')
        connection.execute(f'ALTER DEFAULT PRIVILEGES GRANT INSERT ON TABLES TO "{role}"')
        rebuild(built, store, state="words", take_over=False)
        connection.execute(f'CREATE INDEX ON "{table}" (count)')
        with pytest.raises(ConfigError, match="an index that was made or dropped after the rebuild began"):
            rebuild(built, store, state="words", take_over=True)
        clean(built, store, "words")
        rebuild(built, store, state="words", take_over=True)
        rights = "SELECT has_table_privilege(%s, %s, 'SELECT'), has_table_privilege(%s, %s, 'INSERT')"
        assert connection.execute(rights, (role, table, role, table)).fetchone() == (True, False)
        comment = connection.execute("SELECT obj_description(to_regclass(%s))", (f'"{table}"',)).fetchone()
        assert comment == ("it's mine",)
        connection.execute(f'ALTER DEFAULT PRIVILEGES REVOKE INSERT ON TABLES FROM "{role}"')
        clean(built, store, "words")
        connection.execute(f'DROP TABLE "{table}" CASCADE')
        connection.execute(f'DROP ROLE "{role}"')
    built["words"].states[0].close()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_a_topology_over_any_store_goes_on_while_its_state_is_exchanged(
    kind: str, tmp_path: Path, store: MemoryStore, name: str, request: pytest.FixtureRequest, often: Often
) -> None:
    server = request.getfixturevalue("postgres" if kind == "postgres" else "redis_server")
    table = name.replace("-", "_")[:40]

    def backend() -> Any:
        return PostgresBackend(server.dsn, table) if kind == "postgres" else RedisBackend(server.url, table)

    spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 5)
    with submit(counting(tmp_path, spout=spout, backend=backend()), store=store, executor="local") as running:
        with Feed(spout) as feed:
            running.wait_for_commit(10, PATIENCE_S)
            copy = counting(tmp_path, spout=spout, backend=backend())
            for _ in range(often(2, 3)):
                found = rebuild(copy, store, state="words", take_over=True)
                assert found.difference is not None and found.difference.difference_count == 0
                running.wait_for_commit(found.txid + 3, PATIENCE_S)
        running.wait_until_caught_up(PATIENCE_S)
    assert held(copy) == expected(feed.rows)
    assert verify(copy, store).right
    clean(copy, store, "words")
    copy["words"].states[0].close()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_what_differs_and_changes_nothing_without_yes(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(counting(tmp_path, Wrong()), store)
    mended = counting(tmp_path)
    done = command(monkeypatch, store, "words", app=app, topology=mended)
    assert done.exit_code == 3
    assert done.stdout.splitlines()[0].endswith("4 keys compared with the rebuilt ones, 4 differ")
    assert done.stdout.splitlines()[-1] == "nothing was exchanged; add --yes to put the rebuilt rows in place"
    assert held(mended) == {"a": (3, 6)}
    done = command(monkeypatch, store, "words", "--yes", "--json", app=app, topology=mended)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["type"], told["txid"], told["resumed_at"]) == (0, "rebuild", 3, 3)
    assert held(mended) == RIGHT
    (exchange,) = rebuild_module.read_exchanges(store, "anew")
    assert (exchange.component_id, exchange.txid, exchange.differed) == ("words", 3, 4)
    done = command(monkeypatch, store, "words", app=app, topology=mended)
    assert done.exit_code == 0 and "all agree" in done.stdout
    done = command(monkeypatch, store, "words", "--clean", app=app, topology=mended)
    assert done.exit_code == 0 and done.stdout.count("removed: ") == 2
    done = command(monkeypatch, store, "words", "--clean", "--json", app=app, topology=mended)
    assert json.loads(done.stdout) == {"type": "cleaned", "removed": []}


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.integration
def test_driver_and_rebuild_are_killed_and_every_count_is_right(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, seed: int
) -> None:
    """Both run as processes, while records keep coming; whichever is killed is started again."""
    chance, kills = random.Random(seed), 30
    topic, sent = topics.create(name, 2), Counter[bytes]()
    words = OverKafka("tests.kit.replays:kafka_topology", servers, topic, tmp_path / "x.db")

    def send(count: int) -> None:
        for part in range(2):
            values = [f"w{chance.randrange(30)}".encode() for _ in range(count)]
            topics.send(topic, values, part)
            sent.update(values)

    send(2_000)
    zookeeper = [f"--set={key}={value}" for key, value in words.config.items()]
    driver = RunProcess(tmp_path / "driver.log", words.where, {**words.settings, **words.config}, executor="local")
    driver.start()
    rebuilt = 0
    try:
        with contextlib.closing(store_of(Config.of(words.config))) as store:
            wait_for(lambda: committed_txid(store, name) > 0, what="the first commit")
            for _ in range(kills):
                send(300)
                rebuilt += words.killed_after(chance.uniform(0.8, 4.0), "rebuild", "words", "--yes")
                if chance.random() < 0.5:
                    driver.kill()
                    driver.start()
            # a rebuild is refused while the transaction that a killed driver left is not closed
            left = committed_txid(store, name)
            send(300)
            wait_for(lambda: committed_txid(store, name) > left, what="a commit of the last driver")
        answer = words.ratchet("rebuild", "words", "--yes")
        assert answer.returncode == 0, answer.stderr
        assert "in place; the former ones are kept" in answer.stdout
    finally:
        driver.end()
    words.catch_up(kafka_topology(words.settings))
    with sqlite3.connect(words.database) as connection:
        found = dict(connection.execute("SELECT word, count FROM words WHERE NOT _deleted"))
    assert found == {word.decode(): count for word, count in sent.items()}
    assert words.ratchet("verify").returncode == 0
    history = call("ratchet", "history", topic, *zookeeper).stdout.splitlines()
    assert "the rows of 'words' were exchanged for rebuilt ones" in history[-1]
    print(f"seed {seed}: {kills} kills, {rebuilt} exchanges before the last one")
