"""Decodes with any codec, also with a codec that raises unexpected errors: the values that cause an
error are bad values, so that a producer cannot stop a topology.

The codec is called on halves, and on single values below 16. If it raises for each of n values,
it is called at most 1.25 n + 1 times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from framework.errors import RatchetError, panics
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import HALVED_FROM, Codec, Truths, UndecodableValueError, Values, joined


def is_about_values(error: BaseException) -> bool:
    """Whether other values may decode. Ratchet's own errors define their consequences. Missing
    memory, modules, files and connections do not depend on a value."""
    if isinstance(error, (RatchetError, MemoryError, ImportError, ConnectionError, TimeoutError)):
        return False
    if isinstance(error, OSError):
        return error.errno is None  # as of bz2 and gzip for damaged data
    return isinstance(error, (Exception, *panics()))


def decode_good(codec: Codec, raw: Values | pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
    """``decode_good`` of the codec; values for which it raises an error are bad values."""
    try:
        return _called(codec, raw)
    except BaseException as error:
        if not is_about_values(error):
            raise
        parts = list(_found(codec, raw, 0, error))
    bad = [each for _, its in parts for each in its]
    batches = [batch for batch, _ in parts if batch is not None]
    return _joined(batches) if batches else _no_rows(codec), bad


def decode(codec: Codec, raw: Values | pa.BinaryArray) -> pa.RecordBatch:
    """``decode`` of the codec. Raises ``UndecodableValueError`` for the first bad value, even if
    the codec raises another error."""
    try:
        return codec.decode_array(raw) if isinstance(raw, pa.Array) else codec.decode(raw)
    except UndecodableValueError:
        raise
    except BaseException as error:
        if not is_about_values(error):
            raise
        batches = []
        for batch, bad in _found(codec, raw, 0, error):
            if bad:
                raise UndecodableValueError(bad[0].index, bad[0].reason) from error
            batches += [] if batch is None else [batch]
    return _joined(batches) if batches else _no_rows(codec)


def left_out(codec: Codec, raw: Values | pa.BinaryArray) -> Truths | None:
    """``left_out`` of the codec. Values for which it raises an error are not left out, so that
    decoding reports the error."""
    try:
        return codec.left_out(raw)
    except BaseException as error:
        if not is_about_values(error):
            raise
    if len(raw) < 2:
        return None
    middle = len(raw) // 2
    found: Truths = np.zeros(len(raw), np.bool_)
    for half in (slice(0, middle), slice(middle, len(raw))):
        its = left_out(codec, raw[half])
        if its is not None:
            found[half] = its
    return found if found.any() else None


def _called(codec: Codec, raw: Values | pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
    return codec.decode_good_array(raw) if isinstance(raw, pa.Array) else codec.decode_good(raw)


def _found(
    codec: Codec, raw: Values | pa.BinaryArray, begin: int, error: BaseException
) -> Iterator[tuple[pa.RecordBatch | None, list[BadRecord]]]:
    """The rows and the bad values of each part of values that cannot be decoded together, in order.
    ``begin``: the index of the first of these values. ``error``: what the codec raised for them."""
    if len(raw) < 2:
        yield None, [BadRecord(begin + at, _reason(codec, error)) for at in range(len(raw))]
        return
    size = (len(raw) + 1) // 2 if len(raw) >= HALVED_FROM else 1
    for at in range(0, len(raw), size):
        part = raw[at : at + size]
        try:
            batch, bad = _called(codec, part)
        except BaseException as its:
            if not is_about_values(its):
                raise
            yield from _found(codec, part, begin + at, its)
        else:
            yield batch, [BadRecord(begin + at + each.index, each.reason) for each in bad]


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows in one batch. Parts may differ in their types if a codec infers types from
    values."""
    tables = [pa.Table.from_batches([each]) for each in batches]
    schema = pa.unify_schemas([each.schema for each in batches], promote_options="permissive")
    return joined([batch for each in tables for batch in each.cast(schema).to_batches()] or batches[:1])


def _no_rows(codec: Codec) -> pa.RecordBatch:
    names = list(codec.fields)
    return pa.RecordBatch.from_arrays([pa.array([], codec.fields.type_of(name)) for name in names], names=names)


def _reason(codec: Codec, error: BaseException) -> str:
    """One line, which ``BadRecord`` escapes."""
    if isinstance(error, UndecodableValueError):
        return error.reason
    return f"{type(codec).__name__} raised {type(error).__name__}: {error}"
