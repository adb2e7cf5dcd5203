"""What a change record says about its change, as columns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError

#: The parts of ``source`` and of ``transaction`` that are read.
SOURCE = {
    "ts_ms": pa.int64(),
    "snapshot": pa.string(),
    "name": pa.string(),
    "db": pa.string(),
    "schema": pa.string(),
    "table": pa.string(),
    "txId": pa.int64(),
    "lsn": pa.int64(),
    "file": pa.string(),
    "pos": pa.int64(),
    "row": pa.int64(),
    "gtid": pa.string(),
}
TRANSACTION = {"id": pa.string(), "total_order": pa.int64(), "data_collection_order": pa.int64()}

#: The name of what a field holds, and its type.
METADATA = {
    "op": pa.string(),
    "ts_ms": pa.int64(),
    "source_ts_ms": pa.int64(),
    "snapshot": pa.string(),
    "server": pa.string(),
    "database": pa.string(),
    "schema": pa.string(),
    "table": pa.string(),
    "tx_id": pa.int64(),
    "lsn": pa.int64(),
    "position": pa.int64(),
    "file": pa.string(),
    "pos": pa.int64(),
    "row": pa.int64(),
    "gtid": pa.string(),
    "transaction_id": pa.string(),
    "total_order": pa.int64(),
    "data_collection_order": pa.int64(),
    "unavailable": pa.list_(pa.string()),
}
_IN_SOURCE = {"source_ts_ms": "ts_ms", "server": "name", "database": "db", "tx_id": "txId"}
_IN_TRANSACTION = {"transaction_id": "id"}
#: The place in a binary log has 32 bits, its file the bits above.
_FILE = 2**32


def names_of(metadata: Sequence[str] | Mapping[str, str], columns: Sequence[str]) -> dict[str, str]:
    """Field -> the name of what it holds. Raises ``TopologyError`` for an unknown name, and for a
    field that is called as a column of the table."""
    if isinstance(metadata, str):
        raise TopologyError(f"metadata must be a list, such as [{metadata!r}], or a mapping from a field to a name")
    found = dict(metadata) if isinstance(metadata, Mapping) else {each: each for each in metadata}
    for field, name in found.items():
        if name not in METADATA:
            near = difflib.get_close_matches(str(name), METADATA, n=1)
            hint = f"perhaps {near[0]!r} is meant" if near else f"known: {', '.join(METADATA)}"
            raise TopologyError(f"metadata: there is no {name!r}; {hint}")
        if field in columns:
            raise TopologyError(
                f"metadata: the table has a column {field!r} too; give the field another name, as in "
                f"metadata={{'change_{field}': {name!r}}}"
            )
    return found


def columns_of(batch: pa.RecordBatch, names: Iterable[str], missing: Sequence[Sequence[str]]) -> list[pa.Array]:
    """The columns of a batch of envelopes. ``missing``: for each row, what is ``unavailable``."""
    source = dict(zip(SOURCE, batch.column("source").flatten(), strict=True))
    transaction = dict(zip(TRANSACTION, batch.column("transaction").flatten(), strict=True))
    found = []
    for name in names:
        if name in ("op", "ts_ms"):
            found.append(batch.column(name))
        elif name == "unavailable":
            found.append(pa.array(missing, METADATA[name]))
        elif name == "position":
            found.append(_positions(source))
        elif name in TRANSACTION or name in _IN_TRANSACTION:
            found.append(transaction[_IN_TRANSACTION.get(name, name)])
        else:
            found.append(source[_IN_SOURCE.get(name, name)])
    return found


def _positions(source: Mapping[str, pa.Array]) -> pa.Array:
    """The LSN, or where a change is in the binary logs."""
    numbers = pc.replace_substring_regex(source["file"], r"^.*\.0*(\d+)$", r"\1")
    usual = pc.match_substring_regex(numbers, r"^\d{1,9}$")
    numbers = pc.if_else(usual, numbers, pa.scalar(None, pa.string())).cast(pa.int64())
    return pc.coalesce(source["lsn"], pc.add(pc.multiply(numbers, pa.scalar(_FILE, pa.int64())), source["pos"]))
