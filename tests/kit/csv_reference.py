"""Compares the CSV codec with Python's csv module, many rows of each schema at a time.

``python -m tests.kit.csv_reference --values 10000000 --seed 1``: the cells that ``csv`` reads, as
``int``, ``float``, ``Decimal`` and ``fromisoformat`` understand them, are the codec's rows; what
they do not understand is a bad record; ``csv`` reads what the codec encodes as the same rows.

The codec finds the cells with ``csv`` too; Arrow gives them their meaning.
"""

from __future__ import annotations

import collections
import csv
import datetime
import decimal
import io
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from spouts import CsvCodec
from tests.kit.comparing import check_own, check_rows, check_verdicts, go_through
from tests.kit.fuzzing import Counts

VALUES = 4_000
#: Different values of each field.
_POOL = 30
_TEXTS = [
    "a",
    "wörd",
    "\U0001f600",
    "a b",
    " x ",
    'say "hi"',
    "two\nlines",
    "\r\n",
    "a,b;c\td|e",
    "x" * 40,
    "NULL",
    "0",
]
#: Cells that are values of few types or none.
_OTHERS = ["x", "1.5", "--1", "1e", "0x10", "TRUE", "2026-13-01", "24:00:00", "1 2", "99999999999999999999", "nul"]
_KINDS: list[pa.DataType] = [
    *(pa.type_for_alias(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(pa.float64(), pa.string(), pa.string(), pa.bool_(), pa.decimal128(20, 4), pa.date32(), pa.time64("us")),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ms")),
]
#: Of the years 1 to 9999.
_DAYS = 3_652_059
_DAY_US = 86_400 * 10**6


class Rows:
    """Random fields, and rows of CSV."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.wrong = self.chance.choice([0, 0, 0, 0, 0, 0.01])
        self.schema = pa.schema([(f"f{n}", self.chance.choice(_KINDS)) for n in range(self.chance.randint(1, 6))])
        self.delimiter, self.quote = self.chance.choice([",", ",", ";", "\t", "|"]), self.chance.choice(['"', '"', "'"])
        self.null = self.chance.choice(["", "", "NULL", "\\N"])

    def values(self, count: int) -> list[bytes]:
        """The cells are from a few, in all combinations."""
        pools = [[self._cell(each.type) for _ in range(_POOL)] for each in self.schema]
        if self.wrong:
            pools[-1] = [cell + self.delimiter * (self.chance.random() < self.wrong) for cell in pools[-1]]
        rows = zip(*(self.chance.choices(pool, k=count) for pool in pools), strict=True)
        return [self.delimiter.join(each).encode() for each in rows]

    def _cell(self, declared: pa.DataType) -> str:
        if self.chance.random() < 0.1:
            return self.null
        text = self.chance.choice(_OTHERS) if self.chance.random() < self.wrong else self._text(declared)
        special = any(each in text for each in (self.delimiter, self.quote, "\r", "\n"))
        if special or self.chance.random() < 0.1:
            return f"{self.quote}{text.replace(self.quote, self.quote * 2)}{self.quote}"
        return text

    def _text(self, declared: pa.DataType) -> str:
        chance, types = self.chance, pa.types
        if types.is_integer(declared):
            low = 0 if types.is_unsigned_integer(declared) else -(2 ** (declared.bit_width - 1))
            most = low + 2**declared.bit_width - 1
            return str(chance.choice([low, most, chance.randint(low, most), chance.randint(0, 100)]))
        if types.is_floating(declared):
            return repr(chance.choice([0.0, -0.0, 1e300, 5e-324, 0.1, chance.uniform(-1e9, 1e9), chance.random()]))
        if types.is_boolean(declared):
            return chance.choice(["true", "false"])
        if types.is_decimal(declared):
            return f"{decimal.Decimal(chance.randrange(1 - 10**16, 10**16)).scaleb(-chance.choice([0, 1, 4])):f}"
        if types.is_string(declared):
            return chance.choice(_TEXTS)
        moment = datetime.datetime(1, 1, 1) + datetime.timedelta(
            days=chance.randrange(_DAYS), microseconds=chance.choice([0, chance.randrange(_DAY_US)])
        )
        if types.is_date(declared):
            return moment.date().isoformat()
        if types.is_time(declared):
            return moment.time().isoformat(chance.choice(["auto", "microseconds"]))
        if declared.unit == "ms":
            moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
            return moment.isoformat(chance.choice([" ", "T"]), "milliseconds")
        return moment.isoformat(chance.choice([" ", "T"])) + ("Z" if declared.tz else "")


Parse = Callable[[str], Any]


def _parse(declared: pa.DataType) -> Parse:
    """What a cell means; raises ``ValueError``."""
    types = pa.types
    if types.is_string(declared):
        return str
    if types.is_boolean(declared):
        return {"true": True, "false": False}.__getitem__
    if types.is_date(declared):
        return datetime.date.fromisoformat
    if types.is_time(declared):
        return datetime.time.fromisoformat
    if types.is_timestamp(declared):
        return datetime.datetime.fromisoformat
    if types.is_decimal(declared):
        return decimal.Decimal
    if not types.is_integer(declared):
        return float
    low = 0 if types.is_unsigned_integer(declared) else -(2 ** (declared.bit_width - 1))
    return lambda text: _integer(text, low, low + 2**declared.bit_width)


def _integer(text: str, low: int, end: int) -> int:
    if re.fullmatch("0x[0-9a-f]+", text):  # as Arrow reads it
        return int(text, 16)
    if not re.fullmatch(r"-?\d+", text) or not low <= int(text) < end:
        raise ValueError(text)
    return int(text)


class Reference:
    """Rows as ``csv`` and the types of Python read them."""

    def __init__(self, rows: Rows) -> None:
        self._options: dict[str, Any] = {"delimiter": rows.delimiter, "quotechar": rows.quote, "strict": True}
        self._parses = [_parse(each.type) for each in rows.schema]
        self._types = [each.type for each in rows.schema]
        self._null = rows.null

    def row(self, value: bytes) -> list[Any]:
        """Raises ``ValueError``, ``KeyError`` or ``ArithmeticError``."""
        try:
            found = list(csv.reader(io.StringIO(value.decode(), newline=""), **self._options))
        except csv.Error as error:
            raise ValueError(str(error)) from None
        (cells,) = found or [[""]]
        pairs = zip(self._parses, cells or [""], strict=True)
        return [None if cell == self._null else parse(cell) for parse, cell in pairs]

    def columns(self, rows: Sequence[Sequence[Any]]) -> list[pa.Array]:
        return [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), self._types, strict=True)]


def compare(seed: int, count: int = VALUES) -> Counts:
    """Rows of one schema. Raises ``Difference``."""
    made = Rows(seed)
    codec = CsvCodec(made.schema, delimiter=made.delimiter, quote=made.quote, null=made.null)
    reference = Reference(made)
    values = made.values(count)
    batch, bad = codec.decode_good(values)
    rows, good, refused = [], [], {}
    has_decimals = any(pa.types.is_decimal(each.type) for each in made.schema)
    for place, value in enumerate(values):
        try:
            row = reference.row(value)
            if made.wrong and has_decimals:
                reference.columns([row])  # a number of too many digits
        except (ValueError, LookupError, ArithmeticError, pa.ArrowException) as error:
            refused[place] = str(error)
            continue
        rows.append(row)
        good.append(value)
    shown = f"{made.schema} {made.delimiter!r} {made.quote!r} {made.null!r}"
    check_verdicts({each.index: each.reason for each in bad}, refused, values, shown)
    counts: Counts = collections.Counter(values=count, refused=len(refused))
    if rows:
        check_rows(batch, reference.columns(rows), good, shown)
        written = codec.encode(batch).to_pylist()
        check_rows(batch, reference.columns([reference.row(each) for each in written]), written, shown)
        check_own(codec, batch, written, shown)
    return counts


if __name__ == "__main__":
    go_through(__doc__, compare)
