"""The codecs and the libraries of their formats read and write the same: random schemas, and values
of each. ``python -m tests.kit.avro_reference``, ``protobuf_reference``, ``json_reference``,
``messagepack_reference`` and ``csv_reference`` do it for longer."""

from __future__ import annotations

import collections
from types import ModuleType

import pyarrow as pa
import pytest

from tests.kit import avro_reference, csv_reference, json_reference, messagepack_reference, protobuf_reference
from tests.kit.comparing import Difference, check_rows, check_verdicts, same
from tests.kit.fuzzing import Counts
from tests.kit.targets import Often

pytestmark = pytest.mark.behaviour("2.9")

MODULES = (avro_reference, protobuf_reference, json_reference, messagepack_reference, csv_reference)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_random_values_are_read_and_written_as_the_library_does(module: ModuleType, often: Often) -> None:
    counts: Counts = collections.Counter()
    for seed in range(1, often(20, 5_000)):
        print(f"seed {seed}")
        counts += module.compare(seed, 40)
    assert 0 < counts["refused"] < counts["values"] / 2, counts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1.0, 0.0]), pa.array([1.0, -0.0])),
        (pa.array([float("nan")]), pa.array([0.0])),
        (pa.array([None], pa.float32()), pa.array([float("nan")], pa.float32())),
        (pa.array([[1], []]), pa.array([[], [1]])),
        (pa.array([[None]], pa.list_(pa.int64())), pa.array([None], pa.list_(pa.int64()))),
        (pa.array([{"a": None}], pa.struct({"a": pa.int64()})), pa.array([None], pa.struct({"a": pa.int64()}))),
        (pa.array([{"a": [0.0]}]), pa.array([{"a": [-0.0]}])),
        (pa.array([{"a": 1}], pa.map_("string", "int64")), pa.array([{"a": 2}], pa.map_("string", "int64"))),
        (pa.array([{"a": 1}], pa.map_("string", "int64")), pa.array([{"b": 1}], pa.map_("string", "int64"))),
        (pa.array([1], pa.timestamp("us")), pa.array([2])),
        (pa.array([1, 2]), pa.array([1])),
    ],
)
def test_columns_that_differ_are_told_apart(one: pa.Array, other: pa.Array) -> None:
    assert same(one, one) and same(other, other)
    assert same(one.slice(1), one[1:])
    assert not same(one, other)
    assert not same(other, one)


def test_a_difference_names_the_shortest_value() -> None:
    batch = pa.record_batch({"n": pa.array([1, 2, 3])})
    with pytest.raises(Difference, match=r"(?s)value b'y'.field n of int64: 3.the reference: 7.2 such values"):
        check_rows(batch, [pa.array([1, 5, 7])], [b"a", b"xxx", b"y"], "s")
    with pytest.raises(Difference, match=r"(?s)value b'y'.the codec: wrong.the reference: a row.2 such values"):
        check_verdicts({2: "wrong"}, {1: "bad"}, [b"a", b"xxx", b"y"], "s")
