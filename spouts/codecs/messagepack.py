"""MessagePack maps as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.arrow_columns import column_of
from spouts.codecs.codec import BulkCodec, Values
from spouts.codecs.encoding_codec import EncodingCodec

#: The extension type of timestamps becomes a moment with a zone.
_AS_MOMENT = 3


class MessagePackCodec(BulkCodec, EncodingCodec):
    """MessagePack maps with a declared schema: each value is one map, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. Other keys of the maps are ignored. A missing
    key is null. Numbers, text, binary, booleans, arrays and maps are those of the type; timestamps
    are MessagePack's extension type, so a field of them is a timestamp in UTC.

    Errors: a value of another type, an integer beyond the type, a timestamp outside the years 1 to
    9999, text that is not UTF-8, bytes after the map, and a value that is no map.

    >>> codec = MessagePackCodec(Fields(word=str, n=int))
    >>> codec.decode([codec.encode_row({"word": "dog", "n": 7}), b"\\x81\\xa1n\\x08"]).to_pylist()
    [{'word': 'dog', 'n': 7}, {'word': None, 'n': 8}]
    """

    def __init__(self, fields: Fields | pa.Schema) -> None:
        self.fields, self._types = declared_types(type(self).__name__, fields)

    def decode_together(self, values: Values) -> pa.RecordBatch:
        rows = [_map_of(value) if value is not None else {} for value in values]
        columns = []
        for name, declared in self._types.items():
            try:
                columns.append(column_of([row.get(name) for row in rows], declared))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{name}: {error}") from error
        return pa.RecordBatch.from_arrays(columns, names=[*self._types])

    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        return bytes(msgpack.packb(row, datetime=True))


def declared_types(codec: str, fields: Fields | pa.Schema) -> tuple[Fields, dict[str, pa.DataType]]:
    """The fields of a codec, and their types. Raises ``TopologyError`` for one without a type."""
    declared = fields if isinstance(fields, Fields) else Fields.of_schema(fields)
    schema = declared.schema()
    if schema is None or not len(schema):
        raise TopologyError(f"{codec} needs a type for every field, as in {codec}(Fields(word=str, amount=int))")
    return declared, {each.name: each.type for each in schema}


def _map_of(value: bytes) -> dict[Any, Any]:
    """Raises ``ValueError`` with the reason."""
    try:
        found = msgpack.unpackb(value, timestamp=_AS_MOMENT, strict_map_key=False)
    except msgpack.ExtraData as error:
        raise ValueError(f"{len(error.extra):,} bytes are left after the value") from None
    except msgpack.StackError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"a text is not valid UTF-8 ({error.reason})") from None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(f"no MessagePack: {error or type(error).__name__}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, and a value is one map")
    return found
