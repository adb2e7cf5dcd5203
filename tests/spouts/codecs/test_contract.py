"""Every codec passes the contract suite, which its authors can use for their own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields
from framework.testing.conformance import CodecContract
from spouts import AliasedCodec, AvroCodec, BulkCodec, BytesCodec, Codec, JsonCodec, ProtobufCodec, TextCodec
from spouts.codecs.codec import Values
from tests.kit.avro import encoded
from tests.kit.protobuf import classes, field, file_of, message, set_of

WORD = {"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}, {"name": "n", "type": "long"}]}
ROWS: list[Mapping[str, Any]] = [{"word": "dog", "n": 1}, {"word": "", "n": -(2**62)}, {"word": "naïve ☃", "n": 0}]


class TestBytes(CodecContract):
    def codec(self) -> Codec:
        return BytesCodec()

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [(b"", {"value": b""}), (b"\x00\xff", {"value": b"\x00\xff"})]


class TestText(CodecContract):
    def codec(self) -> Codec:
        return TextCodec("line")

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [(b"", {"line": ""}), ("☃".encode(), {"line": "☃"})]

    def bad(self) -> Sequence[bytes]:
        return [b"\xff", b"ok\xc3"]


class TestJson(CodecContract):
    def codec(self) -> Codec:
        return JsonCodec(Fields(word=str, n=int))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        values = [b'{"word": "dog", "n": 1}', b'{"n": -4611686018427387904, "word": ""}']
        return list(zip([*values, '{"word":"naïve ☃","n":0}'.encode()], ROWS, strict=True))

    def bad(self) -> Sequence[bytes]:
        return [b"", b"{", b'{"word": 1}', b"[1]", b'{"n": 1.5}']


class TestJsonByArrow(TestJson):
    """Of a type that the compiled part leaves to Arrow."""

    def codec(self) -> Codec:
        return JsonCodec(Fields(word=str, n=int, total=pa.decimal128(9, 2)))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [(value, {**row, "total": None}) for value, row in super().good()]


class TestProtobuf(CodecContract):
    file = file_of(message("Word", field("word", 1, "string"), field("n", 2, "int64")))

    def codec(self) -> Codec:
        return ProtobufCodec("t.Word", set_of(self.file))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        word = classes(self.file)["t.Word"]
        return [(word(**row).SerializeToString(), row) for row in ROWS]

    def bad(self) -> Sequence[bytes]:
        return [b"\xff", b"\x0a\x05a", b"\x0a\x01\xff"]


class TestJsonOfOtherTypes(CodecContract):
    """Of types that JSON does not have, under other names."""

    def codec(self) -> Codec:
        types = {"at": pa.timestamp("us", "UTC"), "raw": pa.binary(), "share": pa.float64()}
        return JsonCodec(Fields.of(types), alias={"at": "meta.at"}, non_finite=True)

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        at = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
        return [
            (b'{"meta.at": "2023-11-14T22:13:20Z", "raw": "YQ=="}', {"at": at, "raw": b"a", "share": None}),
            (b'{"meta.at": "2023-11-15T00:13:20.000000999+02:00"}', {"at": at, "raw": None, "share": None}),
            (b'{"share": "-Infinity", "at": 1}', {"at": None, "raw": None, "share": float("-inf")}),
        ]

    def bad(self) -> Sequence[bytes]:
        return [b'{"meta.at": 1}', b'{"meta.at": "0000-01-01"}', b'{"raw": "a"}', b'{"share": "1"}', b'{"share": "NaN"']


class TestAliased(CodecContract):
    def codec(self) -> Codec:
        return AliasedCodec(AvroCodec(WORD), {"text": "word"})

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [
            (value, {"text": row["word"], "n": row["n"]}) for value, row in zip(encoded(WORD, *ROWS), ROWS, strict=True)
        ]

    def bad(self) -> Sequence[bytes]:
        return [b"\xff"]


class TestAvro(CodecContract):
    def codec(self) -> Codec:
        return AvroCodec(WORD)

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return list(zip(encoded(WORD, *ROWS), ROWS, strict=True))

    def bad(self) -> Sequence[bytes]:
        return [b"\xff", encoded(WORD, ROWS[0])[0] + b"x", encoded(WORD, ROWS[0])[0][:-1]]


class Numbers(BulkCodec):
    """As in the documents: decodes all or none."""

    fields = Fields(n=int)

    def decode_together(self, values: Values) -> pa.RecordBatch:
        return pa.record_batch([pa.array([None if each is None else int(each) for each in values], pa.int64())], ["n"])


class TestNumbers(CodecContract):
    def codec(self) -> Codec:
        return Numbers()

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [(b"%d" % number, {"n": number}) for number in range(20)]

    def bad(self) -> Sequence[bytes]:
        return [b"x", b"", b"1.5"]


class OneShort(Numbers):
    """Loses the last value, once there are several."""

    def decode_together(self, values: Values) -> pa.RecordBatch:
        return super().decode_together(values[:-1] if len(values) > 2 else values)


class Zeroes(Numbers):
    """Gives 0 for a null value."""

    def decode_together(self, values: Values) -> pa.RecordBatch:
        return super().decode_together([each or b"0" for each in values])


class Remembers(Numbers):
    """Cannot be sent to a task once it has decoded something."""

    def decode_together(self, values: Values) -> pa.RecordBatch:
        self.opened = open(__file__)  # noqa: SIM115 - on purpose
        self.opened.close()
        return super().decode_together(values)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (OneShort, "test_good_values_become_their_rows_in_order"),
        (Zeroes, "test_a_null_value_is_a_row_of_nulls"),
        (Remembers, "test_a_pickled_copy_decodes_alike"),
    ],
)
def test_the_suite_notices_a_codec_that_is_wrong(kind: type[Codec], test: str) -> None:
    suite = TestNumbers()
    suite.codec = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, TypeError)):
        getattr(suite, test)()
