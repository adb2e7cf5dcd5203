"""A fuzzer of documents in the coordination store.

``python -m tests.kit.znode_fuzz --minutes 60 --seed 1``: whatever a topology's documents are, the
other topologies are listed as before; commands and the page say what is damaged in a line that a
terminal shows as it is; and a driver that starts over them refuses them, or commits every record
exactly once.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.commands import topologies
from framework.coordination.store import CoordinationStore, MemoryStore, Put
from framework.coordination.transactional_state import encode_document
from framework.core.checkpoint_record import CheckpointRecord, Layout
from framework.core.leader_loop import read_record
from framework.errors import RatchetError, escaped
from framework.inspect.rebuild import read_exchanges
from framework.inspect.topologies import read_topologies
from framework.transactions.documents import (
    differences_to_state,
    read_history,
    read_joined,
    read_origin,
    read_plan,
    read_undone,
)
from framework.ui.page_updates import Encoded, Viewer, encode
from framework.ui.sources.root import RootSource
from sinks import Count, OpaqueMapState, StateCommitter
from sinks.memory import MemoryBackend
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.fuzzing import Counts, go_on, other_document
from tests.kit.waiting import PATIENCE_S

WORDS = [["a"], ["b"], ["a"], ["c"]] * 3
_NAMES = ["²", "x", "-1", "9" * 30, "7", "\u202e"]
_COMMANDS = ("list", "status", "history")


class World:
    """A topology in the middle of its records, its sink, and others that are whole."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.store = MemoryStore()
        with submit(self.topology(6), store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
            status = run.status().summary()
        for name in ("whole", "words"):
            self._tell(name, "transactional", {**status, "phase": "running", "epoch": 1})
        for name in ("core", "cores"):
            self._tell(name, "core", {"phase": "running", "epoch": 1, "pending": 3, "components": {"a": {"acked": 2}}})
            record = CheckpointRecord(txid=3, layouts={"count": Layout(2, 8)}, assigned={"count": Layout(2, 8)}, last=3)
            self.store.apply([Put(f"{name}/checkpoint", encode_document(record.document(), name))])
        done = {"txid": 1, "at": "2026-01-01", "differed": 0, "made_by": {}}
        undone = {"txid": 2, "finished": True, "attempts": []}
        self.store.apply([Put("words/rebuild/count/taken_over", encode_document(done, "words"))])
        self.store.apply([Put("words/joined", encode_document({"memory x": 2}, "words"))])
        self.store.apply([Put("words/undone", encode_document(undone, "words"))])
        for node, data in list(self.store._nodes.items()):
            if node.startswith("/words/") and "/drivers/" not in node:
                self.store.apply([Put(f"whole/{node.removeprefix('/words/')}", data)])

    def topology(self, rows: int) -> Topology:
        spout = OpaqueMemoryTransactionalSpout({0: WORDS[:rows]}, Fields(word=str), 2)
        builder = TransactionalTopologyBuilder("words", "lines", spout)
        state = OpaqueMapState(self.backend)
        builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("lines")
        return builder.build()

    def damaged(self, chance: random.Random) -> MemoryStore:
        """The store with one to three documents changed."""
        store = MemoryStore()
        store._nodes, store._epochs = dict(self.store._nodes), dict(self.store._epochs)
        own = sorted(each for each in store._nodes if each.startswith(("/words/", "/cores/")))
        for _ in range(chance.randrange(1, 4)):
            node = chance.choice(own)
            if chance.random() < 0.1:
                store._nodes.pop(node, None)
                continue
            data = other_document(chance, self.store._nodes[node])
            if chance.random() < 0.1:  # a name that no txid has
                node = f"{node.rpartition('/')[0]}/{chance.choice(_NAMES)}"
            store._nodes[node] = data
        return store

    def _tell(self, name: str, kind: str, status: dict[str, Any]) -> None:
        driver = {"kind": kind, "host": "a", "pid": 1, "started_at": 1e9, "said_at": 1e9, "status": status}
        self.store.apply([Put(f"{name}/drivers/1", encode_document(driver, name))])


@functools.cache
def world() -> World:
    return World()


@functools.cache
def whole() -> list[Any]:
    return [each.document() for each in read_topologies(world().store) if each.id in ("whole", "core")]


def fuzz_documents(seed: int) -> Counts:
    """Read damaged documents in all ways in which commands and the page do."""
    counts: Counts = collections.Counter()
    chance = random.Random(seed)
    store = world().damaged(chance)
    found = read_topologies(store)
    assert [each.document() for each in found if each.id in ("whole", "core")] == whole()
    for each in found:
        counts["unreadable" if each.unreadable else "readable"] += 1
        if each.unreadable:
            assert shows_as_it_is(each.unreadable), each.unreadable
    for name in ("words", "cores"):
        for read in _readers(store, name):
            counts[_outcome(read)] += 1
        _look(store, name)
    _command(store, chance.choice(_COMMANDS), "words" if chance.random() < 0.7 else "cores")
    return counts


def _readers(store: CoordinationStore, name: str) -> list[Callable[[], Any]]:
    return [
        lambda: read_history(store, name),
        lambda: read_joined(store, name),
        lambda: read_origin(store, name),
        lambda: read_undone(store, name),
        lambda: read_exchanges(store, name),
        lambda: read_plan(store, name, "lines"),
        lambda: read_record(store, name),
        lambda: differences_to_state(store, world().topology(6)),
    ]


def _outcome(read: Callable[[], Any]) -> str:
    try:
        read()
    except RatchetError as error:
        assert shows_as_it_is(str(error)), error
        return "refused"
    return "read"


def _look(store: CoordinationStore, name: str) -> None:
    """As the page does, which shows any error, and goes on."""
    source = RootSource(store, "/root")
    assert {"whole", "core"} <= {each["topology"] for each in source.topologies()}
    encode(source.topologies())
    try:
        view = source.topology(name)
        source.transaction(name, 2)
    except RatchetError:
        return
    if view is not None:
        Viewer().news(Encoded(1, view))


def _command(store: CoordinationStore, command: str, name: str) -> None:
    words = ["--set", "transactional.zookeeper.servers=nowhere:1"]
    app: Any = getattr(topologies, f"{command}_app")
    held, topologies.store_of = topologies.store_of, lambda *_, **__: store  # type: ignore[assignment]
    try:
        answer = CliRunner().invoke(app, words if command == "list" else [name, *words])
    finally:
        topologies.store_of = held
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code in (0, 1, 2)
    for line in answer.output.splitlines():
        assert shows_as_it_is(line), line
    if command == "list":
        names = {line.split()[0] for line in answer.stdout.split("\n")[1:] if line and not line.startswith("error: ")}
        assert {"whole", "core", "words", "cores"} >= names >= {"whole", "core"}, names


def fuzz_driver(seed: int) -> Counts:
    """Start a driver over damaged documents. It refuses them, or counts every record once."""
    counts: Counts = collections.Counter()
    its = World()
    store = its.damaged(random.Random(seed))
    before = copy.deepcopy(its.backend.items())
    try:
        with submit(its.topology(len(WORDS)), store=store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
    except RatchetError as error:
        assert shows_as_it_is(str(error).replace("\n", " ")), error
        counts["refused"] += 1
        found = {key: row.value for key, row in its.backend.items().items()}
        assert found == {key: row.value for key, row in before.items()}, (seed, found)
        return counts
    found = {key: row.value for key, row in its.backend.items().items()}
    assert found == {("a",): (6,), ("b",): (3,), ("c",): (3,)}, (seed, found)
    counts["exact"] += 1
    return counts


def shows_as_it_is(text: str) -> bool:
    """Whether a terminal shows it in one line, and obeys nothing of it."""
    return text == escaped(text)


def fuzz(seed: int) -> Counts:
    counts = fuzz_documents(seed)
    if seed % 50 == 0:
        counts += fuzz_driver(seed)
    return counts


if __name__ == "__main__":
    go_on(__doc__, fuzz)
