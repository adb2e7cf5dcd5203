"""Codecs: the values of Kafka records as Arrow columns.

A codec decodes many values at once, with vectorised code, or reports the value that it cannot
decode. A null value (a tombstone) is not an error: all its fields are null. The same codecs decode
keys and headers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from framework.errors import RatchetError, reason_of
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord

Values = Sequence[bytes | None]
Truths = np.ndarray[Any, np.dtype[np.bool_]]
#: From this many values on, bad values are searched by halving; below, one by one.
HALVED_FROM = 16


class UndecodableValueError(Exception):
    """The value at ``index`` of the given values cannot be decoded, for ``reason``."""

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        self.reason = reason_of(reason)
        super().__init__(f"value {index}: {self.reason}")


class TooLargeTogetherError(RatchetError):
    """The given values together become too large, although none is bad. Decode them in parts of
    ``count`` values; the first part is small enough."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(f"more than {count} of these values together are too large: decode fewer at a time")


class Codec(ABC):
    """Decodes values into the columns named by ``fields``. It is pickled and sent to tasks.

    To write one, implement ``decode``. If your decoder reads many values together and cannot tell
    which of them is bad, subclass ``BulkCodec`` instead.
    """

    fields: Fields

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that changes how values are decoded does not inherit another way around it."""
        super().__init_subclass__(**options)
        if not vars(cls).keys().isdisjoint(("decode", "decode_good", "decode_together")):
            for name in ("decode_array", "decode_good_array"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Codec)[name])

    @abstractmethod
    def decode(self, values: Values) -> pa.RecordBatch:
        """One row per value, in order. Raises ``UndecodableValueError`` for the first value that
        cannot be decoded. Every method that decodes may raise ``TooLargeTogetherError`` for more
        than one value."""

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        """Which values have no row, and are no errors: a spout does not decode their records, and
        counts them as read. None: all have one."""
        return None

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, in order, and the bad values."""
        batches: list[pa.RecordBatch] = []
        bad: list[BadRecord] = []
        begin = 0
        while begin < len(values) or not batches:
            try:
                batches.append(self.decode(values[begin:]))
                break
            except UndecodableValueError as error:
                index = begin + error.index
                batches.append(self.decode(values[begin:index]))
                bad.append(BadRecord(index, error.reason))
                begin = index + 1
        return joined(batches), bad

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        """``decode`` of values that lie in a binary array. Override it if you can decode them where
        they lie; otherwise they become Python objects. One row per value, in order. Raises
        ``UndecodableValueError`` for the first value that cannot be decoded."""
        return self.decode(values.to_pylist())

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """``decode_good`` of values that lie in a binary array."""
        return self.decode_good(values.to_pylist())


class BulkCodec(Codec):
    """A codec that decodes all values in one call, or none. Bad values are found by halving."""

    @abstractmethod
    def decode_together(self, values: Values) -> pa.RecordBatch:
        """One row per value, in order. Raises ``ValueError`` or an Arrow error if a value cannot be
        decoded. For a single value, the message is the reason."""

    def decode(self, values: Values) -> pa.RecordBatch:
        try:
            return self.decode_together(values)
        except (ValueError, pa.ArrowException):
            first = self._find(values, 0, [], only_first=True)
        if first:
            raise UndecodableValueError(first[0].index, first[0].reason)
        raise UndecodableValueError(0, "the values cannot be decoded together")

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        try:
            return self.decode_together(values), []
        except (ValueError, pa.ArrowException):
            batches: list[pa.RecordBatch] = []
            bad = self._find(values, 0, batches, only_first=False)
        return joined(batches) if batches else self.decode_together([]), bad

    def _find(self, values: Values, begin: int, batches: list[pa.RecordBatch], *, only_first: bool) -> list[BadRecord]:
        """The bad values among values that cannot be decoded together. Appends the rows of the
        others to ``batches``, in order."""
        if len(values) == 1:
            try:
                batches.append(self.decode_together(values))
                return []
            except (ValueError, pa.ArrowException) as error:
                return [BadRecord(begin, self.reason(error))]
        size = len(values) // 2 if len(values) >= HALVED_FROM else 1
        bad: list[BadRecord] = []
        for position in range(0, len(values), size):
            if bad and only_first:
                break
            part = values[position : position + size]
            if size > 1:
                try:
                    batches.append(self.decode_together(part))
                    continue
                except (ValueError, pa.ArrowException):
                    pass
            bad += self._find(part, begin + position, batches, only_first=only_first)
        return bad

    def reason(self, error: Exception) -> str:
        """The reason to report for a single value that cannot be decoded."""
        return str(error)


class PerValueCodec(Codec):
    """A codec that checks each value separately. Implement ``decode_good``."""

    @abstractmethod
    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]: ...

    def decode(self, values: Values) -> pa.RecordBatch:
        return all_good(*self.decode_good(values))


class BytesCodec(Codec):
    """The value as it is, in one binary field.

    >>> BytesCodec().decode([b"a", None]).to_pydict()
    {'value': [b'a', None]}
    """

    def __init__(self, field: str = "value") -> None:
        self.fields = Fields.of({field: pa.binary()})

    def decode(self, values: Values) -> pa.RecordBatch:
        return pa.record_batch([_binary(values)], names=list(self.fields))

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return pa.record_batch([values], names=list(self.fields))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self.decode_array(values), []


class TextCodec(PerValueCodec):
    """The value as UTF-8 text, in one string field. Invalid UTF-8 is an error.

    >>> TextCodec("line").decode([b"a", None]).to_pydict()
    {'line': ['a', None]}
    """

    def __init__(self, field: str = "value") -> None:
        self.fields = Fields.of({field: pa.string()})

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._decoded(_binary(values))

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return all_good(*self._decoded(values))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._decoded(values)

    def _decoded(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        bad: list[BadRecord] = []
        try:
            text = values.cast(
                pa.large_string() if pa.types.is_large_binary(values.type) else pa.string()
            )  # checks the encoding
        except (ValueError, pa.ArrowException):
            listed = values.to_pylist()
            found = [_invalid_utf8(value) for value in listed]
            bad = [BadRecord(index, reason) for index, reason in enumerate(found) if reason is not None]
            good = [value for value, reason in zip(listed, found, strict=True) if reason is None]
            text = self._decoded(_binary(good))[0].column(0)
        return pa.record_batch([text], names=list(self.fields)), bad


def all_good(batch: pa.RecordBatch, bad: list[BadRecord]) -> pa.RecordBatch:
    """The rows. Raises ``UndecodableValueError`` for the first bad value."""
    if bad:
        raise UndecodableValueError(bad[0].index, bad[0].reason)
    return batch


def without_rows(
    batch: pa.RecordBatch, bad: list[BadRecord], refused: Mapping[int, str], count: int
) -> tuple[pa.RecordBatch, list[BadRecord]]:
    """The result of ``decode_good`` for ``count`` values, when rows of it are refused, too.
    ``refused``: the number of each such row -> the reason."""
    if not refused:
        return batch, bad
    places = np.delete(np.arange(count), [each.index for each in bad])
    bad = [*bad, *(BadRecord(int(places[row]), reason) for row, reason in refused.items())]
    kept = np.delete(np.arange(batch.num_rows), list(refused))
    return batch.take(pa.array(kept)), sorted(bad, key=lambda each: each.index)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate record batches of one schema. A text or binary column of more than 2 GiB gets
    offsets of 64 bits: it is ``large_string``, ``large_binary`` or ``large_list`` then."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches)
    arrays = [joined_column(column) for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, names=table.schema.names)


def joined_column(column: pa.ChunkedArray) -> pa.Array:
    """The values of a column in one array; see ``joined``."""
    if column.num_chunks == 0:
        return pa.array([], column.type)
    try:
        return pa.concat_arrays(column.chunks)
    except pa.ArrowInvalid:  # more than offsets of 32 bits reach
        wide = _wide(column.type)
        return pa.concat_arrays([chunk.cast(wide) for chunk in column.chunks])


def _binary(values: Values) -> pa.Array:
    made = pa.array(values, pa.binary())
    return joined_column(made) if isinstance(made, pa.ChunkedArray) else made


def _wide(declared: pa.DataType) -> pa.DataType:
    """The type with offsets of 64 bits."""
    types = pa.types
    if types.is_struct(declared):
        return pa.struct([each.with_type(_wide(each.type)) for each in declared])
    if types.is_list(declared):
        return pa.large_list(declared.value_field.with_type(_wide(declared.value_type)))
    if types.is_string(declared):
        return pa.large_string()
    return pa.large_binary() if types.is_binary(declared) else declared


def _invalid_utf8(value: bytes | None) -> str | None:
    try:
        (value or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}"
    return None
