"""User code's data in the memory of a process: in its modules, its classes, its functions.

A restarted worker has all of it in its initial form. So a simulation records it once, and restores
it for each restart, and before each schedule. An ``Outside`` is no memory of a worker, and stays.

It finds: lists, dictionaries, sets and the like, attributes of classes and of objects of the user's
classes, closures and default arguments, and caches of ``functools``. It cannot restore generators
and data in C code.
"""

from __future__ import annotations

import random
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

from framework.testing.simulation.external_effects import Outside
from framework.topology import Bolt, FencedState, Topology
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.topology.spouts import Spout

_OURS = ("framework", "spouts", "sinks", "integration")
_INSTALLED = tuple(
    str(Path(each).resolve())
    for each in {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    if each != sysconfig.get_path("data")
)
#: Larger containers are data, not memory: they are not inspected.
_SIZE_MAX = 100_000
_EMPTY = CellType()
_CODE = (ModuleType, type, FunctionType, BuiltinFunctionType, staticmethod, classmethod, property)


def _is_users(module: ModuleType | None) -> bool:
    """Whether a module belongs to the user's own code."""
    if module is None or module.__name__.partition(".")[0] in _OURS:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__" or not hasattr(module, "__spec__") or module.__spec__ is None
    return not str(Path(file).resolve()).startswith(_INSTALLED)


class WorkerMemory:
    """The memory at the time of construction. ``namespaces``: of the user's modules, by name."""

    def __init__(self, topology: Topology) -> None:
        self.namespaces: dict[str, MutableMapping[str, Any]] = {}
        self.outside: list[Outside] = []
        # keeps inspected objects alive, so that their ids stay unique
        self._seen: dict[int, Any] = {}
        self._kept: list[tuple[str, Callable[[], bool], Callable[[], None]]] = []
        self._unseen: list[Callable[[], None]] = []  # entries that are not shown
        self._open: deque[tuple[str, Any]] = deque()
        for component in topology.components:
            made_by = component.factory
            if made_by is not None:
                self._open.append((getattr(made_by, "__name__", component.id), made_by))
            given = unwrapped(component.instance)
            self._open.append((type(given).__name__, type(given)))
            for value in vars(given).values():
                if isinstance(value, Outside | FunctionType):
                    self._open.append((component.id, value))
        while self._open:
            self._look(*self._open.popleft())

    def restore(self) -> None:
        """Restore the memory of a process that has just begun."""
        for put_back in self._unseen:
            put_back()
        for _, changed, put_back in self._kept:
            if changed():
                put_back()

    def changed(self) -> list[str]:
        """The entries that have changed, by their most specific names."""
        names = dict.fromkeys(name for name, changed, _ in self._kept if changed())
        return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]

    # --- inspection -------------------------------------------------------------------------------

    def _look(self, name: str, found: Any) -> None:
        if id(found) in self._seen:
            return
        if isinstance(found, Outside):
            self._seen[id(found)] = found
            if not any(found.is_same(each) for each in self.outside):
                self.outside.append(found)
        elif isinstance(found, ModuleType):
            if _is_users(found):
                self._seen[id(found)] = found
                self.namespaces[found.__name__] = vars(found)
                self._bindings(found.__name__, vars(found))
        elif isinstance(found, type):
            self._class(name, found)
        elif isinstance(found, FunctionType):
            self._function(name, found)
        elif isinstance(found, list | dict | set | deque | bytearray):
            self._container(name, found)
        elif isinstance(found, random.Random):
            self._seen[id(found)] = found
            at_first = found.getstate()
            self._kept.append((name, lambda: found.getstate() != at_first, lambda: found.setstate(at_first)))
        elif isinstance(found, staticmethod | classmethod | property):
            for each in (getattr(found, "__func__", None), getattr(found, "fget", None)):
                if each is not None:
                    self._open.append((name, each))
        elif callable(getattr(found, "cache_clear", None)) and callable(getattr(found, "cache_info", None)):
            self._seen[id(found)] = found
            at_first = found.cache_info().currsize
            self._kept.append((name, lambda: found.cache_info().currsize != at_first, found.cache_clear))
            self._open.append((name, getattr(found, "__wrapped__", None)))
        elif _is_users(sys.modules.get(type(found).__module__)) and not isinstance(found, FencedState | Bolt | Spout):
            self._seen[id(found)] = found
            self._open.append((type(found).__name__, type(found)))
            if hasattr(found, "__dict__"):
                self._bindings(name, vars(found))

    def _class(self, name: str, found: type) -> None:
        module = sys.modules.get(found.__module__)
        if not _is_users(module):
            return
        self._seen[id(found)] = found
        self._open.append((found.__module__, module))
        self._open += [(each.__name__, each) for each in found.__mro__[1:]]
        at_first = _data(vars(found))

        def changed() -> bool:
            now = _data(vars(found))
            return now.keys() != at_first.keys() or any(now[key] is not value for key, value in at_first.items())

        def put_back() -> None:
            for key in [each for each in _data(vars(found)) if each not in at_first]:
                delattr(found, key)
            for key, value in at_first.items():
                if vars(found).get(key) is not value:
                    setattr(found, key, value)

        if "<locals>" in found.__qualname__ or found.__module__ == "__main__":
            self._kept_code(found)
        self._kept.append((found.__qualname__.split("<locals>.")[-1], changed, put_back))
        for key, value in list(vars(found).items()):
            self._open.append((f"{found.__name__}.{key}", value))

    def _kept_code(self, found: type) -> None:
        """A class that no module names is pickled as a whole. Each copy of it gets other functions,
        with variables of their own."""
        code = {key: value for key, value in vars(found).items() if not _is_private(key) and isinstance(value, _CODE)}

        def put_back() -> None:
            for key, value in code.items():
                if vars(found).get(key) is not value:
                    setattr(found, key, value)

        self._unseen.append(put_back)

    def _function(self, name: str, found: FunctionType) -> None:
        module = sys.modules.get(found.__module__ or "")
        if not _is_users(module):
            return
        self._seen[id(found)] = found
        self._open.append((found.__module__, module))
        self._open += [(name, each) for each in (*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values())]
        self._bindings(name, vars(found))
        for variable, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            if cell == _EMPTY:
                continue
            self._cell(f"{found.__name__}.{variable}", cell)

    def _cell(self, name: str, cell: CellType) -> None:
        at_first = cell.cell_contents

        def put_back() -> None:
            cell.cell_contents = at_first

        self._kept.append((name, lambda: cell.cell_contents is not at_first, put_back))
        self._open.append((name, at_first))

    def _container(self, name: str, found: Any) -> None:
        if len(found) > _SIZE_MAX:
            return
        self._seen[id(found)] = found
        at_first = list(found.items()) if isinstance(found, dict) else list(found)

        def changed() -> bool:
            now = list(found.items()) if isinstance(found, dict) else list(found)
            return len(now) != len(at_first) or any(
                not _same(one, other) for one, other in zip(now, at_first, strict=True)
            )

        def put_back() -> None:
            found.clear()
            if isinstance(found, dict):
                dict.update(found, at_first)  # a Counter's own update would add
            else:
                (found.update if isinstance(found, set) else found.extend)(at_first)

        self._kept.append((name, changed, put_back))
        values: Iterable[Any] = (value for _, value in at_first) if isinstance(found, dict) else at_first
        self._open += [(name, value) for value in values if not isinstance(value, str | bytes | int | float)]

    def _bindings(self, name: str, namespace: MutableMapping[str, Any]) -> None:
        """The names of a module, or the attributes of an object or a function."""
        at_first = _data(namespace)

        def changed() -> bool:
            now = _data(namespace)
            return now.keys() != at_first.keys() or any(now[key] is not value for key, value in at_first.items())

        def put_back() -> None:
            for key in [each for each in _data(namespace) if each not in at_first]:
                del namespace[key]
            namespace.update(at_first)

        for key, value in at_first.items():
            self._kept.append(_binding(f"{name}.{key}", namespace, key, value))
        self._kept.append((name, changed, put_back))
        for key, value in list(namespace.items()):
            if not _is_private(key):
                self._open.append((f"{name}.{key}", value))


def _binding(
    name: str, namespace: MutableMapping[str, Any], key: str, value: Any
) -> tuple[str, Callable[[], bool], Callable[[], None]]:
    def put_back() -> None:
        namespace[key] = value

    return name, lambda: namespace.get(key) is not value, put_back


def _data(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The possible memory in a namespace: no code, and no data of Python or a library."""
    return {key: value for key, value in namespace.items() if not _is_private(key) and not isinstance(value, _CODE)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    return one is other or (isinstance(one, str | bytes | int | float) and one == other)


def _is_private(key: str) -> bool:
    """Whether the entry belongs to Python or a library, and is not memory of user code."""
    return key.startswith("__") or key in ("_abc_impl",)
