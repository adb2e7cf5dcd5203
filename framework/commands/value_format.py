"""Formats values for the output of commands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from framework.errors import UNPRINTABLE

#: The most characters of a value that are shown.
SHOWN = 200


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def text_of(data: bytes | None) -> str | None:
    """The beginning of a record's bytes, as text."""
    if data is None:
        return None
    text = data.decode(errors="backslashreplace")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(data):,} bytes)"


def printable(text: str | None) -> str:
    """The text, with control characters and invisible ones escaped."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in (text or "nothing")
    )


def json_text(value: Any) -> str:
    """JSON with the letters of all languages, and terminal control characters escaped."""
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(value, ensure_ascii=False))


def json_able(value: Any) -> Any:
    """The value, with the floats that JSON lacks as text: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, Mapping):
        return {str(name): json_able(item) for name, item in value.items()}
    return [*map(json_able, value)] if isinstance(value, (list, tuple)) else value


def made_by_line(made_by: Mapping[str, str]) -> str:
    """A line about the code that made a transaction, from ``lineage_of``."""
    named = (("Ratchet", "ratchet"), ("Python", "python"), ("topology", "shape"), ("code", "code"))
    return ", ".join(f"{name} {made_by[key]}" for name, key in named if made_by.get(key))
