"""Event times of a column, or of one tuple, as microseconds since 1970."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa

from framework.durations import seconds_to_micros, timedelta_to_micros
from framework.errors import BadRecordError, TopologyError

#: The units of numbers in a column of times, in microseconds.
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
#: Times before the year 2 and after the year 9998 are invalid: windows around them have no bounds.
_FIRST, _LAST = -62_104_060_800_000_000, 253_370_764_800_000_000
#: Numbers beyond this overflow.
_MOST = 1 << 61
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def micros_since_epoch(moment: datetime.datetime) -> int:
    """Microseconds since 1970. ``moment``: with a zone."""
    return timedelta_to_micros(moment - _EPOCH)


def time_of(value: Any, field: str) -> int:
    """The time of one tuple: a ``datetime`` with a zone, or seconds since 1970. Raises
    ``BadRecordError`` for another value."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return micros_since_epoch(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return seconds_to_micros(value)
    raise BadRecordError(
        f"field {field!r} holds {value!r}: a window needs a datetime with a zone, or seconds since 1970 as a number"
    )


def check_times(component_id: str, field: str, declared: pa.DataType | None, unit: str) -> None:
    """Raise ``TopologyError`` for a column that holds no event times."""
    if unit not in UNITS:
        raise TopologyError(f"component {component_id!r}: unit is {unit!r}: give 's', 'ms' or 'us'")
    if declared is None:
        raise TopologyError(
            f"component {component_id!r}: field {field!r} has no type; declare it, as in Fields(at=datetime)"
        )
    if pa.types.is_timestamp(declared):
        if declared.tz is None:
            raise TopologyError(
                f"component {component_id!r}: field {field!r} is a timestamp without a zone, so it names no moment: declare "
                "it with one, as in pa.timestamp('us', 'UTC')"
            )
    elif not (pa.types.is_integer(declared) or pa.types.is_floating(declared)):
        raise TopologyError(
            f"component {component_id!r}: field {field!r} is {declared}: event time is a timestamp with a zone, or a number"
        )


def times_of(column: pa.Array | pa.ChunkedArray, field: str, unit: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The times of a column that ``check_times`` has accepted. Raises ``BadRecordError`` for a
    null, and for a number that is no valid time."""
    if column.null_count:
        raise BadRecordError(f"field {field!r} is null, and every record needs an event time")
    if pa.types.is_floating(column.type):
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64) * UNITS[unit]
        wrong = ~(np.abs(numbers) < _MOST)
        micros = np.round(np.where(wrong, 0, numbers)).astype(np.int64)
    else:
        counted = column.type.unit if pa.types.is_timestamp(column.type) else unit
        if pa.types.is_uint64(column.type):
            wrong = column.to_numpy(zero_copy_only=False) >= _MOST
            raw = np.where(wrong, 0, column.to_numpy(zero_copy_only=False)).astype(np.int64)
        else:
            raw = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
            wrong = np.zeros(len(raw), bool)
        factor = 1 if counted == "ns" else UNITS[counted]
        wrong |= ~((raw > -(_MOST // factor)) & (raw < _MOST // factor))
        micros = raw // 1_000 if counted == "ns" else np.where(wrong, 0, raw) * factor
    wrong |= (micros < _FIRST) | (micros >= _LAST)
    if wrong.any():
        shown = column[int(np.flatnonzero(wrong)[0])]
        if pa.types.is_timestamp(column.type):  # Python cannot represent such a time
            raise BadRecordError(
                f"field {field!r} holds a time beyond the years 2 to 9998: {shown.value} {column.type.unit}"
            )
        raise BadRecordError(
            f"field {field!r} holds {shown}, which is no time in {unit!r} of the years 2 to 9998: give unit= if it counts others"
        )
    return micros
