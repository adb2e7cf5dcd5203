"""``ratchet compact PATH``: merges the small files of a table, and removes files that are no longer
needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from framework.commands.exit_status import exit_codes
from framework.errors import ConfigError
from framework.local_paths import local_path
from sinks.lake.file_table_base import TARGET_BYTES, FileTable, FileTableShape, described
from sinks.lake.parquet_table import GRACE_S, ParquetTable


def table_at(path: Path, target_bytes: int) -> FileTable:
    """The table in a folder, as an object of its kind."""
    held = FileTableShape.read(path)
    if held is not None and held.kind == "DeltaLakeTable":
        from sinks.lake.delta import DeltaLakeTable  # an optional extra

        return DeltaLakeTable(path, target_bytes=target_bytes)
    return ParquetTable(path, target_bytes=target_bytes)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    path: Annotated[Path, typer.Argument(help="the table's folder")],
    target_bytes: Annotated[int, typer.Option(min=1, help="size to aim at, in bytes")] = TARGET_BYTES,
    grace_s: Annotated[
        float, typer.Option(min=0, help="seconds after which a file that nobody needs is removed")
    ] = GRACE_S,
) -> None:
    """Merge the small files of a Parquet or Delta Lake table. The topology that writes it may
    run meanwhile."""
    with exit_codes():
        if FileTableShape.read(local_path(path, "table")) is None:
            raise ConfigError(f"{path} is not the folder of a table")
        table = table_at(path, target_bytes)
        table.read_header()
        before, after = table.compact()
        removed = table.vacuum(older_than_s=grace_s)
    print(json.dumps({"files_before": before, "removed": removed, **described(table.files()), "compacted_to": after}))  # noqa: T201
