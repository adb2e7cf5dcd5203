"""Rows that a codec encodes and decodes again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from framework import Fields


def round_trip(codec: Any, batch: pa.RecordBatch) -> list[bytes]:
    """The values of the rows. They are decoded to the same rows; a row alone, and rows in a slice,
    have the same values."""
    codec.check_encodable(Fields.of_schema(batch.schema))
    encoded = codec.encode(batch)
    assert encoded.type == pa.large_binary()
    values: list[bytes] = encoded.to_pylist()
    for name, column in zip(batch.schema.names, codec.decode(values).columns, strict=True):
        assert column.to_pylist() == batch.column(name).to_pylist(), name
    assert [codec.encode(batch.slice(number, 1))[0].as_py() for number in range(batch.num_rows)] == values
    assert codec.encode(batch.slice(1)).to_pylist() == values[1:]
    return values
