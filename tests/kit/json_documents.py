"""JSON documents of a few schemas, most of them as they should be, and the others nearly."""

from __future__ import annotations

import json
import random

import pyarrow as pa

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_POINT = pa.struct([("x", pa.int64()), ("y", pa.float64()), ("word", pa.string())])
SCHEMAS = {
    "numbers": pa.schema([*((name, name) for name in INTEGERS), ("float", pa.float32()), ("double", pa.float64())]),
    "plain": pa.schema([("word", pa.string()), ("amount", pa.int64()), ("ok", pa.bool_()), ("double", pa.float64())]),
    "nested": pa.schema(
        [
            ("word", pa.string()),
            ("point", _POINT),
            ("words", pa.list_(pa.string())),
            ("points", pa.list_(pa.struct([("point", _POINT), ("list", pa.list_(pa.list_(pa.int32())))]))),
            ("sure", pa.list_(pa.field("item", pa.bool_(), nullable=False))),
        ]
    ),
    "required": pa.schema([pa.field("word", pa.string(), nullable=False), ("amount", pa.int64())]),
    "required inside": pa.schema(
        [
            pa.field("word", pa.struct([pa.field("text", pa.string(), nullable=False), ("n", pa.int64())])),
            ("amount", pa.list_(pa.struct([pa.field("n", pa.int64(), nullable=False)]))),
        ]
    ),
}

#: Numbers at the limits of types and parsers.
_LIMITS = """0 -0 1 -1 7 127 128 -128 -129 255 256 32767 32768 65535 65536 2147483647 2147483648 -2147483648 4294967295
4294967296 9007199254740993 999999999999999999 1000000000000000000 9223372036854775807 9223372036854775808
-9223372036854775808 -9223372036854775809 18446744073709551615 18446744073709551616 123456789012345678901234567890 0.0
-0.0 1.0 1.5 -2.25 0.1 0.30000000000000004 1e3 1E3 1e+3 1e-3 1e05 1e22 1e23 1e99 1e100 1e-99 1e-100 1e308 1e309 1e400
0e400 0e99 1e-400 1.7976931348623157e308 1.7976931348623159e308 5e-324 2e-324 2.2250738585072011e-308 3.4028235e38
3.4028236e38 3.5e38 1e39 1e-45 1.4e-45 7e-46 1.17549435e-38 16777217 8388608.5 0.500000029802322387695 01 1. .5 - +1 1e
1e+ 0x10 1_0 NaN Infinity -Infinity"""
NUMBERS = _LIMITS.split()
NUMBERS += ["9" * count for count in (19, 20, 64, 65, 308, 309, 400)]
NUMBERS += ["0." + "1" * count for count in (17, 61, 62, 63, 300)]
_TEXTS = [
    "",
    "a",
    "word",
    "ä",
    "\U0001f600",
    "\0",
    "\x1f",
    "\x7f",
    '"',
    "\\",
    "/",
    "\u2028",
    "x" * 15,
    "y" * 40,
    "2026-01-02",
]
_TEXTS += ["12e4567", "true", "null", "{}", "a\nb", "\ufeff", "\uffff"]
_TOKENS = r"""{ } [ ] , : " \ / null true false 0 - . e E 1 ": ," {} [] "": \" \\ /**/ // \u0000 \ud83d \ude00 \ud83d\ude00
\u00e4 \u12 \x \n \u0077ord "\u0077ord":1,"""
#: What a mutation puts somewhere.
_PIECES = [
    *(piece.encode() for piece in _TOKENS.split()),
    *(b" ", b"\n", b"\r", b"\t", b"\0", b"\x0b", b"\x0c", b"\x7f", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b'"word":"a",', b'"word":null,', b'"amount":1,', b'"x":1e400,', b'"x":[1e400],', b'"x":{"x":1,"x":2},'),
    *(number.encode() for number in NUMBERS),
]


class Documents:
    """Documents of a schema, most of them as they should be."""

    def __init__(self, seed: int, schema: pa.Schema) -> None:
        self._random = random.Random(seed)
        self._schema = schema

    def usual(self) -> bytes:
        return self._object(list(self._schema)).encode("utf-8", "surrogatepass")

    def mutated(self) -> bytes:
        value = self.usual()
        for _ in range(self._random.randint(1, 3)):
            value = self._mutation(value)
        return value

    def _mutation(self, value: bytes) -> bytes:
        begin, end = sorted(self._random.randint(0, len(value)) for _ in range(2))
        end = min(end, begin + self._random.choice([1, 1, 2, 8, 80]))
        match self._random.randrange(6):
            case 0:
                return value[:begin] + value[end:]
            case 1:
                return value[:begin] + bytes([self._random.randrange(256)]) + value[begin + 1 :]
            case 2:
                return value[:begin] + value[begin:end] * 2 + value[end:]
            case 3:
                other = self.usual()
                return value[:begin] + other[self._random.randint(0, len(other)) :]
            case _:
                return value[:begin] + self._random.choice(_PIECES) + value[self._random.choice([begin, end]) :]

    def _object(self, fields: list[pa.Field]) -> str:
        chance = self._random.random
        members = [(each.name, self._value(each.type)) for each in fields if chance() > 0.1]
        while chance() < 0.3:
            members.append((self._random.choice(["x", "id", "wor", "words2", "", "ä"]), self._unknown(0)))
        if chance() < 0.3:
            self._random.shuffle(members)
        if members and chance() < 0.02:
            members.append(self._random.choice(members))
        comma, colon = (",", ":") if chance() < 0.8 else (self._blank() + "," + self._blank(), self._blank() + ":")
        return "{" + comma.join(f"{self._key(name)}{colon}{value}" for name, value in members) + "}"

    def _value(self, declared: pa.DataType) -> str:
        chance = self._random.random
        if chance() < 0.06:
            return "null"
        if chance() < 0.01:
            return self._unknown(0)
        if pa.types.is_struct(declared):
            return self._object(list(declared))
        if pa.types.is_list(declared):
            return "[" + ",".join(self._value(declared.value_type) for _ in range(self._random.randrange(4))) + "]"
        if pa.types.is_boolean(declared):
            return self._random.choice(["true", "false"])
        if pa.types.is_string(declared):
            return self._text(self._random.choice(_TEXTS))
        if chance() < 0.05:
            return self._random.choice(NUMBERS)
        if pa.types.is_floating(declared):
            return repr(
                self._random.choice([self._random.uniform(-1e3, 1e3), self._random.random() * 10 ** self._exponent()])
            )
        bits = self._random.randint(1, declared.bit_width)
        low = 0 if pa.types.is_unsigned_integer(declared) else -(2 ** (bits - 1))
        return str(self._random.randint(low, low + 2**bits - 1))

    def _exponent(self) -> int:
        return self._random.choice([self._random.randint(-30, 30), self._random.randint(-300, 300)])

    def _unknown(self, depth: int) -> str:
        kind = self._random.randrange(7 if depth < 4 else 5)
        if kind < 2:
            return self._text(self._random.choice(_TEXTS))
        if kind == 2:
            return self._random.choice(NUMBERS) if self._random.random() < 0.2 else str(self._random.randrange(10**6))
        if kind in (3, 4):
            return self._random.choice(["null", "true", "false", "[]", "{}", "0"])
        parts = [self._unknown(depth + 1) for _ in range(self._random.randrange(3))]
        if kind == 5:
            return "[" + ",".join(parts) + "]"
        return "{" + ",".join(f"{self._text(self._random.choice('abw'))}:{part}" for part in parts) + "}"

    def _key(self, name: str) -> str:
        return (
            self._text(name)
            if self._random.random() > 0.01
            else '"' + "".join(f"\\u{ord(each):04x}" for each in name) + '"'
        )

    def _text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=self._random.random() < 0.1)

    def _blank(self) -> str:
        return self._random.choice(["", " ", "\n", "\t \r", "  "])
