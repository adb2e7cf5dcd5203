"""The two streams of a join by key, and the rows that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from framework.bounded_pages import PAGE_KEYS, pages_within
from framework.errors import TopologyError
from framework.topology import Input
from framework.value_size import size_of
from sinks.backend import Key, Value
from sinks.external_row_sorter import PAGE_BYTES
from sinks.value_encoding import JsonColumns

#: The sides.
LEFT, RIGHT = 0, 1


class Side:
    """One of the two streams. ``own``: its fields without the key."""

    def __init__(self, source: Input, key: tuple[str, ...]) -> None:
        self.fields = source.fields
        self.own = [name for name in source.fields if name not in key]
        self.codec = JsonColumns(source.fields.select(self.own), "a waiting record")


class JoinInputs:
    """Both streams. They have the fields of the key in common, with the same types, and no other.
    Raises ``TopologyError`` for other streams."""

    def __init__(self, component_id: str, key: tuple[str, ...], left: Input, right: Input) -> None:
        for name in key:
            kinds = left.fields.type_of(name), right.fields.type_of(name)
            if kinds[0] != kinds[1]:
                raise TopologyError(
                    f"committer {component_id!r}: key field {name!r} is {kinds[0]} on the left and {kinds[1]} on the right; "
                    "make them equal"
                )
        if left.grouping != right.grouping:
            raise TopologyError(f"committer {component_id!r}: group both streams by the same fields, in the same order")
        shared = (set(left.fields) & set(right.fields)) - set(key)
        untyped = [name for each in (left, right) for name in each.fields if each.fields.type_of(name) is None]
        if shared or untyped:
            raise TopologyError(
                f"committer {component_id!r}: {left.component_id!r} and {right.component_id!r} both have "
                f"{', '.join(map(repr, sorted(shared)))}; rename fields of one of them in a bolt upstream"
                if shared
                else f"committer {component_id!r}: field {untyped[0]!r} has no type; declare it"
            )
        self.key_fields = left.fields.select(list(key))
        self._sides = Side(left, key), Side(right, key)

    def __getitem__(self, side: int) -> Side:
        return self._sides[side]

    def __iter__(self) -> Iterator[Side]:
        return iter(self._sides)

    def schema(self) -> pa.Schema:
        """Of joined rows: the key, the other fields of the left side, those of the right one."""
        parts = [self.key_fields, *(each.fields.select(each.own) for each in self._sides)]
        return pa.schema([(name, part.type_of(name)) for part in parts for name in part])

    def alone(self, key: Key, side: int, values: Value) -> Value:
        """A row of a record without a partner."""
        nulls = [None] * len(self._sides[1 - side].own)
        return (*key, *values, *nulls) if side == LEFT else (*key, *nulls, *values)

    def batches(self, rows: Iterable[Value]) -> Iterator[pa.RecordBatch]:
        """The joined rows, in small batches, because many rows may share a large value."""
        schema = self.schema()
        for page, _ in pages_within(rows, PAGE_KEYS, PAGE_BYTES, size_of):
            columns = [pa.array(each, kind) for each, kind in zip(zip(*page, strict=True), schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
