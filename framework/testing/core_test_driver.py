"""Runs a core topology over lists, in one line, and returns the rows that its components emit and
the acked records.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from framework.config import Config
from framework.core.run import CoreRun, CoreTopologyFailed, submit_core
from framework.errors import ConfigError
from framework.execution.executor_name import LOCAL
from framework.testing.simulation.row_recording_bolts import probes_below, rows_of_stream
from framework.testing.simulation.sample_records import row_of
from framework.topology import BaseBasicBolt, BaseRichSpout, Component, CoreTopology, Tuple
from framework.topology.bolts import DEFAULT_STREAM
from framework.topology.tuples import rows_of

_TIMEOUT_S = 60.0
#: How often errors are checked while waiting.
_LOOK_S = 0.1

Rows = dict[tuple[str, str], list[Mapping[str, Any]]]
#: The recorded rows of runs in this process. Bolts are copied, and the copies live in this process,
#: too.
_seen: dict[str, tuple[Rows, dict[str, list[int]]]] = {}


@dataclass(frozen=True, slots=True)
class CoreDone:
    """The result of a core topology over lists. ``acked``: spout -> the numbers of its acked
    records, once per ack, in the order of the acks."""

    acked: Mapping[str, Sequence[int]]
    _rows: Rows

    def rows(self, component_id: str, stream: str = DEFAULT_STREAM) -> list[Mapping[str, Any]]:
        """The rows that a component has emitted on a stream, including those of replayed records.
        Raises ``ConfigError`` for a stream that does not exist."""
        return rows_of_stream(self._rows, component_id, stream)


def run_core_on(
    topology: CoreTopology,
    records: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    again: Sequence[int] = (),
    config: Mapping[str, Any] | Config | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> CoreDone:
    """Run a core topology over lists, in this process, until every record is acked.

    * ``records``: the records that the spout emits on its default stream, each a mapping by field
      names or a sequence of values; or a mapping of spouts to such records.
    * ``again``: the numbers of records whose ack is lost once, so that they are replayed, as may
      happen under at-least-once. With several spouts, they apply to each.

    Raises ``CoreTopologyFailed`` with the first error of a component, ``TimeoutError`` when records
    are not acked in time, and ``ConfigError`` for records that do not fit.

    >>> def test_splitting() -> None:
    ...     done = run_core_on(topology(), [["the cow"]], again=[0])
    ...     assert [row["word"] for row in done.rows("split")] == ["the", "cow", "the", "cow"]
    """
    by_spout = dict(records) if isinstance(records, Mapping) else {_only(topology): records}
    unknown = sorted(set(by_spout) - {each.id for each in topology.spouts})
    if unknown:
        raise ConfigError(
            f"there is no spout {unknown[0]!r}; there are: {', '.join(each.id for each in topology.spouts)}"
        )
    run = uuid.uuid4().hex
    rows: Rows = {}
    acked: dict[str, list[int]] = {each.id: [] for each in topology.spouts}
    _seen[run] = rows, acked
    try:
        built = _over_lists(topology, by_spout, tuple(again), run)
        for each in topology.components:
            for stream in each.streams:
                rows[each.id, stream] = []
        with submit_core(built, Config.of(config or {}), LOCAL, None) as running:
            _finish(running, timeout_s)
        return CoreDone(acked, rows)
    finally:
        del _seen[run]


def _finish(running: CoreRun, timeout_s: float) -> None:
    """Wait until every record is acked. An error of a component ends the test immediately, because
    a run would replay its records for ever."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            running.wait_until_idle(min(_LOOK_S, timeout_s))
            return
        except TimeoutError:
            errors = running.component_errors()
            if errors:
                raise CoreTopologyFailed.of(errors[0]) from None
            if time.monotonic() > deadline:
                raise


def _only(topology: CoreTopology) -> str:
    spout, *others = topology.spouts
    if others:
        raise ConfigError(
            f"topology {topology.id!r} has several spouts: give records by spout "
            f"({', '.join(each.id for each in topology.spouts)})"
        )
    return spout.id


def _over_lists(
    topology: CoreTopology, by_spout: Mapping[str, Iterable[Any]], again: tuple[int, ...], run: str
) -> CoreTopology:
    components = []
    for each in topology.components:
        if isinstance(each.instance, BaseRichSpout):
            spout = _ListSpout(each, list(by_spout.get(each.id, ())), again, run)
            each = replace(each, instance=spout, factory=None, parallelism=1)
        components.append(each)
    return CoreTopology(topology.id, (*components, *probes_below(topology.components, lambda: _Probe(run))))


class _Probe(BaseBasicBolt):
    """Records the rows that a component emits."""

    def __init__(self, run: str) -> None:
        self._run = run

    def execute(self, tup: Tuple, collector: Any) -> None:
        rows, _ = _seen[self._run]
        rows[tup.source_component, tup.source_stream].append(dict(zip(tup.fields, tup.values, strict=True)))


class _ListSpout(BaseRichSpout):
    """Emits the records of a list, and again those that failed."""

    def __init__(self, component: Component, records: list[Any], again: tuple[int, ...], run: str) -> None:
        fields = component.streams.get(DEFAULT_STREAM)
        if records and fields is None:
            raise ConfigError(f"spout {component.id!r} has no default stream")
        self._id, self._run = component.id, run
        self._rows = [
            next(rows_of(row_of(fields, record, f"record {number} of spout {component.id!r}")))
            for number, record in enumerate(records)
            if fields is not None
        ]
        self._again = set(again)
        self._streams = component.streams
        outside = sorted(each for each in again if not 0 <= each < max(len(records), 1))
        if outside:
            raise ConfigError(f"spout {component.id!r} has {len(records)} records, so there is no record {outside[0]}")

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self._collector = collector
        self._waiting = deque(range(len(self._rows)))

    def next_tuple(self) -> None:
        if self._waiting:
            number = self._waiting.popleft()
            self._collector.emit(self._rows[number], message_id=number)

    def ack(self, message_id: int) -> None:
        if message_id in self._again:  # the ack is lost
            self._again.discard(message_id)
            self._waiting.append(message_id)
        else:
            _, acked = _seen[self._run]
            acked[self._id].append(message_id)

    def fail(self, message_id: int) -> None:
        self._waiting.append(message_id)

    def declare_output_fields(self, declarer: Any) -> None:
        for stream, fields in self._streams.items():
            declarer.declare(fields, stream)
