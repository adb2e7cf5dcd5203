"""An oracle for the content of a state, in exact arithmetic, and random work for it.

It shares no code with sinks or framework. Numbers are fractions, moments are microseconds, and the
row of a key is what its input rows add up to.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

Exact = Any
PARIS = ZoneInfo("Europe/Paris")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
#: Both moments that are half past two on 25 October 2026 in Paris.
TWICE = [datetime.datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=PARIS) for fold in (0, 1)]
NAN = "not a number"


def exact(value: Any) -> Exact:
    """What ``value`` stands for: two values of any form are equal
    here exactly if they mean the same.
    """
    if value is None or isinstance(value, (str, bytes, bool)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return NAN if value != value else value
    if isinstance(value, (int, float, Decimal)):
        return Fraction(value)
    if isinstance(value, datetime.datetime):
        known = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return ("moment", (known - _EPOCH) // datetime.timedelta(microseconds=1))
    return value


def rank(value: Exact) -> Any:
    """A sort key for exact values of one type: NaN above all numbers, text by its code points."""
    if isinstance(value, str) and value != NAN:
        return [ord(letter) for letter in value]
    return (1, 0) if value == NAN else (0, value)


def merged(rule: str, old: Exact, new: Exact) -> Exact:
    if old is None or new is None:
        return new if old is None else old
    if rule == "sum":
        return old + new
    if rule in ("min", "max"):
        return sorted([old, new], key=rank)[0 if rule == "min" else 1]
    return old if rule == "first" else new


#: Column -> (field of the input, rule). "count" counts rows, "mean" divides two others.
COLUMNS = {
    "rows": (None, "count"),
    "present": ("i", "count"),
    "total": ("i", "sum"),
    "exact": ("d", "sum"),
    "mean": ("d", "mean"),
    "mean_sum": ("d", "sum"),
    "mean_count": ("d", "count"),
    "real": ("f", "sum"),
    "low": ("g", "min"),
    "high": ("g", "max"),
    "word": ("t", "min"),
    "top": ("t", "max"),
    "since": ("at", "min"),
    "until": ("at", "max"),
    "flag": ("b", "last"),
    "raw": ("y", "first"),
    "day": ("day", "max"),
}


#: The columns that SQLite adds and compares by itself.
PLAIN_COLUMNS = {name: (field, rule) for name, (field, rule) in COLUMNS.items() if field != "d"}
Columns = Mapping[str, tuple[str | None, str]]


class Oracle:
    """``rows``: key -> column -> exact value. A key that is not in it is absent or deleted."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.rows: dict[Exact, dict[str, Exact]] = {}

    def row(self, key: Any) -> dict[str, Exact]:
        """The row of a key. If there is none, it is created, all nulls."""
        return self.rows.setdefault(exact(key), dict.fromkeys(self.columns))

    def copy(self) -> Oracle:
        made = Oracle(self.columns)
        made.rows = {key: dict(row) for key, row in self.rows.items()}
        return made

    def add(self, key: Any, row: dict[str, Any]) -> None:
        """Add one row of the input."""
        held = self.row(key)
        for column, (field, rule) in self.columns.items():
            value = exact(row[field]) if field is not None else 1
            if rule == "count":
                held[column] = (held[column] or 0) + (value is not None)
            elif rule != "mean":
                held[column] = merged(rule, held[column], value)
        if "mean" in held:
            count, total = held["mean_count"], held["mean_sum"]
            held["mean"] = exact(float(total / count)) if count and total is not None else None

    def put(self, key: Any, values: Sequence[Any]) -> None:
        self.rows[exact(key)] = dict(zip(self.columns, map(exact, values), strict=True))

    def delete(self, key: Any) -> None:
        self.rows.pop(exact(key), None)


class Values:
    """Random values of every type, in every form."""

    def __init__(self, chance: random.Random, *, nan: bool) -> None:
        self.chance = chance
        self._special = [math.inf, -math.inf, 5e-324, -0.0, 1.7e308, *([math.nan, -math.nan] if nan else [])]
        self.keys: dict[str, list[Any]] = {
            "text": ["", "a", "A", "ß", "\U0001f600", "\uffee", "0", "NULL", "a,b", 'x"y', "\\N"],
            "real": [0.0, -0.0, 0, 1, 1.0, 2.5, Decimal("2.5"), -7e300, 1e-310, math.inf, *([math.nan] if nan else [])],
            "exact": [Decimal("0"), Decimal("-0.00"), 1, Decimal("1.0"), Decimal("1.00"), Decimal("9" * 36 + ".99")],
            "whole": [0, 1, -1, 2**63 - 1, -(2**63), 1.0],
            "moment": [*TWICE, TWICE[0].astimezone(datetime.UTC), datetime.datetime(2026, 10, 25, 1, 30)],
        }

    def key(self, kind: str) -> Any:
        return self.chance.choice(self.keys[kind])

    def row(self) -> dict[str, Any]:
        """A row of the input, with a null here and there."""
        made = {
            "i": self.chance.choice([0, 1, -1, self.chance.randrange(-(2**40), 2**40)]),
            "d": self.decimal(20),
            "f": self.chance.choice([-0.0, self.chance.randrange(-(2**40), 2**40) / 1024]),
            "g": self.chance.choice([*self._special, self.chance.uniform(-10, 10)]),
            "t": self.key("text"),
            "at": self.key("moment"),
            "b": self.chance.random() < 0.5,
            "y": self.chance.randbytes(self.chance.randrange(3)),
            "day": datetime.date.fromordinal(self.chance.randrange(1, 3_652_060)),
        }
        return {name: None if self.chance.random() < 0.15 else value for name, value in made.items()}

    def decimal(self, digits: int) -> Decimal:
        unscaled = self.chance.randrange(10 ** self.chance.randrange(digits + 1))
        return Decimal((self.chance.randrange(2), tuple(map(int, str(unscaled))), -4))

    def whole_row(self, columns: Columns) -> tuple[Any, ...]:
        """The values of every column, as a user's own committer might put them: zeros, nulls,
        other forms.
        """
        fields = self.row()
        made = []
        for field, rule in columns.values():
            if rule == "count":
                made.append(self.chance.choice([0, None, 3, 3.0]))
            elif rule == "mean":
                made.append(self.chance.choice([0.0, -0.0, None, 2.5, 1]))
            elif field == "d":
                made.append(self.chance.choice([0, None, 7, Decimal("1E+2"), self.decimal(37), fields[field]]))
            else:
                made.append(fields[field])
        return tuple(made)
