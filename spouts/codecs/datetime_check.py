"""Decodes with any codec; values with a moment, a date or a time of day that Python cannot hold are
bad. A bolt that reads them row by row would fail, or get another time: 24:00 as 00:00."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from framework.topology.python_datetime_range import outside_python
from spouts.codecs import codec_error_isolation
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Codec, UndecodableValueError, Values, without_rows


def decoded(codec: Codec, raw: Values | pa.BinaryArray) -> pa.RecordBatch:
    """The rows. Raises ``UndecodableValueError`` for the first bad value."""
    try:
        batch = codec_error_isolation.decode(codec, raw)
    except UndecodableValueError as error:
        if error.index:
            decoded(codec, raw[: error.index])  # raises for an earlier one
        raise
    found = _outside(batch)
    if found:
        first = min(found)
        raise UndecodableValueError(first, found[first])
    return batch


def decoded_good(codec: Codec, raw: Values | pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
    """The rows of the good values, and the bad values."""
    batch, bad = codec_error_isolation.decode_good(codec, raw)
    return without_rows(batch, bad, _outside(batch), len(raw))


def _outside(batch: pa.RecordBatch) -> dict[int, str]:
    """Row -> why Python cannot hold it."""
    found: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        outside = outside_python(column)
        for row in np.flatnonzero(outside) if outside is not None else ():
            found.setdefault(
                int(row),
                f"{name}: Python holds the years 1 to 9999 and 00:00 to 23:59:59, and this {column.type} is another",
            )
    return found
