"""The buffer of a join: rows of an opaque state with the records that may still find a partner."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from framework.operators.interval_join_buckets import bucket_end, bucket_of, buckets_around
from framework.operators.watermarks import NEVER
from framework.topology import Fields
from framework.value_size import size_of
from sinks.backend import Key, Value
from sinks.states import MapState
from sinks.value_encoding import JsonColumns, whole_number

#: The most records per row. Adding a record, or its first partner, rewrites the row.
ROW_RECORDS = 32
#: A row with about this many bytes gets no further record: no store takes rows of any size.
ROW_BYTES = 256 << 10
DUE = "due_at"
#: The columns that identify a row of a key: the side (0 is the left one), the time range, and a
#: number. Row 0 contains the number of the last row of its bucket.
PARTS = ("join_side", "join_bucket", "join_row")
VALUE_FIELDS = Fields(due_at=int, last_row=int, waiting=str)

Sides = tuple[list["Waiting"], list["Waiting"]]


@dataclass(slots=True)
class Waiting:
    """A record that may still find partners. ``row``: its row in the state, if it was there before
    the transaction."""

    at: int
    values: Value
    matched: bool = False
    row: Key | None = None


@dataclass(slots=True)
class _Row:
    records: list[Waiting] = field(default_factory=list)
    last: int = 0
    due_at: int = 0
    is_held: bool = False
    size: int | None = None  # about its bytes, once a record is added

    @property
    def is_full(self) -> bool:
        if self.size is None:
            self.size = sum(size_of(each.values) for each in self.records)
        return len(self.records) >= ROW_RECORDS or self.size >= ROW_BYTES

    def add(self, each: Waiting) -> None:
        self.records.append(each)
        self.size = (self.size or 0) + size_of(each.values)


def key_fields(key: Fields) -> Fields:
    types = {name: key.type_of(name) for name in key}
    return Fields.of({**types, **dict.fromkeys(PARTS, pa.int64())})


class WaitingRows:
    """The waiting records that one transaction reads and changes. ``outer``: for each side, whether
    a record without a partner is sent. The cost of a transaction is proportional to its records, to
    their possible partners, and to the due records."""

    def __init__(
        self, state: MapState, codecs: Sequence[JsonColumns], within: int, outer: Sequence[bool], watermark: int
    ) -> None:
        self._state, self._codecs, self._within, self._outer = state, codecs, within, outer
        self._watermark = watermark
        self._rows: dict[Key, _Row] = {}
        self._of: dict[tuple[Key, int], list[Key]] = defaultdict(list)
        self._changed: dict[Key, None] = {}

    def read(self, new: Mapping[Key, Sides]) -> None:
        """Read the possible partners of new records, and the rows to which these will be added."""
        whole: set[Key] = set()
        own: set[Key] = set()
        for key, sides in new.items():
            for side, records in enumerate(sides):
                for each in records:
                    own.add((*key, side, bucket_of(each.at, self._within), 0))
                    whole.update((*key, 1 - side, bucket, 0) for bucket in buckets_around(each.at, self._within))
        self._load(sorted(whole | own, key=repr))
        more = [(*first[:-1], number) for first in whole for number in range(1, self._rows[first].last + 1)]
        more += [(*first[:-1], last) for first in own - whole if (last := self._rows[first].last)]
        self._load(sorted(more, key=repr))
        for key, row in self._rows.items():
            if row.is_held and row.due_at < self._watermark:
                self._changed[key] = None

    def of(self, key: Key, side: int) -> list[Waiting]:
        """The records of a key's side that were read."""
        return [each for row in self._of[key, side] for each in self._rows[row].records if each.row is not None]

    def match(self, side: int, each: Waiting) -> None:
        if self._outer[side] and not each.matched:
            each.matched = True
            if each.row is not None:
                self._changed[each.row] = None

    def add(self, key: Key, side: int, each: Waiting) -> None:
        """Keep a new record."""
        first = (*key, side, bucket_of(each.at, self._within), 0)
        head = self._rows[first]
        place = (*first[:-1], head.last)
        if self._rows[place].is_full:
            head.last += 1
            place = (*first[:-1], head.last)
            self._rows[place] = _Row()
            self._changed[first] = None
        self._rows[place].add(each)
        self._changed[place] = None

    def write(self, mine: Callable[[Sequence[Key]], Sequence[bool]]) -> Iterator[list[tuple[Key, int, Waiting]]]:
        """Write the changed rows, then page by page the other rows with due records, without their
        expired records. Returns the expired records of outer sides without a partner, with key and
        side. ``mine``: as in ``MapState.due``."""
        yield self._write({place: self._rows[place] for place in self._changed})
        # A record that waits until ``due_at`` can still find a partner with that time, so the
        # record expires afterwards.
        for page in self._state.due(DUE, NEVER, self._watermark - 1, mine):
            yield self._write({key: self._row(key, value) for key, value in page if key not in self._rows})
            self._state.write()

    def _write(self, rows: Mapping[Key, _Row]) -> list[tuple[Key, int, Waiting]]:
        puts: dict[Key, tuple[int, int, str]] = {}
        gone, alone = [], []
        for place, row in rows.items():
            side, width = place[-3], len(PARTS)
            kept = [each for each in row.records if not self.is_over(each)]
            if self._outer[side]:
                alone += [
                    (place[:-width], side, each) for each in row.records if not each.matched and self.is_over(each)
                ]
            due = self._due(side, kept)
            if not kept and place[-1] == 0 and row.last:
                due = bucket_end(place[-2], self._within) + self._within
            if due is not None and due >= self._watermark:
                puts[place] = due, row.last, self._text(side, kept)
            elif row.is_held:
                gone.append(place)
        self._state.multi_put(list(puts), list(puts.values()))
        self._state.delete(gone)
        return alone

    def is_over(self, each: Waiting) -> bool:
        return each.at + self._within < self._watermark

    def _due(self, side: int, kept: Iterable[Waiting]) -> int | None:
        """When a row is due next: its first record has to be sent alone, or its last one expires.
        None: it has no records."""
        alone = [each.at for each in kept if self._outer[side] and not each.matched]
        at = min(alone) if alone else max((each.at for each in kept), default=None)
        return at + self._within if at is not None else None

    def _load(self, keys: Sequence[Key]) -> None:
        missing = [key for key in keys if key not in self._rows]
        for key, value in zip(missing, self._state.multi_get(missing) if missing else (), strict=True):
            self._take(key, value)

    def _take(self, key: Key, value: Value | None) -> None:
        self._rows[key] = self._row(key, value) if value is not None else _Row()
        self._of[key[: -len(PARTS)], key[-3]].append(key)

    def _row(self, key: Key, value: Value) -> _Row:
        return self._state.restored(key, partial(self._restored, key), value)

    def _restored(self, key: Key, value: Value) -> _Row:
        due_at, last, text = value
        codec = self._codecs[key[-3]]
        records = [Waiting(whole_number(at), codec.decode(its), matched, key) for at, matched, its in json.loads(text)]
        return _Row(records, whole_number(last), whole_number(due_at), is_held=True)

    def _text(self, side: int, kept: Sequence[Waiting]) -> str:
        codec = self._codecs[side]
        return json.dumps([[each.at, each.matched, list(codec.encode(each.values))] for each in kept])
