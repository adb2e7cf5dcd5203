"""Avro values, as a producer writes them."""

from __future__ import annotations

import io
import struct
from typing import Any

import fastavro


def encoded(schema: Any, *rows: Any) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    values = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        values.append(stream.getvalue())
    return values


def framed(schema_id: int, *values: bytes) -> list[bytes]:
    return [struct.pack(">bI", 0, schema_id) + value for value in values]
