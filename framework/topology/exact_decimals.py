"""Decimals that Arrow may be given: from texts, and from values of Python.

Arrow scales a number by a table of powers of ten. For a number with many more digits after the
point than its type has, such as ``1e-100000000``, it reads beyond the table: it gives 0, or ends
the process (seen with pyarrow 26.0.1). So no such number may reach it.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.canonical_form import form_of

#: Texts that Arrow reads itself: at most 37 digits after the point, so that the power of ten
#: between them and any type is in its table.
_PLAIN = r"^[+-]?[0-9]+(\.[0-9]{1,37})?$"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,18})?")
_SHOWN = 60


def exact_decimal(number: decimal.Decimal | str, declared: pa.DataType) -> decimal.Decimal | None:
    """The number with the scale of the declared type; None if the type does not hold it exactly, or
    if a text is no number.

    >>> [exact_decimal(each, pa.decimal128(5, 2)) for each in ("12.50e1", "1e-100000000")]
    [Decimal('125.00'), None]
    """
    if isinstance(number, str):
        if _NUMBER.fullmatch(number) is None:
            return None
        number = decimal.Decimal(number)
    try:
        made: decimal.Decimal = form_of(declared)(number)
    except ValueError:
        return None
    return made


def decimals_of_text(texts: pa.Array, declared: pa.DataType) -> pa.Array:
    """The numbers that texts write, in a decimal type. Raises ``ArrowInvalid`` for a text that is
    no number, or whose number the type does not hold exactly."""
    others = pc.fill_null(pc.invert(pc.match_substring_regex(texts, _PLAIN)), False)
    if not pc.any(others).as_py():
        return texts.cast(declared)
    found = []
    for text in texts.filter(others).to_pylist():
        number = exact_decimal(text, declared)
        if number is None:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise pa.ArrowInvalid(f"The string '{shown}' is not exactly a value of {declared}")
        found.append(number)
    plain = pc.if_else(others, pa.scalar(None, texts.type), texts).cast(declared)
    return pc.replace_with_mask(plain, others, pa.array(found, declared))


@lru_cache(maxsize=1024)
def holds_decimals(declared: pa.DataType) -> bool:
    """Whether values of a type are decimals, or contain some."""
    if pa.types.is_dictionary(declared):
        return holds_decimals(declared.value_type)
    if pa.types.is_nested(declared):
        return any(holds_decimals(declared.field(number).type) for number in range(declared.num_fields))
    return bool(pa.types.is_decimal(declared))


@lru_cache(maxsize=256)
def _unit(scale: int) -> decimal.Decimal:
    return decimal.Decimal(1).scaleb(-scale)


def checked_decimals(values: Sequence[Any], declared: pa.DataType) -> Sequence[Any]:
    """The values, in a form that Arrow can store. ``declared``: their type, for which
    ``holds_decimals``. Raises ``ValueError`` for a number that it does not hold exactly."""
    return [_checked(each, declared) for each in values]


def _checked(value: Any, declared: pa.DataType) -> Any:
    types = pa.types
    if value is None or not holds_decimals(declared):
        return value
    if types.is_dictionary(declared):
        return _checked(value, declared.value_type)
    if types.is_decimal(declared):
        if not isinstance(value, decimal.Decimal) or value.same_quantum(_unit(declared.scale)):
            return value
        made = exact_decimal(value, declared)
        if made is None:
            raise ValueError(f"{repr(value)[:_SHOWN]} is not exactly a value of {declared}")
        return made
    if types.is_map(declared):
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(_checked(key, declared.key_type), _checked(item, declared.item_type)) for key, item in pairs]
    if types.is_struct(declared):
        if isinstance(value, Mapping):
            kinds = {each.name: each.type for each in declared}
            return {name: _checked(item, kinds[name]) if name in kinds else item for name, item in value.items()}
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            return _checked(dict(value), declared)
        return tuple(_checked(item, field.type) for item, field in zip(value, declared, strict=False))
    return [_checked(item, declared.field(0).type) for item in value] if declared.num_fields == 1 else value
