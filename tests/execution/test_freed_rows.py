"""The rows of a batch are freed with the batch, and do not wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from framework import ArrowBolt, Fields, TransactionalTopologyBuilder, submit
from framework.errors import RetryableError
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration
FIELDS = Fields.of({"word": pa.string(), "n": pa.int64()})


class Watched(ArrowBolt):
    """Passes batches on, and remembers which of them are alive. Every fourth call fails."""

    deterministic = True
    seen: list[weakref.ref[Any]] = []

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self.seen.append(weakref.ref(batch))
        if self._fails and len(self.seen) % 4 == 0:
            raise RetryableError("not now")
        made = batch.slice(0)
        self.seen.append(weakref.ref(made))
        yield made

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tasks", [1, 2])
def test_no_batch_waits_for_the_garbage_collector(tasks: int, fails: bool) -> None:
    Watched.seen.clear()
    rows = {0: [["a", number] for number in range(40)]}
    builder = TransactionalTopologyBuilder("freed", "spout", OpaqueMemoryTransactionalSpout(rows, FIELDS, 4))
    builder.set_bolt("watched", Watched(fails), tasks).fields_grouping("spout", Fields("n"))
    counts = StateCommitter(OpaqueMapState(MemoryBackend("freed")), ["word"], {"n": Count()})
    builder.set_bolt("count", counts).global_grouping("watched")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert len(Watched.seen) >= 20
    assert not [each for each in Watched.seen if each() is not None]
