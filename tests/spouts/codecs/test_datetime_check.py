"""Times that Python cannot hold are bad values, whichever codec decodes them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spouts import AvroCodec, Codec, UndecodableValueError
from spouts.codecs.datetime_check import decoded, decoded_good
from tests.kit.avro import encoded

_YEAR_US = 31_556_952 * 10**6


def avro(logical: str) -> dict[str, Any]:
    kind = "int" if logical in ("date", "time-millis") else "long"
    field = {"name": "at", "type": ["null", {"type": kind, "logicalType": logical}]}
    return {"type": "record", "name": "V", "fields": [field]}


def written(logical: str, count: int) -> bytes:
    """A value as other writers may write it: Python's refuse it."""
    plain = {"type": "record", "name": "V", "fields": [{"name": "at", "type": ["null", "long"]}]}
    (value,) = encoded(plain, {"at": count})
    return value


OUTSIDE = {
    "date": [-1_000_000, 10**7],
    "timestamp-millis": [-2000 * _YEAR_US // 1000, 8_100 * _YEAR_US // 1000],
    "timestamp-micros": [-2000 * _YEAR_US, 8_100 * _YEAR_US],
    "local-timestamp-micros": [-2000 * _YEAR_US, 8_100 * _YEAR_US],
    "time-millis": [-1, 86_400_000, 90_000_000],
    "time-micros": [-1, 86_400_000_000],
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("logical", OUTSIDE)
@pytest.mark.parametrize("times", [1, 1_000])
@pytest.mark.parametrize("in_array", [False, True])
def test_a_time_that_python_cannot_hold_is_a_bad_value(logical: str, times: int, in_array: bool) -> None:
    codec = AvroCodec(avro(logical))
    values = [*(written(logical, count) for count in (0, *OUTSIDE[logical], 86_399)), None, b"\xff"] * times
    given = pa.array(values, pa.binary()) if in_array else values
    batch, bad = decoded_good(codec, given)
    each = len(OUTSIDE[logical])
    indices = [start + index for start in range(0, len(values), each + 4) for index in (*range(1, each + 1), each + 3)]
    assert [found.index for found in bad] == indices
    assert batch.num_rows == 3 * times
    wanted = "is not a time of day" if logical.startswith("time-") else "at: Python holds the years 1 to 9999"
    assert wanted in bad[0].reason
    with pytest.raises(UndecodableValueError) as error:
        decoded(codec, given)
    assert error.value.index == 1


class _Nested(Codec):
    fields = AvroCodec(avro("date")).fields

    def decode(self, values: Any) -> pa.RecordBatch:
        column = pa.array([[{"day": 0}], [{"day": 10**7}], None], pa.list_(pa.struct([("day", pa.int32())])))
        return pa.record_batch([column.cast(pa.list_(pa.struct([("day", pa.date32())])))], ["at"])


def test_one_inside_another_value_is_one_too() -> None:
    with pytest.raises(UndecodableValueError) as error:
        decoded(_Nested(), [b"", b"", b""])
    assert error.value.index == 1
