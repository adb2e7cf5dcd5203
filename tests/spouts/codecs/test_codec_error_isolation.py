"""A codec that raises an error of another kind makes bad values of what it raises for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from framework.errors import BadRecordError, ConfigError, RetryableError
from framework.topology import Fields
from spouts import BytesCodec, Codec, UndecodableValueError
from spouts.codecs import codec_error_isolation
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Truths, Values
from spouts.codecs.datetime_check import decoded, decoded_good
from tests.kit.panics import PanicException

Wrong = Callable[[bytes], BaseException | None]


class Whole(Codec):
    """A user's codec of numbers, which raises what ``wrong`` says."""

    def __init__(self, wrong: Wrong) -> None:
        self.fields = Fields(n=int)
        self.wrong, self.calls, self.read = wrong, 0, 0

    def decode(self, values: Values) -> pa.RecordBatch:
        self.calls += 1
        self.read += len(values)
        for value in values:
            error = self.wrong(value or b"")
            if error is not None:
                raise error
        return pa.record_batch([pa.array([None if each is None else int(each) for each in values])], names=["n"])

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        listed = values.to_pylist() if isinstance(values, pa.Array) else values
        self.decode([each for each in listed if each is not None])
        return np.array([each == b"7" for each in listed])


class PerValue(PerValueCodec):
    def __init__(self, wrong: Wrong) -> None:
        self.its = Whole(wrong)
        self.fields = self.its.fields

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        good = [each for each in values if each != b"bad"]
        bad = [BadRecord(at, "it is bad") for at, each in enumerate(values) if each == b"bad"]
        return self.its.decode(good), bad


def key_error(value: bytes) -> BaseException | None:
    return KeyError("no\nname") if value == b"x" else None


@pytest.mark.parametrize("kind", [Whole, PerValue])
@pytest.mark.parametrize("in_array", [False, True])
@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_one_value_for_which_a_codec_raises_is_a_bad_one(kind: Any, in_array: bool, place: int) -> None:
    values = [b"%d" % number for number in range(1_000)]
    values[place] = b"x"
    codec = kind(key_error)
    batch, bad = decoded_good(codec, pa.array(values, pa.binary()) if in_array else values)
    assert batch.column("n").to_pylist() == [number for number in range(1_000) if number != place]
    assert bad == [BadRecord(place, f"{kind.__name__} raised KeyError: 'no\\nname'")]
    with pytest.raises(UndecodableValueError, match="raised KeyError") as raised:
        decoded(codec, pa.array(values, pa.binary()) if in_array else values)
    assert raised.value.index == place


def test_values_that_a_codec_calls_bad_and_those_it_raises_for_are_found_together() -> None:
    values = [None if at % 10 == 5 else b"bad" if at % 7 == 3 else b"x" if at % 11 == 2 else b"1" for at in range(300)]
    batch, bad = decoded_good(PerValue(key_error), values)
    assert [each.index for each in bad] == [at for at, each in enumerate(values) if each in (b"bad", b"x")]
    assert {each.reason for each in bad} == {"it is bad", "PerValue raised KeyError: 'no\\nname'"}
    assert batch.column("n").to_pylist() == [each and int(each) for each in values if each not in (b"bad", b"x")]
    with pytest.raises(UndecodableValueError) as raised:
        decoded(PerValue(key_error), values)
    assert raised.value.index == bad[0].index


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 33, 1_000, 1_025])
def test_a_codec_that_raises_for_all_is_called_a_bounded_number_of_times(count: int) -> None:
    codec = Whole(lambda value: RecursionError("deep"))
    batch, bad = decoded_good(codec, pa.array([b"1"] * count, pa.binary()))
    assert batch.schema == pa.schema([("n", pa.int64())])
    assert batch.num_rows == 0
    assert bad == [BadRecord(at, "Whole raised RecursionError: deep") for at in range(count)]
    assert codec.calls <= 1.25 * count + 1
    codec.calls = 0
    with pytest.raises(UndecodableValueError, match="deep"):
        decoded(codec, [b"1"] * count)
    assert codec.calls <= 32  # only the first is searched


def test_few_calls_find_one_value_of_many() -> None:
    codec = Whole(key_error)
    decoded_good(codec, [b"x" if at == 70_000 else b"1" for at in range(100_000)])
    assert codec.calls <= 60
    assert codec.read <= 300_000


@pytest.mark.parametrize(
    "error", [PanicException("in Rust"), RecursionError("deep"), OSError("Invalid data stream"), AssertionError()]
)
def test_what_may_be_about_a_value_makes_a_bad_one(error: BaseException) -> None:
    batch, bad = decoded_good(Whole(lambda value: error if value == b"x" else None), [b"1", b"x", b"2"])
    assert batch.to_pylist() == [{"n": 1}, {"n": 2}]
    assert bad == [BadRecord(1, f"Whole raised {type(error).__name__}: {error}")]


@pytest.mark.parametrize(
    "error",
    [
        RetryableError("the registry"),
        ConfigError("the codec"),
        BadRecordError("the record"),
        MemoryError(),
        KeyboardInterrupt(),
        ModuleNotFoundError("no polars"),
        ConnectionError("gone"),
        FileNotFoundError(2, "no schema"),
    ],
)
def test_what_is_about_no_value_is_raised(error: BaseException) -> None:
    codec = Whole(lambda value: error)
    for call in (decoded, decoded_good, codec_error_isolation.left_out):
        codec.calls = 0
        with pytest.raises(type(error)):
            call(codec, [b"1", b"2"])
        assert codec.calls == 1


def test_what_a_codec_raises_while_it_says_what_is_left_out_is_no_end() -> None:
    values = [b"7" if at % 3 == 0 else b"x" if at in (10, 50) else b"1" for at in range(100)]
    for given in (values, pa.array(values, pa.binary())):
        found = codec_error_isolation.left_out(Whole(key_error), given)
        assert found is not None
        assert np.flatnonzero(found).tolist() == [at for at, each in enumerate(values) if each == b"7"]
    assert codec_error_isolation.left_out(Whole(key_error), [b"x"] * 3) is None
    assert codec_error_isolation.left_out(BytesCodec(), [b"x"]) is None


def test_a_codec_that_raises_for_no_values_too_has_rows_of_its_fields() -> None:
    class Never(Codec):
        fields = Fields.of({"a": pa.string(), "b": None})

        def decode(self, values: Values) -> pa.RecordBatch:
            return json.loads("{")

    for given in ([], [b"1"]):
        batch, bad = decoded_good(Never(), given)
        assert batch.schema.names == ["a", "b"]
        assert len(bad) == len(given)
