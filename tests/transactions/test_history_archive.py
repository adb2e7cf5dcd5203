"""The record of each closed transaction is kept for good, exactly once."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import Config, Topology, TransactionalTopologyBuilder, submit
from framework.commands import topologies
from framework.commands.topologies import history_app
from framework.errors import ConfigError, RatchetError, RetryableError, StaleWriterError
from framework.preflight import preflight
from framework.testing.conformance.backend_test_helpers import Faulty
from framework.transactions import MemoryStore, committed_txid
from framework.transactions import documents as documents_module
from framework.transactions import history_archive as keeping_module
from framework.transactions.documents import read_incarnation, read_transaction
from framework.transactions.history_archive import Copying, HistoryTarget, history_target
from framework.transactions.reset import reset_everything
from framework.transactions.undo import undo
from integration import PostgresServer
from sinks import MemoryBackend, SqliteBackend
from sinks.transaction_history_table import KEY, VALUE, HistoryTable, history_table
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.own_logs import own_logs
from tests.kit.replays import FIELDS, Sums, run, state_at
from tests.kit.waiting import PATIENCE_S, wait_for


class Kept:
    """A topology with a row per transaction, and the table of its records."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.store = MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 1)
        self.address = address or f"sqlite:{folder / 'history.db'}"
        self.target = history_table(self.address, "kept")
        self.memory = MemoryBackend("records")
        self.memory.bind(KEY, VALUE)

    def build(self) -> Topology:
        builder = TransactionalTopologyBuilder("kept", "spout", self.spout)
        builder.set_bolt("sums", Sums(state_at(self.folder))).global_grouping("spout")
        return builder.build()

    @property
    def settings(self) -> dict[str, Any]:
        return {"topology.history.table": self.address}

    def feed(self, transactions: int) -> None:
        for number in range(transactions):
            self.spout.append(0, ["dog", number])

    def close_transactions(self, transactions: int) -> None:
        """So many more are closed, and not copied."""
        self.feed(transactions)
        run(self.build(), self.store)

    def copying(self, target: HistoryTarget | None = None, epoch: int = 1) -> Copying:
        incarnation = read_incarnation(self.store, "kept")
        return Copying(self.store, "kept", target or HistoryTable(self.memory), incarnation, epoch)

    def held(self, target: HistoryTarget | None = None) -> dict[int, Any]:
        """By txid, as far as the topology has committed."""
        incarnation = read_incarnation(self.store, "kept")
        reader = target or HistoryTable(self.memory)
        found = {txid: reader.read(incarnation, txid) for txid in range(1, committed_txid(self.store, "kept") + 5)}
        return {txid: each.record for txid, each in found.items() if each is not None}

    def recorded(self) -> dict[int, Any]:
        committed = committed_txid(self.store, "kept")
        return {txid: read_transaction(self.store, "kept", txid) for txid in range(1, committed + 1)}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.target.close()


def test_each_closed_transaction_has_its_record_in_the_table_after_each_run(kept: Kept) -> None:
    for more in (3, 2):
        kept.feed(more)
        run(kept.build(), kept.store, kept.settings)
        assert kept.held(kept.target) == kept.recorded()
    with sqlite3.connect(kept.folder / "history.db") as connection:
        query = "SELECT txid, until_txid, attempts, closed_at IS NOT NULL, record FROM history_kept_live ORDER BY txid"
        rows = connection.execute(query).fetchall()
    connection.close()
    assert [row[:4] for row in rows] == [(txid, txid, 1, 1) for txid in range(1, 6)]
    assert '"source_rows": 1' in rows[0][4]


@pytest.mark.integration
def test_a_table_of_postgresql_keeps_them_too(tmp_path: Path, postgres: PostgresServer, name: str) -> None:
    kept = Kept(tmp_path, f"{postgres.dsn}#{name.replace('-', '_')}")
    kept.feed(3)
    run(kept.build(), kept.store, kept.settings)
    assert list(kept.held(kept.target)) == [1, 2, 3]
    assert kept.held(kept.target) == kept.recorded()
    kept.target.close()


# --- crashes ---


@pytest.mark.parametrize("after", [False, True], ids=["nothing done", "answer lost"])
def test_a_crash_at_each_write_neither_loses_nor_doubles_a_record(
    kept: Kept, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying ends at its call number 0, 1, 2, ...; another one goes on from what is there. It
    has nothing of the first but the table."""
    monkeypatch.setattr(keeping_module, "PAGE", 2)
    kept.close_transactions(5)
    crashed = 0
    for call in itertools.count():
        kept.memory = MemoryBackend(f"records {call}")
        kept.memory.bind(KEY, VALUE)
        written: list[int] = []
        faulty = Faulty(kept.memory)
        faulty.fails_at, faulty.after = call, after
        try:
            kept.copying(HistoryTable(faulty)).catch_up()
        except RatchetError:
            crashed += 1
            written = list(kept.held())
        else:
            break
        assert written == list(range(1, len(written) + 1))  # in order: no hole that a later one is behind
        kept.copying(epoch=2).catch_up()
        assert kept.held() == kept.recorded()
        assert len(kept.memory.items()) == 5
    assert crashed >= 3 * 4  # pages, calls


def test_a_copying_that_failed_goes_on_by_itself(kept: Kept) -> None:
    kept.close_transactions(2)
    faulty = Faulty(kept.memory)
    copying = kept.copying(HistoryTable(faulty))
    copying.catch_up()
    kept.close_transactions(1)
    for faulty.fails_at in range(4):
        faulty.calls, faulty.after = 0, True
        with pytest.raises(RetryableError):
            copying.catch_up()
        kept.close_transactions(1)
    copying.catch_up()
    assert kept.held() == kept.recorded() and len(kept.held()) == 7


def test_a_former_leader_cannot_write_once_a_later_one_has(kept: Kept) -> None:
    kept.close_transactions(2)
    former, later = kept.copying(epoch=1), kept.copying(epoch=2)
    former.catch_up()
    kept.close_transactions(1)
    later.catch_up()
    before = kept.memory.items()
    kept.close_transactions(1)
    for _ in range(2):  # it had begun; it begins again
        with pytest.raises(StaleWriterError):
            former.catch_up()
    assert kept.memory.items() == before
    later.catch_up()
    assert kept.held() == kept.recorded()


def test_a_leader_writes_when_a_former_one_was_in_the_middle_of_it(kept: Kept) -> None:
    """The former one has raised the header, and writes its rows after the later one has begun."""
    kept.close_transactions(3)

    class Stalled(Faulty):
        def multi_put(self, *arguments: Any) -> None:
            kept.copying(epoch=2).catch_up()
            super().multi_put(*arguments)

    with pytest.raises(StaleWriterError):
        kept.copying(HistoryTable(Stalled(kept.memory))).catch_up()
    assert kept.held() == kept.recorded()
    assert {row.stamp.epoch for row in kept.memory.items().values()} == {2}


# --- a past that changes, or is gone ---


@pytest.mark.parametrize("copied_between", [True, False])
def test_a_transaction_that_was_taken_back_has_the_record_of_its_last_life(kept: Kept, copied_between: bool) -> None:
    kept.close_transactions(3)
    kept.copying().catch_up()
    assert undo(kept.build(), kept.store, 10) == 3
    copying = kept.copying(epoch=2)
    if copied_between:
        copying.catch_up()
        assert [each.outcome for each in kept.held()[3].attempts] == ["undone"]
        assert kept.held()[3].closed_at is None
    kept.close_transactions(2)
    copying.catch_up()
    assert [each.outcome for each in kept.held()[3].attempts] == ["undone", "committed"]
    assert kept.held() == kept.recorded() and len(kept.memory.items()) == 5


def test_a_topology_that_is_begun_anew_has_records_of_its_own(kept: Kept) -> None:
    kept.close_transactions(3)
    former = kept.copying()
    former.catch_up()
    reset_everything(kept.build(), kept.store, 10)
    kept.spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 1)
    kept.close_transactions(2)
    kept.copying(epoch=2).catch_up()
    assert list(kept.held()) == [1, 2] and kept.held() == kept.recorded()
    assert len(kept.memory.items()) == 5
    with pytest.raises(StaleWriterError):
        former._newest = None
        former.catch_up()


def test_what_the_store_no_longer_has_is_a_gap_that_says_so(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents_module, keeping_module):
        monkeypatch.setattr(module, "RECORDS_MAX", 5)
    kept.close_transactions(2)
    kept.copying().catch_up()
    kept.close_transactions(9)
    with own_logs() as logs:
        kept.copying(epoch=2).catch_up()
    assert [(each["event"], each["txid"], each["until_txid"]) for each in logs] == [("history.gap", 3, 6)]
    held = kept.held()
    assert {txid: each is not None for txid, each in held.items()} == {
        **dict.fromkeys((1, 2), True),
        3: False,
        **dict.fromkeys(range(7, 12), True),
    }
    gap = HistoryTable(kept.memory).read(read_incarnation(kept.store, "kept"), 3)
    assert gap is not None and (gap.txid, gap.until_txid, gap.record) == (3, 6, None)


def test_a_record_of_a_life_that_was_taken_back_and_is_gone_becomes_a_gap(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (documents_module, keeping_module):
        monkeypatch.setattr(module, "RECORDS_MAX", 5)
    kept.close_transactions(3)
    kept.copying().catch_up()
    undo(kept.build(), kept.store, 10)
    kept.close_transactions(8)
    kept.copying(epoch=2).catch_up()
    held = kept.held()
    assert held[3] is None and [txid for txid, each in held.items() if each is None] == [3]


# --- a run ---


class Away(Faulty):
    """A table that does not answer as long as ``away``."""

    away = True

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self.away:
            raise RetryableError("the table is on holiday")
        return super()._call(name, *arguments, **options)

    def prepare(self, topology_id: str) -> Any:
        if self.away:
            raise RetryableError("the table is on holiday")
        return super().prepare(topology_id)


def test_a_target_that_is_away_stops_nothing_and_is_caught_up_with(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "RETRY_S", 0.01)
    away = Away(kept.memory)
    monkeypatch.setattr("framework.submission.history_target", lambda config, topology_id: HistoryTable(away))
    kept.feed(3)
    with submit(kept.build(), store=kept.store, executor="local") as running:
        running.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: running.status().history_waiting is not None)
        assert "history waits: the table is on holiday" in running.status().progress_line(0.0)
        away.away = False
        wait_for(lambda: running.status().history_waiting is None)
        assert kept.held() == kept.recorded() and len(kept.held()) == 3
        assert "history" not in running.status().progress_line(0.0)
        kept.feed(1)
        running.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: len(kept.held()) == 4)


def test_a_place_that_cannot_be_used_is_refused_before_the_start(kept: Kept, tmp_path: Path) -> None:
    SqliteBackend(tmp_path / "history.db", "history_kept", KEY, VALUE).prepare("another")
    with pytest.raises(ConfigError, match="history_kept.*belongs to topology 'another'"):
        submit(kept.build(), kept.settings, store=kept.store, executor="local")
    findings = {each.subject: each for each in preflight(kept.build(), Config.of(kept.settings), "local", False)}
    assert isinstance(findings["history"].error, ConfigError)
    with pytest.raises(ConfigError, match="no address of a table: write sqlite:PATH"):
        submit(kept.build(), {"topology.history.table": "mysql://host/db"}, store=kept.store, executor="local")


@pytest.mark.parametrize(
    ("address", "location"),
    [
        ("sqlite:/a/b.db", "table 'history_word_count' of /a/b.db"),
        ("sqlite:///a/b.db#mine", "table 'mine' of /a/b.db"),
        ("postgresql://u@host:5/db#mine", "table 'mine' of PostgreSQL at host:5/db"),
    ],
)
def test_an_address_names_the_store_and_the_table(address: str, location: str) -> None:
    assert history_table(address, "word-count").location == location


def test_a_password_in_the_address_is_shown_to_nobody() -> None:
    config = Config.of({"topology.history.table": "postgresql://u:hunter2@host/db"})
    assert "topology.history.table" not in config.for_components()
    assert "hunter2" not in str(config.shown())
    target = history_target(config, "kept")
    assert target is not None and "hunter2" not in target.location


# --- the command ---


def test_the_command_finds_in_the_table_what_the_store_has_dropped(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    for module in (documents_module, keeping_module):
        monkeypatch.setattr(module, "RECORDS_MAX", 5)
    kept.close_transactions(2)
    kept.feed(5)
    run(kept.build(), kept.store, kept.settings)
    kept.close_transactions(7)
    run(kept.build(), kept.store, kept.settings)
    monkeypatch.setattr(topologies, "store_of", lambda settings, observes: kept.store)
    monkeypatch.setattr(kept.store, "close", lambda: None)

    def ask(*words: str, table: str = kept.address) -> Any:
        zookeeper = "transactional.zookeeper.servers=127.0.0.1:1"
        settings = ["--set", zookeeper, *(["--set", f"topology.history.table={table}"] if table else [])]
        return CliRunner().invoke(history_app, ["kept", *settings, *words], catch_exceptions=False)

    assert read_transaction(kept.store, "kept", 5) is None
    found = ask("--txid", "5")
    assert found.exit_code == 0 and found.stdout.startswith("transaction 5, 1 attempts, plan ")
    assert ask("--txid", "14").stdout.startswith("transaction 14, ")
    gone = ask("--txid", "8")
    assert gone.exit_code == 2
    assert "not in table 'history_kept' of" in gone.stderr and "which lacks transactions 8 to 9" in gone.stderr
    without = ask("--txid", "5", table="")
    assert without.exit_code == 2 and "longer ago than a thousand transactions" in without.stderr


def test_without_the_key_nothing_is_kept(kept: Kept) -> None:
    assert history_target(Config.of({}), "kept") is None


def test_no_part_of_a_password_is_taken_for_the_name_of_a_table_and_shown() -> None:
    with pytest.raises(ConfigError, match="%23 for #") as refused:
        history_table("postgresql://u:12#s3cret@host/db", "kept")
    assert "s3cret" not in str(refused.value)
