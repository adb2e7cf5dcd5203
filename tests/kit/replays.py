"""Topologies over an in-memory source that are run and replayed: by the function, and by the
command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from framework import (
    BaseBasicBolt,
    BaseTransactionalBolt,
    Committer,
    Fields,
    Topology,
    TransactionalTopologyBuilder,
    submit,
)
from framework.commands import loading
from framework.commands.replay import app as replay_app
from framework.inspect.replay import ReplayReport, Watch, plan_to_replay, replay
from framework.observe import TransactionRecord
from framework.topology import Change, FencedState
from framework.transactions import CoordinationStore, MemoryStore
from integration import EmbeddedServers
from sinks import Count, MapState, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, OpaqueMemoryTransactionalSpout, TextCodec
from tests.kit.command import Answer, call
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)
KEY, VALUE = Fields(word=str), Fields(v=int)


class Sums(BaseTransactionalBolt, Committer):
    """Adds numbers per word, times its factor, in each of its states. -1 deletes the word."""

    factor = 1

    def __init__(self, *kept: MapState) -> None:
        self.kept = list(kept)

    def states(self) -> Sequence[FencedState]:
        return self.kept

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt, self.rows = batch_id, list[tuple[str, int]]()

    def execute(self, tup: Any) -> None:
        self.rows.append((tup["word"], tup["n"]))

    def finish_batch(self) -> None:
        for each in self.states():
            assert isinstance(each, MapState)
            each.begin_commit(self.attempt)
            for word, number in self.rows:
                self.take(each, word, number)
            each.commit(self.attempt)

    def take(self, state: MapState, word: str, number: int) -> None:
        if number == -1:
            state.delete([word])
        else:
            state.multi_update([word], [lambda value: (value or 0) + number * self.factor])


class Same(BaseBasicBolt):
    """Emits what it gets."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], tup["n"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def state_at(folder: Path, name: str = "sums") -> OpaqueMapState:
    return OpaqueMapState(SqliteBackend(folder / "x.db", name, KEY, VALUE))


def topology_of(rows: Sequence[Sequence[Any]], bolt: Any, *, name: str = "replayed", batch: int = 1) -> Topology:
    """The spout and one bolt, ``bolt``; a batch per row, by default."""
    builder = TransactionalTopologyBuilder(name, "spout", OpaqueMemoryTransactionalSpout({0: [*rows]}, FIELDS, batch))
    builder.set_bolt("bolt", bolt).global_grouping("spout")
    return builder.build()


def run(built: Topology, store: CoordinationStore, config: Mapping[str, Any] | None = None) -> None:
    with submit(built, config, store=store, executor="local") as running:
        running.wait_until_caught_up(PATIENCE_S)


def replayed(built: Topology, store: CoordinationStore, txid: int, watch: Watch | None = None) -> ReplayReport:
    return replay(built, store, planned=plan_to_replay(store, built, txid), watch=watch)


def told(changes: Sequence[Change]) -> dict[Any, bool | None]:
    return {each.key: each.agrees for each in changes}


def only(records: Sequence[TransactionRecord]) -> Callable[..., TransactionRecord | None]:
    """In place of ``read_transaction``: no others are recorded any more."""
    return lambda store, topology_id, txid: {each.txid: each for each in records}.get(txid)


def command(
    monkeypatch: pytest.MonkeyPatch,
    store: MemoryStore,
    *words: str,
    app: typer.Typer = replay_app,
    **named: Topology | Callable[[], Topology],
) -> Result:
    """``ratchet replay``, or the command of ``app``, for the ``topology`` among those named;
    ``own:NAME`` is the name of the others."""
    module = types.ModuleType("own")
    vars(module).update(named)
    monkeypatch.setitem(sys.modules, "own", module)
    monkeypatch.setattr(loading, "store_of", lambda settings: store)
    monkeypatch.setattr(store, "close", lambda: None)
    return CliRunner().invoke(
        app, ["own:topology", "--set", "transactional.zookeeper.servers=127.0.0.1:1", *words], catch_exceptions=False
    )


@dataclass(frozen=True)
class OverKafka:
    """Commands for a topology over Kafka. ``where``: MODULE:FUNCTION, which makes it from the
    settings ``app.topic``, ``app.kafka`` and ``app.database``.
    """

    where: str
    servers: EmbeddedServers
    topic: str
    database: Path

    @property
    def settings(self) -> dict[str, str]:
        return {
            "app.topic": self.topic,
            "app.kafka": self.servers.bootstrap_servers,
            "app.database": str(self.database),
            **self.config,
        }

    @property
    def config(self) -> dict[str, str]:
        return {"transactional.zookeeper.servers": self.servers.zookeeper}

    def catch_up(self, topology: Topology) -> None:
        with submit(topology, self.config, executor="local") as running:
            running.wait_until_caught_up(PATIENCE_S)

    def ratchet(self, name: str, *words: str) -> Answer:
        """``ratchet NAME TOPOLOGY WORDS``."""
        return call("ratchet", name, self.where, *words, *self._options)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """The same as a process of its own, in a group of its own, so that it can be killed."""
        return subprocess.Popen(
            [sys.executable, "-m", "ratchet", name, self.where, *words, *self._options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def killed_after(self, seconds: float, name: str, *words: str) -> bool:
        """Start the same, and kill it after so long. Returns whether it was done before, well."""
        command = self.start(name, *words)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return command.wait(seconds) == 0
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
        return False

    @property
    def _options(self) -> list[str]:
        return [part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")]


def kafka_topology(app: Any) -> Topology:
    """Counts the words of a topic, for ``OverKafka``."""
    spout = OpaqueKafkaTransactionalSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec("word"), batch_records_max=40
    )
    builder = TransactionalTopologyBuilder(app["app.topic"], "spout", spout, 2)
    state = OpaqueMapState(SqliteBackend(app["app.database"], "words"))
    builder.set_bolt("words", StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
    return builder.build()
