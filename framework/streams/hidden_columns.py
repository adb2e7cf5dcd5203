"""Columns that a pipeline adds to rows for its own use, and that users never see.

``CARRIED`` are the topic, partition and time of the record of a row. A source reads them if a step
below uses event time, and the steps in between carry them: a row that a function makes has those of
the row that it was made of. Expressions, functions and sinks never see them, and no column of a
user has such a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.topology import HIDDEN, RECORD_FIELDS

#: Topic and partition of a record, and its time.
TOPIC, PARTITION, TIMESTAMP = RECORD_FIELDS
PLACE = (TOPIC, PARTITION)
CARRIED = frozenset(RECORD_FIELDS)
#: The times of the rows of both sides of a join.
TIME, TIME_RIGHT = f"{HIDDEN}time", f"{HIDDEN}time_right"
#: A column of frames with tombstones, as ``framework.streams.tombstones`` says.
MARK = f"{HIDDEN}mark"


def is_hidden(name: str) -> bool:
    return name.startswith(HIDDEN)


def hidden_of(names: Iterable[str]) -> list[str]:
    return [name for name in names if is_hidden(name)]


def visible(schema: pa.Schema) -> pa.Schema:
    """The columns that users see."""
    return pa.schema([each for each in schema if not is_hidden(each.name)])


def with_carried(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """The columns, and these of ``CARRIED``."""
    wanted = set(names)
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in RECORD_FIELDS.items() if name in wanted)])


def field_of(schema: pa.Schema, name: str) -> pa.Field:
    """A column of the schema, or of ``CARRIED``."""
    return pa.field(name, RECORD_FIELDS[name]) if name in CARRIED else schema.field(name)


def without_hidden(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns that functions of users get."""
    return frame.drop(hidden_of(frame.columns))


def with_hidden_of(made: pl.DataFrame, frame: pl.DataFrame, origins: Sequence[int]) -> pl.DataFrame:
    """Rows made of the rows of a frame, with its hidden columns. ``origins``: for each row, the
    number of the row that it was made of."""
    names = hidden_of(frame.columns)
    if not names:
        return made
    return made.hstack(frame.select(pl.col(names).gather(pl.Series(origins, dtype=pl.UInt32))))


def check_new_names(call: Call, names: Iterable[str]) -> None:
    """Raise ``TopologyError`` for a name that a hidden column could have."""
    for name in names:
        if isinstance(name, str) and is_hidden(name):
            raise call.mistake(
                f"column {name!r} begins with {HIDDEN!r}, as those that pipelines add: give another name"
            )
