"""Rows with what a function of the user knows about their key.

The same key gets one answer in a transaction and task. A replay asks again, and may get another
one, unless a cache still holds the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
from cachetools import LRUCache, TTLCache

from framework.call_site import Call
from framework.errors import BatchTooLargeError
from framework.streams.function_steps import CallingStep, frame_of_values, refusal, values_of
from framework.streams.polars_frames import UNREPRESENTABLE, refusing
from framework.streams.row_growth_limits import PART_BYTES, bytes_in, divided, sizes_of_rows
from framework.streams.stateless_steps import Columns
from framework.topology.bolts import LookupCounts
from framework.topology.canonical_form import RowForm, form_of

Key = tuple[Any, ...]
Answer = tuple[Any, ...]
#: The keys that a cache holds where the user says nothing.
CACHE_SIZE = 10_000
#: The bytes of a cache for each of its keys, on average: with larger keys or answers it holds
#: fewer.
KEY_BYTES = 8 << 10
#: The most bytes of answers for several keys that a task holds for a batch.
ANSWERS_BYTES_MAX = 128 << 20
#: The form in which keys are compared: moments in UTC.
_KEY_FORM = RowForm(None)
_FLOAT_FORM = form_of(pa.float64())
#: The caches of this process, by the key of their calls.
_caches: LRUCache[str, TTLCache[Key, Cached]] = LRUCache(maxsize=64)
_caches_lock = threading.Lock()


class Cached(NamedTuple):
    """An answer, and the bytes that it takes in a cache with its key."""

    answer: Answer
    size: int

    @classmethod
    def of(cls, key: Key, answer: Answer) -> Cached:
        return cls(answer, max(KEY_BYTES, bytes_in((*key, *answer), {})))


class _Held:
    """The bytes of the answers that a task holds for a batch."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, call: Call, answers: Any, keys: int) -> None:
        """Count more answers. ``keys``: those that the task looks up. Raises
        ``BatchTooLargeError``."""
        self._bytes += bytes_in((answers,), {})
        if self._bytes > ANSWERS_BYTES_MAX and keys > 1:
            raise BatchTooLargeError(
                f"{call}: the answers for the keys of a batch have more than {ANSWERS_BYTES_MAX:,} bytes, and a task holds all of "
                "them: take smaller batches, by batches(max_records=...)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(CallingStep):
    """``answers``: the columns that the function returns. ``batch_size``: the keys that it takes at
    a time; None: one, not in a list. ``cache_s``: how long a process keeps an answer; None: it
    keeps none."""

    on: tuple[str, ...]
    answers: pa.Schema
    batch_size: int | None = None
    cache_s: float | None = None
    cache_size: int = CACHE_SIZE
    #: The answers of this batch and task, and their counts. Each has a copy of the step.
    answered: dict[Key, Answer] = field(default_factory=dict, compare=False)
    held: _Held = field(default_factory=_Held, compare=False)
    counted: list[LookupCounts] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.calls.function, "__qualname__", type(self.calls.function).__qualname__)

    def counts(self) -> LookupCounts:
        """The lookups of this batch and task."""
        return reduce(LookupCounts.plus, self.counted, LookupCounts(failed=len(self.calls.failed)))

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return pl.concat(self.applied(frame))

    def carried(self, frame: pl.DataFrame, known: Columns, checked: Columns) -> Iterable[pl.DataFrame]:
        return self.applied(frame)

    def applied(self, frame: pl.DataFrame) -> Iterable[pl.DataFrame]:
        # Equal keys are found by grouping, because a join of polars does not find NaN in a frame of
        # one row.
        numbered = [pl.col(name).alias(str(number)) for number, name in enumerate(self.on)]
        with refusing(self.call, *UNREPRESENTABLE):
            keys = frame.select(numbered)
            groups = keys.with_row_index("row").group_by(pl.exclude("row"), maintain_order=True).agg("row")
            groups = groups.drop_nulls()
            rows = [
                tuple([_FLOAT_FORM(each) if isinstance(each, float) else each for each in key])
                for key in groups.drop("row").rows()
            ]
        answers = frame_of_values(self.call, self.answers, self._answers(rows))
        with refusing(self.call):
            places = groups.select("row").with_row_index("place").explode("row")
            place = (
                keys.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"))
                .join(places, on="row", how="left", maintain_order="left")
                .select("place")
            )
            first = 0
            for its in self._parts(place, answers):
                yield frame.slice(first, its.height).hstack(answers.select(pl.all().gather(its["place"])))
                first += its.height

    def _parts(self, place: pl.DataFrame, answers: pl.DataFrame) -> Sequence[pl.DataFrame]:
        """The places of the rows' answers, in parts with few bytes of answers. Raises
        ``BadRecordError`` for an answer that is too large for a row."""
        if place.height * answers.estimated_size() <= PART_BYTES:
            return (place,)
        sizes = sizes_of_rows(answers)
        at = place["place"].to_arrow()
        copied = sizes[at.fill_null(0).to_numpy()] * at.is_valid().to_numpy(zero_copy_only=False)
        return divided(
            self.call, place, copied.astype(np.float64), lambda worst: f"an answer has {copied[worst]:,} bytes"
        )

    def needs(self, wanted: Columns) -> Columns:
        return (wanted - set(self.answers.names)) | set(self.on)

    def known(self, known: Columns, above: pa.Schema) -> Columns:
        return known | (set(self.answers.names) if set(self.on) <= known else set())

    def _answers(self, given: Sequence[Key]) -> list[Answer]:
        """The answers for these keys. ``given``: the keys in the form for the function."""
        keys = list(map(_KEY_FORM, given))
        found = [self.answered.get(key) for key in keys]
        unknown = [place for place, answer in enumerate(found) if answer is None]
        if self.cache_s is not None:
            cache = self._cache(self.cache_s)
            with _caches_lock:
                for place in unknown:
                    cached = cache.get(keys[place])
                    found[place] = cached.answer if cached is not None else None
            for place in unknown:
                self._hold(found[place], unknown)
            left = [place for place in unknown if found[place] is None]
            self.counted.append(LookupCounts(cached=len(unknown) - len(left)))
            unknown = left
        for place, answer in zip(unknown, self._asked([given[place] for place in unknown]), strict=True):
            found[place] = answer
        answers = [answer for answer in found if answer is not None]
        self.answered.update(zip(keys, answers, strict=True))
        if self.cache_s is not None:
            with _caches_lock:
                for place in unknown:
                    cached = Cached.of(keys[place], answers[place])
                    if cached.size <= cache.maxsize:
                        cache[keys[place]] = cached
        return answers

    def _asked(self, keys: Sequence[Key]) -> list[Answer]:
        given = [key[0] for key in keys] if len(self.on) == 1 else list(keys)
        if not given:
            return []
        began = time.monotonic()
        hold = partial(self._hold, unknown=given)
        if self.batch_size is None:
            returned = self.calls.results(given, hold)
        else:
            parts = [given[first : first + self.batch_size] for first in range(0, len(given), self.batch_size)]
            answers = self.calls.results(parts, hold)
            returned = [each for part, its in zip(parts, answers, strict=True) for each in self._of_part(part, its)]
        missing = sum(each is None for each in returned)
        took_s = time.monotonic() - began
        self.counted.append(LookupCounts(asked=len(given) - missing, missing=missing, seconds=took_s))
        nothing = (None,) * len(self.answers)
        return [values_of(self.call, self.answers, each) if each is not None else nothing for each in returned]

    def _hold(self, answers: Any, unknown: Sequence[Any]) -> None:
        """Count answers for some of the keys that had none yet."""
        self.held.add(self.call, answers, len(self.answered) + len(unknown))

    def _of_part(self, keys: Sequence[Any], returned: Any) -> Sequence[Any]:
        if isinstance(returned, Mapping):
            return [returned.get(key) for key in keys]
        if not isinstance(returned, (list, tuple)) or len(returned) != len(keys):
            many = f" of {len(returned)}" if isinstance(returned, (list, tuple)) else ""
            raise refusal(
                self.call,
                f"the function got {len(keys)} keys, and returned a {type(returned).__name__}{many}: return a mapping of keys "
                "to answers, or a list with an answer for each key",
            )
        return returned

    def _cache(self, seconds: float) -> TTLCache[Key, Cached]:
        with _caches_lock:
            if self.calls.key not in _caches:
                _caches[self.calls.key] = TTLCache(self.cache_size * KEY_BYTES, seconds, getsizeof=attrgetter("size"))
            return _caches[self.calls.key]
