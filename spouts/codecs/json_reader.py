"""Rows of JSON objects: the usual ones by the compiled reader, the others by Arrow's.

Invariant: a value has the row, or the reason, that Arrow's reader gives it, wherever it is decoded.
The only values that have a row though Arrow's reader refuses them are those with the names of
floats that JSON has no number for.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import UndecodableValueError, Values, joined
from spouts.codecs.json_arrow import ArrowJsonCodec, nullable
from spouts.codecs.json_native import native_json

Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: As the JSON forms of Protocol Buffers, and of ``sinks.KafkaSink``, write them.
_NAMED_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Rows(NamedTuple):
    """Rows, the index of the value of each, in order, and the values that have none."""

    batch: pa.RecordBatch
    places: Numbers
    bad: list[BadRecord]


class JsonReader:
    """Reads values into rows of ``nullable(schema)``. ``shown``: the types that reasons name.
    ``non_finite``: whether a float may be one of the texts "NaN", "Infinity" and "-Infinity".
    Raises an Arrow error for a schema that Arrow's reader cannot decode into."""

    def __init__(self, schema: pa.Schema, shown: pa.Schema, *, non_finite: bool) -> None:
        self._schema, self._shown = schema, shown
        if native_json(schema) is None:  # Arrow's reader decodes into all types of the compiled one
            self._arrow  # noqa: B018
        self._floats = {each.name for each in schema if non_finite and pa.types.is_floating(each.type)}

    @functools.cached_property
    def _arrow(self) -> ArrowJsonCodec:
        """Made on first use, because that takes time, and few values are unusual."""
        return ArrowJsonCodec(self._schema, self._shown)

    def read(self, values: Values | pa.BinaryArray, *, only_first: bool) -> Rows:
        """``only_first``: bad values after the first one, and rows after it, may be left out."""
        native = native_json(self._schema)
        if native is None:
            return self._by_arrow(_listed(values), only_first=only_first)
        array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values, pa.binary())
        if isinstance(array, pa.ChunkedArray):  # of more than 2 GiB
            return self._read_chunks(array, only_first=only_first)
        if not isinstance(array, pa.BinaryArray):
            return self._by_arrow(array.to_pylist(), only_first=only_first)
        batch, unusual = native.read(array)
        if not len(unusual):
            return Rows(batch, np.arange(len(array)), [])
        others = unusual.to_numpy()
        rest = self._by_arrow(array.take(unusual).to_pylist(), only_first=only_first)
        bad = [BadRecord(int(others[each.index]), each.reason) for each in rest.bad]
        usual = Rows(batch, np.delete(np.arange(len(array)), others), bad)
        return _merged([usual, rest._replace(places=others[rest.places], bad=[])])

    def _read_chunks(self, array: pa.ChunkedArray, *, only_first: bool) -> Rows:
        found: list[Rows] = []
        begin = 0
        for chunk in array.chunks:
            part = self.read(chunk, only_first=only_first)
            bad = [BadRecord(begin + each.index, each.reason) for each in part.bad]
            found.append(Rows(part.batch, begin + part.places, bad))
            begin += len(chunk)
            if bad and only_first:
                break
        return _merged(found)

    def _by_arrow(self, values: Values, *, only_first: bool) -> Rows:
        if only_first:
            try:
                return Rows(self._arrow.decode(values), np.arange(len(values)), [])
            except UndecodableValueError as error:
                until = self._by_arrow(values[: error.index + 1], only_first=False)
            if until.bad:
                return until
        batch, bad = self._arrow.decode_good(values)
        rows = Rows(batch, np.delete(np.arange(len(values)), [each.index for each in bad]), bad)
        return self._with_named_floats(values, rows) if bad and self._floats else rows

    def _with_named_floats(self, values: Values, rows: Rows) -> Rows:
        """Add the rows of values that are bad only because fields of floats have names."""
        named: dict[frozenset[str], list[int]] = defaultdict(list)
        for each in rows.bad:
            named[self._named(values[each.index])].append(each.index)
        found = [rows]
        for fields, places in named.items():
            if fields:
                found.append(self._read_named([values[place] for place in places], np.array(places), fields))
        good = np.concatenate([each.places for each in found[1:]]).tolist() if found[1:] else []
        bad = [each for each in rows.bad if each.index not in set(good)]
        return _merged([rows._replace(bad=bad), *found[1:]])

    def _named(self, value: bytes | None) -> frozenset[str]:
        """The fields of floats that have a name."""
        try:
            read = json.loads(value or b"")
        except (ValueError, RecursionError):
            return frozenset()
        if not isinstance(read, dict):
            return frozenset()
        return frozenset(
            each for each in self._floats if isinstance(read.get(each), str) and read[each] in _NAMED_FLOATS
        )

    def _read_named(self, values: Values, places: Numbers, fields: frozenset[str]) -> Rows:
        """The rows of values in which these fields are names of floats."""
        schema = pa.schema([each.with_type(pa.string()) if each.name in fields else each for each in self._schema])
        batch, bad = ArrowJsonCodec(schema).decode_good(values)
        columns = []
        for wanted, column in zip(nullable(self._schema), batch.columns, strict=True):
            if wanted.name in fields:
                which = pc.index_in(column, value_set=pa.array(list(_NAMED_FLOATS)))
                column = pa.array(_NAMED_FLOATS.values(), wanted.type).take(which)
            columns.append(column)
        rows = pa.RecordBatch.from_arrays(columns, schema=nullable(self._schema))
        return Rows(rows, np.delete(places, [each.index for each in bad]), [])


def _merged(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in the order of their values."""
    bad = [each for part in parts for each in part.bad]
    parts = [part for part in parts if len(part.places)] or parts[:1]
    batch, places = joined([part.batch for part in parts]), np.concatenate([part.places for part in parts])
    if np.any(np.diff(places) < 0):
        order = np.argsort(places)
        batch, places = batch.take(pa.array(order)), places[order]
    return Rows(batch, places, sorted(bad, key=lambda each: each.index))


def _listed(values: Values | pa.BinaryArray) -> Values:
    return values.to_pylist() if isinstance(values, (pa.Array, pa.ChunkedArray)) else values
