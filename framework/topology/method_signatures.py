"""Checks that the framework can call the methods of a user's component."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

from framework.errors import TopologyError

#: The packages with the methods that a user overrides.
_OURS = ("framework.", "sinks.", "spouts.")
#: The number of classes whose results are cached: a check costs about a millisecond, and topologies
#: are built repeatedly from the same classes.
_CLASSES_MAX = 256


def check_factory(kind: str, component_id: str, factory: Callable[[], object]) -> None:
    """Raise ``TopologyError`` for a class or a function that cannot be called without arguments."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        base = "BaseBasicBolt" if kind == "bolt" else "BaseRichSpout"
        what, advice = ("class", "give an instance") if isinstance(factory, type) else ("function", f"subclass {base}")
        raise TopologyError(f"{kind} {component_id!r} is a {what} that needs arguments ({error}): {advice}") from None
    except ValueError:
        pass  # its signature cannot be read


def check_signatures(kind: str, component_id: str, instance: object) -> None:
    """Raise ``TopologyError`` for a method that takes other arguments than the one it overrides."""
    wrong = _wrong_method(type(instance))  # type: ignore[arg-type] # a class can be hashed
    if wrong is not None:
        raise TopologyError(f"{kind} {component_id!r}: {wrong}")


@lru_cache(_CLASSES_MAX)
def _wrong_method(component: type) -> str | None:
    """The problem of the first method that cannot be called; None if there is none."""
    seen: set[str] = set()
    for cls in component.__mro__:
        for name, own in vars(cls).items():
            if name in seen:
                continue  # hidden by a subclass
            seen.add(name)
            if not isinstance(own, FunctionType) or name.startswith("_") or cls.__module__.startswith(_OURS):
                continue
            overridden = _overridden(component, name)
            if overridden is not None and not _takes(own, *(arguments := _required(overridden))):
                shown = ", ".join([*arguments[0], *(["*", *arguments[1]] if arguments[1] else [])])
                return f"{cls.__name__}.{name}{inspect.signature(own)} cannot be called as it is: write {name}({shown})"
    return None


def _overridden(cls: type, name: str) -> Any:
    """Ratchet's own method of that name, if the class inherits one."""
    found = (vars(base).get(name) for base in cls.__mro__ if base.__module__.startswith(_OURS))
    return next((each for each in found if isinstance(each, FunctionType)), None)


def _required(method: FunctionType) -> tuple[list[str], list[str]]:
    """The arguments of each call: by position, and by name."""
    parameters = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return [each.name for each in parameters if each.kind in kinds], by_name


def _takes(method: FunctionType, arguments: list[str], by_name: list[str]) -> bool:
    try:
        # Check the method that is called, not the one that a decorator has wrapped.
        inspect.signature(method, follow_wrapped=False).bind(*arguments, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True
