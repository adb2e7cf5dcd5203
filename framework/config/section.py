"""The base of the sections of the configuration. A section is the keys of one prefix."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Keys of one prefix. ``Config`` is all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def listed(value: object) -> object:
    """A list of texts, given as a list or as one text with commas.

    >>> listed("one, two")
    ('one', 'two')
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value
