"""Collects tuples until their windows are due: by count, by event time, or by processing time.

Invariant of processing time: a tuple's time is never before windows that have fired, nor before any
tuple that is still kept. This holds whatever the host's clock does, over restarts and in other
tasks. So no window fires twice.

Invariant of lateness: a window that is over stays over when the lateness is raised. Its tuples are
deleted, so it could only fire again with the late tuples alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from framework.durations import MICROS, seconds_to_micros
from framework.operators.count_windows import CountWindow
from framework.operators.timestamps import time_of
from framework.operators.watermarks import NEVER, Reading, Source, Watermark
from framework.state.time_window_settings import TimeWindow
from framework.state.window_entries import (
    CLOCK,
    LATENESS,
    Window,
    damaged,
    entries_of,
    kept_form,
    place_in,
    tuples_of,
)
from framework.topology.stateful import KeyValueState
from framework.topology.tuples import Tuple


class CountBuffer:
    """Windows by count."""

    def __init__(self, windows: CountWindow, state: KeyValueState[Any, Any]) -> None:
        self._windows, self._state = windows, state

    def add(self, key: tuple[Any, ...], tup: Tuple, origin: int | None = None) -> tuple[bool, list[Window]]:
        """Returns whether the tuple is late, and the windows that it makes due."""
        count = (self._state.get((key, "n")) or 0) + 1
        self._state.put((key, "n"), count)
        self._state.put((key, "t", count - 1), kept_form(tup, count))
        if not self._windows.due(count):
            return False, []
        start = self._windows.start(count)
        kept = self._state.multi_get([(key, "t", number) for number in range(start, count)])
        for number in self._windows.gone(count):
            self._state.delete((key, "t", number))
        return False, [Window(key, start=start, end=count, tuples=tuples_of(kept))]


@dataclass(frozen=True, slots=True)
class WindowTask:
    """The task that windows live in. ``place``: the number of tasks, and the number of this one.
    ``of_key``: the task of a window key, among this many. ``form``: converts a window key of the
    state to its canonical form."""

    place: tuple[int, int]
    of_key: Callable[[tuple[Any, ...], int], int]
    form: Callable[[tuple[Any, ...]], tuple[Any, ...]]


class FormerWatermarks:
    """The watermarks of keys in the tasks that had them before. ``entries``: of the state.
    ``most``: the latest watermark."""

    def __init__(self, task: WindowTask) -> None:
        self._task = task
        self._of_tasks: dict[int, dict[int, int]] = {}  # number of tasks -> task -> watermark
        self._of_keys: dict[tuple[Any, ...], int] = {}
        self.entries: dict[Any, int] = {}
        self.most = NEVER

    def put(self, entry: Any, reached: int) -> None:
        self.entries[entry] = reached
        self.most = max(self.most, reached)
        if (place := place_in(entry)) is None:
            self._of_keys[entry[0]] = reached
        else:
            self._of_tasks.setdefault(place[0], {})[place[1]] = reached

    def of(self, key: tuple[Any, ...]) -> int:
        if not self.entries:
            return NEVER
        found = self._of_keys.get(key, NEVER)
        for tasks, known in self._of_tasks.items():
            found = max(found, known.get(self._task.of_key(key, tasks), NEVER))
        return found


class EventTimeBuffer:
    """Event-time windows. ``elapsed``: in seconds, monotonic. ``now``: in seconds since 1970, may
    go backwards. ``expires``: whether tuples expire in the state."""

    def __init__(
        self,
        windows: TimeWindow,
        state: KeyValueState[Any, Any],
        task: WindowTask,
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
        self._reached_before, self._over_before = FormerWatermarks(task), FormerWatermarks(task)
        self._arrivals = 0
        self._newest = NEVER  # the latest pane
        self._over = NEVER  # windows of this task that end by then are over
        reached: int | None = None
        latest: dict[tuple[str, str], dict[tuple[int, int], int]] = {each: {} for each in inputs}
        panes, moved = [], []
        held: Counter[tuple[Any, int]] = Counter()  # number of tuples by key and pane
        for key, value in entries_of(state):
            what, own = key[1], (place_in(key) or place) == place and key[0] == ()
            if what == "p":
                panes.append((task.form(key[0]), key[2], value))
            elif what == "t":
                if type(key[2]) is int:
                    raise damaged(key, value)  # as in count windows
                self._arrivals = max(self._arrivals, value[4])
                held[task.form(key[0]), key[2][0]] += 1
            elif what == "m":
                latest.get(key[2], {})[place_in(key) or place] = value
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
            reached = self._times.reached(self._elapsed_now()) if inputs else NEVER
        # With other inputs, or another lag, than before, more windows may be due. They have not
        # fired yet, so continue from the recorded watermark.
        self._watermark = NEVER if reached is None else reached
        self._settle_in(moved)
        if self._field:
            self._raise_lateness()
            self._forget_before()
        for key, pane, count in panes:
            if count > held[key, pane] and not expires:
                raise damaged((key, "p", pane), count)
            self._schedule(key, pane)

    def _latest_of(self, known: Mapping[tuple[int, int], int]) -> int:
        """The latest time of an input in this task: its own, or that of the old task that was
        furthest behind when the number of tasks has changed. If inputs may be idle, old tasks
        without any tuple of this input do not count."""
        place = self._task.place
        if place in known or not known:
            return known.get(place, NEVER)
        tasks = max(known)[0]
        whole = self._windows.idle is not None or all((tasks, each) in known for each in range(tasks))
        return min(known.values()) if whole else NEVER

    def _settle_in(self, moved: Iterable[Any]) -> None:
        """Put this task's entries under its own place, and delete entries of other places."""
        wanted = {self._own("m", source): at for source, at in self._times.latest().items() if at > NEVER}
        wanted |= {self._own(what): at for what, at in (("r", self._watermark), ("o", self._over)) if at > NEVER}
        for entry in moved:
            if entry not in wanted:
                self._state.delete(entry)
        for entry, at in wanted.items():
            self._state.put(entry, at)
        self._saved = {source: at for source, at in self._times.latest().items() if at > NEVER}

    def _own(self, what: str, *more: Any) -> tuple[Any, ...]:
        return ((), what, *more, *self._task.place)

    def _raise_lateness(self) -> None:
        """When the lateness is raised, note which windows are already over."""
        lateness = self._windows.lateness
        before = self._state.get(LATENESS)
        if before is not None and before < lateness:
            if self._watermark > NEVER:
                self._over = max(self._watermark - before, self._over)
                self._state.put(self._own("o"), self._over)
            for (values, _, *place), reached in self._reached_before.entries.items():
                entry = (values, "o", *place)
                self._over_before.put(entry, max(reached - before, self._over_before.entries.get(entry, NEVER)))
                self._state.put(entry, self._over_before.entries[entry])
        self._state.put(LATENESS, lateness)

    def _forget_before(self) -> None:
        """Delete the watermarks of other tasks once this task's own exceeds them all."""
        entries = [*self._reached_before.entries, *self._over_before.entries]
        most = max(self._reached_before.most, self._over_before.most)
        if entries and most <= self._watermark - self._windows.lateness:
            for each in entries:
                self._state.delete(each)
            self._reached_before, self._over_before = FormerWatermarks(self._task), FormerWatermarks(self._task)

    def add(self, key: tuple[Any, ...], tup: Tuple, origin: int | None = None) -> tuple[bool, list[Window]]:
        """Returns whether the tuple is late, and the windows that it makes due. ``origin``: stands
        for the tuple's source partition."""
        at = time_of(tup[self._field], self._field)
        if self._windows.is_ahead(at, seconds_to_micros(self._now())):
            return True, []
        late, again = self._take_in(key, tup, at)
        source, now = (tup.source_component, tup.source_stream), self._elapsed_now()
        if self._times.saw(source, origin, at, now):
            if (latest := self._times.latest_of(source)) > self._saved.get(source, NEVER):
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
            if newest > self._saved.get(source, NEVER):
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
            self._state.put((key, "t", (pane, number)), kept_form(tup, self._arrivals))
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
            tuples=tuples_of(self._state.multi_get(places)),
            firing=firing,
            watermark=self._watermark_of(key) / MICROS,
        )


class ProcessingTimeBuffer(EventTimeBuffer):
    """Processing-time windows: only ticks make them due. ``now``: in seconds; it may go
    backwards."""

    def __init__(
        self,
        windows: TimeWindow,
        state: KeyValueState[Any, Any],
        task: WindowTask,
        now: Callable[[], float],
        *,
        expires: bool = False,
    ) -> None:
        super().__init__(windows, state, task, (), elapsed=now, now=now, expires=expires)
        self._at = max(self._newest, state.get(CLOCK) or NEVER)

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
            self._state.put(CLOCK, self._watermark)
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
