"""The fields hash: stable over processes and releases, blind to how a value is represented."""

import datetime
import decimal
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from framework.topology.hashing import ALGORITHM, hash_rows, hash_value


def one(array: pa.Array) -> int:
    return int(hash_rows([array])[0])


def test_hash_golden_values_hold() -> None:
    values = ["dog", "", None, 1, -7, 2.5, True, b"dog", datetime.date(2026, 1, 1), [1, "a"]]
    # A change here moves keys between the tasks of running topologies: it needs a new name for the algorithm.
    assert ALGORITHM == "fields-hash/1"
    assert [hash_value(value) for value in values] == [
        0xF58F6F28498F6763,
        0xD6B9D4D14FF6BE13,
        0x1982E3A7BB241055,
        0x4E5C1B441FF8643E,
        0xF0F9A8E709DD4924,
        0x755B6D98AAC57831,
        0x07EBB745A9AF4972,
        0xF4BB6C133EF16A31,
        0x655F791C94A69D92,
        0x2785293C270A66BF,
    ]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([1], pa.int8()), pa.array([1], pa.int64())),
        (pa.array([1], pa.int64()), pa.array([1.0])),
        (pa.array([1.0]), pa.array([decimal.Decimal("1.00")])),
        (pa.array([0.0]), pa.array([-0.0])),
        (pa.array([math.nan]), pa.array([-math.nan])),
        (pa.array([2.5], pa.float32()), pa.array([decimal.Decimal("2.5")])),
        (pa.array(["dog"]), pa.array(["dog"], pa.large_string())),
        (pa.array(["dog"]), pa.array(["cat", "dog"]).dictionary_encode().take(pa.array([1]))),
        (
            pa.array([1_700_000_000_000], pa.timestamp("ms", tz="UTC")),
            pa.array([1_700_000_000_000_000], pa.timestamp("us", tz="Europe/Paris")),
        ),
    ],
)
def test_hash_equal_values_of_other_types_hash_alike(left: pa.Array, right: pa.Array) -> None:
    assert one(left) == one(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array(["1"]), pa.array([1])),
        (pa.array([None], pa.string()), pa.array([""])),
        (pa.array([True]), pa.array([1])),
        (pa.array([b"a"]), pa.array(["a"])),
        (pa.array([["a", "b"]]), pa.array([["ab"]])),
    ],
)
def test_hash_different_values_hash_apart(left: pa.Array, right: pa.Array) -> None:
    assert one(left) != one(right)


def test_hash_column_equals_hash_of_each_value() -> None:
    values = ["a", None, "b", "a", "ß", "a\0"]
    assert hash_rows([pa.array(values)]).tolist() == [hash_value(value) for value in values]


def test_hash_several_fields_depend_on_their_order() -> None:
    a, b = pa.array(["x"]), pa.array(["y"])
    assert hash_rows([a, b]).tolist() != hash_rows([b, a]).tolist()


def test_hash_spreads_over_tasks() -> None:
    words = pa.array([f"word{number}" for number in range(10_000)])
    counts = np.bincount((hash_rows([words]) % np.uint64(7)).astype(int), minlength=7)
    assert counts.min() > 1_200


def test_hash_is_the_same_in_another_process() -> None:
    code = "from framework.topology.hashing import hash_value; print(hash_value('dog'), hash_value(2.5))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(hash_value("dog")), str(hash_value(2.5))]
