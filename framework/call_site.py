"""The line of the user's file that calls an operator, and errors that name the line."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from framework.errors import TopologyError, escaped

V = TypeVar("V")

#: The code between a user's line and an operator.
_OURS = tuple(
    str(Path(__file__).resolve().parents[1] / part)
    for part in (
        *(package + os.sep for package in ("framework/operators", "framework/streams", "ratchet")),
        "framework/call_site.py",
        "framework/user_call_argument_checks.py",
    )
)
#: More columns than this are not listed in a message.
_SHOWN_MAX = 12


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator as the user wrote it, such as ``filter('cents > 5')``, and its
    place."""

    text: str
    place: str

    def mistake(self, what: object) -> TopologyError:
        """The error about this call. An error that already names the call is returned unchanged."""
        said = escaped(" ".join(str(what).removeprefix(f"{self}: ").split()))
        return TopologyError(f"{self}: {said}")

    def unknown_column(self, name: str, columns: Iterable[str], more: str = "") -> TopologyError:
        """The error for a column that does not exist. ``more``: other names that may be meant."""
        return self.mistake(f"there is no column {name!r}{nearest(name, columns)}{more}")

    def check_options(self, given: Iterable[str], known: Iterable[str]) -> None:
        """Raise ``TopologyError`` for an option that is not known."""
        names = list(known)
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise self.mistake(f"there is no option {unknown!r}{nearest(unknown, names)}")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class UnknownNameError(TopologyError, KeyError, AttributeError):
    """A dictionary of streams, or of rows, lacks a name."""

    __str__ = Exception.__str__  # KeyError's own would quote the message


class ByName(dict[str, V]):
    """A dictionary whose error for a missing name has the user's line and the existing names."""

    def __missing__(self, name: object) -> NoReturn:
        call = replace(called(""), text=f"[{name!r}]")
        raise UnknownNameError(str(call.mistake(f"there is no {name!r}{nearest(str(name), self)}")))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        call = replace(called(""), text=f".{name}")
        said = f"write [{name!r}]" if name in self else f"there is no {name!r}{nearest(name, self)}"
        raise UnknownNameError(str(call.mistake(said)))


def called(operator: str, /, *arguments: object, **named: object) -> Call:
    """The call of an operator, with the place of the nearest frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    shown = [*map(_shown, arguments), *(f"{name}={_shown(value)}" for name, value in named.items())]
    return Call(f"{operator}({', '.join(shown)})", f"{_near(frame.f_code.co_filename)}:{frame.f_lineno}")


def options_of(function: Callable[..., object]) -> list[str]:
    """The arguments that a function takes by name only."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def without_none(**named: object) -> dict[str, object]:
    """The arguments that the user gave, for the text of a call."""
    return {name: each for name, each in named.items() if each is not None}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest name, and the existing names."""
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
