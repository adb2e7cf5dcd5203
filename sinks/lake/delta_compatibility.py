"""The requirements of a Delta table for its writers and readers, by its protocol and its schema.

Other programs may add a constraint, a generated column or a feature at any time. Ratchet appends
plain Parquet files, and evaluates no SQL. A table with other requirements is refused before
anything is written, and the error names the requirement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deltalake
import pyarrow as pa

from framework.errors import ConfigError

#: Features that require nothing of a writer that appends whole files, except where the schema or
#: the configuration uses them.
_MET_BY_APPENDS = frozenset(
    {
        *("appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed", "columnMapping"),
        *(
            "timestampNtz",
            "variantType",
            "variantType-preview",
            "v2Checkpoint",
            "vacuumProtocolCheck",
            "domainMetadata",
        ),
    }
)
#: Supported writer versions: up to 5, their features are those above; with 7, the table names its
#: features. Version 6 has identity columns.
_WRITER_VERSIONS = (1, 2, 3, 4, 5, 7)
#: Features under which a data file does not hold exactly the rows of the table.
_UNREAD = ("deletionVectors",)
_CONSTRAINT = "delta.constraints."
#: Keys of a field's metadata that require a writer to check or to generate values.
_FIELD_DEMANDS = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generation expression",
    "delta.identity.": "an identity",
    "CURRENT_DEFAULT": "a default",
    "__CHAR_VARCHAR_TYPE_STRING": "a length",
}


def check_readable(table: deltalake.DeltaTable, location: str) -> None:
    """Raise ``ConfigError`` for a table whose data files do not contain exactly its rows."""
    protocol = table.protocol()
    for each in _UNREAD:
        if each in {*(protocol.reader_features or ()), *(protocol.writer_features or ())}:
            raise _refusal(location, f"has the feature {each}")
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise _refusal(location, f"has the feature columnMapping, with the mode {mode!r}")


def check_known(table: deltalake.DeltaTable, location: str) -> None:
    """Raise ``ConfigError`` for a table with an unknown feature: its folder may hold files of
    another kind, or refer to its files in another way."""
    check_readable(table, location)
    version = table.protocol().min_writer_version
    if version not in _WRITER_VERSIONS:
        raise _refusal(location, f"wants writers of version {version}")
    for feature in sorted({*(table.protocol().writer_features or ())} - _MET_BY_APPENDS):
        raise _refusal(location, f"has the feature {feature}")


def check_writable(
    table: deltalake.DeltaTable, location: str, *, schema: pa.Schema, partition_by: Sequence[str]
) -> None:
    """Raise ``ConfigError`` for a table whose requirements an append of ``schema`` does not meet,
    or that has other columns or partitions than Ratchet has made."""
    check_known(table, location)
    metadata = table.metadata()
    for key, text in sorted(metadata.configuration.items()):
        if key.startswith(_CONSTRAINT):
            raise _refusal(location, f"has the constraint {key.removeprefix(_CONSTRAINT)!r}, {text}")
    if list(metadata.partition_columns) != list(partition_by):
        raise _refusal(
            location, f"is partitioned by {list(metadata.partition_columns)}, and was made with {list(partition_by)}"
        )
    held = _fields(table.schema())
    ours = _fields(deltalake.Schema.from_arrow(schema))
    for name, field in held.items():
        for key, what in _demands(field):
            raise _refusal(location, f"has {what} ({key}) in column {name!r}")
        if name not in ours and not field["nullable"]:
            raise _refusal(
                location, f"has the column {name!r}, which must not be null, and which the topology does not write"
            )
    for name, field in ours.items():
        if name not in held:
            raise _refusal(location, f"has lost the column {name!r}")
        if _plain(held[name]) != _plain(field):
            raise _refusal(location, f"has changed the column {name!r} to {json.dumps(_plain(held[name]))}")


def _refusal(location: str, what: str) -> ConfigError:
    return ConfigError(
        f"{location}: another program has changed this Delta table: it {what}. Ratchet cannot write such a table; "
        "take that back, or use another path"
    )


def _fields(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    return {each["name"]: each for each in json.loads(schema.to_json())["fields"]}


def _demands(node: Any) -> Iterator[tuple[str, str]]:
    """The metadata keys of a field, or of a field nested in it, that bind writers."""
    if isinstance(node, list):
        for each in node:
            yield from _demands(each)
    if isinstance(node, dict):
        for key in node.get("metadata") or ():
            yield from ((key, what) for prefix, what in _FIELD_DEMANDS.items() if key.startswith(prefix))
        for name, each in node.items():
            if name != "metadata":
                yield from _demands(each)


def _plain(node: Any) -> Any:
    """A field without its metadata, and without that of nested fields."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if isinstance(node, dict):
        return {name: _plain(each) for name, each in node.items() if name != "metadata"}
    return node
