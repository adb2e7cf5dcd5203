"""Protobuf messages: types, presence, defaults, bad values, bounds; alone and by a registry."""

from __future__ import annotations

import datetime
import json
import math
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import json_format
from google.protobuf.type_pb2 import Option

from framework.errors import ConfigError, TopologyError
from integration import RegistryServer
from spouts import ProtobufCodec, RegistryJsonCodec, RegistryProtobufCodec, UndecodableValueError
from spouts.codecs import protobuf_columns, protobuf_map_key_collisions, protobuf_memory_limit
from spouts.codecs.codec import Codec
from spouts.codecs.protobuf import ProtobufDecoder
from tests.kit.protobuf import EVERYTHING, KINDS, NUMBERS, classes, field, file_of, map_of, message, serialized, set_of
from tests.kit.targets import Often

ROOT = Path(__file__).parents[3]
Everything = classes(EVERYTHING)["t.Everything"]


@pytest.fixture(scope="module")
def everything() -> ProtobufCodec:
    return ProtobufCodec("t.Everything", set_of(EVERYTHING))


def row_of(codec: Codec, *values: Any) -> dict[str, Any]:
    found: dict[str, Any] = codec.decode([each.SerializeToString() for each in values]).to_pylist()[0]
    return found


def test_a_generated_class_and_a_descriptor_set_give_the_same(everything: ProtobufCodec, tmp_path: Path) -> None:
    path = tmp_path / "t.pb"
    path.write_bytes(set_of(EVERYTHING))
    value = Everything(a_int64=7, inners=[{"n": 1}, {"n": 2}]).SerializeToString()
    found = everything.decode([value, None])
    for other in (ProtobufCodec(Everything), ProtobufCodec("t.Everything", path)):
        again = pickle.loads(pickle.dumps(other))
        assert again.fields == everything.fields
        assert again.decode([value, None]).equals(found)
    assert ProtobufCodec(Option).fields.names == ("name", "value")


def test_absent_fields_are_null_where_absence_is_told_and_else_zero(everything: ProtobufCodec) -> None:
    row = row_of(everything, Everything())
    zeros: dict[str, Any] = {"bool": False, "string": "", "bytes": b""}
    for kind in KINDS:
        assert row[f"a_{kind}"] == zeros.get(kind, 0)
        assert row[f"many_{kind}"] == []
        assert row[f"maybe_{kind}"] is None
    absent = ("one_text", "one_inner", "inner", "at", "took", "wrapped", "data", "empty")
    assert [row[each] for each in absent] == [None] * len(absent)
    assert (row["color"], row["colors"], row["inners"], row["counts"], row["named"]) == ("RED", [], [], [], [])
    assert all(value is None for value in everything.decode([None]).to_pylist()[0].values())


def test_fields_that_are_there_have_their_values(everything: ProtobufCodec) -> None:
    given = Everything(
        maybe_int32=0,
        one_text="",
        color=7,
        colors=[5, 0, 7],
        inner={"n": 1, "deep": {"n": 2}},
        inners=[{}, {"n": -3}],
        counts={"b": 2, "a": 1},
        named={2: {"n": 20}, 1: {}},
        wrapped={"value": 0},
        data={"b": None, "a": [1.5, "x", True]},
        empty={},
    )
    given.at.FromJsonString("2026-01-02T03:04:05.123456789Z")
    given.took.FromJsonString("-1.000001999s")
    row = row_of(everything, given)
    deep = classes(EVERYTHING)["t.Inner"](n=2).SerializeToString()
    assert (row["maybe_int32"], row["one_text"], row["wrapped"], row["empty"]) == (0, "", 0, b"")
    assert (row["color"], row["colors"]) == ("7", ["BLUE", "RED", "7"])
    assert row["inner"] == {"n": 1, "deep": deep}  # a message within itself is kept as its bytes
    assert row["inners"] == [{"n": 0, "deep": None}, {"n": -3, "deep": None}]
    assert row["counts"] == [("a", 1), ("b", 2)]
    assert row["named"] == [(1, {"n": 0, "deep": None}), (2, {"n": 20, "deep": None})]
    assert row["at"] == datetime.datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=datetime.UTC)
    assert row["took"] == datetime.timedelta(seconds=-1, microseconds=-1)
    assert json.loads(row["data"]) == {"a": [1.5, "x", True], "b": None}


LIMITS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "sint32": (-(2**31), 2**31 - 1),
    "sint64": (-(2**63), 2**63 - 1),
    "fixed32": (0, 2**32 - 1),
    "fixed64": (0, 2**64 - 1),
    "sfixed32": (-(2**31), 2**31 - 1),
    "sfixed64": (-(2**63), 2**63 - 1),
}


def some(kind: str, chance: random.Random) -> Any:
    if kind in LIMITS:
        least, most = LIMITS[kind]
        return chance.choice([least, most, 0, chance.randint(least, most), chance.randint(0, 100)])
    if kind == "bool":
        return chance.random() < 0.5
    if kind == "bytes":
        return chance.randbytes(chance.randrange(5))
    if kind == "string":
        return "".join(chance.choice('aä\x00€😀"') for _ in range(chance.randrange(5)))
    value = chance.choice([0.0, -0.0, 1.5, math.inf, chance.uniform(-1e9, 1e9)])
    return struct.unpack("f", struct.pack("f", value))[0] if kind == "float" else value


def random_message(chance: random.Random) -> Any:
    found = Everything()
    for kind in KINDS:
        if chance.random() < 0.5:
            setattr(found, f"a_{kind}", some(kind, chance))
        if chance.random() < 0.5:
            setattr(found, f"maybe_{kind}", some(kind, chance))
        getattr(found, f"many_{kind}").extend(some(kind, chance) for _ in range(chance.randrange(3)))
    if chance.random() < 0.5:
        found.inner.n = some("int64", chance)
    for _ in range(chance.randrange(3)):
        found.inners.add(n=some("int64", chance))
        found.counts[some("string", chance)] = some("int64", chance)
        found.named[some("int32", chance)].n = some("int64", chance)
    if chance.random() < 0.5:
        found.at.seconds, found.at.nanos = chance.randrange(-(10**9), 10**10), chance.randrange(10**6) * 1_000
    found.color = chance.choice([0, 5])
    return found


#: Decodes values with the implementation of Protobuf in pure Python, and prints them as JSON.
OTHER = """
import sys
from google.protobuf import json_format
from google.protobuf.internal import api_implementation
from tests.spouts.codecs.test_protobuf import Everything
assert api_implementation.Type() == "python"
for line in sys.stdin:
    print(json_format.MessageToJson(
        Everything.FromString(bytes.fromhex(line)), indent=None,
        preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
"""


@pytest.mark.slow
def test_rows_are_what_another_implementation_decodes(everything: ProtobufCodec, seed: int) -> None:
    chance = random.Random(seed)
    values = [random_message(chance).SerializeToString() for _ in range(300)]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", "PYTHONPATH": str(ROOT)}
    lines = "".join(f"{each.hex()}\n" for each in values)
    answer = subprocess.run(
        [sys.executable, "-c", OTHER], input=lines, capture_output=True, text=True, env=environment, check=False
    )
    assert answer.returncode == 0, answer.stderr
    others = [json.loads(each) for each in answer.stdout.splitlines()]
    rows = everything.decode(values).to_pylist()
    assert len(rows) == len(others) == 300
    for row, value, other in zip(rows, values, others, strict=True):
        made = Everything()
        for name, its in row.items():
            _set(made, name, its)
        assert made == Everything.FromString(value)  # nothing is lost
        said = json_format.MessageToDict(
            made, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        assert json.loads(json.dumps(said)) == other
    assert [everything.decode([each]).to_pylist()[0] for each in values] == rows


def _set(made: Any, name: str, its: Any) -> None:
    if its is None:
        return
    if name == "at":
        made.at.FromDatetime(its)
    elif name == "color":
        made.color = {"RED": 0, "BLUE": 5}[its]
    elif name in ("inner", "inners"):
        for each in its if isinstance(its, list) else [its]:
            (made.inners.add() if name == "inners" else made.inner).n = each["n"]
    elif name == "counts":
        made.counts.update(its)
    elif name == "named":
        for key, each in its:
            made.named[key].n = each["n"]
    elif isinstance(its, list):
        getattr(made, name).extend(its)
    else:
        setattr(made, name, its)


def test_bad_values_are_named_and_the_rest_comes_in_order(everything: ProtobufCodec) -> None:
    good = [Everything(a_int64=n).SerializeToString() for n in range(6)]
    far = Everything()
    far.at.seconds = 253_402_300_800
    nan = Everything()
    nan.data["x"] = math.nan
    values = [
        good[0],
        b"\xff",
        good[1],
        None,
        far.SerializeToString(),
        nan.SerializeToString(),
        b"\x72\x01\xff",
        good[2],
    ]
    batch, bad = everything.decode_good(values)
    assert batch.column(3).to_pylist() == [0, 1, None, 2]
    assert [each.index for each in bad] == [1, 4, 5, 6]
    reasons = [each.reason for each in bad]
    assert "no message t.Everything" in reasons[0]
    assert "a Timestamp of 253402300800 s and 0 ns is not between the years 1 and 9999" in reasons[1]
    assert "google.protobuf.Struct has no JSON form" in reasons[2]
    assert "no message t.Everything" in reasons[3]  # text that is not UTF-8
    with pytest.raises(UndecodableValueError, match="value 1"):
        everything.decode(values)
    for value in values:
        assert len(everything.decode_good([value])[1]) == (value in (b"\xff", *[values[n] for n in (4, 5, 6)]))


def test_defaults_and_required_fields_of_proto2() -> None:
    old = file_of(
        message(
            "Old",
            field("id", 1, "int32", label="required"),
            field("n", 2, "int32", defaultValue="7"),
            field("m", 3, "int32"),
        ),
        syntax="proto2",
    )
    codec = ProtobufCodec("t.Old", set_of(old))
    batch, bad = codec.decode_good([classes(old)["t.Old"](id=1).SerializeToString(), b""])
    assert batch.to_pylist() == [{"id": 1, "n": 7, "m": None}]
    assert [each.reason for each in bad] == ["no message t.Old: required fields are absent: id"]


#: Where a message has a map beside messages with required fields, the library's list of those that
#: are absent is wrong, or ends the process.
BESIDE_A_MAP = file_of(
    message(
        "M",
        field("id", 1, "int32", label="required"),
        field("many", 2, ".t.M", label="repeated"),
        field("counts", 3, ".t.M.CountsEntry", label="repeated"),
        field("named", 4, ".t.M.NamedEntry", label="repeated"),
        field("one", 5, ".t.M"),
        nestedType=[map_of("CountsEntry", "uint64", "sfixed64"), map_of("NamedEntry", "string", ".t.M")],
    ),
    syntax="proto2",
)


@pytest.mark.parametrize(
    ("message", "absent"),
    [
        ({"many": [{"id": 1}, {}]}, "id, many[1].id"),
        ({"id": 1, "named": {"b": {}, "a": {}}}, "named['a'].id, named['b'].id"),
        ({"id": 1, "one": {"one": {}}}, "one.id, one.one.id"),
        ({"many": [{}] * 5}, "id, many[0].id, many[1].id"),
    ],
)
def test_absent_required_fields_are_named_in_messages_beside_a_map(message: dict[str, Any], absent: str) -> None:
    codec = ProtobufCodec("t.M", set_of(BESIDE_A_MAP))
    value = classes(BESIDE_A_MAP)["t.M"](counts={0: 1}, **message).SerializePartialToString()
    (bad,) = codec.decode_good([value])[1]
    assert bad.reason == f"no message t.M: required fields are absent: {absent}"
    inside = ", ".join(f"many[0].{each}" for each in absent.split(", "))
    with pytest.raises(ValueError, match=re.escape(f"required fields are absent: {inside}")):
        codec.encode_row({"id": 1, "counts": [(0, 1)], "many": [value]})


def test_a_bad_moment_among_good_values_costs_a_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by halving."""
    at = [Everything(at={"seconds": 10**12 if n == 700 else n}).SerializeToString() for n in range(1_000)]
    made = []
    batch_of = ProtobufDecoder._batch

    def counting(decoder: ProtobufDecoder, messages: Any, *sizes: int) -> pa.RecordBatch:
        made.append(len(messages))
        return batch_of(decoder, messages, *sizes)

    monkeypatch.setattr(ProtobufDecoder, "_batch", counting)
    batch, bad = ProtobufCodec(Everything).decode_good(at)
    assert (batch.num_rows, [each.index for each in bad]) == (999, [700])
    assert len(made) < 50


@pytest.mark.parametrize("dense", [True, False])
def test_messages_with_few_of_their_fields_have_the_same_columns(
    dense: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the fields that they have are read: 450,000 empty messages took 4.7 s."""
    of_two = message("Two", field("n", 1, "int32", defaultValue="7"), field("text", 2, "string"))
    two = file_of(
        message("Lists", field("two", 1, ".o.Two", label="repeated")), of_two, name="o", package="o", syntax="proto2"
    )
    chance = random.Random(seed)
    holder = file_of(
        message("Holder", field("many", 1, ".t.Everything", label="repeated"), field("lists", 2, ".o.Lists")),
        name="holder.proto",
        package="h",
        dependency=["t.proto", "o"],
    )
    makes = classes(EVERYTHING, two, holder)
    some_of = [random_message(chance) if dense or number % 5 == 0 else Everything() for number in range(40)]
    value = makes["h.Holder"](lists={"two": [{}, {"n": 0}, {"n": 7, "text": ""}, {}]})
    for each in (*some_of, Everything(a_double=-0.0, maybe_double=-0.0)):
        value.many.add().MergeFromString(each.SerializeToString())
    codec = ProtobufCodec("h.Holder", set_of(EVERYTHING, two, holder))
    every = codec.decode([value.SerializeToString()] * 2)
    monkeypatch.setattr(protobuf_columns, "READ_CELLS", 0)
    monkeypatch.setattr(protobuf_columns, "READ_PER_BYTE", 0)
    monkeypatch.setattr(protobuf_columns, "PART_VALUES", 7)
    found = codec.decode([value.SerializeToString()] * 2)
    found.validate(full=True)
    assert repr(found.to_pylist()) == repr(every.to_pylist())  # with -0.0
    assert found.schema == every.schema


def test_few_fields_of_many_empty_messages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = message("Wide", *[field(f"f{n}", n, "int64") for n in range(1, 31)])
    codec = ProtobufCodec(
        "t.Many", set_of(file_of(wide, message("Many", field("wide", 1, ".t.Wide", label="repeated"))))
    )
    read = []
    places = protobuf_columns._places
    monkeypatch.setattr(
        protobuf_columns,
        "_places",
        lambda *given: read.append([len(each) for each in places(*given)]) or places(*given),
    )  # type: ignore[func-returns-value]
    batch, bad = codec.decode_good([b"\x0a\x00" * 20_000 + b"\x0a\x02\x18\x05"])
    assert (len(batch.column(0)[0]), bad) == (20_001, [])
    assert [sum(its) for its in zip(*read, strict=True)] == [0, 0, 1, *[0] * 27]
    assert batch.column(0)[0][20_000].as_py()["f3"] == 5


def test_equal_short_values_are_converted_to_json_once(
    everything: ProtobufCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many empty ones in a value took microseconds each."""
    converted = []
    to_json = protobuf_columns._json
    monkeypatch.setattr(protobuf_columns, "_json", lambda value: converted.append(1) or to_json(value))  # type: ignore[func-returns-value]
    long = {"b": "x" * 100}
    given = [{}, {"a": None}, long, {}, {"a": None}, {"a": 1}, long]
    rows = everything.decode([Everything(data=each).SerializeToString() for each in given]).to_pylist()
    assert [json.loads(row["data"]) for row in rows] == given
    assert len(converted) == 5


@pytest.mark.slow
def test_a_value_cannot_fill_the_memory(everything: ProtobufCodec) -> None:
    """Empty messages within a message take two bytes each."""
    wide = file_of(
        message("Wide", *[field(f"f{n}", n, "int64") for n in range(1, 1_001)]),
        message("Many", field("wide", 1, ".t.Wide", label="repeated")),
    )
    codec = ProtobufCodec("t.Many", set_of(wide))
    some_of = b"\x0a\x00" * 2_000
    batch, bad = codec.decode_good([b"\x0a\x00" * 1_000_000, some_of, b"\x0a\x00"])
    assert [(each.index, each.reason) for each in bad] == [
        (0, f"its messages take more than {protobuf_memory_limit.PARSED_BYTES_MAX >> 20} MiB of memory"),
        (1, "its messages hold too many fields for its size"),
    ]
    assert [len(each) for each in batch.column(0)] == [1]
    assert [len(codec.decode_good([each])[1]) for each in (some_of, b"\x0a\x00")] == [1, 0]
    deep = b""
    for _ in range(200):
        deep = b"\x12" + bytes([len(deep) % 128]) + deep if len(deep) < 128 else b"\x12" + _varint(len(deep)) + deep
    inner = ProtobufCodec("t.Inner", set_of(EVERYTHING))
    assert len(inner.decode_good([deep])[1]) == 1


@pytest.mark.parametrize("syntax", ["a group", "a deep message at the end"])
def test_messages_are_counted_wherever_they_are(syntax: str) -> None:
    """Before they are parsed: that is when they take the memory."""
    wide = message("Wide", *[field(f"f{n}", n, "int64") for n in range(1, 201)])
    many = field("wide", 1, ".t.Wide", label="repeated")
    group = {"name": "group", "number": 2, "label": "LABEL_OPTIONAL", "type": "TYPE_GROUP", "typeName": ".t.Many.Group"}
    deep = field("deep", 3, ".t.Many")
    file = file_of(
        wide, message("Many", many, group, deep, nestedType=[message("Group", {**many, "number": 7})]), syntax="proto2"
    )
    empty = b"\x0a\x00" * 200_000
    nested = b""
    for _ in range(60):
        nested = b"\x1a" + (bytes([len(nested)]) if len(nested) < 128 else _varint(len(nested))) + nested
    for _ in range(60):
        nested = b"\x1a" + _varint(len(nested)) + nested
    value = b"\x13" + b"\x3a\x00" * 200_000 + b"\x14" if syntax == "a group" else empty + nested
    size = protobuf_memory_limit.ParsedSize(classes(file)["t.Many"].DESCRIPTOR)
    with pytest.raises(ValueError, match="its messages take more than 256 MiB of memory"):
        size.check(value)
    size.check(value[:100_000] + b"\x14")


KEYED = file_of(
    message(
        "Keyed",
        *[
            field(kind, number, f".t.Keyed.{kind.title()}Entry", label="repeated")
            for number, kind in enumerate(NUMBERS, 1)
        ],
        field("one", 20, ".t.Keyed"),
        field("many", 21, ".t.Keyed", label="repeated"),
        field("named", 22, ".t.Keyed.NamedEntry", label="repeated"),
        nestedType=[
            *[map_of(f"{kind.title()}Entry", kind, "int32") for kind in NUMBERS],
            map_of("NamedEntry", "string", ".t.Keyed"),
        ],
    )
)
#: 8,000 keys that have one place in a table of 16,384; their pairs are more than the most.
ONE_PLACE = [number << 17 for number in range(8_000)]
FOLDED = [number << 32 | number for number in range(1, 8_001)]


keyed = classes(KEYED)["t.Keyed"]


@pytest.mark.parametrize("kind", NUMBERS)
def test_keys_of_a_map_that_were_chosen_to_collide_make_a_bad_record(kind: str) -> None:
    """The parser compared each with all others: 60,000 took 20 s."""
    narrow = kind.endswith("32")
    chosen = [each >> 2 for each in ONE_PLACE if each >> 2 < 2**31] if narrow else FOLDED
    codec = ProtobufCodec("t.Keyed", set_of(KEYED))
    of_others = keyed(**{kind: {number * 7_919: number for number in range(8_000)}})
    values = [keyed(**{kind: dict.fromkeys(chosen, 1)}).SerializeToString(), of_others.SerializeToString()]
    batch, bad = codec.decode_good(values)
    assert [(each.index, each.reason) for each in bad] == [
        (0, "keys of a map were chosen so that they collide in the parser's hash table")
    ]
    assert [len(each) for each in batch.column(kind)] == [8_000]


@pytest.mark.parametrize("place", ["one", "many", "named", "merged"])
def test_such_keys_are_found_wherever_the_parser_puts_them_together(place: str) -> None:
    inner = keyed(uint64=dict.fromkeys(FOLDED, 1))
    made = {
        "one": lambda: keyed(one={"one": inner}).SerializeToString(),
        "many": lambda: keyed(many=[{}, inner]).SerializeToString(),
        "named": lambda: keyed(named={"a": inner}).SerializeToString(),
        "merged": lambda: b"".join(keyed(one={"uint64": {each: 1}}).SerializeToString() for each in FOLDED),
    }[place]()
    keys = protobuf_map_key_collisions.MapKeys(keyed.DESCRIPTOR)
    with pytest.raises(ValueError, match="were chosen so that they collide"):
        keys.check(made)
    keys.check(made[: len(made) // 4])


def test_the_same_keys_in_messages_of_their_own_do_not_collide() -> None:
    many = [keyed(uint64={each: 1}) for each in FOLDED]
    batch, bad = ProtobufCodec("t.Keyed", set_of(KEYED)).decode_good([keyed(many=many).SerializeToString()])
    assert not bad and batch.num_rows == 1


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7])


@pytest.mark.parametrize(
    ("message_", "descriptor_set", "said"),
    [
        ("t.Everything", None, "needs a generated class, or the name of a message and descriptor_set="),
        (Everything, b"x", "needs a generated class"),
        ("t.None", set_of(EVERYTHING), "there is no message 't.None'; there are: t.Inner, t.Empty, t.Everything"),
        ("t.X", b"\xff", "what was given is no descriptor set: make one by protoc"),
        ("t.X", b"", "what was given is an empty descriptor set"),
        ("t.X", "no.such.file", "the descriptor set cannot be read"),
        ("t.X", set_of(file_of(dependency=["a.proto"])), "lacks 'a.proto': give protoc --include_imports"),
        ("t.Empty", set_of(EVERYTHING), "message 't.Empty' has no fields"),
    ],
)
def test_what_is_no_type_is_refused(message_: Any, descriptor_set: Any, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        ProtobufCodec(message_, descriptor_set)


# --- by a Schema Registry -------------------------------------------------------------------------

PLACE = file_of(message("Place", field("x", 1, "int64")), name="place.proto", package="geo")
ORDER = file_of(
    message(
        "Order",
        field("id", 1, "int64"),
        field("place", 2, ".geo.Place"),
        nestedType=[message("Line", field("n", 1, "int32"))],
    ),
    message("Other", field("id", 1, "int64")),
    name="order.proto",
    package="shop",
    dependency=["place.proto"],
)


@pytest.fixture
def orders(registry: RegistryServer) -> int:
    registry.register("place", "message Place {}", schema_type="PROTOBUF", serialized=serialized(PLACE))
    return registry.register(
        "orders-value",
        "message Order {}",
        [{"name": "place.proto", "subject": "place", "version": 1}],
        schema_type="PROTOBUF",
        serialized=serialized(ORDER),
    )


def framed(schema_id: int, indexes: bytes, body: bytes) -> bytes:
    return struct.pack(">bI", 0, schema_id) + indexes + body


@pytest.mark.integration
def test_messages_name_their_schema_and_which_message_of_it_they_are(registry: RegistryServer, orders: int) -> None:
    made = classes(PLACE, ORDER)
    body = made["shop.Order"](id=7, place={"x": 1}).SerializeToString()
    newer = file_of(
        message("Order", field("id", 1, "int64"), field("more", 9, "string")), name="order.proto", package="shop"
    )
    other_id = registry.register(
        "orders-value", "message Order {}", schema_type="PROTOBUF", serialized=serialized(newer)
    )
    more = classes(newer)["shop.Order"](id=8, more="x").SerializeToString()
    codec = pickle.loads(pickle.dumps(RegistryProtobufCodec(registry.url, message=made["shop.Order"])))
    values = [
        framed(orders, b"\x00", body),
        framed(orders, b"\x02\x00", body),
        framed(other_id, b"\x00", more),
        None,
        framed(orders, b"\x02\x02", body),
        framed(orders, b"\x04\x00\x00", body),
        framed(orders, b"\x02\x08", body),
        framed(orders, b"", b""),
    ]
    batch, bad = codec.decode_good(values)
    assert batch.to_pylist() == [
        {"id": 7, "place": {"x": 1}},
        {"id": 7, "place": {"x": 1}},
        {"id": 8, "place": None},
        {"id": None, "place": None},
    ]
    assert [(each.index, each.reason) for each in bad] == [
        (4, "it is a message shop.Other, not shop.Order"),
        (5, "it is a message shop.Order.Line, not shop.Order"),
        (6, "its schema has no message with the indexes [4]"),
        (7, "the value ends within its indexes of messages"),
    ]


@pytest.mark.integration
def test_the_latest_schema_of_a_subject_gives_the_fields(registry: RegistryServer, orders: int) -> None:
    codec = RegistryProtobufCodec(registry.url, subject="orders-value")
    assert codec.fields.names == ("id", "place")
    assert codec.fields.type_of("place") == pa.struct([("x", pa.int64())])
    other = RegistryProtobufCodec(registry.url, subject="orders-value", message="shop.Other")
    assert other.decode([framed(orders, b"\x02\x02", b"\x08\x05")]).to_pylist() == [{"id": 5}]
    with pytest.raises(TopologyError, match="there is no message 'shop.X'; there are: shop.Order, shop.Other"):
        RegistryProtobufCodec(registry.url, subject="orders-value", message="shop.X")
    registry.register("avro", {"type": "record", "name": "X", "fields": []})
    with pytest.raises(ConfigError, match="subject 'avro': its schema is of the kind AVRO, not PROTOBUF"):
        RegistryProtobufCodec(registry.url, subject="avro")
    registry.register("text", "message X {}", schema_type="PROTOBUF")
    with pytest.raises(ConfigError, match="subject 'text': the Schema Registry has given no serialized schema"):
        RegistryProtobufCodec(registry.url, subject="text")
    with pytest.raises(TopologyError, match="needs subject=, or a generated class"):
        RegistryProtobufCodec(registry.url)


@pytest.mark.integration
def test_objects_name_their_json_schema(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spouts.codecs.registry_codec._PAUSES_S", (0.001, 0.001))
    text = {"type": "string"}
    place = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/number"}},
        "$defs": {"number": {"type": "integer"}},
    }
    order = {
        "type": "object",
        "properties": {
            "id": {"$ref": "text.json"},
            "place": {"$ref": "geo/place.json#"},
            "to": {"$ref": "geo/place.json"},
        },
        "required": ["id"],
    }
    registry.register("text", text, schema_type="JSON")
    registry.register("place", place, schema_type="JSON")
    references = [
        {"name": "text.json", "subject": "text", "version": 1},
        {"name": "geo/place.json", "subject": "place", "version": 1},
    ]
    known = registry.register("orders", order, references, schema_type="JSON")
    avro = registry.register("avro", {"type": "record", "name": "X", "fields": []})
    codec = pickle.loads(pickle.dumps(RegistryJsonCodec(registry.url, subject="orders")))
    values = [framed(known, b"", each) for each in (b'{"id": "a", "place": {"x": 1}}', b"{}", b"[]")]
    values += [framed(avro, b"", b"{}"), framed(999, b"", b"{}")]
    batch, bad = codec.decode_good(values)
    assert batch.to_pylist() == [{"id": "a", "place": {"x": 1}, "to": None}]
    assert [each.index for each in bad] == [1, 2, 3, 4]
    assert f"schema id {avro}: it is AVRO, not JSON" in bad[2].reason
    assert "does not know schema id 999" in bad[3].reason
    with pytest.raises(TopologyError, match="needs subject= or schema=, or fields= alone"):
        RegistryJsonCodec(registry.url)


def test_mutated_values_are_bad_or_good_alone_and_together(everything: ProtobufCodec, seed: int, often: Often) -> None:
    chance = random.Random(seed)
    for _ in range(often(2, 200)):
        values = []
        for _ in range(300):
            value = bytearray(random_message(chance).SerializeToString())
            for _ in range(chance.randrange(4)):
                at = chance.randrange(len(value) + 1)
                value[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            values.append(bytes(value))
        batch, bad = everything.decode_good(values)
        assert 0 < len(bad) < 300
        alone = [everything.decode_good([each]) for each in values]
        assert [index for index, (_, its) in enumerate(alone) if its] == [each.index for each in bad]
        rows = [row for each, _ in alone for row in each.to_pylist()]
        assert repr(rows) == repr(batch.to_pylist())  # NaN is not equal to itself
