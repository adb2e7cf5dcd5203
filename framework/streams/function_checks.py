"""Checks of a function of the user, before it is called."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import cloudpickle

from framework.call_site import Call
from framework.errors import TopologyError


def check_function(call: Call, function: Callable[..., Any], given: Sequence[str]) -> None:
    """Raise ``TopologyError`` for a function that cannot take its arguments, or never returns a
    value. ``given``: a description of the arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        signature = None
    if signature is not None:
        try:
            signature.bind(*given)
        except TypeError as error:
            raise call.mistake(f"the function is called with {' and '.join(given)}: {error}") from None


def check_returns(call: Call, function: Callable[..., Any]) -> None:
    """Raise ``TopologyError`` for a function of several lines that returns nothing."""
    if isinstance(function, FunctionType) and function.__name__ != "<lambda>" and _returns_nothing(function):
        raise call.mistake("the function has no return with a value: return what it makes")


def unsent(call: Call, function: Callable[..., Any]) -> TopologyError | None:
    """The mistake of a function that cannot be sent to a task, with the variables that it takes
    from its surroundings; None if it can be sent."""
    error = _why_unsent(function)
    if error is None:
        return None
    try:
        taken = inspect.getclosurevars(function)
        around = {**taken.globals, **taken.nonlocals}
    except (TypeError, ValueError):  # no plain function
        around = {}
    name = next((name for name, each in around.items() if _why_unsent(each) is not None), None)
    what = f"it takes {name!r}, a {type(around[name]).__name__}, from outside" if name is not None else str(error)
    return call.mistake(
        f"the function cannot be sent to a task: {what}: open it in setup=..., whose result is the function's last argument"
    )


def _why_unsent(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - of any class
        return error
    return None


def _returns_nothing(function: FunctionType) -> bool:
    """Whether the code never returns a value. Functions that yield return rows in another way."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return False
    code = [each for each in dis.get_instructions(function) if each.opname not in ("CACHE", "NOP")]
    returned: list[Any] = []
    for before, each in zip([None, *code], code, strict=False):
        if each.opname == "RETURN_CONST":
            returned.append(each.argval)
        elif each.opname == "RETURN_VALUE":
            constant = before is not None and before.opname == "LOAD_CONST"
            returned.append(before.argval if constant and before is not None else code)
    return bool(returned) and all(each is None for each in returned)
