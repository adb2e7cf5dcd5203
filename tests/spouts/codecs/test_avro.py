"""Avro into Arrow: the fast way and the slow way agree on every value, good or bad (2.9)."""

from __future__ import annotations

import datetime
import decimal
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError, RetryableError, TopologyError
from integration import RegistryServer
from spouts import AvroCodec, RegistryAvroCodec, UndecodableValueError
from spouts.codecs.avro_bulk import BulkAvro
from spouts.codecs.avro_schema import parsed
from tests.kit.avro import encoded, framed

pytestmark = pytest.mark.behaviour("2.9")

WORD = {
    "type": "record",
    "name": "Word",
    "namespace": "test",
    "fields": [
        {"name": "word", "type": "string"},
        {"name": "n", "type": "long"},
        {"name": "amount", "type": ["null", "int"], "default": None},
        {"name": "share", "type": "double"},
        {"name": "raw", "type": ["null", "bytes"], "default": None},
        {"name": "ok", "type": "boolean"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "small", "type": "float"},
    ],
}


def word(n: int, **changes: Any) -> dict[str, Any]:
    row = {"word": f"wörd{n}", "n": n, "amount": n % 7, "share": n / 3, "raw": b"\x00" * (n % 3), "ok": n % 2 == 0}
    return {**row, "at": 1_700_000_000_000 + n, "small": 0.5, **changes}


def one_by_one(codec: AvroCodec) -> AvroCodec:
    """The same codec without the fast way, which decodes many values at once."""
    slow = pickle.loads(pickle.dumps(codec))
    slow.decode([])
    slow._decoder._bulk = None
    return slow


LONGS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "word": st.text(max_size=200),
            "n": LONGS,
            "amount": st.none() | st.integers(-(2**31), 2**31 - 1),
            "share": st.floats(allow_nan=False),
            "raw": st.none() | st.binary(max_size=200),
            "ok": st.booleans(),
            "at": st.integers(-(2**40), 2**40),
            "small": st.floats(width=32, allow_nan=False),
        }
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.slow
@given(ROWS, st.booleans())
def test_many_at_once_and_one_by_one_give_the_same_rows(rows: list[dict[str, Any]], tombstones: bool) -> None:
    values: list[bytes | None] = list(encoded(WORD, *rows))
    if tombstones:
        values = [each for value in values for each in (value, None)]
    codec = AvroCodec(WORD)
    bulk = codec._decoder._bulk  # type: ignore[union-attr]
    assert bulk is not None, "the fast way does not reach this schema"
    fast = bulk.decode(values)
    assert fast is not None
    assert fast.equals(one_by_one(codec).decode(values))


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_damaged_values_are_found_and_take_nothing_from_their_neighbours(chance: random.Random, damaged: int) -> None:
    """Whatever is wrong with a few values, the others are decoded correctly."""
    values = encoded(WORD, *(word(n) for n in range(40)))
    codec = AvroCodec(WORD)
    slow = one_by_one(codec)
    for index in chance.sample(range(40), damaged):
        kind = chance.randrange(3)
        value = bytearray(values[index])
        if kind == 0:
            del value[chance.randrange(len(value)) :]
        elif kind == 1:
            value += bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
        else:
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        values[index] = bytes(value)
    batch, bad = codec.decode_good(values)
    expected, expected_bad = slow.decode_good(values)
    assert bad == expected_bad
    assert batch.equals(expected) or "nan" in str(batch.to_pylist())


PLAIN = {"type": "record", "name": "P", "fields": [{"name": "a", "type": "string"}, {"name": "b", "type": "long"}]}


@pytest.mark.parametrize(
    ("schema", "rows"), [(WORD, (word(1), word(2))), (PLAIN, ({"a": "dog", "b": 300}, {"a": "cat", "b": 7}))]
)
def test_a_value_that_reads_into_its_neighbour_is_bad(schema: Any, rows: Any) -> None:
    """Joined, the two decode as two whole values; only their lengths show that neither is whole."""
    first, second = encoded(schema, *rows)
    moved = [first[:-1], first[-1:] + second]
    codec = AvroCodec(schema)
    bulk = codec._decoder._bulk  # type: ignore[union-attr]
    assert bulk is not None
    assert bulk.decode([first, second]) is not None
    assert bulk.decode(moved) is None
    batch, bad = codec.decode_good(moved * 10)
    assert batch.num_rows == 0
    assert len(bad) == 20


def test_every_type_has_its_arrow_type() -> None:
    schema = {
        "type": "record",
        "name": "All",
        "fields": [
            {"name": "s", "type": {"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"]}},
            {"name": "f", "type": {"type": "fixed", "name": "Four", "size": 4}},
            {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "t", "type": {"type": "long", "logicalType": "time-micros"}},
            {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-millis"}},
            {"name": "u", "type": {"type": "string", "logicalType": "uuid"}},
            {"name": "list", "type": {"type": "array", "items": ["null", "long"]}},
            {"name": "map", "type": {"type": "map", "values": "double"}},
            {"name": "inner", "type": {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "Suit"}]}},
            {"name": "again", "type": ["null", "Inner"]},
        ],
    }
    row = {
        "s": "HEARTS",
        "f": b"abcd",
        "d": decimal.Decimal("12.34"),
        "day": 19_000,
        "t": 1_000_000,
        "ts": 1_700_000_000_000_001,
        "local": 1_700_000_000_000,
        "u": "6f1c3c3e-6f0f-4b8e-9b0f-0a0a0a0a0a0a",
        "list": [1, None, 3],
        "map": {"a": 0.5},
        "inner": {"x": "SPADES"},
        "again": {"x": "HEARTS"},
    }
    codec = AvroCodec(schema)
    assert codec.fields.type_of("d") == pa.decimal128(9, 2)
    assert codec.fields.type_of("ts") == pa.timestamp("us", "UTC")
    assert codec.fields.type_of("local") == pa.timestamp("ms")
    written = [*encoded(schema, row), None]
    found = codec.decode(written).to_pylist()
    assert found[0] == {
        **row,
        "day": datetime.date(2022, 1, 8),
        "t": datetime.time(0, 0, 1),
        "ts": datetime.datetime(2023, 11, 14, 22, 13, 20, 1, tzinfo=datetime.UTC),
        "local": datetime.datetime(2023, 11, 14, 22, 13, 20),
        "map": [("a", 0.5)],
    }
    assert set(found[1].values()) == {None}


def test_values_are_resolved_to_the_readers_schema_by_either_way() -> None:
    reader = {
        "type": "record",
        "name": "Word",
        "fields": [
            {"name": "n", "type": "double"},
            {"name": "word", "type": ["null", "string"]},
            {"name": "added", "type": "string", "default": "none"},
        ],
    }
    codec = AvroCodec(WORD, reader)
    assert codec.fields.names == ("n", "word", "added")
    values = encoded(WORD, *(word(n) for n in range(30)))
    promoted = {"n": 3.0, "word": "wörd3", "added": "none"}
    assert codec.decode(values).to_pylist()[3] == promoted
    assert one_by_one(codec).decode(values).to_pylist()[3] == promoted
    renamed = {**reader, "fields": [{"name": "text", "aliases": ["word"], "type": "string"}]}
    assert BulkAvro.of(parsed(WORD), parsed(renamed), pa.schema([("text", pa.string())])) is None
    assert AvroCodec(WORD, renamed).decode(values).to_pylist()[3] == {"text": "wörd3"}


def test_a_number_that_its_type_does_not_hold_is_bad_also_deep_inside() -> None:
    def nested(kind: str) -> dict[str, Any]:
        inner = {"type": "record", "name": "I", "fields": [{"name": "n", "type": kind}]}
        return {"type": "record", "name": "O", "fields": [{"name": "list", "type": {"type": "array", "items": inner}}]}

    values = encoded(nested("long"), *({"list": [{"n": 1}, {"n": n}]} for n in (2, 2**40, 3)))
    batch, bad = AvroCodec(nested("int")).decode_good(values)
    assert [row["list"][1]["n"] for row in batch.to_pylist()] == [2, 3]
    assert [each.index for each in bad] == [1]
    assert "more than 32 bits" in bad[0].reason


@pytest.mark.parametrize("kind", ["int", ["null", "int"]])
@pytest.mark.parametrize("beyond", [2**31, -(2**31) - 1, 3 * 2**30, 2**32, 2**34 - 1, 2**40])
def test_an_int_beyond_32_bits_is_bad_however_many_come_with_it(kind: Any, beyond: int) -> None:
    """A reader that drops the upper bits may need as many bytes for the number that is left."""

    def record(field: Any) -> dict[str, Any]:
        return {
            "type": "record",
            "name": "R",
            "fields": [{"name": "n", "type": field}, {"name": "s", "type": "string"}],
        }

    wide = ["null", "long"] if isinstance(kind, list) else "long"
    least, most = -(2**31), 2**31 - 1
    values = encoded(record(wide), *({"n": n, "s": "a"} for n in [*range(20), beyond, least, most]))
    codec = AvroCodec(record(kind))
    batch, bad = codec.decode_good(values)
    assert [each.index for each in bad] == [20]
    assert batch.column("n").to_pylist() == [*range(20), least, most]
    assert (batch, bad) == one_by_one(codec).decode_good(values)


def test_a_schema_that_is_not_a_record_is_one_field_called_value() -> None:
    codec = AvroCodec('"long"')
    assert codec.decode([*encoded("long", 7, -1), None]).to_pydict() == {"value": [7, -1, None]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "record", "name": "R", "fields": [{"name": "u", "type": ["int", "string"]}]},
            r"R.u: a union of 2 types",
        ),
        ({"type": "record", "name": "R", "fields": [{"name": "u", "type": "Unknown"}]}, "'Unknown' is not defined"),
        ({"type": "record", "name": "R", "fields": [{"name": "n", "type": ["null", "R"]}]}, "'R' contains itself"),
        ('{"type": "record"', "cannot be read"),
        ("missing.avsc", "cannot be read.*missing.avsc"),
    ],
)
def test_a_schema_that_has_no_columns_is_named(schema: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        AvroCodec(schema)


def test_a_schema_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "word.avsc"
    file.write_text(json.dumps(WORD))
    assert AvroCodec(file).fields.names[:2] == ("word", "n")
    assert AvroCodec(str(file)).fields == AvroCodec(WORD).fields


# --- the Schema Registry --------------------------------------------------------------------------


SMALL = {"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}]}
LARGE = {**SMALL, "fields": [*SMALL["fields"], {"name": "n", "type": "long", "default": 5}]}


@pytest.mark.integration
class TestRegistry:
    def test_writers_of_several_schemas_are_resolved_to_the_latest(self, registry: RegistryServer) -> None:
        old = registry.register("words-value", SMALL)
        new = registry.register("words-value", LARGE)
        codec = pickle.loads(pickle.dumps(RegistryAvroCodec(registry.url, subject="words-value")))
        values: list[bytes | None] = []
        for n in range(40):
            values += framed(old, *encoded(SMALL, {"word": f"old{n}"}))
            values += framed(new, *encoded(LARGE, {"word": f"new{n}", "n": n}))
            values.append(None)
        found = codec.decode(values).to_pylist()
        assert found[:6] == [
            {"word": "old0", "n": 5},
            {"word": "new0", "n": 0},
            {"word": None, "n": None},
            {"word": "old1", "n": 5},
            {"word": "new1", "n": 1},
            {"word": None, "n": None},
        ]
        assert len(found) == 120
        codec.decode(values)
        assert registry.requests[f"/schemas/ids/{old}"] == 1  # asked for once, however many values have it

    @pytest.mark.slow
    def test_undecodable_values_are_named_and_the_rest_comes_in_order(self, registry: RegistryServer) -> None:
        known = registry.register("words-value", SMALL)
        other = registry.register("other-value", "message Word {}", schema_type="PROTOBUF")
        (good, again) = encoded(SMALL, {"word": "a"}, {"word": "b"})
        values = [*framed(known, good), b"\x00\x00", *framed(999, good), b"\x01" + good * 3, *framed(other, good)]
        values += [*framed(known, b"\x08abc"), *framed(known, again)]
        codec = RegistryAvroCodec(registry.url, schema=SMALL)
        batch, bad = codec.decode_good(values)
        assert batch.to_pydict() == {"word": ["a", "b"]}
        reasons = {each.index: each.reason for each in bad}
        assert list(reasons) == [1, 2, 3, 4, 5]
        assert "2 bytes are too few" in reasons[1]
        assert "does not know schema id 999" in reasons[2]
        assert "first byte is 1, not 0" in reasons[3]
        assert "PROTOBUF, not Avro" in reasons[4]
        assert "ends early" in reasons[5]
        with pytest.raises(UndecodableValueError, match="value 1"):
            codec.decode(values)

    def test_schemas_may_refer_to_others_and_each_to_its_own_version(self, registry: RegistryServer) -> None:
        at = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
        point = {"type": "record", "name": "Point", "namespace": "geo", "fields": [{"name": "x", "type": "long"}, at]}
        newer = {**point, "fields": [{"name": "label", "type": "string", "default": "-"}, *point["fields"]]}
        place = {"type": "record", "name": "Place", "fields": [{"name": "point", "type": "geo.Point"}]}
        registry.register("point", point)
        registry.register("point", newer)
        old = registry.register("place", place, [{"name": "geo.Point", "subject": "point", "version": 1}])
        new = registry.register("place", place, [{"name": "geo.Point", "subject": "point", "version": 2}])
        codec = pickle.loads(pickle.dumps(RegistryAvroCodec(registry.url, subject="place")))
        values = []
        for schema_id, inner in ((old, point), (new, newer)):
            inline = {**place, "fields": [{"name": "point", "type": inner}]}
            row = {"point": {"x": 7, "at": 1_000, **({"label": "home"} if inner is newer else {})}}
            values += framed(schema_id, *encoded(inline, row))
        when = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
        assert codec.decode(values).to_pylist() == [
            {"point": {"label": "-", "x": 7, "at": when}},
            {"point": {"label": "home", "x": 7, "at": when}},
        ]

    def test_a_registry_that_is_away_is_waited_for_and_not_taken_for_a_bad_record(
        self, registry: RegistryServer
    ) -> None:
        known = registry.register("words-value", SMALL)
        codec = RegistryAvroCodec({"url": registry.url, "max.retries": 0}, schema=SMALL)
        values = framed(known, *encoded(SMALL, {"word": "a"}))
        registry.fail_next(1)
        with pytest.raises(RetryableError, match="Schema Registry"):
            codec.decode_good(values)
        assert codec.decode(values).num_rows == 1
        registry.stop()
        with pytest.raises(RetryableError, match="Schema Registry"):
            codec.decode_good(framed(777, b"x"))

    def test_a_password_works_and_is_not_shown(self, tmp_path: Path) -> None:
        registry = RegistryServer(tmp_path / "guarded", user="me:canary")
        registry.start()
        assert b"canary" not in Path(f"/proc/{registry.pid}/cmdline").read_bytes()
        registry.register("words-value", SMALL)
        settings = {"url": registry.url, "basic.auth.user.info": "me:canary"}
        codec = RegistryAvroCodec(settings, subject="words-value")
        assert codec.fields.names == ("word",)
        assert "canary" not in repr(codec)
        with pytest.raises(ConfigError, match="refuses subject 'words-value'.*credentials") as refused:
            RegistryAvroCodec({**settings, "basic.auth.user.info": "me:wrong"}, subject="words-value")
        assert "wrong" not in str(refused.value)
        with pytest.raises(ConfigError, match="does not know subject 'none'"):
            RegistryAvroCodec(settings, subject="none")
        registry.stop()

    def test_a_password_in_the_address_is_not_shown(self) -> None:
        codec = RegistryAvroCodec({"url": "http://me:s3cret@127.0.0.1:1", "max.retries": 0}, schema=SMALL)
        with pytest.raises(RetryableError, match=r"http://127.0.0.1:1 ") as away:
            codec.decode(framed(1, b"x"))
        assert "s3cret" not in f"{codec!r} {away.value}"

    def test_a_registry_codec_without_a_reader_schema_is_refused(self, registry: RegistryServer) -> None:
        with pytest.raises(TopologyError, match="subject= or schema="):
            RegistryAvroCodec(registry.url)
        with pytest.raises(ConfigError, match="needs a url"):
            RegistryAvroCodec({}, subject="x")
