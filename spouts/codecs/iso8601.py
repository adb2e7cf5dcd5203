"""Text of ISO 8601 and RFC 3339 as Arrow columns: moments, dates and times of day.

Invariants:

1. Text has one meaning, whatever other text is in the column: Arrow's own parser reads columns of
   usual text only, and ``_parsed`` gives the same for these. A test compares them.
2. Only values of Python's ``datetime`` are accepted. Other text gives null: years before 1 and
   after 9999, 24:00, leap seconds, days that no month has.
3. Digits beyond the declared unit are cut off, so the moment never moves to another second or day.

Accepted, after the date: ``T``, ``t`` or a blank, minutes and seconds or not, a fraction of the
second of any length after a point or a comma, ``Z``, ``z`` or an offset from UTC (``+02``,
``+0200``, ``+02:00``, ``+00:53:28``), and the name of a zone in brackets, which changes nothing
(RFC 9557). The forms without separators too (``20231114T221320Z``). Moments without an offset are
in UTC.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.python_datetime_range import outside_python

_DATE = r"(?P<date>\d{4}-\d{2}-\d{2}|\d{8})"
_CLOCK = r"(?P<clock>\d{2}(?::\d{2}(?::\d{2})?)?|\d{4}|\d{6})(?P<fraction>[.,]\d+)?"
_ZONE = r" ?(?P<zone>[Zz]|[+-]\d{2}(?::?\d{2}(?::?\d{2})?)?)?"
_MOMENT = rf"^{_DATE}(?:[Tt ]{_CLOCK}{_ZONE})?(?:\[[^\[\]]*\])*$"
_TIME = r"^(?P<clock>\d{2}:\d{2}(?::\d{2})?)(?P<fraction>[.,]\d+)?(?P<zone>[Zz]|[+-]00:?00)?$"
_FINER_THAN_MICROSECONDS = r"([.]\d{6})\d+"
#: Arrow's parser takes these first: it is slow to refuse a whole column.
_PROBED = 8
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
#: What fits into 64 bits of nanoseconds, in whole seconds.
_NANOSECONDS_MAX_S = 2**63 // 10**9 - 1

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Truths = np.ndarray[Any, np.dtype[np.bool_]]


def moments(texts: pa.StringArray, declared: pa.TimestampType) -> pa.Array:
    """The moments, in the declared type; null where a text is none. A text with an offset is its
    moment in UTC, also if the type has no zone."""
    found = _by_arrow(texts, declared)
    if found is None and declared.unit != "ns":
        found = _by_arrow(pc.replace_substring_regex(texts, _FINER_THAN_MICROSECONDS, r"\1"), declared)
    if found is None:
        found = _moments(texts, declared)
    return _within_python(found)


def dates(texts: pa.StringArray, declared: pa.DataType) -> pa.Array:
    """The dates; null where a text is none. A text may say midnight of the date, in any zone."""
    try:
        found = texts.cast(pa.date32())
    except pa.ArrowInvalid:
        days, _, nanoseconds, valid = _parsed(texts, _MOMENT)
        found = pa.array(days.astype(np.int32), pa.int32(), mask=~(valid & (nanoseconds == 0))).view(pa.date32())
    return _within_python(found).cast(declared)


def times_of_day(texts: pa.StringArray, declared: pa.DataType) -> pa.Array:
    """The times of day, in UTC or without a zone; null where a text is none."""
    _, _, nanoseconds, valid = _parsed(texts, _TIME)
    counted = nanoseconds // (10**9 // _PER_SECOND[declared.unit])
    plain = pa.int32() if declared.bit_width == 32 else pa.int64()
    return pa.array(counted, pa.int64(), mask=~valid).cast(plain).view(declared)


def _by_arrow(texts: pa.StringArray, declared: pa.TimestampType) -> pa.Array | None:
    """The moments, if all texts are usual: all with an offset, or none."""
    exact = "ns" if declared.unit == "ns" else "us"
    for zone in ("UTC", None):
        try:
            texts.slice(0, _PROBED).cast(pa.timestamp(exact, zone))
            counted = texts.cast(pa.timestamp(exact, zone)).view(pa.int64())
        except pa.ArrowInvalid:
            continue
        finer = _PER_SECOND[exact] // _PER_SECOND[declared.unit]
        if finer > 1:
            valid = counted.is_valid().to_numpy(zero_copy_only=False)
            counted = pa.array(counted.fill_null(0).to_numpy() // finer, pa.int64(), mask=~valid)
        return counted.view(declared)
    return None


def _moments(texts: pa.StringArray, declared: pa.TimestampType) -> pa.Array:
    days, offsets, nanoseconds, valid = _parsed(texts, _MOMENT)
    per_second = _PER_SECOND[declared.unit]
    seconds = days * 86_400 + nanoseconds // 10**9 - offsets
    if declared.unit == "ns":
        valid = valid & (np.abs(seconds) < _NANOSECONDS_MAX_S)
        seconds = np.where(valid, seconds, 0)
    counted = seconds * per_second + nanoseconds % 10**9 // (10**9 // per_second)
    return pa.array(counted, pa.int64(), mask=~valid).view(declared)


def _parsed(texts: pa.StringArray, pattern: str) -> tuple[Numbers, Numbers, Numbers, Truths]:
    """For each text: the days since 1970, the offset from UTC in seconds, the nanoseconds of the
    day, and whether the text is valid."""
    parts = pc.extract_regex(texts, pattern)
    valid = parts.is_valid().to_numpy(zero_copy_only=False)
    named = {field.name: pc.fill_null(column, "") for field, column in zip(parts.type, parts.flatten(), strict=True)}
    clock = pc.replace_substring(named["clock"], ":", "")
    hours, minutes, seconds = (_digits(clock, at, 2) for at in (0, 2, 4))
    valid = valid & (hours < 24) & (minutes < 60) & (seconds < 60)
    whole = pc.or_(pc.equal(named["fraction"], ""), pc.equal(pc.utf8_length(clock), 6))
    valid = valid & whole.to_numpy(zero_copy_only=False)  # of a minute or an hour, a fraction is no second's
    nanoseconds = (hours * 3600 + minutes * 60 + seconds) * 10**9 + _digits(named["fraction"], 1, 9)
    zone = pc.replace_substring(named["zone"], ":", "")
    parts_of_zone = [_digits(pc.replace_substring_regex(zone, "[Zz]", ""), at, 2) for at in (1, 3, 5)]
    valid = valid & (parts_of_zone[0] < 24) & (parts_of_zone[1] < 60) & (parts_of_zone[2] < 60)
    west = pc.starts_with(zone, "-").to_numpy(zero_copy_only=False)
    offsets = parts_of_zone[0] * 3600 + parts_of_zone[1] * 60 + parts_of_zone[2]
    if "date" not in named:
        return np.zeros(len(texts), np.int64), offsets, nanoseconds, valid
    date = pc.replace_substring(named["date"], "-", "")
    year, month, day = _digits(date, 0, 4), _digits(date, 4, 2), _digits(date, 6, 2)
    months = ((year - 1970) * 12 + month - 1).astype("M8[M]")
    dated = months.astype("M8[D]") + (day - 1)
    valid = valid & (month >= 1) & (month <= 12) & (day >= 1) & (dated.astype("M8[M]") == months)
    return dated.astype(np.int64), np.where(west, -offsets, offsets), nanoseconds, valid


def _digits(texts: pa.StringArray, at: int, count: int) -> Numbers:
    """The digits of each text from a place on, as numbers. Missing parts are 0."""
    padded = pc.utf8_rpad(pc.utf8_slice_codeunits(texts, at, at + count), count, padding="0")
    found: Numbers = padded.cast(pa.int64()).to_numpy()
    return found


def _within_python(column: pa.Array) -> pa.Array:
    outside = outside_python(column)
    return column if outside is None else pc.if_else(pa.array(outside), pa.scalar(None, column.type), column)
