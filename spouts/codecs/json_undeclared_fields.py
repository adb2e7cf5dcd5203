"""The fields of JSON objects that no schema declares, as one JSON text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from framework.errors import TopologyError
from spouts.codecs.bad_records import BadRecord

OnExtra = Literal["ignore", "capture"]
#: The field of undeclared fields.
EXTRA = "extra"


class Extra:
    """``declared``: the names of the fields in the objects that have columns of their own."""

    def __init__(self, declared: Sequence[str]) -> None:
        self._declared = frozenset(declared)

    def read(self, values: Sequence[bytes | None], places: Any) -> tuple[pa.Array, list[BadRecord]]:
        """The texts of the values at ``places``, which are objects, and those that have none."""
        found: list[str | None] = []
        bad = []
        for place in map(int, places):
            value = values[place]
            try:
                found.append(self._of(value.decode()) if value is not None else None)
            except (ValueError, RecursionError) as error:
                bad.append(BadRecord(place, f"field {EXTRA!r}: {error}"))
                found.append(None)
        return pa.array(found, pa.string()), bad

    def _of(self, text: str) -> str | None:
        """Each value as it is written, so that no number changes. Of a name that is given twice,
        the last counts."""
        if self._declared.issuperset(_read(text)):
            return None
        members: dict[str, str] = {}
        at = text.index("{") + 1
        while True:
            begin = _blanks(text, at)
            name, end = _DECODER.raw_decode(text, begin)
            value = _blanks(text, _blanks(text, end) + 1)
            _, at = _DECODER.raw_decode(text, value)
            if name not in self._declared:
                members.pop(name, None)
                members[name] = f"{text[begin:end]}:{text[value:at]}"
            at = _blanks(text, at)
            if text[at] == "}":
                return "{" + ",".join(members.values()) + "}"
            at += 1


def checked_extra(extra: str, fields: Sequence[str], names: Sequence[str]) -> Extra | None:
    """The capture of undeclared fields; None: they are ignored. Raises ``TopologyError``."""
    if extra not in ("ignore", "capture"):
        raise TopologyError(f"extra must be 'ignore' or 'capture', not {extra!r}")
    if extra == "ignore":
        return None
    if EXTRA in fields:
        raise TopologyError(
            f"extra='capture' makes a field {EXTRA!r}, and the schema has one already: give that another name, by alias="
        )
    return Extra(names)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


#: Numbers stay text: an integer may have more digits than Python reads.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused, strict=False)


def _read(text: str) -> dict[str, Any]:
    found: dict[str, Any] = _DECODER.decode(text)
    return found


def _blanks(text: str, at: int) -> int:
    """The place after blanks."""
    while text[at] in " \t\n\r":
        at += 1
    return at
