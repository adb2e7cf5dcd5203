"""Text of ISO 8601 and RFC 3339: what producers write is read, what Python cannot hold is not."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spouts.codecs import iso8601
from spouts.codecs.iso8601 import dates, moments, times_of_day

UTC = datetime.UTC
MICROSECONDS = pa.timestamp("us", "UTC")
AT = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)

FORMS = {
    "2023-11-14T22:13:20Z": AT,
    "2023-11-14t22:13:20z": AT,
    "2023-11-14 22:13:20": AT,
    "2023-11-14T22:13:20": AT,
    "2023-11-14T22:13:20-00:00": AT,
    "2023-11-15T00:13:20+02:00": AT,
    "2023-11-15T00:13:20+0200": AT,
    "2023-11-15T00:13:20+02": AT,
    "2023-11-15 00:13:20 +02:00": AT,  # SQL Server
    "2023-11-14T16:43:20-05:30": AT,
    "20231114T221320Z": AT,
    "20231114T221320+0000": AT,
    "2023-11-14T23:13:20+01:00[Europe/Paris]": AT,  # Java's ZonedDateTime
    "2023-11-14T22:13:20.123Z": AT.replace(microsecond=123000),
    "2023-11-14 22:13:20,123": AT.replace(microsecond=123000),  # Python's logging
    "2023-11-14T22:13:20.1234567Z": AT.replace(microsecond=123456),  # .NET
    "2023-11-14T22:13:20.123456789Z": AT.replace(microsecond=123456),  # Go, Java
    "2023-11-14T22:13:20.1234567890123Z": AT.replace(microsecond=123456),
    "2023-11-14T22:13Z": AT.replace(second=0),  # Java, of a whole minute
    "2023-11-14T22": AT.replace(minute=0, second=0),
    "2023-11-14": AT.replace(hour=0, minute=0, second=0),
    "1880-01-01 00:53:28+00:53:28": datetime.datetime(1880, 1, 1, tzinfo=UTC),  # PostgreSQL
    "0001-01-01T00:00:00Z": datetime.datetime(1, 1, 1, tzinfo=UTC),  # Go's zero
    "9999-12-31T23:59:59.9999999Z": datetime.datetime.max.replace(tzinfo=UTC),  # .NET's DateTime.MaxValue
    "1969-12-31T23:59:59.9999999Z": datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "2024-02-29": datetime.datetime(2024, 2, 29, tzinfo=UTC),
}
_NO_MOMENTS = """0000-01-01T00:00:00Z 10000-01-01T00:00:00Z +10000-01-01T00:00:00Z -0001-01-01T00:00:00Z 0001-01-01T00:00:00+02:00
9999-12-31T23:59:59-02:00 2023-11-14T24:00:00Z 2023-11-14T25:00:00Z 2023-11-14T22:60:00Z 2016-12-31T23:59:60Z
2023-02-29 2023-13-01 2023-00-01 2023-01-00 2023-01-32 2023-1-1 23-01-01 1700000000 1700000000123 2023-11-14T22:13:20.Z
2023-11-14T 2023-11-14Z 2023-11-14T22:13:20+24:00 2023-11-14T22:13:20+02:60 2023-1114 2023-11-14T2213:20Z never
2023-11-14T22:13.5Z 2023-11-14T22.5Z 2023-11-14T22:13,5 20231114T2213.5Z ２０２３-11-14"""  # noqa: RUF001 - digits that are not ASCII
NO_MOMENTS = _NO_MOMENTS.split()


@pytest.mark.parametrize("text", FORMS)
def test_every_form_that_producers_write_is_the_same_moment_alone_and_among_others(text: str) -> None:
    assert moments(pa.array([text]), MICROSECONDS).to_pylist() == [FORMS[text]]
    among = [*FORMS, text, None, "never"] * 20
    assert moments(pa.array(among), MICROSECONDS).to_pylist() == [*FORMS.values(), FORMS[text], None, None] * 20


@pytest.mark.parametrize("text", NO_MOMENTS)
def test_text_that_is_no_moment_of_python_is_null_alone_and_among_others(text: str) -> None:
    assert moments(pa.array([text]), MICROSECONDS).to_pylist() == [None]
    assert moments(pa.array(["2023-11-14", text] * 500), MICROSECONDS).null_count == 500
    assert moments(pa.array(["2023-11-14T22:13:20.123456789Z", text] * 500), MICROSECONDS).null_count == 500


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York", "+02:00"])
def test_digits_beyond_the_unit_are_cut_off_in_every_unit_and_zone(unit: str, zone: str | None) -> None:
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[unit]
    texts = [
        "1969-12-31T23:59:59.987654321Z",
        "2023-11-14T22:13:20.987654321",
        "2023-11-15T00:13:20.9+02:00",
        "2023-11-14",
    ]
    found = moments(pa.array(texts), pa.timestamp(unit, zone)).cast(pa.int64()).to_pylist()
    seconds = [-1, 1_700_000_000, 1_700_000_000, 1_699_920_000]
    fractions = ["987654321", "987654321", "900000000", "0"]
    assert found == [at * 10**digits + int(part[:digits] or 0) for at, part in zip(seconds, fractions, strict=True)]


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "+02:00"])
def test_every_moment_that_is_found_can_be_read_in_its_zone(zone: str) -> None:
    texts = [
        "0001-01-01T00:00:00Z",
        "0001-01-01T08:00:00Z",
        "9999-12-31T20:00:00Z",
        "9999-12-31T23:59:59Z",
        "2023-11-14",
    ]
    found = moments(pa.array(texts), pa.timestamp("us", zone))
    assert 0 < found.null_count < 3
    assert len(found.to_pylist()) == 5


def test_moments_beyond_64_bits_of_nanoseconds_are_null() -> None:
    texts = ["1600-01-01T00:00:00Z", "2263-01-01T00:00:00Z", "0001-01-01", "2023-11-14T22:13:20.123456789Z"]
    found = moments(pa.array(texts), pa.timestamp("ns", "UTC"))
    assert found.cast(pa.int64()).to_pylist() == [None, None, None, 1_700_000_000_123_456_789]


@given(
    st.lists(
        st.datetimes(
            datetime.datetime(1, 1, 3), datetime.datetime(9999, 12, 29), timezones=st.none() | st.timezones()
        ).filter(lambda at: at.tzinfo is None or at.utcoffset() is not None),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["T", " "]),
    st.sampled_from(["auto", "microseconds", "milliseconds", "seconds", "minutes"]),
)
def test_text_of_pythons_datetime_is_read_as_python_reads_it(
    written: list[datetime.datetime], separator: str, precision: str
) -> None:
    texts = [at.isoformat(separator, precision) for at in written]
    wanted = [datetime.datetime.fromisoformat(text) for text in texts]
    wanted = [at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC) for at in wanted]
    assert moments(pa.array(texts), MICROSECONDS).to_pylist() == wanted


_WORDS = """2023-11-14 20231114 2023-02-29 0000-01-01 0001-01-01 9999-12-31 T t 22 22:13 24:00 22:13:20 221320 23:59:60 .1 .123456
    .1234567 ,5 Z +02:00 -0530 +02 +24:00 x"""
_PARTS = st.sampled_from([*_WORDS.split(), " ", ""])


@given(
    st.lists(st.lists(_PARTS, max_size=6).map("".join), min_size=1, max_size=4),
    st.sampled_from(["s", "ms", "us", "ns"]),
)
def test_what_arrow_reads_is_read_to_the_same_moment_beside_what_it_refuses(texts: list[str], unit: str) -> None:
    declared = pa.timestamp(unit, "UTC")
    together = moments(pa.array(texts), declared)
    assert pa.concat_arrays([moments(pa.array([text]), declared) for text in texts]).equals(together)
    assert iso8601._within_python(iso8601._moments(pa.array(texts), declared)).equals(together)


def test_dates_are_read_alone_and_as_midnight() -> None:
    texts = ["2023-11-14", "20231114", "2023-11-14T00:00:00", "2023-11-14T00:00:00.000Z", "2023-11-14T00:00:00+02:00"]
    day = datetime.date(2023, 11, 14)
    for declared in (pa.date32(), pa.date64()):
        assert dates(pa.array(texts), declared).to_pylist() == [day] * 5
        assert dates(pa.array([texts[0], None]), declared).to_pylist() == [day, None]
        no_dates = ["2023-11-14T01:00:00", "0000-01-01", "10000-01-01", "2023-02-29", "14.11.2023", "19675", ""]
        for each in no_dates:
            assert dates(pa.array([each, "2023-11-14"]), declared).to_pylist() == [None, day]


def test_times_of_day_are_read_and_those_that_no_day_has_are_null() -> None:
    texts = ["22:13:20.123456", "22:13:20", "22:13", "22:13:20Z", "22:13:20+00:00", "22:13:20,5", None]
    found = times_of_day(pa.array(texts), pa.time64("us")).to_pylist()
    at = datetime.time(22, 13, 20)
    assert found == [
        at.replace(microsecond=123456),
        at,
        at.replace(second=0),
        at,
        at,
        at.replace(microsecond=500000),
        None,
    ]
    for declared in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        none = ["24:00:00", "25:00", "-01:00:00", "22:60", "22:13:60", "22:13:20+02:00", "22", "now"]
        assert times_of_day(pa.array(none), declared).to_pylist() == [None] * len(none)
        assert times_of_day(pa.array(["01:02:03"]), declared).to_pylist() == [datetime.time(1, 2, 3)]
