"""A codec around another codec, for values whose floats must be finite."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.nested_value_search import Truths, values_with
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Codec, PerValueCodec, Values, all_good, without_rows
from spouts.codecs.encoding_codec import WrappingCodec, encoder, refusal


class FiniteCodec(PerValueCodec, WrappingCodec):
    """Refuses values of another codec with a NaN or infinite float, also inside of lists, structs
    and maps, because one such value makes the sum of its group NaN or infinite for ever. Use it for
    formats that have such floats; ``JsonCodec`` refuses them by default, unless ``non_finite`` is
    set. Rows with such a float are not encoded, either.

    >>> from spouts import CsvCodec
    >>> codec = FiniteCodec(CsvCodec(Fields(word=str, share=float)))
    >>> _, (bad,) = codec.decode_good([b"dog,0.5", b"cat,nan"])
    >>> bad.index, bad.reason
    (1, 'share: nan is not a finite number')
    """

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec):
            raise TopologyError(f"FiniteCodec: {codec!r} is no codec: give the one for the values")
        self._codec = codec
        self.fields = codec.fields

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        return self._codec.left_out(values)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        batch, bad = self._codec.decode_good(values)
        return without_rows(batch, bad, _not_finite(batch), len(values))

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return all_good(*self.decode_good_array(values))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        batch, bad = self._codec.decode_good_array(values)
        return without_rows(batch, bad, _not_finite(batch), len(values))

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that the codec inside cannot encode."""
        encoder(self._codec).check_encodable(fields)

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that cannot be encoded."""
        for reason in _not_finite(batch).values():
            raise refusal(self, ValueError(reason))
        return encoder(self._codec).encode(batch)


def _not_finite(batch: pa.RecordBatch) -> dict[int, str]:
    """Row -> which of its floats is not finite."""
    found: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        rows = values_with(_of_floats, column)
        for row in np.flatnonzero(rows).tolist() if rows is not None else ():
            shown = column[row].as_py() if pa.types.is_floating(column.type) else "a float in it"
            found.setdefault(row, f"{name}: {shown} is not a finite number")
    return found


def _of_floats(column: pa.Array) -> Truths | None:
    if not pa.types.is_floating(column.type):
        return None
    wrong = pc.invert(pc.is_finite(column)).fill_null(False)
    found: Truths = wrong.to_numpy(zero_copy_only=False)
    return found if found.any() else None
