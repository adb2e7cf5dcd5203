"""Spouts and bolts for tests of core topologies.

They record what they did in a ``Seen``, which is kept outside of them, by key. All copies of a
component in this process share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    BaseRichSpout,
    CoreTopology,
    FailedException,
    Fields,
    Tuple,
)
from framework.core import spout_task
from framework.core.driver import RoundDriver
from framework.core.event_times import paths_of
from framework.core.leader_loop import stateful_components
from framework.core.local import LocalRounds
from framework.core.plan import CorePlan
from framework.core.run import ticks_of
from framework.execution.plan import plan_execution


@dataclass
class Seen:
    """What happened, in order."""

    opened: int = 0
    closed: int = 0
    acked: list[Any] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)
    executed: list[Any] = field(default_factory=list)
    held: list[tuple[Any, Tuple]] = field(default_factory=list)
    cleaned: int = 0
    objects: set[int] = field(default_factory=set)


_seen: dict[str, Seen] = {}


def seen(key: str) -> Seen:
    return _seen.setdefault(key, Seen())


class ListSpout(BaseRichSpout):
    """Emits each of ``items`` once.

    ``tracked``: with the message id ``("id", item)``. ``again``: a failed item is emitted again.
    """

    def __init__(self, key: str, items: list[Any], *, tracked: bool = True, again: bool = True) -> None:
        self.key, self.items, self.tracked, self.again = key, items, tracked, again

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector = collector
        self.waiting = self.items[context.task_index :: context.task_count]
        seen(self.key).opened += 1

    def next_tuple(self) -> None:
        if self.waiting:
            item = self.waiting.pop(0)
            self.collector.emit([item], message_id=("id", item) if self.tracked else None)

    def ack(self, message_id: Any) -> None:
        seen(self.key).acked.append(message_id[1])
        seen(self.key).objects.add(id(self))

    def fail(self, message_id: Any) -> None:
        seen(self.key).failed.append(message_id[1])
        if self.again:
            self.waiting.append(message_id[1])

    def close(self) -> None:
        seen(self.key).closed += 1

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


class Rich(BaseRichBolt):
    """Does what ``act`` says with each tuple: called with the bolt, the tuple and the collector."""

    def __init__(
        self, key: str, act: Callable[[Any, Tuple, Any], None], fields: Fields | None = None, **streams: Fields
    ) -> None:
        self.key, self.act, self.fields, self.streams = key, act, fields, streams

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector, self.context = collector, context
        self.kept: list[Any] = []
        self.waiting: dict[Any, Tuple] = {}

    def execute(self, tup: Tuple) -> None:
        seen(self.key).executed.append(tup.values)
        self.act(self, tup, self.collector)

    def cleanup(self) -> None:
        seen(self.key).cleaned += 1

    def declare_output_fields(self, declarer: Any) -> None:
        if self.fields is not None:
            declarer.declare(self.fields)
        for name, fields in self.streams.items():
            declarer.declare(fields, name)


class Basic(BaseBasicBolt):
    """Emits each value ``times`` times, and fails those in ``refused``."""

    def __init__(self, key: str, times: int = 1, refused: tuple[int, ...] = ()) -> None:
        self.key, self.times, self.refused = key, times, refused

    def execute(self, tup: Tuple, collector: Any) -> None:
        seen(self.key).executed.append(tup[0])
        for _ in range(self.times):
            collector.emit([tup[0]])
        if tup[0] in self.refused and seen(self.key).executed.count(tup[0]) == 1:
            raise FailedException("not the first time")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


def ack(bolt: Any, tup: Tuple, collector: Any) -> None:
    collector.ack(tup)


def nothing(bolt: Any, tup: Tuple, collector: Any) -> None:
    """Neither acks nor fails."""


def hold(bolt: Any, tup: Tuple, collector: Any) -> None:
    """Hands the tuple, with its collector, to the test."""
    seen(bolt.key).held.append((collector, tup))


def fail(bolt: Any, tup: Tuple, collector: Any) -> None:
    collector.fail(tup)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stepped:
    """Runs a core topology in this process, round by round, with its own clock.

    The timeout is 30 s.
    """

    def __init__(
        self,
        topology: CoreTopology,
        *,
        ackers: int = 1,
        pending: int = 1_000,
        attempts: int = 5,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.clock = Clock()
        stateful = frozenset(stateful_components(topology))
        self.plan = CorePlan(
            planned := plan_execution(topology),
            conf or {},
            ackers=ackers,
            pending_max=pending,
            stateful=stateful,
            ticks=ticks_of(topology),
            paths=paths_of(topology, planned),
        )
        self.rounds = LocalRounds(self.plan, self.clock)
        self.driver = RoundDriver(self.plan, self.rounds, timeout_s=30, attempts_max=attempts, clock=self.clock)

    def step(self, times: int = 1, *, seconds: float = 0.0) -> Stepped:
        """Run ``times`` rounds; the clock advances by ``seconds`` before each. However slow the
        machine is, a round has the same tuples."""
        with mock.patch.object(spout_task, "ROUND_SPOUT_S", math.inf):
            for _ in range(times):
                self.clock.now += seconds
                assert self.driver.step()
                self.driver._spout_wait_s = 0.0  # no test waits for a spout
        return self
