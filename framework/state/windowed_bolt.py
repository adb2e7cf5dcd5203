"""The bolt that collects tuples in windows. They are kept in the bolt's state, so they survive the
bolt's process: a windowed bolt acks a tuple immediately.
"""

from __future__ import annotations

import decimal
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError, TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.watermarks import LATE_STREAM, Reading, Source
from framework.state.time_window_settings import TimeWindow
from framework.state.window_buffers import CountBuffer, EventTimeBuffer, ProcessingTimeBuffer, WindowTask
from framework.state.window_entries import (
    CLOCK,
    KIND,
    LATENESS,
    OF_THE_TASK,
    Window,
    entries_of,
    place_in,
)
from framework.topology.bolts import DEFAULT_STREAM, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import form_of, key_form
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields
from framework.topology.groupings import FieldsGrouping
from framework.topology.stateful import EVERY_TASK, BaseStatefulBolt, KeyValueState
from framework.topology.tuples import Tuple


class BaseWindowedBolt(BaseStatefulBolt):
    """Collects tuples in windows.

    * ``windows``: a ``CountWindow`` or a ``TimeWindow``.
    * ``key``: fields; each combination of their values has windows of its own, and the input must
      be grouped by them. Without a key, each task has its own windows, and the number of tasks
      cannot change.
    * ``late``: fields of the input. A tuple that comes too late, or whose time is too far ahead, is
      emitted with these fields on the stream ``late``. Without ``late``, such tuples are dropped.
      Both kinds are counted (``late_tuples``).

    >>> class Totals(BaseWindowedBolt):
    ...     def __init__(self):
    ...         super().__init__(TimeWindow(60, "at", lag_s=5), key=["user"])
    ...     def execute_window(self, window, collector):
    ...         collector.emit([*window.key, window.start, sum(each["amount"] for each in window.tuples)])
    ...     def declare_output_fields(self, declarer):
    ...         super().declare_output_fields(declarer)
    ...         declarer.declare(Fields(user=str, start=float, total=int))

    Source: ``org.apache.storm.topology.base.BaseWindowedBolt`` and ``BaseStatefulWindowedBolt``.
    """  # noqa: W505 - doctest lines are not wrapped

    gathers = True

    def __init__(
        self, windows: CountWindow | TimeWindow, *, key: Sequence[str] = (), late: Fields | None = None
    ) -> None:
        if isinstance(windows, CountWindow) and late is not None:
            raise ConfigError("windows by count know no late tuples: late= is for a TimeWindow")
        if isinstance(windows, TimeWindow) and windows.timestamp is None and late is not None:
            raise ConfigError("no tuple is late by processing time: late= is for a TimeWindow with a timestamp")
        self.windows = windows
        self.key_fields = tuple(key)
        self.late = late
        self._inputs: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def execute_window(self, window: Window, collector: WindowCollector) -> None:
        """Called for each window that is due. Rows that it emits are anchored to the tuple or tick
        that made the window due."""

    def now(self) -> float:
        """Processing time, in seconds since 1970; by default the host's clock. It may go backwards;
        windows do not. Event-time windows use it only to detect times that are too far ahead."""
        return time.time()

    def elapsed(self) -> float:
        """A monotonic time in seconds, for ``idle_s``; by default a clock of the host that cannot
        be set. It never goes backwards."""
        return time.monotonic()

    def open(self, conf: Mapping[str, Any], context: TopologyContext) -> None:
        """Called once, before any other method: connect here."""

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self.late is not None:
            declarer.declare(self.late, LATE_STREAM)

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        super().bind(component_id, inputs, parallelism)
        needed = [*self.key_fields, *(self.late.names if self.late is not None else ())]
        if isinstance(self.windows, TimeWindow) and self.windows.timestamp is not None:
            needed.append(self.windows.timestamp)
        for each in inputs:
            for name in needed:
                if name not in each.fields:
                    raise TopologyError(
                        f"windowed bolt {component_id!r} needs field {name!r}, which {each.component_id!r} does not emit (it "
                        f"emits: {', '.join(each.fields.names)})"
                    )
            if self.key_fields and parallelism > 1 and not self._keeps_together(each, inputs[0]):
                raise TopologyError(
                    f"windowed bolt {component_id!r} has windows per {', '.join(self.key_fields)}: group the stream of "
                    f"{each.component_id!r} by fields among them, and all streams by the same ones, so that each key is in one task"
                )
        self._component_id = component_id
        self._key_types = [{each.fields.type_of(name) for each in inputs} for name in self.key_fields]
        self._inputs = tuple((each.component_id, each.stream) for each in inputs)
        self._grouped = tuple(
            self.key_fields.index(name)
            for each in inputs[:1]
            for name in (each.grouping.key_fields() or ())
            if name in self.key_fields
        )

    def _keeps_together(self, one: Input, first: Input) -> bool:
        """Whether tuples of one key go to the same task, whichever of the two streams they come
        from."""
        fields = one.grouping.key_fields() if isinstance(one.grouping, FieldsGrouping) else None
        return (
            fields is not None
            and set(fields.names) <= set(self.key_fields)
            and fields.names == (first.grouping.key_fields() or fields).names
        )

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: Any
    ) -> None:
        self._collector = collector
        self._place = context.task_count, context.task_index
        self._key_forms = [_key_form_of(types) for types in self._key_types]
        self.open(conf, context)

    def init_state(self, state: KeyValueState[Any, Any]) -> None:
        self._state = state
        kind = self.windows.kind()
        before: Sequence[Any] = state.get(KIND) or kind
        if before != kind and any(key[1] == "t" for key, _ in entries_of(state)):
            raise ConfigError(
                f"windowed bolt {self._component_id!r} holds tuples that were gathered in {_shown(before)}, and is to have "
                f"{_shown(kind)}: let it have those windows again, give it another name, or forget the state"
            )
        state.put(KIND, kind)
        self._buffer: CountBuffer | EventTimeBuffer
        if isinstance(self.windows, CountWindow):
            self._buffer = CountBuffer(self.windows, state)
            return
        task = WindowTask(self._place, self._task_of, self._form_of_kept)
        if self.windows.timestamp is not None:
            self._buffer = EventTimeBuffer(
                self.windows,
                state,
                task,
                self._inputs,
                elapsed=self.elapsed,
                now=self.now,
                follows=self.follows,
                expires=bool(self.state_ttl_s),
            )
        else:
            self._buffer = ProcessingTimeBuffer(self.windows, state, task, self.now, expires=bool(self.state_ttl_s))

    @property
    def follows_sources(self) -> bool:
        return isinstance(self.windows, TimeWindow) and self.windows.timestamp is not None

    def hear_reading(self, reading: Reading) -> None:
        if isinstance(self._buffer, EventTimeBuffer):
            self._buffer.hear(reading)

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        return self._buffer.take_seen() if isinstance(self._buffer, EventTimeBuffer) else {}

    def pre_prepare(self, txid: int) -> None:
        if isinstance(self._buffer, EventTimeBuffer):
            self._buffer.save()

    def tick_in_s(self) -> float | None:
        return self._buffer.due_in_s() if isinstance(self._buffer, EventTimeBuffer) else None

    def execute(self, tup: Tuple) -> None:
        if tup.is_tick:
            if isinstance(self._buffer, EventTimeBuffer):
                for window in self._buffer.due():
                    self.execute_window(window, WindowCollector(self._collector, tup))
            return
        self.serves_several = False
        key = self._form(tuple([tup[name] for name in self.key_fields]))
        late, due = self._buffer.add(key, tup, self.origin)
        collector = WindowCollector(self._collector, tup)
        self.late_tuples += late
        if late and self.late is not None:
            self._collector.emit([tup[name] for name in self.late], anchors=tup, stream=LATE_STREAM)
        self.serves_several = bool(due)
        for window in due:
            self.execute_window(window, collector)
        self._collector.ack(tup)

    def _task_of(self, key: tuple[Any, ...], tasks: int) -> int:
        """The task of a window key among this many tasks."""
        return FieldsGrouping.task_of([key[place] for place in self._grouped], tasks) if tasks > 1 else 0

    def _form(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """The canonical form of a window key (C29)."""
        return tuple([form(value) for form, value in zip(self._key_forms, key, strict=True)])

    def _form_of_kept(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """As ``_form``, for a key of the state, which may have been made of other fields."""
        try:
            return self._form(key)
        except (ValueError, TypeError, ArithmeticError):
            return key

    def expires(self, key: Any) -> bool:
        return not (isinstance(key, tuple) and key[:1] == ((),) and key[1] in OF_THE_TASK)

    def grouping_key(self, key: Any) -> Sequence[Any] | None:
        values = key[0] if isinstance(key, tuple) and key else None
        if not isinstance(values, tuple):
            return None  # not a window key
        if self.key_fields and (key in (CLOCK, KIND, LATENESS) or place_in(key) is not None):
            return EVERY_TASK
        if values == ():
            return None if self.key_fields else ()  # belongs to the task as a whole
        return [values[place] for place in self._grouped]


def _key_form_of(types: Collection[pa.DataType | None]) -> Callable[[Any], Any]:
    """Returns a function that converts values of a key field to one form: that of its type, if all
    inputs declare the same type. A state returns decimals as floats where these are exact."""
    only = next(iter(types)) if len(types) == 1 else None
    if only is None:
        return key_form
    form, is_decimal = form_of(only), pa.types.is_decimal(only)

    def formed(value: Any) -> Any:
        if value is None:
            return None
        return form(decimal.Decimal(value) if is_decimal and isinstance(value, float) else value)

    return formed


def _shown(kind: Sequence[Any]) -> str:
    return f"windows by {kind[0]} (length {kind[1]:g}, step {kind[2]:g})"


class WindowCollector:
    """Emits the results of a window."""

    def __init__(self, collector: Any, tup: Tuple) -> None:
        self._collector = collector
        self._tup = tup

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        self._collector.emit(values, anchors=self._tup, stream=stream)

    def report_error(self, error: BaseException) -> None:
        self._collector.report_error(error)
