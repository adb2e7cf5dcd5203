"""Every value has one form (C29), and comes back as it was written."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from framework.errors import BadRecordError, TopologyError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import (
    AGGREGATES,
    AWKWARD,
    EVERY_TYPE,
    KEY,
    STATES,
    VALUE,
    either,
    finish,
    open_attempt,
    partials,
    transact,
)
from framework.topology import Fields
from sinks.aggregates import Aggregate, ApproxDistinct, First, Last, Max, Mean, Min, Reduce, Sum
from sinks.backend import MapBackend
from sinks.states import OpaqueMapState


class TypeContract(BackendCase):
    """Every value has one form (C29), and comes back as it was written."""

    def test_decimals_are_exact_to_their_scale_or_an_error(self) -> None:
        """Sums in the store, or by read and put. A value with more digits than the column holds is
        refused, never rounded."""
        kind = pa.decimal128(38, 2)
        backend = self._made(KEY, Fields(total=kind))
        state = OpaqueMapState(backend)
        state.prepare("topology")
        large, small = Decimal("123456789012345678901234567890123456.78"), Decimal("0.01")
        for txid, amount in enumerate((large, small, large.copy_negate()), 1):
            deltas = pa.table({"word": ["a"], "total": pa.array([amount], kind)})
            state.apply(open_attempt(state, txid, 1), deltas, {"total": Sum("n")}, want_values=False)
            finish(state)
            if txid == 2:
                assert state.get("a") == Decimal("123456789012345678901234567890123456.79")
        assert state.get("a") == small
        state.begin_commit(open_attempt(state, 4, 1))
        for wrong in (Decimal("0.001"), Decimal("1e36"), Decimal("nan"), 0.1, "1"):
            with pytest.raises(BadRecordError, match="'total'"):
                state.multi_put(["a"], [wrong])
        assert state.multi_get(["a"]) == [small]

    def test_a_sum_that_leaves_its_type_is_refused_by_the_try_as_by_the_commit(self) -> None:
        """A try adds to the values before the transaction, and writes nothing."""
        for kind, most in ((pa.int64(), 2**63 - 1), (pa.decimal128(38, 0), 10**38 - 1)):
            state = OpaqueMapState(self._made(KEY, Fields(total=kind)))
            state.prepare("topology")
            totals: dict[str, Aggregate] = {"total": Sum("n")}

            def deltas(kind: pa.DataType = kind, **values: int) -> pa.Table:
                numbers = [Decimal(each) if pa.types.is_decimal(kind) else each for each in values.values()]
                return pa.table({"word": list(values), "total": pa.array(numbers, kind)})

            state.apply(open_attempt(state, 1, 1), deltas(a=most, b=-most), totals, want_values=False)
            finish(state)
            for attempt, wrong in enumerate((deltas(c=1, a=1), deltas(b=-2, a=-1)), 1):
                granted = open_attempt(state, 2, attempt)
                with pytest.raises(BadRecordError, match="'total'"):
                    state.apply(granted, wrong, totals, want_values=False)
                with pytest.raises(BadRecordError, match="'total' does not fit into"):
                    state.trying(granted).apply(granted, wrong, totals, want_values=False)
            granted = open_attempt(state, 2, 3)
            for _ in range(2):
                right = deltas(a=-1, b=1, c=most)
                before = [state.get(each) for each in "abc"]
                state.trying(granted).apply(granted, right, totals, want_values=False)
                assert [state.get(each) for each in "abc"] == before
                state.apply(granted, right, totals, want_values=False)
                granted = open_attempt(state, 2, 4)
            assert [int(state.get(each)) for each in "abc"] == [most - 1, 1 - most, most]

    def test_integers_have_no_fraction_to_lose(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        for wrong in (1.5, "1", float("nan"), Decimal("0.5")):
            with pytest.raises(BadRecordError, match="'n'"):
                state.multi_put(["a"], [wrong])
        state.multi_put(["a"], [2.0])
        state.commit(granted)
        assert repr(state.get("a")) == "2"

    @pytest.mark.parametrize(
        ("kind", "forms"),
        [
            (pa.float64(), [0.0, -0.0, 0]),
            (pa.float64(), [1, 1.0, Decimal(1)]),
            (pa.int64(), [1, 1.0]),
            (pa.decimal128(10, 2), [Decimal("1.0"), Decimal("1.00"), 1, Decimal("1E+0")]),
            (pa.decimal128(10, 2), [Decimal("-0"), Decimal("0.00")]),
            (
                pa.timestamp("us", tz="Europe/Paris"),
                [
                    datetime.datetime(2026, 1, 1, 12, tzinfo=ZoneInfo("Europe/Paris")),
                    datetime.datetime(2026, 1, 1, 11, tzinfo=datetime.UTC),
                    datetime.datetime(2026, 1, 1, 11),
                ],
            ),
        ],
        ids=str,
    )
    def test_every_form_of_a_key_is_one_row(self, kind: pa.DataType, forms: list[Any]) -> None:
        if kind in self.cannot_hold:
            return
        backend = self._made(Fields.of({"k": kind}), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        for txid, form in enumerate(forms, 1):
            transact(state, txid, 1, {form: 1})
        assert [row.value for _, row in backend.scan()] == [(len(forms),)]
        assert [state.get(form) for form in forms] == [len(forms)] * len(forms)
        (key,) = [key[0] for key, _ in backend.scan()]
        assert str(key) != "-0.0"

    def test_nan_is_one_value_above_all_numbers_or_is_refused(self) -> None:
        for order in ([1.0, float("nan"), 2.0], [float("nan"), 1.0, 2.0], [2.0, 1.0, float("nan")]):
            state = OpaqueMapState(self._made(KEY, Fields(least=float, most=float)))
            state.prepare("topology")
            try:
                for txid, value in enumerate(order, 1):
                    deltas = pa.table({"word": ["a"], "least": [value], "most": [value]})
                    granted = open_attempt(state, txid, 1)
                    state.apply(granted, deltas, {"least": Min("n"), "most": Max("n")}, want_values=False)
                    finish(state)
            except BadRecordError:
                continue
            least, most = state.get("a")
            assert (least, most != most) == (1.0, True)

    def test_nan_is_one_key_or_is_refused(self) -> None:
        backend = self._made(Fields(k=float), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        try:
            transact(state, 1, 1, {float("nan"): 1})
        except BadRecordError:
            return
        transact(state, 2, 1, {-float("nan"): 1})
        deltas = pa.table({"k": [float("nan")], "n": [1]})
        made = state.apply(open_attempt(state, 3, 1), deltas, {"n": Sum("n")}, want_values=True)
        assert made is not None and made.column("n").to_pylist() == [3]
        assert [row.value for _, row in backend.scan()] == [(3,)]

    def test_an_hour_that_comes_twice_is_two_keys(self) -> None:
        """In the night when clocks go back, Python treats the two hours as equal while they are in
        that zone."""
        kind = pa.timestamp("us", tz="Europe/Paris")
        if kind in self.cannot_hold:
            return
        backend = self._made(Fields.of({"at": kind}), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        instants = pa.array([1_603_585_800_000_000, 1_603_589_400_000_000], kind)
        for txid in (1, 2):
            deltas = pa.table({"at": instants, "n": [1, 10]})
            made = state.apply(open_attempt(state, txid, 1), deltas, {"n": Sum("n")}, want_values=True)
            assert made is not None and made.column("n").to_pylist() == [txid, txid * 10]
            finish(state)
        assert {row.value for _, row in backend.scan()} == {(2,), (20,)}

    def test_every_type_comes_back_as_it_went_in(self) -> None:
        """As key, as value, as previous value; by put and by apply."""
        names = list(self._held_types())
        value = Fields.of({name: EVERY_TYPE[name][0] for name in names})
        count = max(len(values) for _, values in EVERY_TYPE.values())
        rows = [tuple(EVERY_TYPE[name][1][each % len(EVERY_TYPE[name][1])] for name in names) for each in range(count)]
        rows.append((None,) * len(names))
        key = Fields.of({"k_text": pa.string(), "k_day": pa.date32(), "k_big": pa.int64(), "k_raw": pa.binary()})
        keys = [(text, datetime.date(2020, 1, 1 + i), i, text.encode()) for i, text in enumerate(AWKWARD)]
        keys.append(("null", datetime.date(1999, 1, 1), -1, b""))
        for how in ("put", "apply"):
            backend = self._made(key, value)
            state = OpaqueMapState(backend)
            state.prepare("topology")
            for txid, shift in ((1, 0), (2, 1)):
                shifted = rows[shift:] + rows[:shift]
                granted = open_attempt(state, txid, 1)
                if how == "put":
                    state.begin_commit(granted)
                    state.multi_put(keys, shifted if len(names) > 1 else [row[0] for row in shifted])
                    state.commit(granted)
                else:
                    columns = [*zip(*keys, strict=True), *zip(*shifted, strict=True)]
                    schema = pa.schema([(n, key.type_of(n)) for n in key] + [(n, value.type_of(n)) for n in value])
                    deltas = pa.table(
                        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
                    )
                    new_values = state.apply(granted, deltas, {n: Last(n) for n in names}, want_values=True)
                    assert new_values is not None and new_values.schema == schema
                    before = rows if txid == 2 else [(None,) * len(names)] * len(rows)
                    merged = [
                        tuple(old if new is None else new for old, new in zip(*pair, strict=True))
                        for pair in zip(before, shifted, strict=True)
                    ]
                    assert [tuple(row.values())[len(key) :] for row in new_values.to_pylist()] == merged
                finish(state)
            found = backend.multi_get(keys)
            assert [row.prev for row in found if row is not None] == rows
            if how == "put":
                assert [row.value for row in found if row is not None] == rows[1:] + rows[:1]
            assert dict(backend.scan()) == dict(zip(keys, found, strict=True))
            backend.close()

    def test_every_type_can_be_a_key(self) -> None:
        for name, (kind, values) in self._held_types().items():
            if isinstance(values[0], str):
                values = [each for each in values if len(each.encode()) <= self.longest_key]
            backend = self._made(Fields.of({name: kind}), VALUE)
            state = OpaqueMapState(backend)
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            state.begin_commit(granted)
            state.multi_put([(each,) for each in values], list(range(len(values))))
            state.commit(granted)
            assert {key[0]: row.value for key, row in backend.scan()} == {each: (i,) for i, each in enumerate(values)}
            assert [row.value for row in backend.multi_get([(each,) for each in values]) if row] == [
                (i,) for i in range(len(values))
            ]
            backend.close()

    def _held_types(self) -> dict[str, tuple[pa.DataType, Sequence[Any]]]:
        """The part of ``EVERY_TYPE`` that the store holds."""
        return {
            name: (kind, values)
            for name, (kind, values) in EVERY_TYPE.items()
            if kind not in self.cannot_hold and (self.holds_infinities or name != "boundless")
        }

    def test_an_infinity_that_cannot_be_held_is_refused(self) -> None:
        if self.holds_infinities:
            return
        for value, how in itertools.product(EVERY_TYPE["boundless"][1], ("put", "apply")):
            backend = self._made(KEY, Fields(real=float))
            state = OpaqueMapState(backend)
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            with pytest.raises(BadRecordError, match="infinity"):
                if how == "put":
                    state.begin_commit(granted)
                    state.multi_put(["dog"], [value])
                    state.commit(granted)
                else:
                    deltas = pa.table({"word": ["dog"], "real": [value]})
                    state.apply(granted, deltas, {"real": Last("real")}, want_values=False)
            assert backend.multi_get([("dog",)]) == [None]
            backend.close()

    def test_a_key_that_is_too_long_is_refused(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        long = "".join(chr(97 + each * 7919 % 26) for each in range(min(self.longest_key, 1_000) + 1))
        if self.longest_key > 1_000:
            state.multi_put([long], [1])
            state.commit(granted)
            assert state.get(long) == 1
            return
        with pytest.raises(BadRecordError, match="longer than"):
            state.multi_put([long], [1])
            state.commit(granted)

    def test_what_cannot_be_held_is_refused_when_it_is_declared(self) -> None:
        if issubclass(type(self._made(KEY, VALUE)), _untyped()):
            return
        for kind in (*self.cannot_hold, pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.timestamp("ns")):
            with pytest.raises(TopologyError, match="'odd'"):
                self._made(KEY, Fields.of({"odd": kind}))

    def test_null_absent_and_deleted_are_three_things(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        state.multi_put(["null", "dead"], [(None, None, None, None), (1, 2, 3, 4)])
        state.commit(granted)
        finish(state)
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.delete(["dead"])
        state.commit(granted)
        null, absent, dead = wide_backend.multi_get([("null",), ("absent",), ("dead",)])
        assert absent is None
        assert null is not None and null.value == (None,) * 4
        assert dead is not None and (dead.value, dead.prev) == (None, (1, 2, 3, 4))
        assert [state.get(key) for key in ("null", "absent", "dead")] == [(None,) * 4, None, None]

    def test_a_null_key_is_refused(self, backend: MapBackend) -> None:
        if issubclass(type(backend), _untyped()):
            return
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        with pytest.raises(BadRecordError, match="null"):
            state.multi_put([(None,)], [1])
            state.commit(granted)

    def test_an_integer_beyond_64_bits_is_refused(self, wide_backend: MapBackend) -> None:
        if issubclass(type(wide_backend), _untyped()):
            return
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        self.apply(state, 1, 1, {"a": [2**63 - 1]})
        granted = open_attempt(state, 2, 1)
        with pytest.raises(BadRecordError):
            state.apply(granted, self.deltas({"a": [1]}), AGGREGATES, want_values=False)
        assert state.get("a")[1] == 2**63 - 1

    def test_many_rows_in_one_commit(self, wide_backend: MapBackend) -> None:
        """More rows than fit into one page, chunk or statement."""
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        words = [f"w{each:06}" for each in range(12_345)]
        self.apply(state, 1, 1, {word: [each] for each, word in enumerate(words)})
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.multi_put(words, [(each, 0, 0, 0) for each in range(len(words))])
        state.commit(granted)
        open_attempt(state, 2, 2)
        finish(state, replay=True)  # this attempt wrote nothing: all rows are restored
        assert {key[0]: row.value for key, row in wide_backend.scan()} == {
            word: (1, each, each, each) for each, word in enumerate(words)
        }
        granted = open_attempt(state, 3, 1)
        state.begin_commit(granted)
        state.delete(words)
        state.commit(granted)
        finish(state)
        open_attempt(state, 4, 1)
        assert state.purge(state.read_header(), 4) == len(words)
        assert list(wide_backend.scan()) == []

    def test_every_aggregate_merges_as_the_fold(self) -> None:
        """Columns that the store merges, columns that are derived from others, and columns that
        Python merges."""
        aggregates: dict[str, Aggregate] = {}
        declared: dict[str, Aggregate] = {
            **AGGREGATES,
            "mean": Mean("n"),
            "first": First("n"),
            "last": Last("n"),
            "distinct": ApproxDistinct("n"),
            "either": Reduce("n", either),
        }
        for chosen in (("count", "mean", "first", "last"), tuple(declared)):
            aggregates = {n: e for name in chosen for n, e in declared[name].expanded(name).items()}
            types = {name: each.output_type(pa.int64()) for name, each in aggregates.items()}
            for state_class in STATES:
                backend = self._made(KEY, Fields.of(types))
                state = state_class(backend)
                state.prepare("topology")
                batches: list[dict[str, list[Any]]] = [
                    {"a": [4, 4, 2], "b": [None]},
                    {"a": [9], "b": [8, 1]},
                    {"c": [0]},
                ]
                for txid, batch in enumerate(batches, 1):
                    deltas = partials(batch, aggregates, types)
                    state.apply(open_attempt(state, txid, 1), deltas, aggregates, want_values=False)
                    finish(state)
                for word, values in (("a", [4, 4, 2, 9]), ("b", [None, 8, 1]), ("c", [0])):
                    wanted = partials({word: values}, aggregates, types).to_pylist()[0]
                    found = dict(zip(aggregates, state.get(word), strict=True))
                    for name in aggregates:
                        if not name.endswith("_sketch"):
                            assert found[name] == wanted[name], (state_class, word, name)
                backend.close()


def _untyped() -> type[MapBackend]:
    """The only backend without columns: it stores values of any type."""
    from sinks.memory import MemoryBackend

    return MemoryBackend
