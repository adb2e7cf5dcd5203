"""Tables of files, written as tasks and driver write them;
and one as an earlier version left it.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from framework.topology import CommitFence, FencedState, Header, OpenCommit, TransactionAttempt
from sinks.lake.file_table_base import FileTable
from sinks.lake.folder_documents import HeaderChain, overwrite, write_once


def opened(table: FencedState, txid: int, attempt: int, epoch: int = 1, digest: str = "digest") -> Header:
    """Raise the header for an attempt, and return it."""
    found = table.read_header()
    header = found.opened(epoch, OpenCommit(txid, attempt, digest))
    table.raise_header(found, header)
    return header


def granted(header: Header, task: int = 0) -> TransactionAttempt:
    """The attempt that a task of the opened commit is given."""
    assert header.open is not None
    fence = CommitFence("topology", header.epoch, header.open.plan_digest, f"bolt:{task}")
    return TransactionAttempt(header.open.txid, header.open.attempt_id, fence)


def append(
    table: FileTable, txid: int, *batches: pa.RecordBatch, attempt: int = 1, epoch: int = 1, digest: str = "digest"
) -> Header:
    """Write, publish and finish a whole transaction, with one task. Returns its opened header."""
    header = opened(table, txid, attempt, epoch, digest)
    table.write(granted(header), batches)
    table.publish(header)
    table.raise_header(header, header.finished(txid))
    return header


def old_partitioned_table(path: Path, partition_by: list[str], *, compacted_by_old_command: bool = False) -> pa.Table:
    """Write a ``ParquetTable`` in format 1: partition values are in the files' paths only.

    Returns its rows.
    """
    day = datetime.date(2026, 1, 1)
    values = ["a/b=%é", "", None, " "]
    rows = pa.table({"p": values, "day": [day] * 4, "n": list(range(4))})
    kinds = pa.schema([rows.schema.field(each) for each in partition_by])
    for folder in ("_ratchet/pending", "_manifest"):
        (path / folder).mkdir(parents=True)
    overwrite(
        path / "_ratchet" / "schema.json",
        {"schema": rows.schema.serialize().to_pybytes().hex(), "partition_by": partition_by},
    )
    header = Header("topology", "incarnation")
    chain = HeaderChain(path / "_ratchet", "table")
    chain.create(header)
    for txid in (1, 2, 3):
        written: list[list[object]] = []
        ds.write_dataset(
            rows,
            path,
            format="parquet",
            basename_template=f"part-{txid}-1-1-bolt-0-{{i}}.parquet",
            partitioning=ds.partitioning(kinds, flavor="hive")
            if partition_by and not compacted_by_old_command
            else None,
            existing_data_behavior="overwrite_or_ignore",
            file_visitor=lambda each, note=written.append: note(
                [str(Path(each.path).relative_to(path)), each.metadata.num_rows, Path(each.path).stat().st_size]
            ),
        )
        if compacted_by_old_command:
            (path / str(written[0][0])).rename(path / f"compacted-{txid}-0.parquet")
            written[0][0] = f"compacted-{txid}-0.parquet"
        write_once(path / "_manifest" / f"{txid:012d}-1-1.json", {"plan_digest": "digest", "files": written})
    chain.replace(header, header.opened(1, OpenCommit(3, 1, "digest")).finished(3))
    return pa.concat_tables([rows] * 3)
