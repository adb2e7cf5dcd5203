"""Declared fields that no record has."""

from __future__ import annotations

import pyarrow as pa
import pytest

from framework.topology import ReadCounts
from spouts.codecs.missing_field_warning import AbsentFields, absent_fields
from tests.kit.own_logs import own_logs

LINES = pa.list_(pa.struct([("price", pa.int64()), ("prize", pa.int64())]))


@pytest.mark.parametrize(
    ("declared", "values", "absent"),
    [
        (pa.int64(), [None, 1], []),
        (pa.int64(), [None, None], ["v"]),
        (pa.int64(), [], []),
        (pa.struct([("city", pa.string())]), [None, None], ["v"]),
        (pa.struct([("city", pa.string()), ("sity", pa.string())]), [None, {"city": "Bonn"}], ["v.sity"]),
        (LINES, [None, [], [{"price": 1}]], ["v[].prize"]),
        (LINES, [[], None], []),
        (pa.list_(pa.int64()), [[None]], []),
        (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None], []),
        (pa.map_(pa.string(), LINES), [[("a", None)], []], []),
        (pa.map_(pa.string(), pa.int64()), [None, None], ["v"]),
        (pa.list_(pa.map_(pa.string(), pa.int64())), [[[("a", 1)]]], []),
        (pa.list_(LINES.value_type, 1), [[{"price": 1}]], []),
    ],
    ids=str,
)
def test_a_field_is_absent_if_it_is_null_wherever_it_could_be(
    declared: pa.DataType, values: list[object], absent: list[str]
) -> None:
    assert sorted(absent_fields(["v"], [pa.array(values, declared)])) == absent


def test_what_one_task_finds_is_not_absent_in_the_batch() -> None:
    whole = ReadCounts()
    for fields in ({"a", "b"}, {"b", "c"}):
        one = ReadCounts()
        one.without("orders", frozenset(fields))
        whole.add(one)
    whole.add(ReadCounts())
    assert whole.absent == {"orders": {"b"}}


def test_the_first_batch_of_each_stream_is_told_of() -> None:
    absent = AbsentFields()
    with own_logs() as logs:
        for _ in range(2):
            absent.check({"default": frozenset({"wrod"}), "orders": frozenset()}, {"default": 7, "orders": 7})
        absent.check({"orders": frozenset({"id"}), "late": frozenset({"at"})}, {"orders": 7})
    assert [(each["event"], each.get("stream"), each["fields"], each["records"]) for each in logs] == [
        ("source.field_absent", None, ["wrod"], 7),
        ("source.field_absent", "late", ["at"], 0),
    ]
