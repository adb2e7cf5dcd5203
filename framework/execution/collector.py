"""Collects a component's output: turns rows into record batches, and sends record batches down
every edge of their stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.arrow_columns import cast_column, column_of
from framework.topology.bolts import DEFAULT_STREAM
from framework.topology.fields import Fields

#: This many rows are held as Python values before they are converted to a record batch.
BUFFERED_ROWS_MAX = 8192

#: Larger batches are split, because offsets in Arrow's columns and lengths between Spark's
#: processes have 32 bits.
BATCH_BYTES_MAX = 256 << 20

#: Takes the stream, the rows, and the receiving task when the stream is direct.
Sink = Callable[[str, pa.RecordBatch, int | None], None]


def _alive() -> None:
    """Outside of a task nothing is cancelled."""


class Streams:
    """The streams that a component declares. Checks emitted rows against them."""

    def __init__(
        self, component_id: str, streams: Mapping[str, Fields], direct_streams: frozenset[str] = frozenset()
    ) -> None:
        self.component_id = component_id
        self._streams = streams
        self._direct_streams = direct_streams

    def fields(self, stream: str, task: int | None) -> Fields:
        """The fields of ``stream``, on which the component emits: to one ``task``, or by the
        groupings when ``task`` is None. Raises ``TopologyError`` when the stream is not declared,
        or not declared for that kind of emit."""
        fields = self._streams.get(stream)
        if fields is None:
            known = ", ".join(sorted(self._streams)) or "none"
            raise TopologyError(
                f"component {self.component_id!r} emitted on stream {stream!r}, which it does not declare (declared: {known})"
            )
        if (stream in self._direct_streams) != (task is not None):
            raise TopologyError(
                f"component {self.component_id!r}, stream {stream!r}: "
                + ("it is direct, so use emit_direct(task, ...)" if task is None else "it is not declared direct")
            )
        return fields

    def takes_rows(self, stream: str) -> bool:
        """Whether rows may be emitted without a target task: the stream is declared, and is not
        direct."""
        return stream in self._streams and stream not in self._direct_streams

    def checked(self, values: Sequence[Any], stream: str, task: int | None) -> tuple[Any, ...]:
        """Return ``values`` if they are as many as the stream declares. Raises ``TopologyError``
        otherwise, and as ``fields`` does."""
        fields = self.fields(stream, task)
        # convert first: a user's sequence may raise, or contain more values than its length says
        row = tuple(values)
        if len(row) != len(fields):
            raise TopologyError(
                f"component {self.component_id!r} emitted {len(row)} values on stream {stream!r}, which declares "
                f"{len(fields)}: {', '.join(fields.names)}"
            )
        return row

    def batches(self, stream: str, values: Sequence[Any]) -> Iterator[pa.RecordBatch]:
        """Make record batches of rows, in the declared types: several if the rows are too wide for
        one. ``values``: of the first row, then of the next, and so on. Raises ``TopologyError``
        naming a field whose values do not fit."""
        width = len(self._streams[stream])
        columns = self._columns(stream, values)
        if not any(isinstance(column, pa.ChunkedArray) for column in columns):
            yield from bounded(pa.RecordBatch.from_arrays(columns, names=list(self._streams[stream].names)))
        else:
            del columns
            half = len(values) // width // 2 * width
            yield from self.batches(stream, values[:half])
            yield from self.batches(stream, values[half:])

    def _columns(self, stream: str, values: Sequence[Any]) -> list[pa.Array | pa.ChunkedArray]:
        """The columns of rows; chunked, if they are wider than the offsets of an array reach."""
        fields = self._streams[stream]
        arrays = []
        for position, name in enumerate(fields):
            try:
                arrays.append(column_of(values[position :: len(fields)], fields.type_of(name)))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                declared = fields.type_of(name) or "one type"
                raise TopologyError(
                    f"component {self.component_id!r}, stream {stream!r}: field {name!r} does not take every value "
                    f"emitted as {declared}: {error}"
                ) from error
        return arrays

    def typed(self, batch: pa.RecordBatch, stream: str, task: int | None) -> pa.RecordBatch:
        """Check an emitted batch, and cast its columns to the declared types where they differ. No
        value is truncated: see ``framework.topology.arrow_columns``. Raises ``TopologyError`` when
        the batch does not have the declared fields, and as ``fields`` does."""
        fields = self.fields(stream, task)
        if not isinstance(batch, pa.RecordBatch):
            raise TopologyError(
                f"component {self.component_id!r} emitted a {type(batch).__name__} on stream {stream!r}: give a "
                "pyarrow.RecordBatch"
            )
        if tuple(batch.schema.names) != fields.names:
            raise TopologyError(
                f"component {self.component_id!r} emitted columns {', '.join(batch.schema.names)} on stream {stream!r}, "
                f"which declares {', '.join(fields.names)}"
            )
        columns = []
        for name, column in zip(fields, batch.columns, strict=True):
            declared = fields.type_of(name)
            if declared is None or column.type == declared:
                columns.append(column)
                continue
            try:
                columns.append(cast_column(column, declared))
            except (pa.ArrowNotImplementedError, ValueError) as error:
                raise TopologyError(
                    f"component {self.component_id!r}, stream {stream!r}: field {name!r} is declared {declared}, and "
                    f"{column.type} does not fit: {error}"
                ) from error
        return pa.RecordBatch.from_arrays(columns, names=list(fields.names))


def bounded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split rows, in order, into batches of at most ``BATCH_BYTES_MAX`` or of one row."""
    if batch.nbytes <= BATCH_BYTES_MAX or batch.num_rows < 2:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from bounded(batch.slice(0, half))
        yield from bounded(batch.slice(half))


class TaskCollector:
    """The ``OutputCollector`` of one component in one task.

    The task that runs the component sets ``sink``, and ``check_alive``, which raises when the
    attempt was cancelled. Both are not pickled: a committer pickled between the phases contains
    this object, and the commit task sets new ones.
    """

    def __init__(
        self, component_id: str, streams: Mapping[str, Fields], direct_streams: frozenset[str] = frozenset()
    ) -> None:
        self._component_id = component_id
        self._streams = Streams(component_id, streams, direct_streams)
        self._rows: dict[tuple[str, int | None], list[Any]] = {}  # the values, row by row
        self.sink: Sink | None = None
        self.check_alive: Callable[[], None] = _alive
        self.subscribers: frozenset[str] = frozenset()
        self.emitted = 0
        self._take_default_stream()

    def subscribed(self, stream: str = DEFAULT_STREAM) -> bool:
        """Whether any bolt subscribes to the stream. If none does, the output need not be
        computed."""
        return stream in self.subscribers

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "sink": None, "check_alive": _alive, "emit": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take_default_stream()

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._emit(values, stream, None)

    def _take_default_stream(self) -> None:
        """Replace ``emit`` by a faster function for the default stream, which carries nearly all
        rows: it needs no lookup, and costs a quarter. It stores the values of all rows in one list,
        so that the caller's sequences are freed immediately and cost no garbage collection."""
        if not self._streams.takes_rows(DEFAULT_STREAM):
            vars(self).pop("emit", None)
            return
        rows = self._rows.setdefault((DEFAULT_STREAM, None), [])
        width = len(self._streams.fields(DEFAULT_STREAM, None))
        most = width * BUFFERED_ROWS_MAX
        keep, other, flush = rows.extend, self._emit, self._flush

        def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
            kind = values.__class__
            if (kind is list or kind is tuple) and len(values) == width and stream == DEFAULT_STREAM:
                keep(values)
                if len(rows) >= most:
                    flush(DEFAULT_STREAM, None)
            else:
                other(values, stream, None)

        self.emit = emit  # type: ignore[method-assign]

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._emit(values, stream, task)

    def _emit(self, values: Sequence[Any], stream: str, task: int | None) -> None:
        row = self._streams.checked(values, stream, task)
        rows = self._rows.setdefault((stream, task), [])
        rows.extend(row)
        if len(rows) >= len(row) * BUFFERED_ROWS_MAX:
            self._flush(stream, task)

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        self._emit_arrow(batch, stream, None)

    def emit_arrow_direct(self, task: int, batch: pa.RecordBatch, stream: str = DEFAULT_STREAM) -> None:
        self._emit_arrow(batch, stream, task)

    def _emit_arrow(self, batch: pa.RecordBatch, stream: str, task: int | None) -> None:
        typed = self._streams.typed(batch, stream, task)
        self._flush(stream, task)
        for part in bounded(typed):
            self._deliver(stream, part, task)

    def flush(self) -> None:
        """Send the buffered rows."""
        for stream, task in list(self._rows):
            self._flush(stream, task)

    def _flush(self, stream: str, task: int | None) -> None:
        rows = self._rows.get((stream, task))
        if rows:
            batches = list(self._streams.batches(stream, rows))
            rows.clear()  # keep the same list: `emit` refers to it
            for batch in batches:
                self._deliver(stream, batch, task)

    def _deliver(self, stream: str, batch: pa.RecordBatch, task: int | None) -> None:
        if self.sink is None:
            raise TopologyError(f"component {self._component_id!r} emitted outside prepare, execute and finish_batch")
        if batch.num_rows:
            self.emitted += batch.num_rows
            self.sink(stream, batch, task)
