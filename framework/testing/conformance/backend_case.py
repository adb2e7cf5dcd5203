"""The parts that the suites of backends share. Needs pytest."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from framework.testing.conformance.backend_test_helpers import (
    AGGREGATES,
    KEY,
    STATES,
    VALUE,
    WIDE,
    finish,
    open_attempt,
)
from framework.topology import Fields
from sinks.backend import MapBackend
from sinks.states import MapState


class BackendCase:
    """The suites of backends share it: the backend, its fixtures, and batches of words."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        """An empty backend called ``name``, bound to these columns."""
        raise NotImplementedError

    #: Types that the store cannot hold. Declaring one of them must raise ``TopologyError``.
    cannot_hold: Sequence[pa.DataType] = ()
    #: The longest text that a key may have, in bytes. A longer one must raise ``BadRecordError``.
    longest_key: int = 1_000_000
    #: Whether columns of floats hold infinities. If not, they must raise ``BadRecordError``.
    holds_infinities = True
    #: Which calls to the store fail, each in a run of its own: (number of the first, step).
    faults: tuple[int, int] = (0, 1)

    @pytest.fixture
    def backend(self) -> Iterator[MapBackend]:
        made = self._made(KEY, VALUE)
        yield made
        made.close()

    @pytest.fixture
    def wide_backend(self) -> Iterator[MapBackend]:
        made = self._made(KEY, WIDE)
        yield made
        made.close()

    def _made(self, key: Fields, value: Fields) -> MapBackend:
        return self.make(f"rows_{uuid.uuid4().hex[:12]}", key, value)

    @pytest.fixture(params=STATES, ids=lambda each: each.value_type.value)
    def state(self, request: pytest.FixtureRequest, backend: MapBackend) -> MapState:
        made: MapState = request.param(backend)
        made.prepare("topology")
        return made

    def apply(
        self, state: MapState, txid: int, attempt: int, batch: dict[str, list[Any]], *, replay: bool = False
    ) -> None:
        granted = open_attempt(state, txid, attempt)
        state.apply(granted, self.deltas(batch), AGGREGATES, want_values=False)
        finish(state, replay=replay)

    @staticmethod
    def deltas(batch: dict[str, list[Any]]) -> pa.Table:
        def present(values: list[Any]) -> list[int]:
            return [value for value in values if value is not None]

        rows = [
            (word, len(values), *((sum(p), min(p), max(p)) if (p := present(values)) else (None,) * 3))
            for word, values in batch.items()
        ]
        columns = list(zip(*rows, strict=True))
        types = [pa.string(), *[pa.int64()] * 4]
        return pa.table(
            [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], names=["word", *AGGREGATES]
        )

    @staticmethod
    def rows(state: MapState, words: str) -> dict[str, Any]:
        return {word: value for word in words if (value := state.get(word)) is not None}

    @staticmethod
    def fold(batches: list[dict[str, list[Any]]]) -> dict[str, Any]:
        every: dict[str, list[Any]] = {}
        for word, values in itertools.chain.from_iterable(batch.items() for batch in batches):
            every.setdefault(word, []).extend(values)
        folded = {}
        for word, values in every.items():
            present = [value for value in values if value is not None]
            extremes = (sum(present), min(present), max(present)) if present else (None,) * 3
            folded[word] = (len(values), *extremes)
        return folded
