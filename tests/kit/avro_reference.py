"""Compares the Avro codec with fastavro, many values of each schema at a time.

``python -m tests.kit.avro_reference --values 10000000 --seed 1``: fastavro's reading of random
bytes of a random schema gives the codec's rows, and fastavro reads what the codec encodes as the
same rows. Of damaged bytes, the codec refuses more than fastavro, which ignores bytes; what it does
not refuse, both read alike. ``tests.kit.avro_java`` compares refusals, and schemas that resolve.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Sequence
from typing import Any

import fastavro
import pyarrow as pa

from spouts import AvroCodec
from tests.kit.avro_pairs import Pairs
from tests.kit.comparing import Difference, as_numbers, check_own, check_rows, check_verdicts, go_through, with_times
from tests.kit.fuzzing import Counts

VALUES = 4_000
#: Different values of each field.
_POOL = 30
#: The years 1 to 9999, one day less at both ends, as each unit counts them from 1970 on.
_DAYS = (-719_161, 2_932_895)
_UNITS = {"millis": 10**3, "micros": 10**6}


class Schemas(Pairs):
    """Random schemas with all logical types that fastavro reads, and bytes of their values.

    ``damages``: a share of the values is damaged, and numbers may be any; fastavro reads times as
    numbers then. Otherwise Python can hold each time.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, plain=0.4)
        self.damages = self.chance.random() < 0.3
        self._flat = False

    def schema(self) -> Any:
        writer, _ = self.pair()
        return self._type(2) if self.chance.random() < 0.05 else writer

    def values(self, schema: Any, count: int) -> list[bytes]:
        """A record's fields take their values from a few, in all combinations."""
        parts = [each["type"] for each in schema["fields"]] if _is_record(schema) else [schema]
        pools = [[self.value(each) for _ in range(_POOL)] for each in parts]
        return [b"".join(each) for each in zip(*(self.chance.choices(pool, k=count) for pool in pools), strict=True)]

    def _record(self, depth: int) -> dict[str, Any]:
        self._flat = self._flat or (depth == 0 and self._names == 0)
        return super()._record(depth)

    def _primitive(self) -> Any:
        form = 1.0 if self._flat else self.chance.random()  # records of plain types are read together
        if form < 0.06:
            return {"type": "long", "logicalType": self.chance.choice(["timestamp-millis", "local-timestamp-millis"])}
        if form < 0.14:
            fixed = self.chance.random() < 0.5
            size = self.chance.choice([1, 4, 9, 16, 20, 32])
            precision = self.chance.randint(1, int((8 * size - 1) * 0.30102))
            decimal = {"logicalType": "decimal", "precision": precision, "scale": self.chance.randint(0, precision)}
            return (
                {"type": "fixed", **self._name("D"), "size": size, **decimal} if fixed else {"type": "bytes", **decimal}
            )
        return super()._primitive()

    def value(self, schema: Any) -> bytes:
        if isinstance(schema, dict) and schema["type"] == "fixed" and "precision" in schema:
            return self._unscaled(schema).to_bytes(schema["size"], "big", signed=True)
        return super().value(schema)

    def _bytes(self, kind: str, schema: Any) -> bytes:
        if not isinstance(schema, dict) or "precision" not in schema:
            return super()._bytes(kind, schema)
        number = self._unscaled(schema)
        least = (number if number >= 0 else ~number).bit_length() // 8 + 1
        return number.to_bytes(least + self.chance.choice([0, 0, 0, 1]), "big", signed=True)

    def _unscaled(self, schema: Any) -> int:
        digits = self.chance.randint(1, schema["precision"])
        return self.chance.choice(
            [0, 10**digits - 1, 1 - 10**digits, self.chance.randrange(1 - 10**digits, 10**digits)]
        )

    def _number(self, kind: str, schema: Any) -> int:
        logical = schema.get("logicalType", "") if isinstance(schema, dict) else ""
        if not logical or self.damages or logical.endswith("nanos"):
            return super()._number(kind, schema)
        if logical == "date":
            return self.chance.choice([*_DAYS, 0, self.chance.randint(*_DAYS)])
        unit = _UNITS[logical.rpartition("-")[2]]
        if logical.startswith("time-"):
            return self.chance.choice([0, 86_400 * unit - 1, self.chance.randrange(86_400 * unit)])
        first, last = (each * 86_400 * unit for each in _DAYS)
        return self.chance.choice([first, -1, 0, last, self.chance.randint(first, last)])


def _is_record(schema: Any) -> bool:
    return isinstance(schema, dict) and schema["type"] == "record"


class Reference:
    """fastavro, with one schema. ``times_as_numbers``: it reads times as the numbers that they
    are."""

    def __init__(self, schema: Any, *, times_as_numbers: bool) -> None:
        self._schema: Any = fastavro.parse_schema(_without_times(schema) if times_as_numbers else schema)
        self._single = not _is_record(schema)
        self._numbers = times_as_numbers

    def row(self, value: bytes) -> Any:
        """Raises ``ValueError`` for bytes after the value, and whatever fastavro raises."""
        stream = io.BytesIO(value)
        found = fastavro.schemaless_reader(stream, self._schema, None)
        if stream.tell() != len(value):
            raise ValueError("bytes are left")
        return {"value": found} if self._single else found

    def columns(self, rows: Sequence[Any], target: pa.Schema) -> list[pa.Array]:
        types = [as_numbers(each.type) if self._numbers else _without_nanos(each.type) for each in target]
        return [pa.array([row[each.name] for row in rows], kind) for each, kind in zip(target, types, strict=True)]


def _without_times(schema: Any) -> Any:
    """The schema with decimals as its only logical types."""
    if isinstance(schema, list):
        return [_without_times(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = schema["type"] if isinstance(schema.get("type"), str) else ""
    if plain in ("int", "long"):
        return plain
    return {
        key: [{**field, "type": _without_times(field["type"])} for field in each]
        if key == "fields"
        else _without_times(each)
        if key in ("items", "values")
        else each
        for key, each in schema.items()
    }


def _without_nanos(declared: pa.DataType) -> pa.DataType:
    """The type with integers in place of nanoseconds, which fastavro does not know."""
    return with_times(declared, lambda each: pa.int64() if getattr(each, "unit", "") == "ns" else each)


def compare(seed: int, count: int = VALUES) -> Counts:
    """Values of one schema. Raises ``Difference``."""
    schemas = Schemas(seed)
    schema = schemas.schema()
    codec, reference = AvroCodec(schema), Reference(schema, times_as_numbers=schemas.damages)
    values = schemas.values(schema, count)
    if schemas.damages:
        values = [schemas.damaged(each) if schemas.chance.random() < 0.1 else each for each in values]
    together = codec._decoder is not None and codec._decoder._bulk is not None and not schemas.damages
    counts: Counts = collections.Counter({"values": count, "read together": count * together})
    batch, bad = codec.decode_good(values)
    refused = {each.index: each.reason for each in bad}
    good = [value for place, value in enumerate(values) if place not in refused]
    counts["refused"] = len(bad)
    if not schemas.damages:
        check_verdicts(refused, {}, values, schema)
    if not good:
        return counts
    rows = []
    for value in good:
        try:
            rows.append(reference.row(value))
        except Exception as error:  # noqa: BLE001 - whatever it is, fastavro refuses the value
            raise Difference(f"schema {schema}\nvalue {value!r}\nthe codec: a row\nfastavro: {error!r}") from None
    check_rows(batch, reference.columns(rows, batch.schema), good, schema)
    counts += _compare_encoding(codec, reference, batch, good, schema)
    return counts


def _compare_encoding(
    codec: AvroCodec, reference: Reference, batch: pa.RecordBatch, values: Sequence[bytes], schema: Any
) -> Counts:
    """What the codec makes of its rows is read as them. Where it makes the bytes that they were
    read from, it is."""
    encoded = codec.encode(batch).to_pylist()
    places = [place for place, (one, other) in enumerate(zip(encoded, values, strict=True)) if one != other]
    if places:
        others = [encoded[place] for place in places]
        columns = reference.columns([reference.row(each) for each in others], batch.schema)
        found = batch.take(pa.array(places))
        check_rows(found, columns, others, schema)
        check_own(codec, found, others, schema)
    return collections.Counter({"encoded in the same bytes": len(values) - len(places), "in others": len(places)})


if __name__ == "__main__":
    go_through(__doc__, compare)
