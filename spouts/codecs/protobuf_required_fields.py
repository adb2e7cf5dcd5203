"""The required fields of proto2 that a message lacks.

The library's own list is not used. If a message has a map, and another field of messages with
required fields, the list has names from invalid memory, or the process ends (protobuf 7.36).
``FindInitializationErrors`` makes this list, and so does ``SerializeToString`` for its error.
``IsInitialized`` is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from spouts.codecs.protobuf_schema import is_map, is_repeated

#: The most fields that a message names.
_NAMED = 3


def check_required(message: Any) -> None:
    """Raise ``ValueError``, which names the first fields, for a message that lacks required
    fields."""
    if not message.IsInitialized():
        raise ValueError(f"required fields are absent: {', '.join(itertools.islice(_absent(message, ''), _NAMED))}")


def _absent(message: Any, where: str) -> Iterator[str]:
    for each in message.DESCRIPTOR.fields:
        if each.is_required and not message.HasField(each.name):
            yield f"{where}{each.name}"
    for each, value in message.ListFields():
        if each.message_type is None:
            continue
        if not is_repeated(each):
            yield from _absent(value, f"{where}{each.name}.")
        elif not is_map(each):
            for number, item in enumerate(value):
                yield from _absent(item, f"{where}{each.name}[{number}].")
        elif each.message_type.fields_by_name["value"].message_type is not None:
            for key in sorted(value):
                yield from _absent(value[key], f"{where}{each.name}[{key!r:.50}].")
