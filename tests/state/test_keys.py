"""Keys that are equal are one key (C29): in states, in windows, in any type that a column takes."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import BaseStatefulBolt, Fields, ReplayableSpout, TopologyBuilder, Tuple, submit
from framework.errors import BadRecordError
from framework.state import BaseWindowedBolt, CountWindow, TimeWindow, Window
from framework.state.checkpointed_key_value_state import LayeredState
from framework.state.memory import MemoryBytes
from framework.state.serialization import MsgpackSerializer
from framework.topology.canonical_form import key_form
from framework.topology.hashing import hash_value
from framework.transactions import MemoryStore
from tests.kit.state_parts import journal, lmdb

NAN = float("nan")
PARIS = datetime.timezone(datetime.timedelta(hours=2))
FORMS = [
    [0, 0.0, -0.0, Decimal(0), Decimal("-0.00")],
    [1, 1.0, Decimal("1.00"), Decimal("1E+0")],
    [2.5, Decimal("2.5"), Decimal("2.500")],
    [NAN, -NAN, float("nan"), Decimal("nan")],
    [Decimal("0.1"), Decimal("0.10")],
    [float("inf"), Decimal("inf")],
    [10**30, (1e30).__class__(10**30), Decimal(10**30)][::2],
    [datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC), datetime.datetime(2026, 1, 1, 14, tzinfo=PARIS)],
]


@pytest.mark.parametrize("key", [Decimal("1E+999999999"), Decimal("-1E+4300"), (Decimal("1E+999999999"),)], ids=str)
def test_a_key_of_too_many_digits_is_an_error_before_it_is_computed(key: Any) -> None:
    with pytest.raises(BadRecordError, match="a state holds up to 4,300"):
        key_form(key)
    assert key_form(Decimal("1E+4299")) == 10**4299


@pytest.mark.rule("C29")
@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: str(forms[0]))
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a tuple"])
def test_all_forms_of_a_key_are_one_key_of_a_state(forms: Sequence[Any], wrapped: bool) -> None:
    keys: list[Any] = [("a", (each, None)) for each in forms] if wrapped else list(forms)
    state = LayeredState(MemoryBytes(), MsgpackSerializer(), MsgpackSerializer())
    for txid, key in enumerate(keys, 1):
        state.put(key, (state.get(key) or 0) + 1)
        state.prepare_commit(txid)
        state.commit(txid)
    assert state.multi_get(keys) == [len(keys)] * len(keys)
    assert len(list(state.items())) == 1
    assert len({hash_value(key_form(each)) for each in keys} | {hash_value(each) for each in keys}) == 1
    state.delete(keys[-1])
    assert list(state.items()) == []


def test_keys_that_differ_stay_apart() -> None:
    keys = [1, True, "1", b"1", (1,), 1.5, Decimal("1.1"), 1.1, 2**53 + 1, float(2**53), None, 0, False, ""]
    state = LayeredState(MemoryBytes(), MsgpackSerializer(), MsgpackSerializer())
    for number, key in enumerate(keys):
        state.put(key, number)
    assert [state.get(each) for each in keys] == list(range(len(keys)))


def test_an_entry_that_an_earlier_version_has_stored_is_found_and_takes_its_form_when_it_is_put() -> None:
    store, plain = MemoryBytes(), MsgpackSerializer()
    keys = [("a", 60.0), 1.0, Decimal("1.50"), -0.0, "b"]
    store.write({plain.dumps(each): plain.dumps(number) for number, each in enumerate(keys, 10)}, 1)
    state = LayeredState(store, plain, plain)
    assert [state.get(each) for each in keys] == [10, 11, 12, 13, 14]
    assert state.multi_get(keys) == [10, 11, 12, 13, 14]
    state.put(("a", 60.0), 20)
    state.delete(1.0)
    state.prepare_commit(2)
    state.commit(2)
    assert sorted(map(repr, state.items())) == sorted(
        map(repr, [(("a", 60), 20), (Decimal("1.50"), 12), (-0.0, 13), ("b", 14)])
    )


#: Ends the windows.
LAST = [7]


class Values(ReplayableSpout):
    """Emits each list of values as one batch, whose columns Arrow gives their types."""

    def __init__(self, fields: Fields, batches: Sequence[Sequence[Any]]) -> None:
        self.fields, self.batches = fields, batches

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.next = collector, 0

    def next_tuple(self) -> None:
        if self.next < len(self.batches):
            declared = self.fields.type_of("k")
            values = self.batches[self.next]
            at = 100.0 if values == LAST else float(self.next)
            columns = [pa.array(values, declared), pa.array([at] * len(values))]
            self.next += 1
            self.collector.emit_arrow(pa.record_batch(columns, ["k", "at"]))

    def position(self) -> int:
        return self.next

    def seek(self, positions: Sequence[int]) -> None:
        (self.next,) = positions

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self.fields)


class Counts(BaseStatefulBolt):
    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        self.counts.put(tup["k"], (self.counts.get(tup["k"]) or 0) + 1)
        self.collector.ack(tup)
        journal(self.key).results = {repr(key): count for key, count in self.counts.items()}

    def __init__(self, key: str) -> None:
        self.key = key

    def declare_output_fields(self, declarer: Any) -> None: ...


class Sizes(BaseWindowedBolt):
    def __init__(self, key: str, windows: Any) -> None:
        super().__init__(windows, key=["k"])
        self.journal = key

    def execute_window(self, window: Window, collector: Any) -> None:
        told = journal(self.journal).results.setdefault("windows", [])
        told.append((repr(window.key[0]), len(window.tuples)))
        collector.emit([window.key[0]])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(k=self.type))

    type: Any = None


TYPED = [
    (pa.float64(), [[0.0, -0.0], [-0.0], [NAN, -NAN], [0.0], [NAN]], {"0.0": 4, "nan": 3}),
    (pa.decimal128(10, 2), [[Decimal("1.50"), Decimal("1.5")], [Decimal("1.50")]], {"Decimal('1.50')": 3}),
    (
        pa.decimal128(10, 2),
        [[Decimal("0"), Decimal("-0")], [Decimal("1.10")]],
        {"Decimal('0.00')": 2, "Decimal('1.10')": 1},
    ),
    (None, [[1, 2.5], [1], [2.5], [Decimal("1.00")], [1.0, 1.0]], {"1": 5, "2.5": 2}),
    (None, [[0.0], [-0.0], [0], [NAN], [-NAN]], {"0": 3, "nan": 2}),
]


@pytest.mark.rule("C29")
@pytest.mark.parametrize(("kind", "batches", "expected"), TYPED)
@pytest.mark.parametrize("restarts", [False, True], ids=["in one run", "with a restart"])
def test_all_forms_of_a_key_are_in_one_window(
    tmp_path: Path, kind: Any, batches: list[Any], expected: dict[str, int], restarts: bool
) -> None:
    """Also what is kept over a restart, and what a window emits in the type of its column."""
    name, store = f"k{uuid.uuid4().hex[:8]}", MemoryStore()
    for end in (2, len(batches)) if restarts else (len(batches),):
        bolt = Sizes(name, TimeWindow(10, "at"))
        bolt.type = kind
        fields = Fields.of({"k": kind, "at": pa.float64()})
        builder = TopologyBuilder(name)
        given = batches[:end] if end < len(batches) else [*batches, LAST]
        builder.set_spout("values", Values(fields, given))
        builder.set_bolt("sizes", bolt, 1).fields_grouping("values", Fields("k"))
        builder.set_bolt("counts", Counts(name + "c")).global_grouping("sizes")
        with submit(builder.build(), lmdb(tmp_path), store=store, executor="local") as run:
            run.wait_until_idle(60)
    assert dict(journal(name).results["windows"]) == expected
    assert len(journal(name).results["windows"]) == len(expected)


@pytest.mark.rule("C29")
@pytest.mark.parametrize(("kind", "batches", "expected"), TYPED)
def test_all_forms_of_a_key_are_one_count_of_a_stateful_bolt(kind: Any, batches: list[Any], expected: Any) -> None:
    name = f"k{uuid.uuid4().hex[:8]}"
    builder = TopologyBuilder(name)
    builder.set_spout("values", Values(Fields.of({"k": kind, "at": pa.float64()}), batches))
    builder.set_bolt("counts", Counts(name), 1).fields_grouping("values", Fields("k"))
    with submit(builder.build(), {}, executor="local") as run:
        run.wait_until_idle(60)
    assert sorted(journal(name).results.values()) == sorted(expected.values())


@pytest.mark.parametrize("tasks", [1, 3])
def test_all_forms_of_a_key_are_in_one_window_by_count(tasks: int) -> None:
    name = f"k{uuid.uuid4().hex[:8]}"
    builder = TopologyBuilder(name)
    batches = [[1, 2.5], [1], [Decimal("2.50")], [1.0]]
    builder.set_spout("values", Values(Fields.of({"k": None, "at": pa.float64()}), batches))
    builder.set_bolt("sizes", Sizes(name, CountWindow(2)), tasks).fields_grouping("values", Fields("k"))
    with submit(builder.build(), {}, executor="local") as run:
        run.wait_until_idle(60)
    assert sorted(journal(name).results["windows"]) == [("1", 2), ("2.5", 2)]
