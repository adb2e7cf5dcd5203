"""The names and types of the values in a tuple."""

from __future__ import annotations

import datetime
import decimal
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import pyarrow as pa

from framework.errors import TopologyError

_ARROW_OF_PYTHON: dict[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime.datetime: pa.timestamp("us", tz="UTC"),
    datetime.date: pa.date32(),
    decimal.Decimal: pa.decimal128(38, 18),
}
FieldType = Union[type, pa.DataType, None]


class Fields:
    """An ordered list of field names, each with or without an Arrow type.

    Positional names are untyped: Arrow infers their type from the values of each batch. Keywords
    are typed, by a Python type (``str``, ``int``, ``float``, ``bool``, ``bytes``, ``datetime``,
    ``date``, ``Decimal``, lists of them such as ``list[int]``) or by an Arrow type. Both may be
    mixed; positional names come first.

    >>> Fields("word", count=int).names
    ('word', 'count')
    >>> Fields(word=str).type_of("word")
    DataType(string)
    >>> Fields("a", "a")
    Traceback (most recent call last):
    ...
    framework.errors.TopologyError: field 'a' is named twice: every field of a stream needs a name of its own

    Source: ``org.apache.storm.tuple.Fields``; the types are Ratchet's.
    """  # noqa: W505 - doctest lines are not wrapped

    __slots__ = ("_index", "_schema", "_types", "names")

    def __init__(self, /, *names: str, **types: FieldType) -> None:
        for name in (*names, *types):
            if not isinstance(name, str) or not name:
                raise TopologyError(f"a field name must be a non-empty string, not {name!r}")
        self.names: tuple[str, ...] = (*names, *types)
        self._types: dict[str, pa.DataType | None] = dict.fromkeys(names)
        for name, declared in types.items():
            self._types[name] = _arrow_type(name, declared)
        self._index = {name: position for position, name in enumerate(self.names)}
        self._schema: pa.Schema | None = None  # made on first use
        for position, name in enumerate(self.names):
            if self._index[name] != position:
                raise TopologyError(f"field {name!r} is named twice: every field of a stream needs a name of its own")

    @classmethod
    def of(cls, types: Mapping[str, FieldType]) -> Fields:
        """Make fields from a mapping, for names that cannot be Python keywords."""
        fields = cls()
        fields.__init__(**dict(types))  # type: ignore[misc]
        return fields

    @classmethod
    def of_schema(cls, schema: pa.Schema) -> Fields:
        return cls.of({field.name: field.type for field in schema})

    def type_of(self, name: str) -> pa.DataType | None:
        """The Arrow type of a field, or None when it is untyped. Raises ``KeyError`` for an unknown
        name."""
        return self._types[name]

    def position(self, name: str) -> int:
        return self._index[name]

    def select(self, names: Sequence[str]) -> Fields:
        return Fields.of({name: self._types[name] for name in names})

    def schema(self) -> pa.Schema | None:
        """The Arrow schema, or None when a field is untyped."""
        if self._schema is None and all(declared is not None for declared in self._types.values()):
            self._schema = pa.schema([(name, self._types[name]) for name in self.names])
        return self._schema

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self.names == other.names and self._types == other._types

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        parts = [name if self._types[name] is None else f"{name}: {self._types[name]}" for name in self.names]
        return f"Fields({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Fields.of, (dict(self._types),))


def _arrow_type(name: str, declared: FieldType) -> pa.DataType | None:
    if declared is None or isinstance(declared, pa.DataType):
        return declared
    found = _ARROW_OF_PYTHON.get(declared)
    if found is None and typing.get_origin(declared) is list:
        (item,) = typing.get_args(declared)
        return pa.list_(_arrow_type(name, item))
    if found is None:
        known = ", ".join(sorted(kind.__name__ for kind in _ARROW_OF_PYTHON))
        raise TopologyError(
            f"field {name!r}: no Arrow type is known for {declared!r}; use one of {known}, list[int] or a pyarrow type"
        )
    return found
