"""The kinds of sequences that user code emits values in."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Pair(NamedTuple):
    n: Any
    text: Any


class Breaks(UserList[Any]):
    """Raises after its first value."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        raise ValueError("the sequence breaks")


class Lies(UserList[Any]):
    """Says that it has two values."""

    def __len__(self) -> int:
        return 2


#: Makes a sequence of two values.
KINDS: dict[str, Callable[[Any, Any], Sequence[Any]]] = {
    "list": lambda *pair: list(pair),
    "tuple": lambda *pair: pair,
    "named tuple": Pair,
    "user's list": lambda *pair: UserList(pair),
    "array of objects": lambda *pair: np.array(pair, object),  # type: ignore[return-value]
    "keys": lambda *pair: dict.fromkeys(pair),  # type: ignore[return-value]
}
