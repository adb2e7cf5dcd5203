"""Codecs: which values decode, which do not, and the index of a bad one."""

from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import Fields
from framework.errors import TopologyError
from spouts import BadRecord, BytesCodec, Codec, JsonCodec, TextCodec, UndecodableValueError
from spouts.codecs.codec import Values, joined

CODEC = JsonCodec(Fields(word=str, amount=int, share=float, ok=bool))
GOOD = b'{"word":"a","amount":1,"share":0.5,"ok":true}'


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b" ",
        b"1",
        b"null",
        b"[1]",
        b'"text"',
        b"{}{}",
        b'{"word":"a"',
        b'{"word":"}',
        b'{"word":1}',
        b'{"word":"\xff"}',
        b'{"word":"a\nb"}',
        b'{"word":"a","word":"b"}',
        b'{"amount":"7"}',
        b'{"amount":1.5}',
        b'{"amount":true}',
        b'{"amount":9223372036854775808}',
        b'{"share":NaN}',
        b'{"share":Infinity}',
        b'{"share":1e400}',
        b'{"ok":1}',
    ],
)
def test_json_bad_value_is_named_by_its_index(bad: bytes) -> None:
    with pytest.raises(UndecodableValueError) as error:
        CODEC.decode([GOOD, GOOD, bad, GOOD])
    assert error.value.index == 2
    assert error.value.reason


@pytest.mark.parametrize(
    ("value", "row"),
    [
        (b"{}", (None, None, None, None)),
        (None, (None, None, None, None)),
        (b' {"amount":\n 3}\r\n', (None, 3, None, None)),
        (b'{"amount":-9223372036854775808,"share":3}', (None, -(2**63), 3.0, None)),
        (b'{"word":"\\u0000\\ud83d\\ude00","ok":null}', ("\0\U0001f600", None, None, None)),
        (b'{"extra":[{"deep":[1]}],"word":""}', ("", None, None, None)),
        (b'{"word":"' + b"x" * 10_000_000 + b'"}', ("x" * 10_000_000, None, None, None)),
        (b'{"extra":' + b"[" * 10_000 + b"]" * 10_000 + b"}", (None, None, None, None)),
    ],
)
def test_json_unusual_but_right_values_decode(value: bytes | None, row: tuple[object, ...]) -> None:
    decoded = CODEC.decode([GOOD, value, GOOD])
    assert tuple(decoded.to_pylist()[1].values()) == row
    assert decoded.num_rows == 3


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {},
                optional={
                    "word": st.one_of(st.none(), st.text()),
                    "amount": st.integers(-(2**63), 2**63 - 1),
                    "share": st.floats(allow_nan=False, allow_infinity=False),
                    "ok": st.booleans(),
                    "other": st.recursive(st.none() | st.text(), lambda inner: st.lists(inner, max_size=3)),
                },
            ),
        ),
        max_size=20,
    )
)
def test_json_decodes_what_pythons_own_encoder_writes(rows: list[dict[str, object] | None]) -> None:
    values = [
        None if row is None else json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows
    ]
    try:
        for value in values:
            (value or b"").decode("utf-8")
    except UnicodeDecodeError:
        return  # a lone surrogate has no UTF-8 form
    decoded = CODEC.decode(values).to_pylist()
    expected = [{name: (row or {}).get(name) for name in CODEC.fields} for row in rows]
    assert decoded == expected


def test_json_needs_types_that_arrow_reads() -> None:
    with pytest.raises(TopologyError, match="needs a type for every field"):
        JsonCodec(Fields("word"))
    with pytest.raises(TopologyError, match="cannot decode into"):
        JsonCodec(pa.schema([("at", pa.duration("s")), ("pairs", pa.map_(pa.string(), pa.month_day_nano_interval()))]))


def test_json_timestamps_and_nested_values_decode() -> None:
    codec = JsonCodec(pa.schema([("at", pa.timestamp("ms")), ("tags", pa.list_(pa.string()))]))
    row = codec.decode([b'{"at":"2026-01-02 03:04:05","tags":["a","b"]}']).to_pylist()[0]
    assert row == {"at": datetime.datetime(2026, 1, 2, 3, 4, 5), "tags": ["a", "b"]}


def test_json_no_values_make_an_empty_batch() -> None:
    assert CODEC.decode([]).num_rows == 0


def test_text_invalid_utf8_is_named_by_its_index() -> None:
    with pytest.raises(UndecodableValueError, match="value 1: invalid UTF-8 at byte 1"):
        TextCodec().decode([b"a", b"b\xff", b"c"])


def test_bytes_and_text_keep_null_and_empty_apart() -> None:
    assert BytesCodec().decode([b"", None]).column(0).to_pylist() == [b"", None]
    assert TextCodec().decode([b"", None]).column(0).to_pylist() == ["", None]


class Picky(Codec):
    """A codec as a user writes it: it has only ``decode``."""

    fields = Fields(value=bytes)

    def decode(self, values: Values) -> pa.RecordBatch:
        for index, value in enumerate(values):
            if value is not None and b"!" in value:
                raise UndecodableValueError(index, "it shouts")
        return pa.record_batch([pa.array(values, pa.binary())], names=["value"])


@pytest.mark.parametrize(
    ("codec", "good", "bad"),
    [
        (JsonCodec(Fields(word=str, n=int)), b'{"word":"a","n":1}', b'{"word":"a","n":"1"}'),
        (TextCodec(), "ä".encode(), b"\xff"),
        (Picky(), b"hello", b"hello!"),
    ],
)
@given(pattern=st.lists(st.sampled_from("gbn"), max_size=90))
def test_decode_good_gives_good_values_in_order_and_bad_ones_by_index(
    codec: Codec, good: bytes, bad: bytes, pattern: list[str]
) -> None:
    """Good values, bad ones and nulls, in any order, are decoded as if each were alone."""
    values = [{"g": good, "b": bad, "n": None}[each] for each in pattern]
    batch, found = codec.decode_good(values)
    array = pa.array([b"before", *values], pa.binary()).slice(1)
    of_array, found_in_array = codec.decode_good_array(array)
    assert (of_array.to_pylist(), found_in_array) == (batch.to_pylist(), found)
    assert [each.index for each in found] == [index for index, each in enumerate(pattern) if each == "b"]
    alone = [codec.decode([value]).to_pylist()[0] for value, each in zip(values, pattern, strict=True) if each != "b"]
    assert batch.to_pylist() == alone
    assert all(isinstance(each, BadRecord) and each.reason for each in found)
    if found:
        with pytest.raises(UndecodableValueError) as error:
            codec.decode(values)
        assert error.value.index == found[0].index
        with pytest.raises(UndecodableValueError) as error:
            codec.decode_array(array)
        assert error.value.index == found[0].index
    else:
        assert codec.decode(values).equals(batch)
        assert codec.decode_array(array).equals(batch)


@pytest.mark.rule("C29")
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b'{"p": {"x": NaN}}', "p"),
        (b'{"p": {"l": [1.5, -Infinity]}}', "p"),
        (b'{"l": [[1.5], [], [NaN]]}', "l"),
        (b'{"w": [{"x": 1e39}]}', "w"),
        (b'{"p": {"x": 1.5, "l": []}, "l": [[1.5], [], null], "w": [{"x": 1e3}, null, {"x": null}]}', None),
        (b'{"p": null}', None),
    ],
)
def test_a_nested_number_that_is_not_finite_is_an_error_too(value: bytes, name: str | None) -> None:
    floats = pa.list_(pa.float64())
    fields = {"p": pa.struct([("x", pa.float64()), ("l", floats)]), "l": pa.list_(floats)}
    codec = JsonCodec(pa.schema({**fields, "w": pa.list_(pa.struct([("x", pa.float32())]))}))
    _, bad = codec.decode_good([b"{}", value])
    assert [each.reason for each in bad] == ([f"{name} is not a finite number"] if name is not None else [])


def test_columns_that_are_longer_together_than_an_array_can_be_are_joined_into_a_wider_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overflowing(arrays: list[pa.Array]) -> pa.Array:
        if any(each.type in (pa.string(), pa.list_(pa.string())) for each in arrays):
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return concat_arrays(arrays)

    concat_arrays = pa.concat_arrays
    monkeypatch.setattr(pa, "concat_arrays", overflowing)
    batch = pa.record_batch([pa.array(["a", None]), pa.array([["b"], None]), pa.array([1, 2])], names=["w", "l", "n"])
    whole = joined([batch, batch])
    assert whole.schema.types == [pa.large_string(), pa.large_list(pa.large_string()), pa.int64()]
    assert whole.to_pylist() == batch.to_pylist() * 2


@pytest.mark.slow  # some gigabytes
@pytest.mark.parametrize(
    "codec", [JsonCodec(Fields(v=str)), JsonCodec(pa.schema([("v", pa.large_string())])), TextCodec("v")]
)
def test_values_of_more_than_2_gib_together_are_all_decoded(codec: Codec) -> None:
    value = b'{"v": "%s"}' % (b"x" * 50_000)
    batch, bad = codec.decode_good([value] * 45_000)
    assert (batch.num_rows, bad) == (45_000, [])
    assert pc.sum(pc.binary_length(batch.column(0))).as_py() > 2**31
    assert codec.decode([value] * 45_000).num_rows == 45_000


def test_chunks_of_json_are_read_as_one() -> None:
    codec = JsonCodec(Fields(word=str, amount=int, share=float, at=datetime.datetime))
    values = [b'{"word": "a"}', b"{", b'{"share": "NaN"}', b'{"at": "x"}', None, b'{"amount": 1}']
    expected, expected_bad = codec.decode_good(values)
    chunked = pa.chunked_array([pa.array(values[:2]), pa.array(values[2:3]), pa.array(values[3:])])
    batch, bad = codec._decoded(chunked, only_first=False)
    assert repr(batch.to_pylist()) == repr(expected.to_pylist())
    assert bad == expected_bad
    assert codec._decoded(chunked, only_first=True)[1][0] == expected_bad[0]
