"""MessagePack maps as Arrow columns."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
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
#: Maps with more keys get other hashes for numbers, and no other keys than texts and integers.
LARGE_MAP_KEYS = 256


class _Integer(int):
    """A key of a large map. The hash of an ``int`` is the number itself, so a producer can choose
    keys that Python's dict compares with all others: 87,000 keys took a minute. The hash of bytes
    has a secret seed."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(self.to_bytes(9, "little", signed=True))


class MessagePackCodec(BulkCodec, EncodingCodec):
    """MessagePack maps with a declared schema: each value is one map, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. Other keys of the maps are ignored. A missing
    key is null. Numbers, text, binary, booleans, arrays and maps are those of the type; timestamps
    are MessagePack's extension type, so a field of them is a timestamp in UTC. A whole float is
    read as an integer, and text and binary as each other. Other types, such as dates and decimals,
    cannot be encoded.

    Errors: a value of another type, an integer beyond the type, a timestamp outside the years 1 to
    9999, text that is not UTF-8, bytes after the map, and a value that is no map.

    >>> codec = MessagePackCodec(Fields(word=str, n=int))
    >>> codec.decode([codec.encode_row({"word": "dog", "n": 7}), b"\\x81\\xa1n\\x08"]).to_pylist()
    [{'word': 'dog', 'n': 7}, {'word': None, 'n': 8}]
    """

    def __init__(self, fields: Fields | pa.Schema) -> None:
        self.fields, self._types = declared_types(type(self).__name__, fields)
        self._of_maps = [name for name, declared in self._types.items() if _holds_maps(declared)]

    def decode_together(self, values: Values) -> pa.RecordBatch:
        rows = [_map_of(value) if value is not None else {} for value in values]
        columns = []
        for name, declared in self._types.items():
            found = [row.get(name) for row in rows]
            try:
                _check_kinds(found, declared)
                columns.append(column_of(found, declared))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{name}: {error}") from error
        return pa.RecordBatch.from_arrays(columns, names=[*self._types])

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` as every codec does, and for types that MessagePack does not
        have."""
        super().check_encodable(fields)
        for name in fields:
            if not _is_held(self._types[name]):
                raise TopologyError(
                    f"MessagePackCodec: field {name!r} is {self._types[name]}, which MessagePack does not hold: cast it to text, "
                    "a number or a timestamp"
                )

    def encode_row(self, row: Mapping[str, Any]) -> bytes:
        maps = {name: _with_maps(row[name], self._types[name], name) for name in self._of_maps if name in row}
        return bytes(msgpack.packb({**row, **maps}, datetime=True, default=_in_utc))


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
        found = _unpacked(value)
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


def _unpacked(value: bytes) -> Any:
    options: dict[str, Any] = {"timestamp": _AS_MOMENT, "strict_map_key": False}
    try:
        return msgpack.unpackb(value, max_map_len=LARGE_MAP_KEYS, **options)
    except ValueError:  # also for a larger map
        return msgpack.unpackb(value, object_pairs_hook=_dict_of, **options)


def _dict_of(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(pairs) <= LARGE_MAP_KEYS:
        return dict(pairs)
    if others := {type(key) for key, _ in pairs} - {str, bytes, int, bool, type(None)}:
        kind = min(each.__name__ for each in others)
        raise ValueError(f"a map of {len(pairs):,} keys, one of which is a {kind}: large maps have texts and integers")
    return {_Integer(key) if type(key) is int else key: item for key, item in pairs}


#: The kinds of MessagePack for the values of a type. Arrow would also convert other kinds, such as
#: an empty text to an empty list, or a number to a moment.
_KINDS: list[tuple[Callable[[pa.DataType], bool], frozenset[type]]] = [
    (pa.types.is_boolean, frozenset({bool})),
    (pa.types.is_integer, frozenset({int, _Integer, float})),
    (pa.types.is_floating, frozenset({int, _Integer, float})),
    (pa.types.is_timestamp, frozenset({datetime.datetime})),
    *(
        (each, frozenset({str, bytes}))
        for each in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
        )
    ),
    (pa.types.is_map, frozenset({dict})),
    (pa.types.is_struct, frozenset({dict})),
    (pa.types.is_list, frozenset({list})),
    (pa.types.is_large_list, frozenset({list})),
]


def _is_held(declared: pa.DataType) -> bool:
    """Whether MessagePack has values of this type."""
    parts = [declared.field(number).type for number in range(declared.num_fields)]
    return any(is_of(declared) for is_of, _ in _KINDS) and all(map(_is_held, parts))


def _in_utc(value: Any) -> Any:
    """A moment without a zone as the extension type needs it."""
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC)
    raise TypeError(f"MessagePack has no {type(value).__name__}")


def _check_kinds(values: Sequence[Any], declared: pa.DataType) -> None:
    """Raise ``ValueError`` for a value, or one inside a value, of another kind."""
    kinds = next((each for is_of, each in _KINDS if is_of(declared)), None)
    if kinds is None:
        return
    if others := set(map(type, values)) - kinds - {type(None)}:
        raise ValueError(f"a {min(each.__name__ for each in others)}, and {declared} is wanted")
    present = [each for each in values if each is not None] if pa.types.is_nested(declared) else []
    if pa.types.is_struct(declared):
        for field in declared:
            _check_kinds([each.get(field.name) for each in present], field.type)
    elif pa.types.is_map(declared):
        _check_kinds([key for each in present for key in each], declared.key_type)
        _check_kinds([item for each in present for item in each.values()], declared.item_type)
    elif pa.types.is_list(declared) or pa.types.is_large_list(declared):
        _check_kinds([item for each in present for item in each], declared.value_type)


def _holds_maps(declared: pa.DataType) -> bool:
    nested = (declared.field(number).type for number in range(declared.num_fields))
    return pa.types.is_map(declared) or any(map(_holds_maps, nested))


def _with_maps(value: Any, declared: pa.DataType, where: str) -> Any:
    """The value with maps in place of Arrow's pairs. Raises ``ValueError`` for a duplicate key."""
    if value is None or not _holds_maps(declared):
        return value
    if pa.types.is_map(declared):
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        found = {key: _with_maps(item, declared.item_type, f"{where}{{}}") for key, item in pairs}
        if len(found) < len(pairs):
            raise ValueError(f"{where} has a key twice")
        return found
    if pa.types.is_struct(declared):
        return {name: _with_maps(each, declared.field(name).type, f"{where}.{name}") for name, each in value.items()}
    return [_with_maps(each, declared.value_type, f"{where}[]") for each in value]
