"""A topology in memory whose spout makes dead letters and reads them again, and which is mended in
between; its drivers die where a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from framework import Config, Fields, Topology, TransactionalTopologyBuilder
from framework.execution import LocalExecutor, plan_execution
from framework.testing.simulation.virtual_threads import DriverDied, VirtualThreads
from framework.topology import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    Bolt,
    OnStream,
    OutputFieldsDeclarer,
    PartitionReader,
    TransactionAttempt,
)
from framework.topology.dead_letters import Letter
from framework.topology.spouts import LEFT_OUT, REFUSED, Meta, Rows
from framework.transactions import CoordinationStore
from framework.transactions.driver import Driver
from sinks import Count, DeadLetterTable, MapState, OpaqueMapState, StateCommitter, TransactionalMapState
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from spouts.memory import complete
from tests.kit.mended import Picky

FIELDS = Fields(value=str)
_STEPS_MAX = 50_000


def cannot_decode(word: str, mended: bool) -> str | None:
    """The reason."""
    return "it is raw" if word.startswith("raw") and not mended else None


def letter_of_record(partition: int, offset: int, value: bytes | None, **changes: Any) -> Letter:
    """The letter of a record of topic ``rows`` that nobody has refused yet."""
    fields = {"topic_id": "id", "topic": "rows", "timestamp_ms": 5, "error": "", "key": None, "headers": []}
    return Letter(**{**fields, "attempts": 0, "ref": [], **changes}, partition=partition, offset=offset, value=value)


class LetteredReader(PartitionReader):
    """Reads one value per row. ``decode``: the row of a record; or the reason, if it has none."""

    def __init__(self, decode: Callable[[Letter], pa.RecordBatch | str]) -> None:
        self._decode = decode

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        letters = []
        for offset, (value,) in enumerate(complete(partition, meta), int(meta["first"])):
            letter = letter_of_record(int(partition), offset, str(value).encode())
            if offset in meta.get(LEFT_OUT, ()):
                reason = meta.get(REFUSED, {}).get(str(offset))
                if reason is not None:
                    yield _row(replace(letter, error=reason))
            else:
                letters.append(letter)
        yield from self.read_letters(letters)

    def read_letters(self, letters: Sequence[Letter]) -> Iterator[Rows]:
        for each in letters:
            decoded = self._decode(each)
            yield _row(replace(each, error=decoded)) if isinstance(decoded, str) else decoded


def _row(letter: Letter) -> OnStream:
    row = letter.row(settled=None)
    return OnStream(DEAD_LETTER_STREAM, pa.RecordBatch.from_pylist([row], DEAD_LETTER_FIELDS.schema()))


def _word(mended: bool, letter: Letter) -> pa.RecordBatch | str:
    word = (letter.value or b"").decode()
    return cannot_decode(word, mended) or pa.record_batch({"value": [word]})


class Lettered:
    """The part of a spout that makes dead letters, and reads them again."""

    letters: Bolt
    mended = False
    replays_letters = True

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self.output_fields())  # type: ignore[attr-defined]
        declarer.declare(DEAD_LETTER_FIELDS, DEAD_LETTER_STREAM)

    def dead_letters(self) -> Bolt:
        return self.letters

    def reader(self, conf: Mapping[str, Any], context: Any) -> PartitionReader:
        return LetteredReader(partial(_word, self.mended))


class LetteredSpout(Lettered, MemoryTransactionalSpout):
    pass


class OpaqueLetteredSpout(Lettered, OpaqueMemoryTransactionalSpout):
    pass


class World:
    """``state``: makes the states, by name."""

    def __init__(self, opaque: bool, words: Mapping[int, list[str]], backend: Callable[[str], Any]) -> None:
        kind = OpaqueMapState if opaque else TransactionalMapState
        self.counts: MapState = kind(backend("counts"))
        self.kept: MapState = kind(backend("letters"))
        data = {each: [[word] for word in its] for each, its in words.items()}
        self.spout = (OpaqueLetteredSpout if opaque else LetteredSpout)(data, FIELDS, 3, on_bad_record="skip")
        self.spout.letters = DeadLetterTable(self.kept)

    def topology(self, mended: bool) -> Topology:
        self.spout.mended = mended
        builder = TransactionalTopologyBuilder("lettered", "spout", self.spout)
        builder.set_bolt("picky", Picky(("never",) if mended else ("bad", "never"))).shuffle_grouping("spout")
        builder.set_bolt("counts", StateCommitter(self.counts, ["value"], {"n": Count()})).global_grouping("picky")
        return builder.build()

    def counted(self) -> dict[str, int]:
        return {key[0]: row.value[0] for key, row in self.counts.backend.scan() if row.value is not None}

    def left(self) -> dict[tuple[int, int], int]:
        """Partition and offset of the letters -> their attempts."""
        return {key[1:]: row.value[-1] for key, row in self.kept.backend.scan() if row.value is not None}


def drive(
    topology: Topology,
    store: CoordinationStore,
    until: Callable[[Driver], bool],
    *,
    die_at: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Run one driver until it is done, or its step ``die_at`` is due. Returns the steps that it
    made."""
    settings = Config.of(config or {})
    executor = LocalExecutor(plan_execution(topology), settings.for_components())
    executor.start()
    threads = VirtualThreads(lambda name: None, _STEPS_MAX)
    driver = Driver(topology, executor, store, settings, threads=threads)
    threads.spawn("driver", driver.running())
    steps = 0

    def over() -> bool:
        nonlocal steps
        steps += 1
        if die_at is not None and steps > die_at:
            raise DriverDied
        assert driver.error is None and driver.failure is None, driver.error or driver.failure
        return until(driver)

    try:
        threads.run(over)
    finally:
        threads.kill()
        executor.close()
        if hasattr(store, "depose"):
            store.depose(topology.id)
    return steps
