"""Compares the MessagePack codec with msgpack, many maps of each schema at a time.

``python -m tests.kit.messagepack_reference --values 10000000 --seed 1``: what msgpack reads of
random maps, and Arrow stores exactly in the declared types, are the codec's rows; a value that a
type does not have is a bad record; msgpack reads what the codec encodes as the same rows.

The codec parses with msgpack too. What is compared is what it adds: which values a type has.
"""

from __future__ import annotations

import collections
import datetime
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pyarrow as pa

from spouts import MessagePackCodec
from tests.kit.comparing import as_numbers, check_own, check_rows, check_verdicts, go_through
from tests.kit.fuzzing import Counts, other_bytes

VALUES = 4_000
#: Different values of each field.
_POOL = 30
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECONDS = (-62_135_596_800 * 10**6, 253_402_300_800 * 10**6 - 1)
_TEXTS = ["", "a", "wörd", "\U0001f600", "\0", "x" * 40]
_FLOATS = [0.0, -0.0, 1.5, 1e300, float("inf"), float("nan"), -2.0]
_LEAVES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float", "double", "string", "binary", "bool"),
]
_MOMENT = pa.timestamp("us", "UTC")


class Maps:
    """Random fields, and MessagePack maps of them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        #: The share of values of another type.
        self.wrong = self.chance.choice([0, 0, 0, 0, 0.02])
        fields = [(f"f{n}", self._type(2)) for n in range(self.chance.randint(1, 6))]
        self.schema = pa.schema(fields)

    def _type(self, depth: int) -> pa.DataType:
        form = self.chance.randrange(10)
        if depth and form == 0:
            return pa.list_(self._type(depth - 1))
        if depth and form == 1:
            return pa.struct([(f"p{n}", self._type(depth - 1)) for n in range(self.chance.randint(1, 3))])
        if depth and form == 2:
            return pa.map_(pa.string(), self._type(depth - 1))
        return _MOMENT if form == 3 else pa.type_for_alias(self.chance.choice(_LEAVES))

    def values(self, count: int) -> list[bytes]:
        """A map's fields take their values from a few, in all combinations and any order."""
        pools = []
        for field in self.schema:
            name = msgpack.packb(field.name)
            pools.append([name + self._packed(field.type) for _ in range(_POOL)] + [b""] * self.chance.choice([0, 3]))
        pools.append([b""] * 9 + [msgpack.packb("other") + msgpack.packb(each) for each in (1, [None], {"a": {}})])
        pools.append([b""] * 9 + [msgpack.packb(each) + b"\x01" for each in (7, None, b"f0")])
        self.chance.shuffle(pools)
        rows = zip(*(self.chance.choices(pool, k=count) for pool in pools), strict=True)
        return [bytes([0x80 + sum(map(bool, each))]) + b"".join(each) for each in rows]

    def _packed(self, declared: pa.DataType) -> bytes:
        return bytes(msgpack.packb(self._value(declared), datetime=True, use_single_float=declared == pa.float32()))

    def _value(self, declared: pa.DataType) -> Any:
        chance, types = self.chance, pa.types
        if chance.random() < 0.06:
            return None
        if chance.random() < self.wrong:
            return chance.choice([1, -1, 2**63, 1.5, 2.0, "a", b"a", True, [], {}, [1], {"a": 1}, _EPOCH])
        if types.is_struct(declared):
            return {each.name: self._value(each.type) for each in declared if chance.random() < 0.9}
        if types.is_map(declared):
            return {chance.choice(_TEXTS): self._value(declared.item_type) for _ in range(chance.randrange(4))}
        if types.is_list(declared):
            return [self._value(declared.value_type) for _ in range(chance.randrange(4))]
        if types.is_timestamp(declared):
            first, last = _MICROSECONDS
            return _EPOCH + datetime.timedelta(
                microseconds=chance.choice([first, last, 0, chance.randint(first, last)])
            )
        if types.is_integer(declared):
            low = 0 if types.is_unsigned_integer(declared) else -(2 ** (declared.bit_width - 1))
            most = low + 2**declared.bit_width - 1
            return chance.choice([low, most, chance.randint(low, most), chance.randint(0, 100)])
        if types.is_floating(declared):
            found = chance.choice([*_FLOATS, chance.uniform(-1e6, 1e6)])
            return _single(found) if declared.bit_width == 32 else found
        if types.is_boolean(declared):
            return chance.random() < 0.5
        text = chance.choice(_TEXTS)
        return text if types.is_string(declared) else text.encode() + b"\xff"


def _single(value: float) -> float:
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return 1.5
    return found


class _OtherTypeError(ValueError):
    """A value that its type does not have."""


Convert = Callable[[Any], Any]


def _conversion(declared: pa.DataType) -> Convert:
    """What a value of msgpack is in a column of numbers, texts and the like. Raises
    ``_OtherTypeError``."""
    types = pa.types
    if types.is_struct(declared):
        parts = [(each.name, _conversion(each.type)) for each in declared]
        return _or_null(dict, lambda value: {name: convert(value.get(name)) for name, convert in parts})
    if types.is_map(declared):
        of_key, of_item = _conversion(declared.key_type), _conversion(declared.item_type)
        return _or_null(dict, lambda value: [(of_key(key), of_item(item)) for key, item in value.items()])
    if types.is_list(declared):
        one = _conversion(declared.value_type)
        return _or_null(list, lambda value: [one(each) for each in value])
    if types.is_timestamp(declared):
        return _or_null(datetime.datetime, lambda value: (value - _EPOCH) // datetime.timedelta(microseconds=1))
    if types.is_integer(declared):
        low = 0 if types.is_unsigned_integer(declared) else -(2 ** (declared.bit_width - 1))
        return _or_null((int, float), lambda value: _whole(value, low, low + 2**declared.bit_width))
    if types.is_string(declared) or types.is_binary(declared):
        return _or_null((str, bytes), _text if types.is_string(declared) else _binary)
    if types.is_floating(declared):
        single = declared == pa.float32()
        return _or_null((int, float), _checked_single if single else lambda value: _exact(value, 2**53))
    return _or_null(bool, lambda value: value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value, "utf-8")


def _binary(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(value, "utf-8")


def _checked_single(value: Any) -> Any:
    if not math.isinf(value):
        struct.pack("<f", value)  # raises OverflowError, which "f" does not
    return _exact(value, 2**24)


def _exact(value: Any, most: int) -> Any:
    if isinstance(value, int) and abs(value) > most:
        raise _OtherTypeError(f"{value} is not exactly a float")
    return value


def _whole(value: Any, low: int, end: int) -> int:
    if value != value or int(value) != value or not low <= value < end:
        raise _OtherTypeError(f"{value} is no integer of the type")
    return int(value)


def _or_null(kind: Any, convert: Convert) -> Convert:
    def converted(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _OtherTypeError(f"{value!r:.100} is not of {kind}")
        return convert(value)

    return converted


class Reference:
    """Rows as msgpack reads them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._conversions = {each.name: _conversion(each.type) for each in schema}
        self._types = {each.name: as_numbers(each.type) for each in schema}

    def row(self, value: bytes) -> dict[str, Any]:
        """Raises ``ValueError``."""
        try:
            found = msgpack.unpackb(value, timestamp=3, strict_map_key=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, msgpack refuses the value
            raise ValueError(repr(error)) from None
        if not isinstance(found, dict):
            raise _OtherTypeError("no map")
        return {name: convert(found.get(name)) for name, convert in self._conversions.items()}

    def columns(self, rows: Sequence[dict[str, Any]]) -> list[pa.Array]:
        return [pa.array([row[name] for row in rows], kind) for name, kind in self._types.items()]


def compare(seed: int, count: int = VALUES) -> Counts:
    """Maps of one schema. Raises ``Difference``."""
    maps = Maps(seed)
    codec, reference = MessagePackCodec(maps.schema), Reference(maps.schema)
    values = maps.values(count)
    if maps.wrong:
        values = [other_bytes(maps.chance, each) if maps.chance.random() < 0.01 else each for each in values]
    batch, bad = codec.decode_good(values)
    rows, good, refused = [], [], {}
    for place, value in enumerate(values):
        try:
            rows.append(reference.row(value))
        except (ValueError, OverflowError) as error:
            refused[place] = str(error)
            continue
        good.append(value)
    check_verdicts({each.index: each.reason for each in bad}, refused, values, maps.schema)
    counts: Counts = collections.Counter(values=count, refused=len(refused))
    if rows:
        check_rows(batch, reference.columns(rows), good, maps.schema)
        written = codec.encode(batch).to_pylist()
        check_rows(batch, reference.columns([reference.row(each) for each in written]), written, maps.schema)
        check_own(codec, batch, written, maps.schema)
    return counts


if __name__ == "__main__":
    go_through(__doc__, compare)
