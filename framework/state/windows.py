"""Windows: tuples collected by count, by event time, or by processing time. They are kept in the
bolt's state, so they survive the bolt's process.

A windowed bolt acks a tuple immediately, because the state holds the tuple. The state has these
entries; their keys begin with the window key, or with ``()`` for the task::

    (key, "n")            count windows: tuples so far
    (key, "t", number)    a tuple, by its number; in time windows, by (pane, number)
    (key, "p", pane)      time windows: number of tuples in a pane
    (key, "f", start)     time windows with lateness: how often a window has fired
    ((), "m", source, tasks, task)  the latest event time seen on each input of a task
    ((), "r", tasks, task)  the watermark of a task: windows due by then have fired
    ((), "o", tasks, task)  windows that end by then were over before the lateness was raised
    ((), "c")             processing time: when windows of this task last fired
    ((), "d")             the kind of these windows, as far as it affects these entries
    ((), "l")             the lateness of these windows

When the number of tasks changes, all entries of a window key move with the key, and every new task
gets the watermarks of all old tasks. A watermark applies only to the keys that its task had: a key
continues from the watermark of the task that it comes from, even when the state has no entries for
the key (C39). So no window fires twice. An input's latest time in a new task is that of the old
task that was furthest behind. A new task deletes the old watermarks once its own exceeds them all.
Processing time is common to all tasks: every task continues from the latest. Every task keeps the
kind of its windows.

Earlier versions had "m", "r" and "o" without the task's place, and an "o" and a watermark ("w")
with each key that has entries.

Invariant of processing time: a tuple's time is never before windows that have fired, nor before any
tuple that is still kept. This holds whatever the host's clock does, over restarts and in other
tasks. So no window fires twice.

Invariant of lateness: a window that is over stays over when the lateness is raised. Its tuples are
deleted, so it could only fire again with the late tuples alone.

Entries of the task never expire, whatever ``state_ttl_s`` is.
"""

from __future__ import annotations

import decimal
import heapq
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from framework.durations import MICROS, seconds_to_micros
from framework.errors import ConfigError, CorruptStateError, TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.timestamps import time_of
from framework.operators.watermarks import LATE_STREAM, NEVER, Reading, Source, Watermark
from framework.shapes import fits
from framework.state.damage import RESTORE, shown
from framework.state.time_windows import TimeWindow
from framework.topology.bolts import DEFAULT_STREAM, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import form_of, key_form
from framework.topology.context import TopologyContext
from framework.topology.fields import Fields
from framework.topology.groupings import FieldsGrouping
from framework.topology.stateful import EVERY_TASK, BaseStatefulBolt, KeyValueState
from framework.topology.tuples import Tuple

_CLOCK = ((), "c")
_KIND = ((), "d")
_LATENESS = ((), "l")
#: The entries of a task, under the key ``()``.
_OF_THE_TASK = frozenset("mrcdlo")
#: The entries that end with a task's place, and the lengths of their keys.
_PLACED = {"m": 5, "r": 4, "o": 4}
_NEVER = NEVER


@dataclass(frozen=True, slots=True)
class Window:
    """A window that is due.

    * ``key``: the values of the key fields.
    * ``start``, ``end``: seconds since 1970, half-open; for count windows, the numbers of the
      tuples.
    * ``tuples``: in the order of arrival.
    * ``firing``: 0 the first time, one more each time that the window fires again.
    * ``watermark``: in seconds; the current time for processing time; None for count windows."""

    key: tuple[Any, ...]
    _: KW_ONLY
    start: float
    end: float
    tuples: Sequence[Tuple]
    firing: int = 0
    watermark: float | None = None


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
        before: Sequence[Any] = state.get(_KIND) or kind
        if before != kind and any(key[1] == "t" for key, _ in _entries(state)):
            raise ConfigError(
                f"windowed bolt {self._component_id!r} holds tuples that were gathered in {_shown(before)}, and is to have "
                f"{_shown(kind)}: let it have those windows again, give it another name, or forget the state"
            )
        state.put(_KIND, kind)
        self._gathering: _ByCount | _ByTime
        if isinstance(self.windows, CountWindow):
            self._gathering = _ByCount(self.windows, state)
            return
        task = _Task(self._place, self._task_of, self._form_of_kept)
        if self.windows.timestamp is not None:
            self._gathering = _ByTime(
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
            self._gathering = _ByClock(self.windows, state, task, self.now, expires=bool(self.state_ttl_s))

    @property
    def follows_sources(self) -> bool:
        return isinstance(self.windows, TimeWindow) and self.windows.timestamp is not None

    def hear_reading(self, reading: Reading) -> None:
        if isinstance(self._gathering, _ByTime):
            self._gathering.hear(reading)

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        return self._gathering.take_seen() if isinstance(self._gathering, _ByTime) else {}

    def pre_prepare(self, txid: int) -> None:
        if isinstance(self._gathering, _ByTime):
            self._gathering.save()

    def tick_in_s(self) -> float | None:
        return self._gathering.due_in_s() if isinstance(self._gathering, _ByTime) else None

    def execute(self, tup: Tuple) -> None:
        if tup.is_tick:
            if isinstance(self._gathering, _ByTime):
                for window in self._gathering.due():
                    self.execute_window(window, WindowCollector(self._collector, tup))
            return
        self.serves_several = False
        key = self._form(tuple([tup[name] for name in self.key_fields]))
        late, due = self._gathering.add(key, tup, self.origin)
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
        return not (isinstance(key, tuple) and key[:1] == ((),) and key[1] in _OF_THE_TASK)

    def grouping_key(self, key: Any) -> Sequence[Any] | None:
        values = key[0] if isinstance(key, tuple) and key else None
        if not isinstance(values, tuple):
            return None  # not a window key
        if self.key_fields and (key in (_CLOCK, _KIND, _LATENESS) or _place_in(key) is not None):
            return EVERY_TASK
        if values == ():
            return None if self.key_fields else ()  # belongs to the task as a whole
        return [values[place] for place in self._grouped]


def _entries(state: KeyValueState[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of a windowed bolt's state. Raises ``CorruptStateError`` for an entry that no
    window has put."""
    for key, value in state.items():
        if not _is_entry(key, value):
            raise _damaged(key, value)
        yield key, value


def _is_entry(key: Any, value: Any) -> bool:
    if not (isinstance(key, tuple) and len(key) > 1 and isinstance(key[0], tuple)):
        return False
    what, more = key[1], key[2:]
    if what == "t":
        place: Any = more[0] if len(more) == 1 else None
        return _is_kept(value) and (fits(place, int) or (fits(place, tuple[int, ...]) and len(place) == 2))
    if what in ("p", "f", "r", "o", "m", "w"):
        numbers = more[1:] if what == "m" else more
        return fits(value, float) and all(fits(each, int) for each in numbers) and (what not in "pfm" or len(more) > 0)
    return True


def _is_kept(value: Any) -> bool:
    """Whether this is a tuple in the form that ``_kept`` makes."""
    if not (isinstance(value, list) and len(value) == 5):
        return False
    component, stream, names, values, arrival = value
    return (
        isinstance(component, str)
        and isinstance(stream, str)
        and fits(names, list[str])
        and isinstance(values, list)
        and len(names) == len(values)
        and fits(arrival, int)
    )


def _damaged(key: Any, value: Any) -> CorruptStateError:
    return CorruptStateError(
        f"a state of windows holds {shown(value)} under the key {shown(key)}, which no window has put: {RESTORE}"
    )


def _place_in(key: Any) -> tuple[int, int] | None:
    """The number of tasks, and the task, that an entry of a task names."""
    return key[-2:] if len(key) > 3 and key[0] == () and _PLACED.get(key[1]) == len(key) else None


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


def _kept(tup: Tuple, arrival: int) -> list[Any]:
    """The stored form of a tuple. ``arrival``: rises from tuple to tuple of a key."""
    return [tup.source_component, tup.source_stream, list(tup.fields.names), list(tup.values), arrival]


def _tuples(kept: Iterable[Any]) -> list[Tuple]:
    kept = list(filter(None, kept))
    for each in kept:
        if not _is_kept(each):
            raise _damaged("of a tuple", each)
    found: dict[tuple[str, ...], Fields] = {}
    return [
        Tuple(None, found.setdefault(tuple(names), Fields(*names)), tuple(values), component, stream)
        for component, stream, names, values, _ in sorted(kept, key=itemgetter(4))
    ]


class _ByCount:
    """Windows by count."""

    def __init__(self, windows: CountWindow, state: KeyValueState[Any, Any]) -> None:
        self._windows, self._state = windows, state

    def add(self, key: tuple[Any, ...], tup: Tuple, origin: int | None = None) -> tuple[bool, list[Window]]:
        """Returns whether the tuple is late, and the windows that it makes due."""
        count = (self._state.get((key, "n")) or 0) + 1
        self._state.put((key, "n"), count)
        self._state.put((key, "t", count - 1), _kept(tup, count))
        if not self._windows.due(count):
            return False, []
        start = self._windows.start(count)
        kept = self._state.multi_get([(key, "t", number) for number in range(start, count)])
        for number in self._windows.gone(count):
            self._state.delete((key, "t", number))
        return False, [Window(key, start=start, end=count, tuples=_tuples(kept))]


@dataclass(frozen=True, slots=True)
class _Task:
    """The task that windows live in. ``place``: the number of tasks, and the number of this one.
    ``of_key``: the task of a window key, among this many. ``form``: converts a window key of the
    state to its canonical form."""

    place: tuple[int, int]
    of_key: Callable[[tuple[Any, ...], int], int]
    form: Callable[[tuple[Any, ...]], tuple[Any, ...]]


class _Before:
    """The watermarks of keys in the tasks that had them before. ``entries``: of the state.
    ``most``: the latest watermark."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        self._of_tasks: dict[int, dict[int, int]] = {}  # number of tasks -> task -> watermark
        self._of_keys: dict[tuple[Any, ...], int] = {}
        self.entries: dict[Any, int] = {}
        self.most = _NEVER

    def put(self, entry: Any, reached: int) -> None:
        self.entries[entry] = reached
        self.most = max(self.most, reached)
        if (place := _place_in(entry)) is None:
            self._of_keys[entry[0]] = reached
        else:
            self._of_tasks.setdefault(place[0], {})[place[1]] = reached

    def of(self, key: tuple[Any, ...]) -> int:
        if not self.entries:
            return _NEVER
        found = self._of_keys.get(key, _NEVER)
        for tasks, known in self._of_tasks.items():
            found = max(found, known.get(self._task.of_key(key, tasks), _NEVER))
        return found


class _ByTime:
    """Event-time windows. ``elapsed``: in seconds, monotonic. ``now``: in seconds since 1970, may
    go backwards. ``expires``: whether tuples expire in the state."""

    def __init__(
        self,
        windows: TimeWindow,
        state: KeyValueState[Any, Any],
        task: _Task,
        inputs: Sequence[tuple[str, str]],
        *,
        elapsed: Callable[[], float],
        now: Callable[[], float],
        follows: Mapping[Source, bool] = MappingProxyType({}),
        expires: bool = False,
    ) -> None:
        self._windows, self._state, self._task, self._elapsed, self._now = windows, state, task, elapsed, now
        self._assigner = windows.assigner
        place = task.place
        self._field = windows.timestamp or ""
        # watermark, kind of action, key, start
        self._due: list[tuple[int, str, _Ordered, int]] = []
        self._scheduled: set[tuple[str, tuple[Any, ...], int]] = set()
        self._reached_before, self._over_before = _Before(task), _Before(task)
        self._arrivals = 0
        self._newest = _NEVER  # the latest pane
        self._over = _NEVER  # windows of this task that end by then are over
        reached: int | None = None
        latest: dict[tuple[str, str], dict[tuple[int, int], int]] = {each: {} for each in inputs}
        panes, moved = [], []
        held: Counter[tuple[Any, int]] = Counter()  # number of tuples by key and pane
        for key, value in _entries(state):
            what, own = key[1], (_place_in(key) or place) == place and key[0] == ()
            if what == "p":
                panes.append((task.form(key[0]), key[2], value))
            elif what == "t":
                if type(key[2]) is int:
                    raise _damaged(key, value)  # as in count windows
                self._arrivals = max(self._arrivals, value[4])
                held[task.form(key[0]), key[2][0]] += 1
            elif what == "m":
                latest.get(key[2], {})[_place_in(key) or place] = value
            elif what == "r" and own:
                reached = value
            elif what == "o" and own:
                self._over = max(self._over, value)
            elif what in ("r", "w"):
                self._reached_before.put(key, value)
            elif what == "o":
                self._over_before.put(key, value)
            if what == "m" or (what in "ro" and own):
                moved.append(key)
        self._times = Watermark(
            {each: self._latest_of(known) for each, known in latest.items()},
            lag=windows.lag,
            idle=windows.idle,
            now=seconds_to_micros(elapsed()),
            follows=follows,
        )
        if reached is None and not self._reached_before.entries:
            # A new state, or one of the first versions, which stored no watermark.
            reached = self._times.reached(self._elapsed_now()) if inputs else _NEVER
        # With other inputs, or another lag, than before, more windows may be due. They have not
        # fired yet, so continue from the recorded watermark.
        self._watermark = _NEVER if reached is None else reached
        self._settle_in(moved)
        if self._field:
            self._raise_lateness()
            self._forget_before()
        for key, pane, count in panes:
            if count > held[key, pane] and not expires:
                raise _damaged((key, "p", pane), count)
            self._schedule(key, pane)

    def _latest_of(self, known: Mapping[tuple[int, int], int]) -> int:
        """The latest time of an input in this task: its own, or that of the old task that was
        furthest behind when the number of tasks has changed. If inputs may be idle, old tasks
        without any tuple of this input do not count."""
        place = self._task.place
        if place in known or not known:
            return known.get(place, _NEVER)
        tasks = max(known)[0]
        whole = self._windows.idle is not None or all((tasks, each) in known for each in range(tasks))
        return min(known.values()) if whole else _NEVER

    def _settle_in(self, moved: Iterable[Any]) -> None:
        """Put this task's entries under its own place, and delete entries of other places."""
        wanted = {self._own("m", source): at for source, at in self._times.latest().items() if at > _NEVER}
        wanted |= {self._own(what): at for what, at in (("r", self._watermark), ("o", self._over)) if at > _NEVER}
        for entry in moved:
            if entry not in wanted:
                self._state.delete(entry)
        for entry, at in wanted.items():
            self._state.put(entry, at)
        self._saved = {source: at for source, at in self._times.latest().items() if at > _NEVER}

    def _own(self, what: str, *more: Any) -> tuple[Any, ...]:
        return ((), what, *more, *self._task.place)

    def _raise_lateness(self) -> None:
        """When the lateness is raised, note which windows are already over."""
        lateness = self._windows.lateness
        before = self._state.get(_LATENESS)
        if before is not None and before < lateness:
            if self._watermark > _NEVER:
                self._over = max(self._watermark - before, self._over)
                self._state.put(self._own("o"), self._over)
            for (values, _, *place), reached in self._reached_before.entries.items():
                entry = (values, "o", *place)
                self._over_before.put(entry, max(reached - before, self._over_before.entries.get(entry, _NEVER)))
                self._state.put(entry, self._over_before.entries[entry])
        self._state.put(_LATENESS, lateness)

    def _forget_before(self) -> None:
        """Delete the watermarks of other tasks once this task's own exceeds them all."""
        entries = [*self._reached_before.entries, *self._over_before.entries]
        most = max(self._reached_before.most, self._over_before.most)
        if entries and most <= self._watermark - self._windows.lateness:
            for each in entries:
                self._state.delete(each)
            self._reached_before, self._over_before = _Before(self._task), _Before(self._task)

    def add(self, key: tuple[Any, ...], tup: Tuple, origin: int | None = None) -> tuple[bool, list[Window]]:
        """Returns whether the tuple is late, and the windows that it makes due. ``origin``: stands
        for the tuple's source partition."""
        at = time_of(tup[self._field], self._field)
        if self._windows.is_ahead(at, seconds_to_micros(self._now())):
            return True, []
        late, again = self._take_in(key, tup, at)
        source, now = (tup.source_component, tup.source_stream), self._elapsed_now()
        if self._times.saw(source, origin, at, now):
            if (latest := self._times.latest_of(source)) > self._saved.get(source, _NEVER):
                self._save(source, latest)
            self._move_on(now)
        return late, again + self._advance()

    def hear(self, reading: Reading) -> None:
        """Take in the progress of the sources, before the rows of a round arrive."""
        self._times.hear(reading, self._elapsed_now())

    def take_seen(self) -> Mapping[Source, Mapping[int | None, int]]:
        """The newest times seen since the last call, by input and origin."""
        return self._times.take_seen()

    def save(self) -> None:
        """Put the entries that a checkpoint must hold: all tuples that have arrived are part
        of it."""
        for source, newest in self._times.newest().items():
            if newest > self._saved.get(source, _NEVER):
                self._save(source, newest)

    def due_in_s(self) -> float | None:
        """Seconds until a window may become due without further input; None when no tuples are
        kept."""
        if not self._due:
            return None
        found = self._times.due_in(self._due[0][0], self._elapsed_now())
        return None if found is None else found / MICROS

    def due(self) -> list[Window]:
        """The windows that are due without further input."""
        self._watermark = max(self._watermark, self._times.reached(self._elapsed_now()))
        if self._due and self._due[0][0] <= self._watermark:
            self._note_reached()
        return self._advance()

    def _elapsed_now(self) -> int:
        return seconds_to_micros(self._elapsed())

    def _save(self, source: Source, latest: int) -> None:
        self._saved[source] = latest
        self._state.put(self._own("m", source), latest)

    def _move_on(self, now: int) -> None:
        reached = self._times.reached(now)
        if reached > self._watermark:
            self._watermark = reached
            self._note_reached()

    def _note_reached(self) -> None:
        self._state.put(self._own("r"), self._watermark)
        self._forget_before()

    def _take_in(self, key: tuple[Any, ...], tup: Tuple, at: int) -> tuple[bool, list[Window]]:
        """Keep a tuple, unless it is late. Returns whether it is late, and the windows that fire
        again because of it."""
        pane = self._assigner.pane_of(at)
        watermark = self._watermark_of(key)
        over = max(watermark - self._windows.lateness, self._over_of(key))
        late = self._assigner.end_of(pane) <= over
        again: list[Window] = []
        if not late:
            number = self._state.get((key, "p", pane)) or 0
            self._state.put((key, "p", pane), number + 1)
            self._arrivals += 1
            self._state.put((key, "t", (pane, number)), _kept(tup, self._arrivals))
            self._schedule(key, pane)
            again = [
                self._window(key, start)
                for start in self._assigner.windows_of(pane)
                if over < self._assigner.end_of(start) <= watermark
            ]
        return late, again

    def _watermark_of(self, key: tuple[Any, ...]) -> int:
        """The watermark of a key: this task's, or that of the task from which the key came,
        whichever is later."""
        return max(self._watermark, self._reached_before.of(key))

    def _over_of(self, key: tuple[Any, ...]) -> int:
        """Windows of a key that end by then were over when the lateness was raised."""
        return max(self._over, self._over_before.of(key))

    def _schedule(self, key: tuple[Any, ...], pane: int) -> None:
        self._newest = max(self._newest, pane)
        watermark = self._watermark_of(key)
        wanted = [(self._assigner.end_of(pane) + self._windows.lateness, "purge", key, pane)]
        for start in self._assigner.windows_of(pane):
            end = self._assigner.end_of(start)
            if end > watermark:
                wanted.append((end, "fire", key, start))
            if self._windows.lateness:
                wanted.append((end + self._windows.lateness, "forget", key, start))
        for each in wanted:
            if each[1:] not in self._scheduled:
                self._scheduled.add(each[1:])
                heapq.heappush(self._due, (each[0], each[1], _Ordered(key), each[3]))

    def _advance(self) -> list[Window]:
        """Fire windows and purge panes up to the watermark. Windows fire before their panes are
        purged."""
        fired = []
        reached = []
        while self._due and self._due[0][0] <= self._watermark:
            at, what, ordered, start = heapq.heappop(self._due)
            self._scheduled.discard((what, ordered.key, start))
            reached.append((at, what, ordered.key, start))
        for _, what, key, start in reached:
            if what == "fire":
                fired.append(self._window(key, start))
        for _, what, key, start in reached:
            if what == "purge":
                for number in range(self._state.get((key, "p", start)) or 0):
                    self._state.delete((key, "t", (start, number)))
                self._state.delete((key, "p", start))
            elif what == "forget":
                self._state.delete((key, "f", start))
        return fired

    def _window(self, key: tuple[Any, ...], start: int) -> Window:
        panes = list(self._assigner.panes_of(start))
        counts = self._state.multi_get([(key, "p", pane) for pane in panes])
        places = [
            (key, "t", (pane, number))
            for pane, count in zip(panes, counts, strict=True)
            for number in range(count or 0)
        ]
        firing = 0
        if self._windows.lateness:
            firing = self._state.get((key, "f", start)) or 0
            self._state.put((key, "f", start), firing + 1)
        return Window(
            key,
            start=start / MICROS,
            end=self._assigner.end_of(start) / MICROS,
            tuples=_tuples(self._state.multi_get(places)),
            firing=firing,
            watermark=self._watermark_of(key) / MICROS,
        )


class _ByClock(_ByTime):
    """Processing-time windows: only ticks make them due. ``now``: in seconds; it may go
    backwards."""

    def __init__(
        self,
        windows: TimeWindow,
        state: KeyValueState[Any, Any],
        task: _Task,
        now: Callable[[], float],
        *,
        expires: bool = False,
    ) -> None:
        super().__init__(windows, state, task, (), elapsed=now, now=now, expires=expires)
        self._at = max(self._newest, state.get(_CLOCK) or _NEVER)

    def add(self, key: tuple[Any, ...], tup: Tuple, origin: int | None = None) -> tuple[bool, list[Window]]:
        self._take_in(key, tup, self._reached_now())
        return False, []

    def due_in_s(self) -> float | None:
        """Seconds until a window is due; None when no tuples are kept."""
        return (self._due[0][0] - self._reached_now()) / MICROS if self._due else None

    def due(self) -> list[Window]:
        """The windows whose end has passed."""
        self._watermark = self._reached_now()
        if self._due and self._due[0][0] <= self._watermark:
            self._state.put(_CLOCK, self._watermark)
            self._note_reached()
        return self._advance()

    def _reached_now(self) -> int:
        """Processing time in microseconds. It never goes backwards."""
        self._at = max(self._at, seconds_to_micros(self._now()))
        return self._at


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Makes any key sortable, for keys that do not compare."""

    key: tuple[Any, ...]

    def __lt__(self, other: _Ordered) -> bool:
        return repr(self.key) < repr(other.key)
