"""The fields of JSON objects that no schema declares are kept as they are written."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from ratchet import Json, Pipeline
from sinks import AppendCommitter, UpsertCommitter
from spouts import JsonCodec, MemoryTransactionalSpout
from tests.kit.row_tables import PostgresDatabase
from tests.kit.waiting import PATIENCE_S

DECLARED = Fields(id=int, name=str)
NAMES = st.sampled_from(["id", "name", "a", 'q"', "\u00e9", "x.y", ""])
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ANY = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3))


def captured(*values: bytes | None, **options: Any) -> list[Any]:
    return JsonCodec(DECLARED, extra="capture", **options).decode(values).column("extra").to_pylist()


def test_undeclared_fields_are_kept_as_they_are_written() -> None:
    assert captured(b'{"price":1.50, "id": 1 , "n" : 123456789012345678901234567890.10 }') == [
        '{"price":1.50,"n":123456789012345678901234567890.10}'
    ]
    assert captured(b'{"a": {"id": [1, {"x": null}]}, "name": "ann"}') == ['{"a":{"id": [1, {"x": null}]}}']
    assert captured(b'{"id": 1, "name": "x"}', b"{}", None, b" { } ") == [None] * 4
    assert captured(b'{"a": 1, "b": 2, "a": 3}') == ['{"b":2,"a":3}']
    assert captured(b'{"\\u0069d": 1, "n": "\\u0000\\n", "\xc3\xa9": 1}') == ['{"n":"\\u0000\\n","\u00e9":1}']
    assert captured(b'{"key": 1, "id": 2}', alias={"id": "key"}) == ['{"id":2}']
    digits = b"9" * 5_000
    assert captured(b'{"n": %s}' % digits) == [f'{{"n":{digits.decode()}}}']


@given(st.lists(st.dictionaries(NAMES, ANY, max_size=5), max_size=4), st.booleans())
def test_what_is_captured_is_what_the_schema_does_not_declare(objects: list[dict[str, Any]], spaced: bool) -> None:
    given_objects = [{**each, "id": 7, "name": "n"} for each in objects]
    values = [json.dumps(each, indent=1 if spaced else None).encode() for each in given_objects]
    plain, codec = JsonCodec(DECLARED).decode(values), JsonCodec(DECLARED, extra="capture")
    batch = codec.decode(values)
    assert batch.schema.equals(codec.fields.schema()) and batch.select(["id", "name"]).equals(plain)
    wanted = [{name: value for name, value in each.items() if name not in DECLARED} or None for each in given_objects]
    assert [None if each is None else json.loads(each) for each in batch.column("extra").to_pylist()] == wanted
    assert codec.decode_array(pa.array(values, pa.binary())).equals(batch)


def test_a_value_that_cannot_be_decoded_is_bad_and_the_others_have_their_rows() -> None:
    deep = b'{"id": 4, "x": %s%s}' % (b"[" * 100_000, b"]" * 100_000)
    values = [b'{"id": 1, "x": 1}', b'{"id": "a", "x": 2}', b"no", None, b'{"id": 2}', b'{"id": 3, "x": 3}', deep]
    batch, bad = JsonCodec(DECLARED, extra="capture").decode_good(values)
    assert {1, 2} <= {each.index for each in bad} <= {1, 2, 6}
    assert batch.column("id").to_pylist()[:4] == [1, None, 2, 3]
    assert batch.column("extra").to_pylist()[:4] == ['{"x":1}', None, None, '{"x":3}']
    assert batch.num_rows + len(bad) == len(values)
    _, (bad_number,) = JsonCodec(DECLARED, extra="capture").decode_good([b'{"id": 1, "x": NaN}'])
    assert bad_number.index == 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TopologyError, match="extra must be 'ignore' or 'capture', not 'keep'"):
        JsonCodec(DECLARED, extra="keep")  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="the schema has one already: give that another name, by alias="):
        JsonCodec(Fields(extra=str), extra="capture")
    assert JsonCodec(Fields(other=str), extra="capture", alias={"other": "extra"}).decode(
        [b'{"extra": "e", "x": 1}']
    ).to_pylist() == [{"other": "e", "extra": '{"x":1}'}]


def test_json_of_a_pipeline_captures_what_it_does_not_declare() -> None:
    assert Json(id=int, extra=str).codec(["id", "extra"]).decode([b'{"extra": "e"}']).to_pylist() == [
        {"id": None, "extra": "e"}
    ]
    captures = Json(id=int, name=str, extra="capture")
    assert captures.schema.names == ["id", "name", "extra"]
    value = b'{"id": 1, "name": "n", "x": 1}'
    assert captures.codec(["id"]).decode([value]).to_pylist() == [{"id": 1}]
    assert captures.codec(["id", "extra"]).decode([value]).column("extra").to_pylist() == ['{"x":1}']
    with pytest.raises(TopologyError, match="extra must be"):
        Json(id=int, extra="keep")
    read = Pipeline("p").read_kafka("t", value=captures, bootstrap_servers="127.0.0.1:1")
    assert read.schema.names == ["id", "name", "extra"]


@pytest.mark.integration
@pytest.mark.parametrize("committer", ["append", "upsert"])
def test_the_undeclared_fields_go_to_a_column_of_jsonb(postgres: Any, committer: str) -> None:
    database = PostgresDatabase(postgres.dsn, f"s_{uuid.uuid4().hex[:12]}")
    database.run("CREATE TABLE events (id integer PRIMARY KEY, name text, extra jsonb)")
    codec = JsonCodec(DECLARED, extra="capture")
    rows = codec.decode([b'{"id": 1, "price": 1.50, "n": 12345678901234567890123}', b'{"id": 2}']).to_pylist()
    spout = MemoryTransactionalSpout({0: [list(each.values()) for each in rows]}, codec.fields, 2)
    builder = TransactionalTopologyBuilder("extra", "spout", spout)
    table = database.table(stamp="_txid")
    bolt = AppendCommitter(table) if committer == "append" else UpsertCommitter(table, ["id"])
    builder.set_bolt("rows", bolt).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found = database.run("SELECT id, extra ->> 'price', extra ->> 'n' FROM events ORDER BY id")
    assert found == [(1, "1.50", "12345678901234567890123"), (2, None, None)]
