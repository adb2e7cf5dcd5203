"""The fields hash is stable over processes and releases,
and independent of a value's representation.
"""

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


@pytest.mark.rule("C22")
def test_hash_golden_values_hold() -> None:
    values = ["dog", "", None, 1, -7, 2.5, True, b"dog", datetime.date(2026, 1, 1), [1, "a"]]
    # A change here moves keys between tasks of running topologies, so the algorithm needs a new
    # name.
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


DATE, TIME = datetime.date(2026, 11, 21), datetime.time(1, 2, 3, 4)
GOLDEN: dict[str, tuple[pa.Array, int]] = {
    "null": (pa.nulls(1), 0x1982E3A7BB241055),
    "bool": (pa.array([True]), 0x07EBB745A9AF4972),
    "int8": (pa.array([-7], pa.int8()), 0xF0F9A8E709DD4924),
    "int16": (pa.array([300], pa.int16()), 0x01B841A777EE484E),
    "int32": (pa.array([70_000], pa.int32()), 0x98D609F9891B928F),
    "int64": (pa.array([2**40], pa.int64()), 0x4FF2AE27E5F653B2),
    "uint8": (pa.array([200], pa.uint8()), 0xBB8C54A4B5953927),
    "uint16": (pa.array([60_000], pa.uint16()), 0xDE7B4222A44F779E),
    "uint32": (pa.array([2**31], pa.uint32()), 0x0F6E83F3ABB50B11),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 0x39D6B0869EDA91D2),
    "float16": (pa.array([1.5], pa.float16()), 0x3B8378B7C30C3C14),
    "float32": (pa.array([2.5], pa.float32()), 0x755B6D98AAC57831),
    "float64": (pa.array([0.1]), 0x25D6E3422E304B06),
    "string": (pa.array(["ß"]), 0x22566B0FB6CD255D),
    "large_string": (pa.array(["ß"], pa.large_string()), 0x22566B0FB6CD255D),
    "string_view": (pa.array(["ß"], pa.string_view()), 0x22566B0FB6CD255D),
    "binary": (pa.array([b"\x00\xff"]), 0x1F678645DB7B030C),
    "large_binary": (pa.array([b"\x00\xff"], pa.large_binary()), 0x1F678645DB7B030C),
    "fixed_size_binary": (pa.array([b"abcd"], pa.binary(4)), 0x2E629E354273EE23),
    "date32": (pa.array([DATE]), 0x00924C275F1C35D7),
    "date64": (pa.array([DATE], pa.date64()), 0x00924C275F1C35D7),
    "time32": (pa.array([datetime.time(1, 2, 3)], pa.time32("s")), 0x4DDDFA6F398DD5CD),
    "time64": (pa.array([TIME], pa.time64("us")), 0xE3E9E80F234393FD),
    "timestamp_s": (pa.array([1_700_000_000], pa.timestamp("s")), 0x8EDA07DB020707BD),
    "timestamp_ns": (pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")), 0x8148508822257E03),
    "timestamp_zoned": (pa.array([1_700_000_000], pa.timestamp("s", tz="Europe/Paris")), 0x8A055EFE7EC2B880),
    "duration_ms": (pa.array([1_500], pa.duration("ms")), 0xFE2D701E61CC58F3),
    "duration_ns": (pa.array([1_500_000_001], pa.duration("ns")), 0xB650F05984861FA2),
    "interval": (pa.array([pa.MonthDayNano([1, 2, 3])]), 0x5819DF8A286BEE07),
    "decimal128": (pa.array([decimal.Decimal("1.25")], pa.decimal128(10, 2)), 0xCC6CED935AD65381),
    "decimal256": (
        pa.array([decimal.Decimal("12345678901234567890123456789.01")], pa.decimal256(60, 2)),
        0x02D7E2F812EC1050,
    ),
    "list": (pa.array([[1, None]]), 0x3D183E8D666CC542),
    "large_list": (pa.array([[1, None]], pa.large_list(pa.int64())), 0x3D183E8D666CC542),
    "fixed_size_list": (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), 0x6A396FC78829EE45),
    "struct": (pa.array([{"a": 1, "b": [{"c": None}]}]), 0x50CF68F1DAD466AA),
    "map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), 0x73C33EA771445432),
    "dictionary": (pa.array(["ß"]).dictionary_encode(), 0x22566B0FB6CD255D),
    "run_end_encoded": (pa.RunEndEncodedArray.from_arrays([1], ["ß"]), 0x22566B0FB6CD255D),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.rule("C22")
def test_hash_golden_value_holds_for_every_arrow_type(name: str) -> None:
    array, expected = GOLDEN[name]
    assert one(array) == expected


def test_hash_golden_value_of_several_fields_with_nulls_holds() -> None:
    columns = [pa.array(["a", None, "a"]), pa.array([1, 1, None]), pa.array([[1], None, []], pa.list_(pa.int64()))]
    assert [f"{each:016X}" for each in hash_rows(columns).tolist()] == [
        "F06859679EB21599",
        "0D9910B384627708",
        "18A8A6BADD32900A",
    ]


def test_hash_tells_nanoseconds_apart() -> None:
    for kind in (pa.duration("ns"), pa.timestamp("ns"), pa.timestamp("ns", tz="UTC")):
        assert one(pa.array([1_500_000_000], kind)) != one(pa.array([1_500_000_001], kind))


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
@pytest.mark.rule("C22")
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
@pytest.mark.rule("C22")
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


@pytest.mark.slow
@pytest.mark.rule("C22")
def test_hash_is_the_same_in_another_process() -> None:
    code = "from framework.topology.hashing import hash_value; print(hash_value('dog'), hash_value(2.5))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(hash_value("dog")), str(hash_value(2.5))]


def test_hash_does_not_depend_on_the_decimal_context_of_the_thread() -> None:
    long = decimal.Decimal("12345678901234567890.123456789")
    expected = hash_value(long)
    with decimal.localcontext() as context:
        context.prec = 6
        assert hash_value(long) == expected
