"""Bolts that several tests use."""

from __future__ import annotations

from typing import Any

from examples.global_count import BatchCount
from framework import (
    BaseBasicBolt,
    BaseTransactionalBolt,
    Committer,
    FailedException,
    Fields,
    OutputFieldsDeclarer,
)
from sinks import MapState

__all__ = ["BatchCount", "Relay", "Split", "UpdateGlobalCount"]


class Split(BaseBasicBolt):
    """A sentence into words."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        for word in tup["sentence"].split():
            collector.emit([word])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))


class UpdateGlobalCount(BaseTransactionalBolt, Committer):
    """Adds the counts of a batch to one row of a state; emits the new total."""

    deterministic = True

    def __init__(self, state: MapState) -> None:
        self.state = state

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.attempt, self.sum = collector, batch_id, 0

    def execute(self, tup: Any) -> None:
        self.sum += tup["count"]

    def finish_batch(self) -> None:
        self.state.begin_commit(self.attempt)
        (total,) = self.state.multi_update(["total"], [lambda count: (count or 0) + self.sum])
        self.state.commit(self.attempt)
        self.collector.emit([total])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(total=int))


class Relay(BaseBasicBolt):
    """Passes on the one field ``word``, and fails when a file says so:
    its content is the number of failures left.
    """

    deterministic = True

    def __init__(self, failures: str | None = None, error: type[BaseException] = FailedException) -> None:
        self.failures = failures
        self.error = error

    def execute(self, tup: Any, collector: Any) -> None:
        if self.failures is not None:
            with open(self.failures, "r+", encoding="utf-8") as file:
                left = int(file.read() or 0)
                if left:
                    file.seek(0)
                    file.write(str(left - 1))
                    file.truncate()
                    raise self.error("as asked")
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))
