"""Floats that are NaN or infinite are bad where a codec refuses them, and never a surprise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields
from framework.errors import BadRecordError, TopologyError
from framework.testing.conformance import CodecContract
from ratchet import Avro, Csv, Finite, Json
from spouts import AvroCodec, Codec, CsvCodec, FiniteCodec, JsonCodec, MessagePackCodec
from tests.kit.avro import encoded

NAN, INF = float("nan"), float("inf")
SCHEMA = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "word", "type": "string"},
        {"name": "share", "type": "double"},
        {"name": "floats", "type": {"type": "array", "items": ["null", "float"]}, "default": []},
        {"name": "of", "type": {"type": "map", "values": "double"}, "default": {}},
    ],
}


def rows(*shares: float) -> list[Mapping[str, Any]]:
    return [{"word": "a", "share": share, "floats": [None, 1.5], "of": {"x": 0.0}} for share in shares]


class TestFinite(CodecContract):
    def codec(self) -> Codec:
        return FiniteCodec(AvroCodec(SCHEMA))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        good = rows(0.5, -1e308)
        return [
            (value, {**row, "of": [*row["of"].items()]})
            for value, row in zip(encoded(SCHEMA, *good), good, strict=True)
        ]

    def bad(self) -> Sequence[bytes]:
        (row,) = rows(1.0)
        wrong = [{**row, "floats": [1.0, INF]}, {**row, "of": {"x": 1.0, "y": NAN}}]
        return [b"\xff", *encoded(SCHEMA, *rows(NAN, INF, -INF), *wrong)]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"', '"-Infinity"', "1e999"])
def test_json_has_no_such_number_unless_it_is_asked_for(text: str) -> None:
    value, fields = f'{{"share": {text}}}'.encode(), Fields(share=float)
    for codec in (JsonCodec(fields), JsonCodec.from_json_schema({"properties": {"share": {"type": "number"}}})):
        _, (bad,) = codec.decode_good([value, b'{"share": 1}'])
        assert bad.index == 0
    _, bads = JsonCodec(fields, non_finite=True).decode_good([value])
    assert (not bads) is text.startswith('"')
    for of_pipeline, is_bad in ((Json(share=float), True), (Json(share=float, non_finite=True), bool(bads))):
        assert bool(of_pipeline.codec(["share"]).decode_good([value])[1]) is is_bad


def test_what_a_codec_would_not_read_is_not_written() -> None:
    batch = pa.record_batch({"share": pa.array([NAN])})
    codecs: list[Any] = [JsonCodec(Fields(share=float)), FiniteCodec(MessagePackCodec(Fields(share=float)))]
    for codec in codecs:
        codec.check_encodable(Fields(share=float))
        with pytest.raises(BadRecordError, match="nan is not a finite number"):
            codec.encode(batch)
        (written,) = codec.encode(pa.record_batch({"share": pa.array([0.5])})).to_pylist()
        assert codec.decode([written]).to_pylist() == [{"share": 0.5}]
    listed = JsonCodec(pa.schema({"all": pa.list_(pa.float64())}))
    with pytest.raises(BadRecordError, match="inf is not a finite number"):
        listed.encode(pa.record_batch({"all": pa.array([[INF]])}))
    (text,) = JsonCodec(Fields(share=float), non_finite=True).encode(batch).to_pylist()
    assert text == b'{"share":"NaN"}'


def test_a_format_of_a_pipeline_refuses_them() -> None:
    assert len(Finite(Csv(share=float)).codec(["share"]).decode_good([b"nan", b"inf", b"1"])[1]) == 2
    assert len(Finite(Avro(SCHEMA)).codec(["share"]).decode_good(encoded(SCHEMA, *rows(NAN, 1.0)))[1]) == 1
    assert CsvCodec(Fields(share=float)).decode_good([b"nan"])[1] == []
    with pytest.raises(TopologyError, match="is no codec"):
        FiniteCodec("csv")  # type: ignore[arg-type]
