"""The tuple that a bolt's ``execute`` receives: a view of one row of an Arrow record batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from framework.topology.attempt import TransactionAttempt
from framework.topology.fields import Fields


class Tuple:
    """One tuple. By name or by position; position 0 is the transaction attempt, named ``id``.

    ``values`` are the declared values, without the attempt. Tuples are made by the framework, in tasks.
    """

    __slots__ = ("attempt", "fields", "source_component", "source_stream", "values")

    def __init__(
        self,
        attempt: TransactionAttempt,
        fields: Fields,
        values: tuple[Any, ...],
        source_component: str,
        source_stream: str,
    ) -> None:
        self.attempt = attempt
        self.fields = fields
        self.values = values
        self.source_component = source_component
        self.source_stream = source_stream

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            if key in self.fields:
                return self.values[self.fields.position(key)]
            if key == "id":
                return self.attempt
            raise KeyError(f"no field {key!r} in {self.fields} of {self.source_component!r}")
        if key == 0:
            return self.attempt
        return self.values[key - 1 if key > 0 else key]

    def __len__(self) -> int:
        return len(self.values) + 1

    def __iter__(self) -> Iterator[Any]:
        yield self.attempt
        yield from self.values

    def __repr__(self) -> str:
        pairs = ", ".join(f"{name}={value!r}" for name, value in zip(self.fields, self.values, strict=True))
        return f"Tuple({self.attempt}, {pairs})"


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of a record batch as Python tuples, in order."""
    if batch.num_columns == 0:
        return iter([()] * batch.num_rows)
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)
