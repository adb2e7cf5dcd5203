"""Arguments that an operator does not have, or lacks, as mistakes of the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from framework.errors import TopologyError
from framework.streams.call_site import called, nearest

C = TypeVar("C", bound=type)
#: Arguments without a default -> what to write.
_EXAMPLES = {
    "name": "name='seen', the id, which its state follows",
    "on": "on='order'",
    "within": "within='1 day'",
    "into": "into=postgres('postgresql://user@host/database')",
}


def checks_arguments(kind: C) -> C:
    """A class whose public methods raise ``TopologyError`` for arguments that they do not take."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, _checked(method))
    return kind


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def operator(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            signature.bind(self, *arguments, **named)
        except TypeError:
            raise _mistake(method.__name__, signature, arguments, named) from None
        return method(self, *arguments, **named)

    return operator


def _mistake(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> TopologyError:
    call = called(name, *arguments, **named)
    known = list(signature.parameters.values())[1:]
    kinds = inspect.Parameter
    by_position = [each.name for each in known if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    has_more = any(each.kind is kinds.VAR_KEYWORD for each in known)
    names = [each.name for each in known if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    unknown = next((each for each in named if each not in names), None)
    if unknown is not None and not has_more:
        return call.mistake(f"there is no argument {unknown!r}{nearest(unknown, names)}")
    if len(arguments) > len(by_position):
        shown = f"it takes {', '.join(by_position)} by position" if by_position else "it takes nothing by position"
        return call.mistake(f"{shown}, and {len(arguments)} are given so: write the others as name=value")
    twice = next((each for each in by_position[: len(arguments)] if each in named), None)
    if twice is not None:
        return call.mistake(f"{twice!r} is given twice, without its name and with it: give it once")
    given = {*by_position[: len(arguments)], *named}
    missing = next(each.name for each in known if each.default is kinds.empty and each.name not in given)
    return call.mistake(f"{missing} is missing: add {_EXAMPLES.get(missing, f'{missing}=...')}")
