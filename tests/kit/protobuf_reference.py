"""Compares the Protobuf codec with google.protobuf, many values of each message type at a time.

``python -m tests.kit.protobuf_reference --values 10000000 --seed 1``: the columns of random
messages are what the library's interface says field by field, the codec refuses what the library
refuses, and the library reads what the codec encodes as the same rows.

The codec parses with the library too, so the parser is compared with itself; what is compared is
presence, defaults, nesting, offsets of lists and maps, chunks, bounds, and the writer. Values are
pieces of messages one after the other: fields in any order, more than once, packed and not, fields
that the type does not have, and damaged bytes.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from spouts import ProtobufCodec
from tests.kit.comparing import as_numbers, check_own, check_rows, check_verdicts, go_through
from tests.kit.fuzzing import Counts, other_bytes
from tests.kit.protobuf import KINDS, NUMBERS, classes, field, file_of, map_of, message, set_of

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

VALUES = 4_000
#: Different pieces of each field.
_POOL = 20
_ENUM = ".t.Color"
#: The kinds of which many can be packed.
_PACKED = (*NUMBERS, "bool", "double", "float", _ENUM)
_WRAPPED = {kind: kind for kind in ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")}
_IMPORTED = [f"google/protobuf/{each}.proto" for each in ("timestamp", "duration", "wrappers", "struct")]
_KEYS = (*NUMBERS, "bool", "string")
_SECONDS = (-62_135_596_800, 253_402_300_799)
_DURATION_S = 315_576_000_000
_TEXTS = ["", "a", "wörd", "\U0001f600", "\0", "x" * 70]
Make = Callable[[], Any]


class Messages:
    """A random type of messages, and pieces of their bytes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        #: Whether some values are damaged, or none that the library takes.
        self.damages = self.chance.random() < 0.3
        self._proto3 = self.chance.random() < 0.7
        self._types: list[dict[str, Any]] = []
        name, self._makes = self._message(2)
        self.name = f"t.{name}"
        self._required = [each["name"] for each in self._types[-1]["field"] if each["label"] == "LABEL_REQUIRED"]
        self.file = self._file(packed=True)
        self.type = classes(self.file)[self.name]

    def values(self, count: int) -> list[bytes]:
        others = classes(self._file(packed=False))[self.name]
        pools = {
            name: [self._piece(self.chance.choice([self.type, others]), name, make) for _ in range(_POOL)]
            for name, make in self._makes.items()
        }
        needed = [pools[name] for name in self._required]
        pieces = [piece for pool in pools.values() for piece in pool]
        pieces += [self._unknown() for _ in range(_POOL // 2)] + [self._plain_zero() for _ in range(_POOL // 2)]
        most = len(pools) + 3
        return [
            b"".join([*map(self.chance.choice, needed), *self.chance.choices(pieces, k=self.chance.randrange(most))])
            for _ in range(count)
        ]

    # --- types -----------------------------------------------------------------------------------

    def _file(self, *, packed: bool) -> Any:
        """``packed``: repeated numbers as the type says, or the other way round."""
        types = json.loads(json.dumps(self._types))
        for each in types:
            for its in each["field"]:
                if "packed" in its.get("options", {}):
                    its["options"]["packed"] ^= not packed
        enum = {"name": "Color", "value": [{"name": name, "number": n} for name, n in (("A", 0), ("B", 5), ("C", -1))]}
        return file_of(*types, syntax="proto3" if self._proto3 else "proto2", enumType=[enum], dependency=_IMPORTED)

    def _message(self, depth: int) -> tuple[str, dict[str, Make]]:
        """A new type: its name, and what makes a value of each field."""
        made = message("")
        made["nestedType"], made["oneofDecl"] = [], []
        makes: dict[str, Make] = {}
        maybe = []
        if self.chance.random() < 0.3:
            made["oneofDecl"].append({"name": "one"})
            for number in range(100, 100 + self.chance.randint(1, 3)):
                self._add(made, makes, number, self._one(depth), oneofIndex=0)
        for number in self.chance.sample(
            [*range(1, 30), 31_000, 536_870_911], self.chance.randint(1, 6 if depth == 2 else 3)
        ):
            form = self.chance.random()
            if form < 0.12:
                self._add_map(made, makes, number, depth)
                continue
            one = self._one(depth)
            if form < 0.4:
                options = {"options": {"packed": self.chance.random() < 0.5}} if one[0] in _PACKED else {}
                self._add(made, makes, number, (one[0], self._many(one[1])), label="repeated", **options)
            elif self._proto3:
                self._add(made, makes, number, one)
                if form < 0.7:
                    maybe.append(made["field"][-1])
            else:
                self._add(made, makes, number, one, **self._of_proto2(one[0], depth))
        for each in maybe:  # after the others, as the descriptor wants them
            each.update(proto3Optional=True, oneofIndex=len(made["oneofDecl"]))
            made["oneofDecl"].append({"name": f"_{each['name']}"})
        made["name"] = f"M{len(self._types)}"
        for each in made["field"]:
            if each.get("typeName") == ".t.":
                each["typeName"] = f".t.{made['name']}"
            elif each.get("typeName", "").endswith("Entry"):
                each["typeName"] = f".t.{made['name']}{each['typeName']}"
        self._types.append(made)
        return made["name"], makes

    def _add(
        self, made: dict[str, Any], makes: dict[str, Make], number: int, one: tuple[str, Make], **more: Any
    ) -> None:
        kind, make = one
        name = f"f{number}"
        made["field"].append(_field(name, number, kind, **more))
        makes[name] = make

    def _add_map(self, made: dict[str, Any], makes: dict[str, Make], number: int, depth: int) -> None:
        key, (kind, make) = self.chance.choice(_KEYS), self._one(min(depth, 1), alone=True)
        entry = map_of(f"F{number}Entry", key, "int32")
        entry["field"][1] = _field("value", 2, kind)
        made["nestedType"].append(entry)
        made["field"].append(_field(f"f{number}", number, f".F{number}Entry", label="repeated"))
        makes[f"f{number}"] = lambda: {self._scalar(key): make() for _ in range(self.chance.randrange(4))}

    def _many(self, make: Make) -> Make:
        return lambda: [make() for _ in range(self.chance.choice([0, 1, 1, 2, 5]))]

    def _of_proto2(self, kind: str, depth: int) -> dict[str, Any]:
        if depth == 2 and self.chance.random() < 0.15:
            return {"label": "required"}
        if kind in NUMBERS and self.chance.random() < 0.3:
            return {"defaultValue": "7"}
        return {"defaultValue": "B"} if kind == _ENUM and self.chance.random() < 0.3 else {}

    def _one(self, depth: int, *, alone: bool = False) -> tuple[str, Make]:
        """A kind of field, and what makes its values. ``alone``: not the message around it."""
        chance = self.chance
        form = chance.randrange(20)
        if form < 10:
            kind = chance.choice(KINDS)
            return kind, lambda: self._scalar(kind)
        if form < 12:
            known = [0, 5, -1]
            return _ENUM, lambda: chance.choice(known if chance.random() < 0.9 or not self._proto3 else [7, -(2**31)])
        if form < 14:
            return ".google.protobuf.Timestamp", lambda: self._moment(*_SECONDS)
        if form == 14:
            return ".google.protobuf.Duration", self._durations()
        if form == 15:
            wrapped = chance.choice([*_WRAPPED])
            title = wrapped.replace("ui", "UI").capitalize() if wrapped[0] != "u" else f"UI{wrapped[2:]}"
            return f".google.protobuf.{title}Value", lambda: {"value": self._scalar(wrapped)}
        if form == 16 and chance.random() < 0.2:  # its JSON form takes long
            return ".google.protobuf.Struct", self._json
        if form == 17 and not alone:
            return ".t.", dict  # itself
        if depth == 0:
            return "int32", lambda: self._scalar("int32")
        name, makes = self._message(depth - 1)
        return f".t.{name}", lambda: self._of_fields(makes)

    # --- values ----------------------------------------------------------------------------------

    def _of_fields(self, makes: dict[str, Make]) -> dict[str, Any]:
        names = self.chance.sample([*makes], self.chance.randint(0, len(makes)))
        return {name: makes[name]() for name in names}

    def _scalar(self, kind: str) -> Any:
        chance = self.chance
        if kind in NUMBERS:
            bits = 32 if kind.endswith("32") else 64
            low = 0 if kind.startswith(("u", "fixed")) else -(2 ** (bits - 1))
            most = low + 2**bits - 1
            return chance.choice([low, most, 0, 1, chance.randint(low, most), chance.randint(max(low, -100), 100)])
        if kind == "bool":
            return chance.random() < 0.5
        if kind == "string":
            return chance.choice(_TEXTS)
        if kind == "bytes":
            return chance.randbytes(chance.choice([0, 1, 3, 40]))
        return chance.choice([0.0, -0.0, 1.5, float("inf"), float("nan"), chance.uniform(-1e9, 1e9), 1e-300])

    def _moment(self, first: int, last: int) -> dict[str, int]:
        seconds = self.chance.choice(
            [first, last, 0, self.chance.randint(first, last), self.chance.randint(first, last)]
        )
        if self.damages and self.chance.random() < 0.01:
            seconds = self.chance.choice([first - 1, last + 1, 2**63 - 1])
        return {
            "seconds": seconds,
            "nanos": self.chance.choice([0, 0, 1_000, 999_999_999, self.chance.randrange(10**9)]),
        }

    def _durations(self) -> Make:
        """Of one sign, so that seconds and nanoseconds of two pieces are a Duration together."""
        sign = self.chance.choice([1, -1])

        def duration() -> dict[str, int]:
            found = self._moment(0, _DURATION_S)
            wrong = self.damages and self.chance.random() < 0.01
            return {"seconds": sign * found["seconds"], "nanos": (-sign if wrong else sign) * found["nanos"]}

        return duration

    def _json(self) -> dict[str, Any]:
        value: dict[str, Any] = self.chance.choice(
            [
                {"number_value": 1.5},
                {"number_value": -0.0},
                {"string_value": "ä\0"},
                {"bool_value": True},
                {"null_value": 0},
                {"list_value": {"values": [{"number_value": 1e300}, {"struct_value": {}}]}},
            ]
        )
        if self.damages and self.chance.random() < 0.01:
            value = {"number_value": float("nan")}
        return {"fields": {self.chance.choice(_TEXTS): value}}

    # --- pieces ----------------------------------------------------------------------------------

    def _piece(self, its: Any, name: str, make: Make) -> bytes:
        made: bytes = its(**{name: make()}).SerializePartialToString()
        return made

    def _unknown(self) -> bytes:
        """A field that the type does not have, of any form on the wire."""
        number = self.chance.choice([200, 30_000, 536_870_910])
        group = _tag(number, 3) + _tag(9, 0) + b"\x01" + _tag(number, 4)
        return self.chance.choice(
            [
                _tag(number, 0) + b"\xff" * 9 + b"\x01",
                _tag(number, 1) + self.chance.randbytes(8),
                _tag(number, 2) + b"\x03abc",
                _tag(number, 5) + self.chance.randbytes(4),
                group,
            ]
        )

    def _plain_zero(self) -> bytes:
        """A number of a field as the library would not write it: zero, in more bytes, too large for
        the field, or a field of another form."""
        number = self.chance.choice(self._types[-1]["field"])["number"]
        return _tag(number, 0) + self.chance.choice(
            [b"\0", b"\x80\0", b"\x02", b"\xff" * 9 + b"\x01", b"\x80" * 4 + b"\x70"]
        )


def _field(name: str, number: int, kind: str, **more: Any) -> dict[str, Any]:
    found = field(name, number, kind, **more)
    return {**found, "type": "TYPE_ENUM"} if kind == _ENUM else found


def _tag(number: int, form: int) -> bytes:
    left, out = number << 3 | form, bytearray()
    while left > 0x7F:
        out.append((left & 0x7F) | 0x80)
        left >>= 7
    return bytes([*out, left])


class Reference:
    """What the library's interface says about messages, as rows."""

    def __init__(self, its: Any) -> None:
        self.type = its
        self._gets = _gets(its.DESCRIPTOR, (its.DESCRIPTOR.full_name,))

    def row(self, value: bytes) -> tuple[Any, dict[str, Any]]:
        """The message and its row. Raises ``ValueError`` for what the library refuses."""
        try:
            found = self.type.FromString(value)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        if not found.IsInitialized():
            raise ValueError("a required field is absent")
        return found, {name: get(found) for name, get in self._gets.items()}

    def columns(self, rows: Sequence[dict[str, Any]], target: pa.Schema) -> list[pa.Array]:
        return [pa.array([row[each.name] for row in rows], as_numbers(each.type)) for each in target]


Get = Callable[[Any], Any]


def _gets(its: Descriptor, within: tuple[str, ...]) -> dict[str, Get]:
    return {each.name: _get(each, within) for each in its.fields}


def _get(its: FieldDescriptor, within: tuple[str, ...]) -> Get:
    name = its.name
    if its.message_type is not None and its.message_type.GetOptions().map_entry:
        one = _value(its.message_type.fields_by_name["value"], within)
        return lambda found: [(key, one(value)) for key, value in sorted(getattr(found, name).items())]
    one = _value(its, within)
    if its.is_repeated:
        return lambda found: [one(each) for each in getattr(found, name)]
    if its.has_presence and (its.message_type is not None or not its.has_default_value):
        return lambda found: one(getattr(found, name)) if found.HasField(name) else None
    return lambda found: one(getattr(found, name))


def _value(its: FieldDescriptor, within: tuple[str, ...]) -> Get:
    if its.enum_type is not None:
        names = {each.number: each.name for each in its.enum_type.values}
        return lambda value: names.get(value, str(value))
    kind = its.message_type
    if kind is None:
        return _text if its.type == FieldDescriptor.TYPE_STRING else lambda value: value
    if kind.full_name in ("google.protobuf.Timestamp", "google.protobuf.Duration"):
        return _microseconds
    if kind.full_name == "google.protobuf.Struct":
        return _as_json
    if kind.full_name.startswith("google.protobuf."):
        return lambda value: value.value
    if kind.full_name in within or not kind.fields:
        return lambda value: value.SerializeToString(deterministic=True)
    gets = _gets(kind, (*within, kind.full_name))
    return lambda value: {name: get(value) for name, get in gets.items()}


def _text(value: str | bytes) -> str:
    """The library gives bytes where a text of proto2 is not UTF-8."""
    if isinstance(value, bytes):
        raise ValueError("text that is not UTF-8")
    return value


def _microseconds(value: Any) -> int:
    value.ToJsonString()  # raises ValueError for one that has no JSON form
    return int(value.ToMicroseconds())


def _as_json(value: Any) -> str:
    try:
        return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, sort_keys=True)
    except json_format.SerializeToJsonError as error:
        raise ValueError(str(error)) from None


def compare(seed: int, count: int = VALUES) -> Counts:
    """Values of one type of messages. Raises ``Difference``."""
    messages = Messages(seed)
    codec, reference = ProtobufCodec(messages.name, set_of(messages.file)), Reference(messages.type)
    chance = messages.chance
    values = messages.values(count)
    if messages.damages:
        values = [other_bytes(chance, each) if chance.random() < 0.05 else each for each in values]
    batch, bad = codec.decode_good(values)
    found, rows, good, refused = [], [], [], {}
    for place, value in enumerate(values):
        try:
            its, row = reference.row(value)
        except ValueError as error:
            refused[place] = str(error)
            continue
        found.append(its)
        rows.append(row)
        good.append(value)
    check_verdicts({each.index: each.reason for each in bad}, refused, values, messages.file)
    counts: Counts = collections.Counter(values=count, refused=len(refused))
    if rows:
        check_rows(batch, reference.columns(rows, batch.schema), good, messages.file)
        counts += _compare_encoding(codec, reference, batch, found, messages.file)
    return counts


def _compare_encoding(
    codec: ProtobufCodec, reference: Reference, batch: pa.RecordBatch, found: Sequence[Any], schema: Any
) -> Counts:
    """What the codec makes of its rows is read as them. Where it makes what the library makes of
    the same messages, it is."""
    for each in found:
        each.DiscardUnknownFields()
    written = [each.SerializeToString(deterministic=True) for each in found]
    encoded = codec.encode(batch).to_pylist()
    places = [place for place, (one, other) in enumerate(zip(encoded, written, strict=True)) if one != other]
    if places:
        others = [encoded[place] for place in places]
        columns = reference.columns([reference.row(each)[1] for each in others], batch.schema)
        rows = batch.take(pa.array(places))
        check_rows(rows, columns, others, schema)
        check_own(codec, rows, others, schema)
    return collections.Counter({"encoded in the same bytes": len(found) - len(places), "in others": len(places)})


if __name__ == "__main__":
    go_through(__doc__, compare)
