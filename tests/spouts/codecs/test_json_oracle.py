"""``JsonCodec`` gives what Python's own ``json`` gives, apart from three things.

What fields do not declare is not looked at closely: it may hold bytes that are not UTF-8, and
``NaN``; a number beyond a double, ``0e400`` too, may be bad there. Surrogates without a partner are
bad wherever they are. A field of unsigned integers does not take ``-0``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spouts import JsonCodec
from tests.kit.json_documents import SCHEMAS, Documents
from tests.kit.targets import examples

_NO_ROW = object()
#: Either is right.
_UNCLEAR = object()


class _Number(str):
    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    __slots__ = ()


class _Bad(ValueError):
    """A value that has no row."""


class _Constant:
    """NaN, or an infinity."""

    def __init__(self, text: str) -> None:
        del text


def _is_huge(text: str) -> bool:
    exponent = re.search(r"[eE](.*)", text)
    return math.isinf(float(text)) or (exponent is not None and int(exponent[1]) > 308)


def _checked_object(members: list[tuple[str, Any]]) -> _Object:
    for key, value in members:
        _check_text(key)
        _check_text(value)
    return _Object(members)


def _check_text(value: Any) -> None:
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list) and not isinstance(value, _Object):
        for each in value:
            _check_text(each)


def row_of(value: bytes, schema: pa.Schema) -> Any:
    """The row, as Python's reader understands the value; ``_NO_ROW`` if it is bad."""
    numbers: list[_Number] = []

    def number(text: str) -> _Number:
        numbers.append(_Number(text))
        return numbers[-1]

    try:
        text = value.decode("utf-8", "replace")
        read = json.loads(
            text,
            parse_int=number,
            parse_float=number,
            parse_constant=_Constant,
            object_pairs_hook=_checked_object,
        )
        if not isinstance(read, _Object):
            raise _Bad
        row = _struct(read, list(schema))
        return _UNCLEAR if any(map(_is_huge, numbers)) else row
    except (ValueError, RecursionError):
        return _NO_ROW


def _struct(read: _Object, fields: list[pa.Field]) -> dict[str, Any]:
    found = {}
    for field in fields:
        values = [value for key, value in read if key == field.name]
        if len(values) > 1:
            raise _Bad
        found[field.name] = _of(values[0], field.type) if values else None
        if found[field.name] is None and not field.nullable:
            raise _Bad
    return found


def _of(value: Any, declared: pa.DataType) -> Any:
    if value is None:
        return None
    types = pa.types
    if types.is_struct(declared) and isinstance(value, _Object):
        return _struct(value, list(declared))
    if types.is_list(declared) and isinstance(value, list) and not isinstance(value, _Object):
        found = [_of(each, declared.value_type) for each in value]
        if None in found and not declared.value_field.nullable:
            raise _Bad
        return found
    if types.is_boolean(declared) and isinstance(value, bool):
        return value
    if types.is_string(declared) and isinstance(value, str) and not isinstance(value, _Number):
        if "\ufffd" in value:
            raise _Bad
        return value
    if isinstance(value, _Number):
        return _number(value, declared)
    if types.is_floating(declared) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise _Bad


def _number(text: str, declared: pa.DataType) -> float | int:
    if pa.types.is_floating(declared):
        found = float(text)
        if declared.bit_width == 32:
            with np.errstate(over="ignore"):
                found = float(np.float32(found))
        if math.isinf(found):
            raise _Bad
        return found
    if not pa.types.is_integer(declared) or not re.fullmatch(r"-?\d+", text):
        raise _Bad
    if pa.types.is_unsigned_integer(declared) and text.startswith("-"):
        raise _Bad
    pa.scalar(int(text), declared)  # raises ArrowInvalid, a ValueError, or OverflowError
    return int(text)


def differences(seed: int, schema: pa.Schema, count: int) -> list[tuple[bytes, Any, Any]]:
    documents = Documents(seed, schema)
    values = [documents.usual() if number % 2 else documents.mutated() for number in range(count)]
    batch, bad = JsonCodec(schema).decode_good(values)
    indices = {each.index for each in bad}
    rows = iter(batch.to_pylist())
    found = []
    for index, value in enumerate(values):
        ours = _NO_ROW if index in indices else next(rows)
        try:
            theirs = row_of(value, schema)
        except OverflowError:
            theirs = _NO_ROW
        if theirs is not _UNCLEAR and not _are_same(ours, theirs):
            found.append((value, ours, theirs))
    return found


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)
    return bool(one is other or (type(one) is type(other) and one == other))


@pytest.mark.parametrize("name", SCHEMAS)
@given(seed=st.integers(0, 2**32))
def test_values_have_the_rows_of_pythons_reader(name: str, seed: int) -> None:
    assert differences(seed, SCHEMAS[name], examples(200)) == []
