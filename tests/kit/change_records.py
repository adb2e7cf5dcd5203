"""Change records as Debezium writes them, with their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Record = tuple[bytes | None, bytes | None]
#: Kafka Connect's descriptions of columns.
INT, TEXT = {"type": "int32"}, {"type": "string"}
BIG = {"type": "int64"}
UNAVAILABLE = "__debezium_unavailable_value"


def change_record(
    table: str,
    columns: Mapping[str, Mapping[str, Any]],
    op: str,
    row: Mapping[str, Any] | None,
    *,
    key: Sequence[str] = ("id",),
    schema: str = "public",
    server: str | None = None,
    before: Mapping[str, Any] | None = None,
    lsn: int | None = 1,
) -> Record:
    """``row``: after the change, or of a delete before it. ``before``: the row before a change.
    ``lsn``: where the change is in the log of the source."""
    described = [{"optional": True, **kind, "field": name} for name, kind in columns.items()]
    sides = [{"type": "struct", "fields": described, "optional": True, "field": side} for side in ("before", "after")]
    envelope = {"type": "struct", "fields": sides, "name": f"shop.{schema}.{table}.Envelope"}
    deleted = op == "d"
    payload = {
        "before": row if deleted else before,
        "after": None if deleted else row,
        "source": {"name": server, "db": "shop", "schema": schema, "table": table, "lsn": lsn},
        "op": op,
        "ts_ms": 1,
    }
    of_key = json.dumps({name: (row or {}).get(name) for name in key}).encode() if key and op != "t" else None
    return of_key, json.dumps({"schema": envelope, "payload": payload}, separators=(",", ":")).encode()


def transaction_marker(status: str, transaction: str, changes: Mapping[str, int]) -> bytes:
    """A record of the topic of transactions. ``status``: "BEGIN" or "END". ``changes``: of each
    table, such as ``public.orders``."""
    schema = {"type": "struct", "fields": [], "name": "io.debezium.connector.common.TransactionMetadataValue"}
    payload = {
        "status": status,
        "id": transaction,
        "event_count": sum(changes.values()),
        "data_collections": [{"data_collection": table, "event_count": count} for table, count in changes.items()],
    }
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":")).encode()
