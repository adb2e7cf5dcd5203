"""Errors for unknown and for missing arguments of an operator or a function, with the user's
line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from framework.call_site import Call, called, nearest
from framework.errors import ConfigError, RatchetError, TopologyError

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
CallOf = Callable[..., Call]
#: Arguments without a default -> what to write.
_EXAMPLES = {
    "after": "after='30 days'",
    "count": "count=100",
    "field": "field='cents'",
    "gap": "gap='30 min'",
    "into": "into=postgres('postgresql://user@host/database')",
    "length": "length='1 h'",
    "name": "name='seen', the id, which its state follows",
    "on": "on='order'",
    "path": "path='shop.db'",
    "share": "share=0.99",
    "target": "target=sqlite('shop.db', 'orders')",
    "step": "step='5 min'",
    "within": "within='1 day'",
}


def checks_arguments(kind: C) -> C:
    """A class whose public methods and whose constructor raise ``TopologyError`` for arguments that
    they do not take."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _checked(kind.__name__ if name == "__init__" else name, method))
    return kind


def checks_call(function: F) -> F:
    """A function whose errors name the user's line, also for arguments that it does not take."""
    return _naming(function, called)


def checks_place(function: F) -> F:
    """As ``checks_call``. The arguments may contain a password, so no message shows them."""
    return _naming(function, lambda name, /, *_, **__: replace(called(name), text=f"{name}(...)"))


def _naming(function: F, call_of: CallOf) -> F:
    checked = _checked(function.__name__, function, call_of, of_object=False)

    @wraps(function)
    def named(*arguments: Any, **by_name: Any) -> Any:
        try:
            return checked(*arguments, **by_name)
        except RatchetError as error:
            call = call_of(function.__name__, *arguments, **by_name)
            if str(error).startswith(call.place):
                raise
            kind = ConfigError if isinstance(error, ConfigError) else TopologyError
            raise kind(str(call.mistake(error))) from None

    return named  # type: ignore[return-value]


def _checked(name: str, function: F, call_of: CallOf = called, *, of_object: bool = True) -> F:
    signature = inspect.signature(function)
    known = list(signature.parameters.values())[of_object:]

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        own = arguments[of_object:]
        try:
            signature.bind(*arguments, **named)
        except TypeError:
            raise _mistake(call_of(name, *own, **named), known, own, named) from None
        option = _no_type(known, named)
        if option is not None:
            raise call_of(name, *own, **named).mistake(
                f"there is no argument {option!r}{nearest(option, _names(known))}; a column has a type, as in {option}=int"
            )
        return function(*arguments, **named)

    return checked  # type: ignore[return-value]


def _names(known: Sequence[inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in known if each.kind in kinds]


def _no_type(known: Sequence[inspect.Parameter], named: Mapping[str, Any]) -> str | None:
    """The first name among the types of columns whose value is a number."""
    if known and known[-1].kind is inspect.Parameter.VAR_KEYWORD and known[-1].name == "types" and _names(known):
        return next((name for name, each in named.items() if name not in _names(known) and _is_number(each)), None)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _mistake(
    call: Call, known: Sequence[inspect.Parameter], arguments: Sequence[Any], named: Mapping[str, Any]
) -> TopologyError:
    kinds = inspect.Parameter
    by_position = [each.name for each in known if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    has_more = any(each.kind is kinds.VAR_KEYWORD for each in known)
    unknown = next((each for each in named if each not in _names(known)), None)
    if unknown is not None and not has_more:
        return call.mistake(f"there is no argument {unknown!r}{nearest(unknown, _names(known))}")
    if len(arguments) > len(by_position):
        shown = f"it takes {', '.join(by_position)} by position" if by_position else "it takes nothing by position"
        return call.mistake(f"{shown}, and {len(arguments)} are given so: write the others as name=value")
    twice = next((each for each in by_position[: len(arguments)] if each in named), None)
    if twice is not None:
        return call.mistake(f"{twice!r} is given twice, without its name and with it: give it once")
    given = {*by_position[: len(arguments)], *named}
    missing = next(each.name for each in known if each.default is kinds.empty and each.name not in given)
    return call.mistake(f"{missing} is missing: add {_EXAMPLES.get(missing, f'{missing}=...')}")
