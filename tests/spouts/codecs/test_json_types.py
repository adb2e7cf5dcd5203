"""How values of each type are written in JSON: by our own sinks, and by other producers."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields
from framework.errors import TopologyError
from sinks.value_encoding import JsonColumns
from spouts import AliasedCodec, JsonCodec, TextCodec, UndecodableValueError

UTC = datetime.UTC
AT = datetime.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
WHOLE = AT.replace(microsecond=0)
D = decimal.Decimal

#: A type that a sink writes, and values of it.
WRITTEN: list[tuple[pa.DataType, list[Any]]] = [
    *((pa.type_for_alias(f"int{bits}"), [-(2 ** (bits - 1)), 0, 2 ** (bits - 1) - 1]) for bits in (8, 16, 32, 64)),
    *((pa.type_for_alias(f"uint{bits}"), [0, 2**bits - 1]) for bits in (8, 16, 32, 64)),
    *((kind, [0.5, -0.0, math.inf, -math.inf, math.nan]) for kind in (pa.float16(), pa.float32(), pa.float64())),
    (pa.bool_(), [True, False]),
    (pa.string(), ["", "ä\0\n", "NaN"]),
    (pa.large_string(), ["ä"]),
    (pa.binary(), [b"", b"\0\xff", b"abcd"]),
    (pa.large_binary(), [b"\0\xff"]),
    (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)]),
    (pa.date64(), [datetime.date(2023, 11, 14)]),
    (pa.time32("s"), [datetime.time(23, 59, 59)]),
    (pa.time32("ms"), [datetime.time(1, 2, 3, 4000)]),
    (pa.time64("us"), [datetime.time(0), datetime.time(1, 2, 3, 4)]),
    *((pa.duration(unit), [datetime.timedelta(days=-3, seconds=5)]) for unit in ("s", "ms", "us")),
    *((pa.timestamp(unit, zone), [WHOLE]) for unit in ("s", "ms", "us") for zone in ("UTC", "Europe/Berlin")),
    *((pa.timestamp(unit), [WHOLE.replace(tzinfo=None)]) for unit in ("s", "ms", "us")),
    (
        pa.timestamp("us", "UTC"),
        [AT, datetime.datetime.min.replace(tzinfo=UTC), datetime.datetime.max.replace(tzinfo=UTC)],
    ),
    (pa.decimal32(5, 2), [D("1.25"), D("0.00")]),
    (pa.decimal64(10, 9), [D("0.000000001"), D("0E-9")]),
    (pa.decimal128(38, 18), [D("0E-18"), D("-12.500000000000000000")]),
    (pa.decimal256(50, 2), [D("1e40").quantize(D("0.01"), context=decimal.Context(60))]),
    (pa.decimal128(20, -3), [D("12E+3")]),
]


@pytest.mark.each_value_once
@pytest.mark.parametrize(("declared", "values"), WRITTEN, ids=str)
@pytest.mark.parametrize("count", [1, 1_000])
def test_what_a_sink_writes_is_read_back(declared: pa.DataType, values: list[Any], count: int) -> None:
    fields = Fields(v=declared)
    columns = JsonColumns(fields, "JSON")
    wanted = pa.array([*values, None], declared)
    written = [json.dumps({"v": columns.encode([each])[0]}, allow_nan=False).encode() for each in wanted.to_pylist()]
    batch, bad = JsonCodec(fields, non_finite=True).decode_good(written * count)
    assert bad == []
    assert batch.schema.types == [declared]
    found = batch.column(0).to_pylist()
    assert repr(found) == repr(wanted.to_pylist() * count)


def decoded(declared: pa.DataType, *texts: str) -> tuple[list[Any], list[str]]:
    batch, bad = JsonCodec(Fields(v=declared)).decode_good([f'{{"v": {text}}}'.encode() for text in texts])
    return batch.column(0).to_pylist(), [each.reason for each in bad]


@pytest.mark.parametrize("text", ['"AP_-"', '"AP/+"', '"YQ=="', '"YQ"', '"YQ="'])
def test_base64_is_read_in_both_alphabets_and_without_padding(text: str) -> None:
    (found,), bad = decoded(pa.binary(), text)
    assert base64.b64encode(found).decode().rstrip("=") == json.loads(text).translate(str.maketrans("-_", "+/")).rstrip(
        "="
    )
    assert bad == []


@pytest.mark.parametrize("text", ['"a"', '"YQ==="', '"Y Q="', '"Y=Q="', '"ä"', '"YQ==\\n"', "1"])
def test_what_is_no_base64_is_bad(text: str) -> None:
    found, (reason,) = decoded(pa.binary(), text)
    assert found == []
    assert reason.startswith("v: ")


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("declared", "text", "reason"),
    [
        (pa.timestamp("us", "UTC"), '"14.11.2023"', "v: '14.11.2023' is no date and time of ISO 8601 between"),
        (pa.timestamp("us", "UTC"), "1700000000123", "v: a number, and Fields declares timestamp[us, tz=UTC]"),
        (pa.timestamp("us", "UTC"), '"0000-01-01T00:00:00Z"', "v: '0000-01-01T00:00:00Z' is no date and time"),
        (pa.date32(), "19675", "v: a number, and Fields declares date32[day]"),
        (pa.time64("us"), '"24:00:00"', "v: '24:00:00' is no time of day"),
        (pa.duration("s"), '"PT5S"', "v: text, and Fields declares duration[s]"),
        (pa.float16(), "70000", "v: 70000.0 is no number that a float of 16 bits holds"),
        (pa.float64(), '"1.5"', "v: text, and Fields declares double"),
        (pa.float64(), '"nan"', "v: text, and Fields declares double"),
        (pa.int64(), "1.5", "v: 1.5 does not fit, and Fields declares int64"),
        (pa.int64(), '"1"', "v: text, and Fields declares int64"),
        (pa.binary(3), '"YQ=="', "v: 'YQ==' is no text of base64, of 3 bytes"),
        (pa.decimal128(5, 2), '"x"', "v: x does not fit, and Fields declares decimal128(5, 2)"),
        (pa.decimal128(5, 2), "1.234", "v: 1.234 does not fit, and Fields declares decimal128(5, 2): requires scale 3"),
        (pa.decimal128(5, 2), "1234", "v: more digits than decimal128(5, 2) holds"),
        (pa.list_(pa.date32()), '["2023-11-14", "x"]', "v: ['2023-11-14', 'x'] is no list<item: date32[day]>"),
        (pa.list_(pa.int8()), "[1000]", "v[]: 1000 does not fit, and Fields declares int8"),
        (pa.struct([("n", pa.int8())]), '{"n": true}', "v.n: true or false, and Fields declares int8"),
        (pa.string(), "{}", "v: an object, and Fields declares string"),
        (pa.string(), '"a", "v": "b"', "v: given twice"),
        (pa.float64(), "1e999", "v: 1e999 is beyond the range of a double"),
        (pa.list_(pa.struct([("n", pa.int64())])), '[{"n": 1}, {"n": -1e400}]', "v[].n: -1e400 is beyond the range"),
        (pa.string(), '"1e999", "other": [[1e999]]', "other[][]: 1e999 is beyond the range of a double"),
    ],
)
@pytest.mark.parametrize("count", [1, 100])
def test_a_value_of_another_type_names_its_field_and_the_declared_type(
    declared: pa.DataType, text: str, reason: str, count: int
) -> None:
    found, reasons = decoded(declared, *[text, "null"] * count)
    assert found == [None] * count
    assert len(reasons) == count
    assert all(each.startswith(reason) for each in reasons), reasons[0]
    with pytest.raises(UndecodableValueError) as error:
        JsonCodec(Fields(v=declared)).decode([b"{}", f'{{"v": {text}}}'.encode()])
    assert (error.value.index, error.value.reason) == (1, reasons[0])


def test_reasons_are_short_however_long_a_value_is() -> None:
    for declared in (pa.timestamp("us"), pa.binary(), pa.decimal128(5, 2)):
        _, (reason,) = decoded(declared, '"' + "!" * 600_000 + '"')
        assert len(reason) < 400
    _, (reason,) = decoded(pa.int64(), "9" * 600_000)
    assert len(reason) < 400


def test_the_first_bad_value_is_named_whichever_step_finds_it() -> None:
    codec = JsonCodec(Fields(at=datetime.datetime, n=int, share=float), non_finite=True)
    good, named = b'{"at": "2023-11-14", "share": 1}', b'{"share": "NaN"}'
    for values, index in (
        ([good, b'{"at": "x"}', named, b"{"], 1),
        ([named, b"{", b'{"at": "x"}'], 1),
        ([named, named, b"{"], 2),
    ):
        for decode, given in ((codec.decode, values), (codec.decode_array, pa.array(values, pa.binary()))):
            with pytest.raises(UndecodableValueError) as error:
                decode(given)  # type: ignore[operator]
            assert error.value.index == index
    assert codec.decode([named, good, None]).column("share").to_pylist()[1:] == [1.0, None]


def test_names_of_floats_stand_where_their_records_stood() -> None:
    codec = JsonCodec(Fields(n=int, a=float, b=pa.float32(), at=datetime.datetime), non_finite=True)
    values = [
        b'{"n": 0, "a": 0.5}',
        b'{"n": 1, "a": "Infinity", "b": 1.5, "at": "2023-11-14T22:13:20.123456789Z"}',
        b'{"n": 2, "a": "NaN", "b": "-Infinity"}',
        b'{"n": 3, "a": "NaN", "b": "x"}',
        b'{"n": 4, "b": "NaN"}',
        b'{"n": 5, "a": "NaN", "at": "never"}',
        None,
        b"[]",
    ]
    batch, bad = codec.decode_good(values)
    assert [each.index for each in bad] == [3, 5, 7]
    assert batch.column("n").to_pylist() == [0, 1, 2, 4, None]
    assert repr(batch.column("a").to_pylist()) == "[0.5, inf, nan, None, None]"
    assert repr(batch.column("b").to_pylist()) == "[None, 1.5, -inf, nan, None]"
    assert batch.column("at").to_pylist()[1] == AT


def test_types_inside_objects_and_lists_are_converted_too() -> None:
    inner = pa.struct([("day", pa.date32()), ("raw", pa.binary())])
    schema = pa.schema([("one", inner), ("many", pa.list_(inner)), ("days", pa.list_(pa.list_(pa.date32())))])
    values = [
        b'{"one": {"day": "2023-11-14", "raw": "YQ=="}, "many": [{"day": null}, null, {"raw": ""}],'
        b' "days": [["2023-11-14"], null, []]}',
        b"{}",
        None,
        b'{"one": {"day": "x"}}',
        b'{"many": [{"day": "2023-11-14"}, {"day": "2023-11-31"}]}',
        b'{"days": [[], ["2023-11-14", "no"]]}',
        b'{"one": {}, "many": [], "days": null}',
    ]
    batch, bad = JsonCodec(schema).decode_good(values)
    day = datetime.date(2023, 11, 14)
    empty = {"day": None, "raw": None}
    assert batch.schema.types == schema.types
    batch.validate(full=True)
    assert [each.index for each in bad] == [3, 4, 5]
    assert batch.to_pylist() == [
        {
            "one": {"day": day, "raw": b"a"},
            "many": [empty, None, {"day": None, "raw": b""}],
            "days": [[day], None, []],
        },
        {"one": None, "many": None, "days": None},
        {"one": None, "many": None, "days": None},
        {"one": empty, "many": [], "days": None},
    ]


def test_fields_that_are_required_are_so_in_every_type() -> None:
    schema = pa.schema(
        [pa.field("at", pa.timestamp("us"), nullable=False), pa.field("share", pa.float64(), nullable=False)]
    )
    batch, bad = JsonCodec(schema, non_finite=True).decode_good(
        [b'{"at": "2023-11-14", "share": "NaN"}', b'{"at": null, "share": 1}', b"{}"]
    )
    assert batch.num_rows == 1
    assert [each.reason for each in bad] == ["at is required, and is missing or null"] * 2


_TRY = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)
if sys.argv[1] == "without":
    sys.meta_path.insert(0, Without())
else:
    import pandas
import pyarrow as pa
from spouts import JsonCodec
codec = JsonCodec(pa.schema([("at", pa.timestamp("us", "UTC")), ("ns", pa.timestamp("ns", "UTC")), ("day", pa.date32())]))
texts = ["2023-11-14T22:13:20.123456789Z", "0000-01-01", "9999-12-31T23:59:59.9999999Z", "10000-01-01", "2023-11-14T24:00:00Z"]
values = [b'{"%s": "%s"}' % (name, text.encode()) for name in (b"at", b"ns", b"day") for text in texts]
for count in (1, 1000):
    batch, bad = codec.decode_good(values * count)
    for name, counted in ("at", pa.int64()), ("ns", pa.int64()), ("day", pa.int32()):
        print(batch.column(name).cast(counted).to_pylist()[: batch.num_rows // count])
    print([each.reason for each in bad][: len(bad) // count])
"""


@pytest.mark.slow
def test_times_that_python_cannot_hold_are_bad_with_and_without_pandas_in_small_batches_and_large() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", _TRY, each], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for each in ("with", "without")
    ]
    assert found[0] == found[1]
    assert found[0][:4] == found[0][4:]
    assert found[0][3].count("is no date") == 12


class TestAlias:
    def test_a_field_is_read_under_its_name_in_the_records(self) -> None:
        codec = JsonCodec(Fields(order=str, at=datetime.datetime, n=int), alias={"order": "id", "at": "meta.at"})
        values = [
            b'{"id": "o-1", "meta.at": "2023-11-14", "n": 7, "order": "x", "meta": {"at": "2000-01-01"}}',
            b'{"order": "x"}',
        ]
        assert codec.decode(values).to_pylist() == [
            {"order": "o-1", "at": datetime.datetime(2023, 11, 14, tzinfo=UTC), "n": 7},
            {"order": None, "at": None, "n": None},
        ]
        assert codec.fields.names == ("order", "at", "n")

    def test_fields_may_exchange_their_names(self) -> None:
        codec = JsonCodec(Fields(a=int, b=int), alias={"a": "b", "b": "a"})
        assert codec.decode([b'{"a": 1, "b": 2}']).to_pylist() == [{"a": 2, "b": 1}]

    def test_a_reason_names_the_field_as_the_record_does(self) -> None:
        codec = JsonCodec(Fields(n=int, day=datetime.date), alias={"n": "the/n.o", "day": "day.of"})
        _, bad = codec.decode_good([b'{"the/n.o": "1"}', b'{"day.of": "x"}'])
        assert [each.reason.split(":")[0] for each in bad] == ["the/n.o", "day.of"]

    @pytest.mark.parametrize(
        ("alias", "message"),
        [
            ({"oder": "id"}, "'oder' is not declared; perhaps 'order' is meant"),
            ({"order": "n"}, "fields 'order' and 'n' are both called 'n' in the records"),
            ({"order": 7}, "must be text, not 7"),
        ],
    )
    def test_an_alias_that_cannot_be_is_refused(self, alias: dict[str, Any], message: str) -> None:
        with pytest.raises(TopologyError, match=message):
            JsonCodec(Fields(order=str, n=int), alias=alias)

    @pytest.mark.parametrize(
        ("alias", "message"),
        [
            ({"a": "wrd"}, "the schema has no field 'wrd'; perhaps 'word' is meant"),
            ({"a": "word", "b": "word"}, "'word' is called both 'a' and 'b'"),
            ({"n": "word"}, "two fields are called 'n'"),
        ],
    )
    def test_an_alias_that_another_codec_cannot_have_is_refused(self, alias: dict[str, str], message: str) -> None:
        with pytest.raises(TopologyError, match=message):
            AliasedCodec(JsonCodec(Fields(word=str, n=int)), alias)
        assert AliasedCodec(TextCodec(), {"line": "value"}).fields.names == ("line",)
