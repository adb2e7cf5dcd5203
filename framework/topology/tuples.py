"""The tuple that a bolt's ``execute`` receives: a view of one row of an Arrow record batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import pyarrow as pa

from framework.errors import UnknownFieldError
from framework.topology.attempt import TransactionAttempt
from framework.topology.canonical_form import python_objects
from framework.topology.fields import Fields

#: The component and the stream of ticks, as in Storm.
SYSTEM_COMPONENT, TICK_STREAM = "__system", "__tick"


class Tuple:
    """One tuple; its values are read by name or by position.

    In a transactional topology, position 0 is the transaction attempt, as in Storm, and the first
    value is at position 1. The attempt is also ``tup.attempt`` and, unless a field has that name,
    ``tup["id"]``. In a core topology there is no attempt, and position 0 is the first value.

    ``values`` are the declared values, without the attempt. The framework makes tuples, in tasks.
    """

    __slots__ = ("_attempt", "fields", "source_component", "source_stream", "values")

    def __init__(
        self,
        attempt: TransactionAttempt | None,
        fields: Fields,
        values: tuple[Any, ...],
        source_component: str,
        source_stream: str,
    ) -> None:
        self._attempt = attempt
        self.fields = fields
        self.values = values
        self.source_component = source_component
        self.source_stream = source_stream

    @property
    def attempt(self) -> TransactionAttempt:
        """The attempt that this tuple belongs to. Raises ``AttributeError`` in a core topology."""
        if self._attempt is None:
            raise AttributeError("tuples of a core topology belong to no transaction attempt")
        return self._attempt

    @property
    def is_tick(self) -> bool:
        """Whether this is a tick, which only says that time has passed. A tick has no values.

        Source: ``org.apache.storm.utils.TupleUtils.isTick``.
        """
        return self.source_stream == TICK_STREAM and self.source_component == SYSTEM_COMPONENT

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            if key in self.fields:
                return self.values[self.fields.position(key)]
            if key == "id" and self._attempt is not None:
                return self._attempt
            near = difflib.get_close_matches(key, self.fields.names, n=1)
            hint = f"; perhaps {near[0]!r} is meant" if near else ""
            raise UnknownFieldError(f"no field {key!r} in {self.fields} of {self.source_component!r}{hint}")
        if key == 0 and self._attempt is not None:
            return self._attempt
        try:
            return self.values[key - 1 if self._attempt is not None and key > 0 else key]
        except IndexError:
            raise UnknownFieldError(
                f"no field at position {key} in {self.fields} of {self.source_component!r}; positions end at {len(self) - 1}"
            ) from None

    def __len__(self) -> int:
        return len(self.values) + (self._attempt is not None)

    def __iter__(self) -> Iterator[Any]:
        if self._attempt is not None:
            yield self._attempt
        yield from self.values

    def __repr__(self) -> str:
        pairs = [f"{name}={value!r}" for name, value in zip(self.fields, self.values, strict=True)]
        return f"Tuple({', '.join([str(self._attempt), *pairs] if self._attempt is not None else pairs)})"


T = TypeVar("T", bound=Tuple)


def specialised(base: type[T], fields: Fields, source_component: str, source_stream: str, *, first: int) -> type[T]:
    """A subclass of ``base`` for the tuples of one stream. Making a tuple then sets only the values
    that differ from tuple to tuple, because a bolt gets millions. ``first``: the position of the
    first value."""
    positions: dict[Any, int] = {name: position for position, name in enumerate(fields)}
    positions.update({position + first: position for position in range(len(fields))})

    class StreamTuple(base):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def __getitem__(self, key: int | str) -> Any:
            try:
                return self.values[positions[key]]
            except (KeyError, TypeError):  # the attempt, a position from the end, or a mistake
                return super().__getitem__(key)

    common = {"fields": fields, "source_component": source_component, "source_stream": source_stream}
    for name, value in common.items():
        setattr(StreamTuple, name, value)  # hides the slot
    return StreamTuple


class _AttemptTuple(Tuple):
    __slots__ = ()

    def __init__(self, attempt: TransactionAttempt, values: tuple[Any, ...]) -> None:
        self._attempt = attempt
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return Tuple, (self._attempt, self.fields, self.values, self.source_component, self.source_stream)


@lru_cache(maxsize=1024)
def tuple_class(
    fields: Fields, source_component: str, source_stream: str
) -> Callable[[TransactionAttempt, tuple[Any, ...]], Tuple]:
    """Return a function that makes the tuples of one stream of a transactional topology."""
    return specialised(_AttemptTuple, fields, source_component, source_stream, first=1)


class _PlainTuple(Tuple):
    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tuple, (None, self.fields, self.values, self.source_component, self.source_stream)


@lru_cache(maxsize=1024)
def plain_class(fields: Fields, source_component: str, source_stream: str) -> type[Tuple]:
    """The class of one stream's tuples without an attempt. To make a tuple, create an empty one
    with ``__new__`` and set its ``values``: it has no other attributes of its own."""
    made = specialised(_PlainTuple, fields, source_component, source_stream, first=0)
    setattr(made, "_attempt", None)  # noqa: B010 - hides the slot
    return made


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of a record batch as Python tuples, in order. Raises ``BadRecordError`` for a moment
    or a time of day that Python cannot represent: Arrow returns 24:00 as 00:00."""
    if batch.num_columns == 0:
        return iter([()] * batch.num_rows)
    return zip(*map(python_objects, batch.columns, batch.schema.names), strict=True)
