"""Why a JSON value does not fit the declared schema, in the declaration's names and types.

For a value of another type, Arrow's error says where the field is. For a number that does not fit,
it does not; this module then looks for the field, unless the value is very large.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

_OTHER_TYPE = re.compile(r"Column\(/(?P<place>.*)\) changed from (?P<wanted>\S+) to (?P<found>\S+) in row", re.DOTALL)
_UNFIT = re.compile(
    r"Failed to convert JSON to (?P<type>.+?)(?:, couldn't parse:|: )(?P<text>\S*)(?P<why>.*)", re.DOTALL
)
_NO_DECIMAL = re.compile(r"The string '(?P<text>.*)' .*? (?P<type>decimal\d+)(?P<why>)", re.DOTALL)
_TOO_BIG = "Number too big to be stored in double"
_TWICE = re.compile(r"Column\(/(?P<place>.*)\) was specified twice in row", re.DOTALL)
_SHOWN_CHARACTERS = 120
#: In a larger value, the field of a number is not looked for.
_READ_BYTES_MAX = 100_000
_KINDS = {
    "object": "an object",
    "array": "an array",
    "string": "text",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


def reason_of(error: Exception, value: bytes, declared: pa.Schema, read: pa.Schema) -> str:
    """The reason to report for one value. ``error``: of Arrow's reader. ``declared``: the types
    that the user sees; ``read``: those that the reader was given, by the same names."""
    text = str(error).removeprefix("JSON parse error: ")
    found = _OTHER_TYPE.match(text)
    if found is not None:
        name, kind = _at(declared, found["place"])
        return f"{name}: {_KINDS.get(found['found'], found['found'])}, and Fields declares {kind}"
    found = _TWICE.match(text)
    if found is not None:
        return f"{_at(declared, found['place'])[0]}: given twice"
    if text.startswith(_TOO_BIG):
        number = _too_big(_document(value))
        if number is not None:
            return f"{number[0]}: {shortened(number[1])} is beyond the range of a double"
    found = _UNFIT.match(text) or _NO_DECIMAL.match(text)
    if found is not None:
        for name, kind in _places(value, read, found):
            shown = shortened(found["text"])
            return f"{name}: {shown} does not fit, and Fields declares {kind}{found['why'] and ':' + found['why']}"
    return shortened(text)


def shortened(text: str) -> str:
    """Text of a record, or with text of one, as a reason shows it."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _at(schema: pa.Schema, place: str) -> tuple[str, str]:
    """A place such as ``address/lines/[]``, as a name, and the type there."""
    for field in schema:
        if place == field.name or place.startswith(f"{field.name}/"):
            name, kind = field.name, field.type
            for part in place[len(field.name) + 1 :].split("/") if place != field.name else ():
                if pa.types.is_list(kind):
                    name, kind = f"{name}[]", kind.value_type
                elif pa.types.is_struct(kind) and kind.get_field_index(part) >= 0:
                    name, kind = f"{name}.{part}", kind.field(part).type
                else:
                    return place.replace("/", "."), "another type"
            return name, str(kind)
    return place.replace("/", "."), "another type"


def _places(value: bytes, read: pa.Schema, unfit: re.Match[str]) -> Iterator[tuple[str, str]]:
    """The fields that hold the number that does not fit, and their types."""
    document = _document(value)
    if isinstance(document, dict):
        for field in read:
            yield from _inside(field.name, document.get(field.name), field.type, unfit)


class _Number(str):
    """The text of a number."""


def _document(value: bytes) -> Any:
    """The document of a value; None if Python cannot read it, or not quickly."""
    if len(value) > _READ_BYTES_MAX:
        return None
    try:
        return json.loads(value, parse_int=_Number, parse_float=_Number)
    except (ValueError, RecursionError):
        return None


def _too_big(document: Any) -> tuple[str, str] | None:
    """The first number of a document that is beyond the range of a double, and its place before
    it. A place is the one around it and a part, as a name of each would need much memory."""
    todo: list[tuple[Any, Any]] = [(None, document)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, dict):
            todo += [((place, f".{key}"), each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            inside = (place, "[]")
            todo += [(inside, each) for each in reversed(value)]
        elif isinstance(value, _Number) and math.isinf(float(value)):
            parts = []
            while place is not None:
                place, part = place
                parts.append(part)
            return "".join(reversed(parts)).removeprefix("."), value
    return None


def _inside(name: str, value: Any, kind: pa.DataType, unfit: re.Match[str]) -> Iterator[tuple[str, str]]:
    if pa.types.is_struct(kind) and isinstance(value, dict):
        for field in kind:
            yield from _inside(f"{name}.{field.name}", value.get(field.name), field.type, unfit)
    elif pa.types.is_list(kind) and isinstance(value, list):
        for item in value:
            yield from _inside(f"{name}[]", item, kind.value_type, unfit)
    elif str(kind).startswith(unfit["type"]) and value == unfit["text"]:
        yield name, str(kind)
