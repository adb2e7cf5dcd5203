"""The line of the user's file that an operator stands on, and errors that name it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from framework.errors import TopologyError, escaped

#: The code between a user's line and an operator.
_OURS = tuple(
    str(Path(__file__).resolve().parents[2] / package) + os.sep for package in ("framework/streams", "ratchet")
)
#: More columns than this are not listed in a message.
_SHOWN_MAX = 12


@dataclass(frozen=True, slots=True)
class Call:
    """An operator as the user wrote it: ``filter('cents > 5')``, and where."""

    text: str
    place: str

    def mistake(self, what: object) -> TopologyError:
        """The error that says what is wrong with this call; one that says so already, as it is."""
        said = escaped(" ".join(str(what).removeprefix(f"{self}: ").split()))
        return TopologyError(f"{self}: {said}")

    def unknown_column(self, name: str, columns: Iterable[str], more: str = "") -> TopologyError:
        """The error for a column that is not there. ``more``: what else may be meant."""
        return self.mistake(f"there is no column {name!r}{nearest(name, columns)}{more}")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def called(operator: str, *arguments: object, **named: object) -> Call:
    """The call of an operator, with the place of the nearest frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    shown = [*map(_shown, arguments), *(f"{name}={_shown(value)}" for name, value in named.items())]
    return Call(f"{operator}({', '.join(shown)})", f"{_near(frame.f_code.co_filename)}:{frame.f_lineno}")


def without_none(**named: object) -> dict[str, object]:
    """The arguments that the user gave, for the text of a call."""
    return {name: each for name, each in named.items() if each is not None}


def nearest(name: str, known: Iterable[str]) -> str:
    """What a message says after an unknown name: the nearest one, and those that there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    more = f", and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    listed = ", ".join(names[:_SHOWN_MAX]) + more
    return (f"; is it {near[0]!r}?" if near else "") + f" (there are: {listed or 'none'})"


def _shown(value: object) -> str:
    name = getattr(value, "__name__", None)
    text = name if callable(value) and isinstance(name, str) else repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _near(file: str) -> str:
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
