"""Takes a component's output: turns rows into record batches, and sends record batches down every
edge of their stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.bolts import DEFAULT_STREAM
from framework.topology.fields import Fields

#: This many rows are held as Python values before they become a record batch.
BUFFERED_ROWS_MAX = 8192

#: Takes the stream, the rows, and the receiving task when the stream is direct.
Sink = Callable[[str, pa.RecordBatch, int | None], None]


class Streams:
    """The streams that a component declares. Checks what it emits against them."""

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
        """Whether the stream is declared, and its groupings say where rows go."""
        return stream in self._streams and stream not in self._direct_streams

    def checked(self, values: Sequence[Any], stream: str, task: int | None) -> tuple[Any, ...]:
        """Return ``values`` if they are as many as the stream declares. Raises ``TopologyError``
        otherwise, and as ``fields`` does."""
        fields = self.fields(stream, task)
        row = tuple(values)  # first: a sequence of the user's may raise, or hold more than it says
        if len(row) != len(fields):
            raise TopologyError(
                f"component {self.component_id!r} emitted {len(row)} values on stream {stream!r}, which declares "
                f"{len(fields)}: {', '.join(fields.names)}"
            )
        return row

    def batch(self, stream: str, values: Sequence[Any]) -> pa.RecordBatch:
        """Make a record batch of rows, in the declared types. ``values``: of the first row, then of
        the next, and so on. Raises ``TopologyError`` naming a field whose values do not fit."""
        fields = self._streams[stream]
        arrays = []
        for position, name in enumerate(fields):
            try:
                arrays.append(pa.array(values[position :: len(fields)], type=fields.type_of(name)))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
                declared = fields.type_of(name) or "one type"
                raise TopologyError(
                    f"component {self.component_id!r}, stream {stream!r}: field {name!r} does not take every value "
                    f"emitted as {declared}: {error}"
                ) from error
        return pa.RecordBatch.from_arrays(arrays, names=list(fields.names))

    def typed(self, batch: pa.RecordBatch, stream: str, task: int | None) -> pa.RecordBatch:
        """Return a batch that is emitted, each column cast to its declared type where they differ.
        The cast is safe: it never loses data silently. Raises ``TopologyError`` when it is no batch
        of the declared fields, and as ``fields`` does."""
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
                columns.append(column.cast(declared))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TopologyError(
                    f"component {self.component_id!r}, stream {stream!r}: field {name!r} is declared {declared}, and "
                    f"{column.type} does not fit: {error}"
                ) from error
        return pa.RecordBatch.from_arrays(columns, names=list(fields.names))


class TaskCollector:
    """The ``OutputCollector`` of one component in one task.

    The task that runs the component sets ``sink``. The sink is not pickled: a committer pickled
    between the phases keeps this object, and the commit task gives it a new sink.
    """

    def __init__(
        self, component_id: str, streams: Mapping[str, Fields], direct_streams: frozenset[str] = frozenset()
    ) -> None:
        self._component_id = component_id
        self._streams = Streams(component_id, streams, direct_streams)
        self._rows: dict[tuple[str, int | None], list[Any]] = {}  # the values, row by row
        self.sink: Sink | None = None
        self.subscribers: frozenset[str] = frozenset()
        self.emitted = 0
        self._take_default_stream()

    def subscribed(self, stream: str = DEFAULT_STREAM) -> bool:
        """Whether any bolt subscribes to the stream. Output without a subscriber need not be
        computed."""
        return stream in self.subscribers

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "sink": None, "emit": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take_default_stream()

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._emit(values, stream, None)

    def _take_default_stream(self) -> None:
        """Replace ``emit`` by a function that knows the default stream, where nearly all rows go:
        it looks nothing up, and costs a quarter. Rows are kept as values one after the other: what
        the caller gave is free at once, and is no work for garbage collection."""
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
        self._deliver(stream, typed, task)

    def flush(self) -> None:
        """Send the buffered rows."""
        for stream, task in list(self._rows):
            self._flush(stream, task)

    def _flush(self, stream: str, task: int | None) -> None:
        rows = self._rows.get((stream, task))
        if rows:
            batch = self._streams.batch(stream, rows)
            rows.clear()  # the same list goes on: `emit` knows it
            self._deliver(stream, batch, task)

    def _deliver(self, stream: str, batch: pa.RecordBatch, task: int | None) -> None:
        if self.sink is None:
            raise TopologyError(f"component {self._component_id!r} emitted outside prepare, execute and finish_batch")
        if batch.num_rows:
            self.emitted += batch.num_rows
            self.sink(stream, batch, task)
