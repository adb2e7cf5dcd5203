"""Quantiles of a stream, by a sketch whose parts merge exactly: a histogram whose buckets grow by
2 %.

However a stream is divided into parts, the sketch is the same, and so is the quantile: neither a
replay nor another number of tasks changes it. A t-digest or a KLL sketch lacks this property.

Source: Masson, Rim and Lee, DDSketch: A Fast and Fully-Mergeable Quantile Sketch with
Relative-Error Guarantees, VLDB 2019.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import CorruptStateError, TopologyError
from sinks.aggregates import Aggregate, Derived, Folded, typed

#: The largest relative distance of a quantile from a value of its rank.
ACCURACY = 0.01
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_LOG_MIDDLE = math.log((_GAMMA + 1) / 2)
_INFINITE = 2**31 - 1
_FORMAT = 1
#: The format, the count of zeros, the numbers of buckets above and below zero.
_HEADER = struct.Struct("<BQII")
_BUCKET, _COUNT = np.dtype("<i4"), np.dtype("<u8")
#: Bucket -> count of values.
_Side = dict[int, int]


@dataclass(slots=True)
class _Histogram:
    """Counts of zeros, and of the values above and below zero by bucket."""

    zeros: int
    above: _Side
    below: _Side

    @classmethod
    def of(cls, values: Sequence[Any]) -> _Histogram:
        numbers = np.array([float(each) for each in values], np.float64)
        numbers = numbers[~np.isnan(numbers)]
        return cls(int((numbers == 0).sum()), _buckets(numbers[numbers > 0]), _buckets(-numbers[numbers < 0]))

    @classmethod
    def read(cls, data: bytes) -> _Histogram:
        """Raises ``CorruptStateError``."""
        try:
            form, zeros, above, below = _HEADER.unpack_from(data)
            if form != _FORMAT or len(data) != _HEADER.size + (above + below) * (_BUCKET.itemsize + _COUNT.itemsize):
                raise ValueError
        except (struct.error, ValueError):
            raise CorruptStateError(f"{len(data)} bytes are no sketch of quantiles") from None
        at, sides = _HEADER.size, []
        for size in (above, below):
            buckets = np.frombuffer(data, _BUCKET, size, at)
            counts = np.frombuffer(data, _COUNT, size, at + buckets.nbytes)
            at += buckets.nbytes + counts.nbytes
            sides.append(dict(zip(buckets.tolist(), counts.tolist(), strict=True)))
        return cls(zeros, *sides)

    def add(self, other: _Histogram) -> None:
        self.zeros += other.zeros
        for own, its in ((self.above, other.above), (self.below, other.below)):
            for bucket, count in its.items():
                own[bucket] = own.get(bucket, 0) + count

    def written(self) -> bytes:
        parts = [_HEADER.pack(_FORMAT, self.zeros, len(self.above), len(self.below))]
        for side in (self.above, self.below):
            buckets = sorted(side)
            parts += [
                np.array(buckets, _BUCKET).tobytes(),
                np.array([side[each] for each in buckets], _COUNT).tobytes(),
            ]
        return b"".join(parts)

    def quantile(self, share: float) -> float | None:
        ordered = [(-_value(each), self.below[each]) for each in sorted(self.below, reverse=True)]
        ordered += [(0.0, self.zeros), *((_value(each), self.above[each]) for each in sorted(self.above))]
        left = share * (sum(count for _, count in ordered) - 1)
        for value, count in ordered:
            left -= count
            if count and left < 0:
                return value
        return None


def _buckets(sizes: np.ndarray[Any, np.dtype[np.float64]]) -> _Side:
    finite = sizes[np.isfinite(sizes)]
    buckets, counts = np.unique(np.ceil(np.log(finite) / _LOG_GAMMA).astype(np.int64), return_counts=True)
    found = dict(zip(buckets.tolist(), counts.tolist(), strict=True))
    return {**found, _INFINITE: len(sizes) - len(finite)} if len(finite) < len(sizes) else found


def _value(bucket: int) -> float:
    """The value that represents a bucket: equally far, relatively, from its least and its greatest
    value.
    """
    if bucket == _INFINITE:
        return math.inf
    try:
        return math.exp(bucket * _LOG_GAMMA - _LOG_MIDDLE)
    except OverflowError:
        return sys.float_info.max


@dataclass(frozen=True)
class QuantileSketch(Folded):
    """A histogram of values."""

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        found = typed(self, input_type)
        if not (pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found)):
            raise TopologyError(f"a quantile of {self.field!r} needs a number, not {found}")
        return pa.binary()

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        if not partial:
            return _Histogram.of(present).written()
        first, *others = map(_Histogram.read, present)
        for each in others:
            first.add(each)
        return first.written()


@dataclass(frozen=True)
class QuantileOf(Derived):
    """The quantile of a sketch."""

    share: float = 0.5

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.float64()

    def derive(self, values: Sequence[Any]) -> Any:
        return None if values[0] is None else _Histogram.read(values[0]).quantile(self.share)


@dataclass(frozen=True)
class Quantile(Aggregate):
    """The value below which ``share`` of the values lie, within 1 % of itself: ``Quantile("ms",
    0.99)``. Nulls and NaN do not count.

    Columns: ``<name>``, a float, and ``<name>_sketch``, the histogram that is merged: 12 bytes for
    each 2 % by which values differ, so 4 KiB for values between 1 and 1,000."""

    share: float = 0.5

    def __post_init__(self) -> None:
        if self.field is None:
            raise TopologyError("Quantile needs a field, as in Quantile('ms', 0.99)")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share <= 1:
            raise TopologyError(f"Quantile({self.field!r}): share is {self.share!r}: give a number between 0 and 1")

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        QuantileSketch(self.field).output_type(input_type)
        return pa.float64()

    def expanded(self, name: str) -> Mapping[str, Aggregate]:
        sketch = f"{name}_sketch"
        return {name: QuantileOf(None, (sketch,), self.share), sketch: QuantileSketch(self.field)}

    def _merge(self, old: Any, new: Any) -> Any:
        raise NotImplementedError
