"""Decimals that Arrow can safely take: from texts, and from values of Python.

Arrow scales a number by a table of powers of ten. For a number with many more digits after the
point than its type has, such as ``1e-100000000``, Arrow reads beyond the table, and gives 0 or ends
the process (seen with pyarrow 26.0.1). So no such number may reach Arrow.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.topology.canonical_form import Form, form_of

Check = Callable[[Any], Any]

#: Texts that Arrow reads itself: at most 37 digits after the point, so that the power of ten
#: between them and any type is in its table.
_PLAIN = r"^[+-]?[0-9]+(\.[0-9]{1,37})?$"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,18})?")
_SHOWN = 60


@lru_cache(maxsize=256)
def _form_of(precision: int, scale: int) -> Form:
    return form_of(pa.decimal256(precision, scale))


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
        made: decimal.Decimal = _form_of(declared.precision, declared.scale)(number)
    except ValueError:
        return None
    return made


def decimals_of_text(texts: pa.Array, declared: pa.DataType) -> pa.Array:
    """The numbers of texts, in a decimal type. Raises ``ArrowInvalid`` for a text that is not a
    number, or whose number the type does not hold exactly."""
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


def with_decimals(column: pa.Array, declared: pa.DataType) -> pa.Array:
    """The column, with decimals in place of texts and integers wherever the declared type has
    decimals, at any depth, because Arrow cannot read texts with many digits, and takes integers
    only if the type holds all of them. Raises as ``decimals_of_text``. The result may have wider
    types.

    >>> with_decimals(pa.array([["1.5", "2e1"]]), pa.list_(pa.decimal128(5, 2))).to_pylist()
    [[Decimal('1.50'), Decimal('20.00')]]
    """
    types, kind = pa.types, column.type
    if kind == declared or not holds_decimals(declared):
        return column
    if types.is_dictionary(declared):
        return with_decimals(column, declared.value_type)
    if types.is_dictionary(kind):
        return with_decimals(column.dictionary_decode(), declared)
    if types.is_decimal(declared):
        if is_text(kind):
            return decimals_of_text(column.cast(pa.large_string()), declared)
        return column.cast(pa.decimal256(76, declared.scale)) if types.is_integer(kind) else column
    if types.is_map(kind) and types.is_map(declared):
        pairs = with_decimals(entries(column), _entries_type(declared))
        return pa.MapArray.from_arrays(pairs.offsets.cast(pa.int32()), *pairs.values.flatten(), mask=column.is_null())
    if is_list(kind) and is_list(declared):
        items = with_decimals(column.flatten(), declared.value_type)
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, items, mask=column.is_null())
    if types.is_struct(kind) and types.is_struct(declared):
        parts = [
            with_decimals(part, declared.field(each.name).type) if declared.get_field_index(each.name) >= 0 else part
            for each, part in zip(kind, column.flatten(), strict=True)
        ]
        fields = [each.with_type(part.type) for each, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether Arrow reads numbers from values of a type as from texts."""
    of = pa.types
    texts = (of.is_string, of.is_large_string, of.is_string_view)
    return any(is_it(kind) for is_it in (*texts, of.is_binary, of.is_large_binary, of.is_binary_view))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list of any of Arrow's layouts."""
    of = pa.types
    lists = (of.is_list, of.is_large_list, of.is_fixed_size_list, of.is_list_view, of.is_large_list_view)
    return any(is_it(kind) for is_it in lists)


def entries(column: pa.MapArray) -> pa.ListArray:
    """The pairs of each map, as a list of structs."""
    return column.cast(_entries_type(column.type))


def _entries_type(kind: pa.MapType) -> pa.ListType:
    return pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))


def holds_decimals(declared: pa.DataType) -> bool:
    """Whether values of a type are decimals, or contain some."""
    return _check_of(declared) is not None


def checked_decimals(values: Sequence[Any], declared: pa.DataType) -> Sequence[Any]:
    """The values, in a form that Arrow can store. ``declared``: their type. Raises ``ValueError``
    for a number that it does not hold exactly."""
    check = _check_of(declared)
    return values if check is None else [None if each is None else check(each) for each in values]


@lru_cache(maxsize=1024)
def _check_of(declared: pa.DataType) -> Check | None:
    """A function from a value of a type to the form that Arrow can store; None for a type without
    decimals."""
    types = pa.types
    if types.is_dictionary(declared):
        return _check_of(declared.value_type)
    if types.is_decimal(declared):
        return partial(_checked_number, declared, decimal.Decimal(1).scaleb(-declared.scale))
    if not types.is_nested(declared):
        return None
    if types.is_map(declared):
        inside = [_check_of(declared.key_type), _check_of(declared.item_type)]
    else:
        inside = [_check_of(declared.field(number).type) for number in range(declared.num_fields)]
    if not any(inside):
        return None
    checks = [_optional(each) if each is not None else _unchanged for each in inside]
    if types.is_map(declared):
        return partial(_checked_pairs, *checks)
    if types.is_struct(declared):
        return partial(_checked_struct, dict(zip([each.name for each in declared], checks, strict=True)))
    return partial(_checked_items, checks[0]) if len(checks) == 1 else _unchanged


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _unchanged(value: Any) -> Any:
    return value


def _checked_number(declared: pa.DataType, unit: decimal.Decimal, value: Any) -> Any:
    """``unit``: a number with the scale of the type."""
    if not isinstance(value, decimal.Decimal) or value.same_quantum(unit):
        return value
    made = exact_decimal(value, declared)
    if made is None:
        raise ValueError(f"{repr(value)[:_SHOWN]} is not exactly a value of {declared}")
    return made


def _checked_items(check: Check, value: Any) -> Any:
    return [check(each) for each in value]


def _checked_pairs(key: Check, item: Check, value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else value
    return [(key(each), item(its)) for each, its in pairs]


def _checked_struct(checks: Mapping[str, Check], value: Any) -> Any:
    """Of a mapping, of pairs, or of values in the order of the fields."""
    if isinstance(value, Mapping):
        return {name: checks.get(name, _unchanged)(its) for name, its in value.items()}
    if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
        return _checked_struct(checks, dict(value))
    return tuple(check(its) for its, check in zip(value, checks.values(), strict=False))
