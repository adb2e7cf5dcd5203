"""Checks that the methods of a user's component can be called as the framework calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from framework.errors import TopologyError

#: Where the methods that a user overrides are defined.
_OURS = ("framework.", "sinks.", "spouts.")


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
    seen: set[str] = set()
    for cls in type(instance).__mro__:
        for name, own in vars(cls).items():
            if name in seen:
                continue  # hidden by a class before this one
            seen.add(name)
            if not isinstance(own, FunctionType) or name.startswith("_") or cls.__module__.startswith(_OURS):
                continue
            overridden = _overridden(type(instance), name)
            if overridden is not None and not _takes(own, _positional(overridden)):
                raise TopologyError(
                    f"{kind} {component_id!r}: {cls.__name__}.{name}{inspect.signature(own)} cannot be called as it is: "
                    f"write {name}({', '.join(_positional(overridden))})"
                )


def _overridden(cls: type, name: str) -> Any:
    """Our own method of that name, if the class inherits one."""
    found = (vars(base).get(name) for base in cls.__mro__ if base.__module__.startswith(_OURS))
    return next((each for each in found if isinstance(each, FunctionType)), None)


def _positional(method: FunctionType) -> list[str]:
    parameters = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in kinds and each.default is each.empty]


def _takes(method: FunctionType, arguments: list[str]) -> bool:
    try:
        # Of what is called, not of what a decorator has wrapped.
        inspect.signature(method, follow_wrapped=False).bind(*arguments)
    except TypeError:
        return False
    return True
