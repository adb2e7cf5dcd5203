"""Rewrites decimals in JSON values as plain texts, because Arrow's reader must not see some of them
in their original form (see ``framework.topology.exact_decimals``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.exact_decimals import exact_decimal, holds_decimals
from spouts.codecs.json_reasons import shortened

#: A negative exponent, more than 37 digits after a point, or an escape that may stand for a part of
#: either.
_UNUSUAL = r"[0-9.][eE]-[0-9]|\.[0-9]{38}|\\u00[2-7]"


class DecimalRewriter:
    """Rewrites the values of a schema in which some fields are or contain decimals."""

    def __init__(self, schema: pa.Schema) -> None:
        self._fields = [each for each in schema if holds_decimals(each.type)]

    def rewritten(self, values: Sequence[bytes | None], binary: pa.BinaryArray) -> Sequence[bytes | None]:
        """The values, with plain decimals. ``binary``: the values. Raises ``ValueError`` for a
        decimal that its type does not hold exactly."""
        if not self._fields:
            return values
        unusual = pc.match_substring_regex(binary, _UNUSUAL)
        if not pc.any(unusual).as_py():
            return values
        return [
            self._rewritten(value) if value is not None and found else value
            for value, found in zip(values, unusual.to_pylist(), strict=True)
        ]

    def _rewritten(self, value: bytes) -> bytes:
        try:
            read = json.loads(value, parse_float=_Number, object_pairs_hook=_members)
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not isinstance(read, dict):
            return value
        for field in self._fields:
            if field.name in read:
                read[field.name] = _plain(read[field.name], field.type, field.name)
        return json.dumps(read).encode()


class _Number(float):
    """A number with a point or an exponent, and its text."""

    text: str

    def __new__(cls, text: str) -> _Number:
        made = super().__new__(cls, text)
        made.text = text
        return made


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(name for name, number in counts.items() if number > 1)}: given twice")
    return found


def _plain(value: Any, declared: pa.DataType, name: str) -> Any:
    """The value with its decimals as plain texts, which Arrow's reader reads as numbers. Raises
    ``ValueError``. Everything else stays, so that the reader may refuse it."""
    types = pa.types
    if types.is_decimal(declared) and isinstance(value, (_Number, str)):
        text = value.text if isinstance(value, _Number) else value
        number = exact_decimal(text, declared)
        if number is None:
            raise ValueError(f"{name}: {shortened(text)} does not fit, and Fields declares {declared}")
        return f"{number:f}"
    if types.is_struct(declared) and isinstance(value, dict):
        kinds = {each.name: each.type for each in declared if holds_decimals(each.type)}
        return {
            each: _plain(its, kinds[each], f"{name}.{each}") if each in kinds else its for each, its in value.items()
        }
    if types.is_map(declared) and isinstance(value, list):
        kinds = {"key": declared.key_type, "value": declared.item_type}
        return [
            {each: _plain(its, kinds[each], name) if each in kinds else its for each, its in pair.items()}
            if isinstance(pair, dict)
            else pair
            for pair in value
        ]
    if isinstance(value, list) and declared.num_fields == 1:
        return [_plain(each, declared.field(0).type, f"{name}[]") for each in value]
    return value
