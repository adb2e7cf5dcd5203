"""Spouts and bolts for tests of state.

They record what they did in a ``Journal``, which is kept outside of them, by key, as long as this
process lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    BaseRichSpout,
    BaseStatefulBolt,
    CoreTopology,
    Fields,
    KeyValueState,
    ReplayableSpout,
    TopologyBuilder,
    Tuple,
)
from framework.config import Config
from framework.core.checkpoint_record import CheckpointRecord, Layout
from framework.core.checkpoints import Checkpoints
from framework.core.leader_loop import read_record, retries_of, stateful_components
from framework.core.rescaling import Namespaces, layout_of, namespace_of, rescaled
from framework.state import LmdbKeyValueStateProvider
from framework.state.provider_settings import provider_of
from framework.transactions import CoordinationStore
from integration import RedisServer
from tests.kit.core_parts import Stepped


@dataclass
class Journal:
    """``steps``: calls of hooks and the like, in order, as (component, task, what). ``emitted``: by
    spouts. ``on``: name of an event -> what to do when it happens; may raise."""

    steps: list[tuple[str, int, str]] = field(default_factory=list)
    emitted: list[Any] = field(default_factory=list)
    acked: list[Any] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)
    seeks: list[Any] = field(default_factory=list)
    results: dict[Any, Any] = field(default_factory=dict)
    on: dict[str, Callable[[Any], None]] = field(default_factory=dict)

    def happens(self, what: str, value: Any) -> None:
        if what in self.on:
            self.on[what](value)


_journals: dict[str, Journal] = {}


def journal(key: str) -> Journal:
    return _journals.setdefault(key, Journal())


def forget_journal(key: str) -> None:
    _journals.pop(key, None)


def once(error: Exception) -> Callable[[Any], None]:
    """An action that raises the first time."""
    left = [error]

    def act(_: Any) -> None:
        if left:
            raise left.pop()

    return act


class Source(BaseRichSpout):
    """Emits each word once, and failed ones again. It cannot go back to a position."""

    def __init__(self, key: str, words: Sequence[str], *, tracked: bool = True) -> None:
        self.key, self.words, self.tracked = key, list(words), tracked

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector = collector
        mine = range(context.task_index, len(self.words), context.task_count)
        self.waiting = [number for number in mine if number not in journal(self.key).acked]

    def next_tuple(self) -> None:
        if self.waiting:
            number = self.waiting.pop(0)
            journal(self.key).emitted.append(number)
            self.collector.emit([self.words[number]], message_id=number)

    def ack(self, message_id: Any) -> None:
        journal(self.key).acked.append(message_id)

    def fail(self, message_id: Any) -> None:
        journal(self.key).failed.append(message_id)
        self.waiting.append(message_id)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Log(ReplayableSpout):
    """Emits the words of a log, which has one partition per list in ``words``.

    Task ``t`` of ``n`` reads the partitions ``p`` with ``p % n == t``. Positions are offsets by
    partition. ``tracked``: with message ids.
    """

    def __init__(self, key: str, words: Sequence[Sequence[str]], *, tracked: bool = True, per_call: int = 1) -> None:
        self.key, self.words, self.tracked, self.per_call = key, [list(each) for each in words], tracked, per_call

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector = collector
        self.offsets = {p: 0 for p in range(len(self.words)) if p % context.task_count == context.task_index}

    def next_tuple(self) -> None:
        for _ in range(self.per_call):
            for partition, offset in self.offsets.items():
                if offset < len(self.words[partition]):
                    self.offsets[partition] += 1
                    message_id = (partition, offset)
                    journal(self.key).emitted.append(message_id)
                    word = self.words[partition][offset]
                    self.collector.emit([word], message_id=message_id if self.tracked else None)
                    break

    def position(self) -> Any:
        return {str(partition): offset for partition, offset in self.offsets.items()}

    def seek(self, positions: Sequence[Any]) -> None:
        journal(self.key).seeks.append(list(positions))
        found = {int(p): offset for each in positions for p, offset in each.items()}
        self.offsets = {p: found.get(p, 0) for p in self.offsets}

    def ack(self, message_id: Any) -> None:
        journal(self.key).acked.append(message_id)

    def fail(self, message_id: Any) -> None:
        journal(self.key).failed.append(message_id)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Split(BaseBasicBolt):
    """A bolt without state that passes each word on."""

    def __init__(self, key: str) -> None:
        self.key = key

    def execute(self, tup: Tuple, collector: Any) -> None:
        journal(self.key).happens("split", tup["word"])
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Holding(BaseRichBolt):
    """Holds each tuple until the test lets it go; then it emits the tuple's ``fields``."""

    fields = Fields(word=str)

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        journal(self.key).results.setdefault("held", []).append((self, tup))

    def let_go(self, tup: Tuple) -> None:
        self.collector.emit([tup[name] for name in self.fields.names], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self.fields)


class Count(BaseStatefulBolt):
    """Counts words, and emits each new count."""

    def __init__(self, key: str) -> None:
        self.key = key

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector, self.context = collector, context
        self.note("prepare")

    def init_state(self, state: KeyValueState[str, int]) -> None:
        self.counts = state
        self.note(f"init_state {state.txid}")
        journal(self.key).happens("init_state", state.txid)

    def execute(self, tup: Tuple) -> None:
        journal(self.key).happens("execute", tup["word"])
        count = (self.counts.get(tup["word"]) or 0) + 1
        self.counts.put(tup["word"], count)
        journal(self.key).results[tup["word"]] = count
        self.collector.emit([tup["word"], count], anchors=tup)
        self.collector.ack(tup)

    def pre_prepare(self, txid: int) -> None:
        self.note(f"pre_prepare {txid}")
        journal(self.key).happens("pre_prepare", txid)

    def pre_commit(self, txid: int) -> None:
        self.note(f"pre_commit {txid}")
        journal(self.key).happens("pre_commit", txid)

    def pre_rollback(self) -> None:
        self.note("pre_rollback")

    def cleanup(self) -> None:
        self.note("cleanup")

    def note(self, what: str) -> None:
        journal(self.key).steps.append((self.context.component_id, self.context.task_index, what))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, count=int))


def counting(key: str, spout: BaseRichSpout, *, spouts: int = 1, counters: int = 2) -> CoreTopology:
    """Words that pass through ``Split`` and are counted."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", spout, spouts)
    builder.set_bolt("split", Split(key), 2).shuffle_grouping("words")
    builder.set_bolt("count", Count(key), counters).fields_grouping("split", Fields("word"))
    return builder.build()


class SteppedState(Stepped):
    """Runs a topology with state in this process, round by round, with its own clock.

    It makes a checkpoint every second. ``record``: the durable record of the checkpoints; give it
    to the next instance.
    """

    def __init__(
        self,
        topology: CoreTopology,
        folder: Path,
        record: CheckpointRecord | None = None,
        *,
        exact: bool = True,
        now: float = 0.0,
    ) -> None:
        conf = Config.of(lmdb(folder)).for_components()
        super().__init__(topology, conf=conf)
        self.clock.now = now
        components = stateful_components(topology)
        provider = provider_of(conf)
        self.record = record or CheckpointRecord()
        self.record = rescaled(Namespaces(topology.id, provider, conf), components, self.record, self._save)
        provider.close()
        self.driver._checkpoints = Checkpoints(
            self.record,
            {name: each.parallelism for name, each in components.items()},
            {each.id: each.parallelism for each in topology.spouts},
            exact=exact,
            durable=True,
            interval_s=1.0,
            attempts_max=5,
            save=self._save,
            layouts={name: layout_of(each, 0) for name, each in components.items()},
            retries=retries_of(topology),
        )
        self.driver._stopping = Impatient()

    def _save(self, record: CheckpointRecord) -> None:
        self.record = record

    @property
    def recoveries(self) -> int:
        assert self.driver._checkpoints is not None
        return self.driver._checkpoints.status().recoveries

    def settle(self) -> SteppedState:
        """Run rounds until everything is in a checkpoint."""
        assert self.driver._checkpoints is not None
        for _ in range(50):
            self.driver._checkpoints.want()
            self.step()
            if self.driver._checkpoints.settled and self.driver._idle is not None:
                return self
        raise AssertionError(f"it does not settle: {self.driver.status()}")

    def close(self) -> None:
        """As if the process had died: nothing is saved."""
        self.rounds.close()


class Impatient(threading.Event):
    """An event whose ``wait`` returns at once: no pause between two tries."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def steps_of(key: str, component_id: str = "count", task: int = 0) -> list[str]:
    return [what for name, number, what in journal(key).steps if (name, number) == (component_id, task)]


def lmdb(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
        "topology.state.provider.config.path": str(folder),
        "topology.state.checkpoint.interval.ms": 50,
        **more,
    }


def checkpointed(
    conf: Mapping[str, Any], store: CoordinationStore, topology_id: str, component_id: str = "count"
) -> dict[Any, Any]:
    """The committed state of a component, all its tasks together, as another process finds it."""
    record = read_record(store, topology_id)
    assert record is not None
    return committed(conf["topology.state.provider.config.path"], record, topology_id, component_id)


def committed(folder: str, record: CheckpointRecord, topology_id: str, component_id: str) -> dict[Any, Any]:
    """The same as ``checkpointed``, by a record; empty before the first checkpoint."""
    provider = LmdbKeyValueStateProvider()
    found: dict[Any, Any] = {}
    config = {"topology.state.provider.config": {"path": folder}}
    layout = record.layouts.get(component_id, Layout(0, 0))
    for task in range(layout.tasks):
        state = provider.new_state(namespace_of(topology_id, component_id, layout.number, task), config, None)
        found.update(state.items())
    provider.close()
    return found


def redis_pool(server: RedisServer) -> dict[str, Any]:
    url = urlsplit(server.url)
    return {"host": url.hostname, "port": url.port, "database": int(url.path.strip("/") or 0)}
