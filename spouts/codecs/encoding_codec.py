"""Codecs that also encode: rows as the values of records, for ``KafkaSink(value_codec=...)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.topology import Fields
from framework.topology.tuples import rows_of
from spouts.codecs.codec import Codec


class EncodingCodec(Codec):
    """A codec that encodes rows one by one. Implement ``encode_row``.

    What it encodes, it decodes to the same row. A field of the codec that the rows do not have is
    null.
    """

    @abstractmethod
    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        """The value of a row. Raises ``ValueError`` with the reason if it cannot be encoded."""

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that the codec does not have, or has with another
        type. No I/O."""
        for name in fields:
            if name not in self.fields:
                raise TopologyError(
                    f"{type(self).__name__} has no field {name!r} (it has: {', '.join(self.fields.names)}): name the fields "
                    "to encode"
                )
            declared, wanted = fields.type_of(name), self.fields.type_of(name)
            if declared is not None and wanted is not None and declared != wanted:
                raise TopologyError(
                    f"{type(self).__name__}: field {name!r} is {declared}, and it encodes {wanted}: cast one"
                )

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that cannot be encoded."""
        names = batch.schema.names
        return pa.array(
            [self._encoded(dict(zip(names, row, strict=True))) for row in rows_of(batch)], pa.large_binary()
        )

    def _encoded(self, row: Mapping[str, Any]) -> bytes:
        try:
            return self.encode_row(row)
        except (ValueError, TypeError, OverflowError) as error:
            raise BadRecordError(f"{type(self).__name__} cannot encode the row: {error}") from error
