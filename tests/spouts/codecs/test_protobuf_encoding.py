"""Rows as messages of Protobuf: what the reference library reads, and what is refused."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields
from framework.errors import BadRecordError, TopologyError
from spouts import ProtobufCodec
from tests.kit.protobuf import EVERYTHING, classes, field, file_of, message, set_of
from tests.kit.round_trips import round_trip
from tests.kit.targets import Often
from tests.spouts.codecs.test_protobuf import Everything, random_message

pytestmark = pytest.mark.behaviour("2.9")


@pytest.fixture(scope="module")
def everything() -> ProtobufCodec:
    return ProtobufCodec("t.Everything", set_of(EVERYTHING))


def a_message(chance: random.Random) -> Any:
    """A message of every kind of field, which keeps its value in columns of microseconds."""
    made = random_message(chance)
    if chance.random() < 0.5:
        made.one_text = chance.choice(["", "a"])
    elif chance.random() < 0.5:
        made.one_inner.n = chance.randrange(3)
    if chance.random() < 0.5:
        made.one_inner.deep.deep.n = 7  # bytes: the type contains itself
    if chance.random() < 0.5:
        made.took.FromMicroseconds(chance.randrange(-(10**15), 10**15))
    if chance.random() < 0.5:
        made.wrapped.value = chance.randrange(-1, 2)
    if chance.random() < 0.5:
        made.data.update({"a": [1.5, None, "x", {"b": True}]})
    if chance.random() < 0.5:
        made.empty.SetInParent()
    made.colors.extend(chance.choice([0, 5, 7, -3]) for _ in range(chance.randrange(3)))
    return made


def test_messages_are_written_as_they_are_read(everything: ProtobufCodec, often: Often) -> None:
    for seed in range(often(3, 300)):
        chance = random.Random(seed)
        made = [a_message(chance) for _ in range(100)]
        batch = everything.decode([each.SerializeToString() for each in made])
        values = everything.encode(batch).to_pylist()
        assert [Everything.FromString(value) for value in values] == made
        assert values == [each.SerializeToString(deterministic=True) for each in made]


def test_rows_alone_in_slices_and_after_a_journey_have_the_same_values(everything: ProtobufCodec) -> None:
    chance = random.Random(1)
    batch = everything.decode([a_message(chance).SerializeToString() for _ in range(20)])
    values = round_trip(pickle.loads(pickle.dumps(everything)), batch)
    assert values == ProtobufCodec(Everything).encode(batch).to_pylist()
    assert everything.encode_row({"a_int64": 7, "color": "BLUE"}) == Everything(a_int64=7, color=5).SerializeToString()


def test_fields_that_the_rows_do_not_have_are_absent(everything: ProtobufCodec) -> None:
    batch = pa.record_batch([pa.array([1, 0])], names=["a_int64"])
    everything.check_encodable(Fields(a_int64=int))
    assert everything.encode(batch).to_pylist() == [Everything(a_int64=n).SerializeToString() for n in (1, 0)]


INNER = pa.struct([pa.field("n", pa.int64()), pa.field("deep", pa.binary())])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("a_int64", None, "a_int64 is null, and its field in the message cannot be absent"),
        ("many_string", None, "many_string is null"),
        ("many_string", ["a", None], r"many_string\[\] is null"),
        ("inner", {"n": None, "deep": None}, "inner.n is null"),
        ("inners", [{"n": 1, "deep": b"\xff"}], "inners.deep: no t.Inner"),
        ("inners", [None], r"inners\[\] is null"),
        ("counts", [("a", None)], "counts{} is null"),
        ("counts", [("a", 1), ("a", 2)], "counts has a key twice"),
        ("color", "GREEN", "color: 'GREEN' is no value of t.Color"),
        ("color", "5", "color: '5' is no value of t.Color"),  # BLUE
        ("color", "99999999999", "Value out of range"),
        ("data", "{", "data: no google.protobuf.Struct"),
        ("data", "[1]", "data: no google.protobuf.Struct"),
        ("at", 2**60, "at: a Timestamp of .* s is not between the years 1 and 9999"),
        ("took", 2**62, "took: a Duration has at most 315,576,000,000 s"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_the_field_is_named(
    everything: ProtobufCodec, name: str, value: Any, words: str
) -> None:
    declared = everything.fields.type_of(name)
    number = isinstance(value, int)
    column = pa.array([value], pa.int64()).view(declared) if number else pa.array([value], declared)
    everything.check_encodable(Fields.of({name: declared}))
    with pytest.raises(BadRecordError, match=f"ProtobufCodec cannot encode the row: .*{words}"):
        everything.encode(pa.record_batch([column], names=[name]))


def test_members_of_a_oneof_exclude_each_other(everything: ProtobufCodec) -> None:
    row = {"one_text": "", "one_inner": {"n": 1, "deep": None}}
    batch = pa.RecordBatch.from_pylist([row], pa.schema([("one_text", pa.string()), ("one_inner", INNER)]))
    with pytest.raises(BadRecordError, match="one_text and one_inner are members of a oneof"):
        everything.encode(batch)


def test_defaults_and_required_fields_of_proto2() -> None:
    file = file_of(
        message(
            "Old",
            field("id", 1, "int32", label="required"),
            field("size", 2, "int32", defaultValue="7"),
            field("note", 3, "string"),
            {"name": "kind", "number": 4, "label": "LABEL_OPTIONAL", "type": "TYPE_ENUM", "typeName": ".t.Kind"},
        ),
        syntax="proto2",
        enumType=[{"name": "Kind", "value": [{"name": "A", "number": 1}]}],
    )
    codec = ProtobufCodec("t.Old", set_of(file))
    old = classes(file)["t.Old"]
    row: dict[str, Any] = {"id": 1, "size": 7, "note": None}
    assert codec.encode_row(row) == old(id=1, size=7).SerializeToString()
    for change, words in (
        ({"id": None}, "id is null"),
        ({"size": None}, "size is null"),  # it would be read as 7
        ({"kind": "3"}, "kind: '3' is no value of t.Kind"),  # an enum of proto2 is closed
    ):
        with pytest.raises(ValueError, match=words):
            codec.encode_row({**row, **change})
    with pytest.raises(TopologyError, match="requires field 'id', and the rows do not have it"):
        codec.check_encodable(Fields.of({"size": pa.int32()}))


def test_another_type_is_refused_before_the_start(everything: ProtobufCodec) -> None:
    with pytest.raises(TopologyError, match="field 'a_int32' is int64, and it encodes int32: cast one"):
        everything.check_encodable(Fields(a_int32=int))
