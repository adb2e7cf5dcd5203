"""A topology that counts words from memory in SQLite; it can be started many times."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework import Fields, Run, Topology, TransactionalTopologyBuilder, submit
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.transactions import MemoryStore, Put
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

WORD = Fields(word=str)
WORDS = [[f"w{number % 5}"] for number in range(40)]
EXACT = {f"w{number}": 10 for number in range(5)}


class Setup:
    """The topology, its coordination store and its database."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "words.db"
        self.store = MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: WORDS, 1: WORDS[:10]}, WORD, 10)
        self.backend = SqliteBackend(self.path, "words")
        self.wrap: Callable[[LocalExecutor], Any] = lambda executor: executor

    def topology(self, parallelism: int = 2) -> Topology:
        builder = TransactionalTopologyBuilder("words", "spout", self.spout, 2)
        committer = StateCommitter(OpaqueMapState(self.backend), ["word"], {"n": Count()})
        builder.set_bolt("count", committer, parallelism).fields_grouping("spout", Fields("word"))
        return builder.build()

    def start(
        self,
        topology: Topology | None = None,
        *,
        accept_changed_topology: bool = False,
        standby: bool = False,
        **config: Any,
    ) -> Run:
        built = topology or self.topology()
        executor = self.wrap(LocalExecutor(plan_execution(built), {}))
        return submit(
            built,
            {"topology.max.spout.pending": 2, **config},
            store=self.store,
            executor=executor,
            accept_changed_topology=accept_changed_topology,
            standby=standby,
        )

    def run_all(self) -> None:
        with self.start() as run:
            run.wait_until_caught_up(PATIENCE_S)

    def counts(self) -> dict[str, int]:
        with sqlite3.connect(self.path) as connection:
            return dict(connection.execute("SELECT word, n FROM words_live"))

    def put(self, path: str, value: Any) -> None:
        raw = value if isinstance(value, bytes) else json.dumps({"format": 1, "value": value}).encode()
        self.store.apply([Put(f"words/{path}", raw)])
