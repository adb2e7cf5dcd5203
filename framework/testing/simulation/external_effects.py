"""Effects of user code outside of its topology: their replacement in a test, and the guard that
keeps a simulation from real effects."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from framework.errors import ConfigError


class _Content:
    """The data that all copies of one ``Outside`` share."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.values: dict[Any, Any] = {}


_shared: WeakValueDictionary[str, _Content] = WeakValueDictionary()


class Outside:
    """Replaces a target that a committer changes outside of its states, such as a mailbox or a
    table of its own. Give it to the committer in place of the real one.

    A simulation empties it before each schedule, and compares its final content with the content
    after one commit of each batch. All copies of it in this process share the content.

    >>> mailbox = Outside("mailbox")
    >>> mailbox.append("hello")
    >>> mailbox.items
    ['hello']
    """

    def __init__(self, name: str = "outside") -> None:
        self.name = name
        self._id = uuid.uuid4().hex
        self._own: _Content | None = _Content()
        _shared[self._id] = self._own

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}

    @property
    def _content(self) -> _Content:
        content = self._own or _shared.get(self._id)
        if content is None:
            raise ConfigError(f"{self.name!r} lives in the process that made it, and this is another one")
        return content

    def is_same(self, other: Outside) -> bool:
        """Whether the other one is a copy of this one."""
        return self._id == other._id

    @property
    def items(self) -> list[Any]:
        """The appended items, in order."""
        return list(self._content.items)

    @property
    def values(self) -> dict[Any, Any]:
        """The values that were put, by key."""
        return dict(self._content.values)

    def append(self, item: Any) -> None:
        """Append an item: a line, a mail, an order."""
        self._content.items.append(item)

    def put(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        self._content.values[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        return self._content.values.get(key, default)

    def clear(self) -> None:
        """Empty it."""
        self._content.items.clear()
        self._content.values.clear()


#: The refused actions: the event of ``sys.audit``, and its meaning.
_REFUSED = {
    "smtplib.connect": "sends mail",
    "smtplib.send": "sends mail",
    "subprocess.Popen": "starts a program",
    "os.system": "starts a program",
    "os.posix_spawn": "starts a program",
    "ftplib.connect": "connects to another host",
    "socket.connect": "connects to another process",
    "socket.sendto": "sends to another process",
}
_CONNECTS = ("ftplib.connect", "socket.connect")
#: Events whose first argument is the path of a changed file.
_CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.symlink", "os.link", "os.chmod", "os.chown"),
    *("os.utime", "os.setxattr", "os.removexattr"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT


class _Guard:
    """One per process, because a hook of ``sys.audit`` cannot be removed. It does nothing unless it
    is armed."""

    def __init__(self) -> None:
        self._installed = False
        self._armed = False
        #: Native ids of the threads that existed before any user code ran. A later thread may get
        #: the identifier that Python gave to one of them, but hardly its native id.
        self._others = frozenset[int | None]()
        self._folder = ""
        self._connect = False
        self.struck: str | None = None

    def install(self) -> None:
        if not self._installed:
            sys.addaudithook(self._hook)
            self._installed = True
        before = frozenset(thread.native_id for thread in threading.enumerate())
        self._others = before - {threading.get_native_id()}

    def arm(self, folder: Path, *, connect: bool) -> None:
        self._folder, self._connect, self._armed = str(folder), connect, True

    def disarm(self) -> None:
        self._armed = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed or threading.get_native_id() in self._others:
            return
        what = self._refuses(event, args)
        if what is not None:
            self.struck = what
            raise ConfigError(f"it {what}, and a simulation changes nothing outside")

    def _refuses(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, _, flags = args
            written = isinstance(path, str | bytes) and isinstance(flags, int) and flags & _WRITES
            return f"writes to {os.fsdecode(path)}" if written and not self._own(os.fsdecode(path)) else None
        if event == "sqlite3.connect":
            path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes) else str(args[0])
            return f"opens the database {path}" if path != ":memory:" and not self._own(path) else None
        if event in _CHANGES:
            both = args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]
            paths = [os.fsdecode(each) for each in both if isinstance(each, str | bytes | os.PathLike)]
            strange = [path for path in paths if path and not self._own(path)]
            return f"changes {strange[0]} ({event})" if strange else None
        if event in _CONNECTS and self._connect:
            return None
        what = _REFUSED.get(event)
        if what is None:
            return None
        shown = ", ".join(str(each) for each in args[1:] or args)
        allowed = ", which `connect` allows" if event in _CONNECTS else ""
        return f"{what} ({event}: {shown[:80]}{allowed})"

    def _own(self, path: str) -> bool:
        return path.startswith(self._folder) or path == os.devnull or ("__pycache__" in path and ".pyc" in path)


_guard = _Guard()


def install_guard() -> None:
    """Call this before any user code runs: later threads count as the user's."""
    _guard.install()


@contextmanager
def guarded(folder: Path, *, connect: bool) -> Iterator[None]:
    """Within the block, let user code write only below ``folder``, and send nothing; with
    ``connect`` it may open connections. Any other action raises a ``ConfigError``, and ``struck``
    reports it."""
    _guard.arm(folder, connect=connect)
    try:
        yield
    finally:
        _guard.disarm()


def struck() -> str | None:
    """The last refused action of user code since the last call; None when there was none."""
    what, _guard.struck = _guard.struck, None
    return what


#: Libraries whose writes or connections ``sys.audit`` does not report.
_IN_C = (
    "confluent_kafka",
    "psycopg",
    "deltalake",
    *("pyarrow.parquet", "pyarrow.fs", "pyarrow.dataset", "pyarrow.csv", "pyarrow.feather", "pyarrow.orc"),
    *("duckdb", "lmdb", "pyodbc", "MySQLdb"),
    "grpc",
    "pymongo",
)
#: Modules that are not inspected.
_OURS = ("framework", "spouts", "sinks", "integration", "builtins", "typing", "collections", "abc")


def unseen_library(bolt: Any) -> str | None:
    """A library that a bolt's own code uses, and whose writes the guard cannot prevent. Inspects
    its attributes, and the names in its methods and in the functions that they call. The bolts of
    Ratchet write through their states."""
    for value in vars(bolt).values():
        found = _library(type(value))
        if found is not None:
            return found
    seen: set[int] = set()
    waiting: list[Any] = list(type(bolt).__mro__)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        found = _library(each)
        if found is not None:
            return found
        if str(getattr(each, "__module__", "")).partition(".")[0] in _OURS:
            continue
        each = getattr(each, "__func__", each)
        if isinstance(each, type):
            waiting += vars(each).values()
        elif isinstance(each, FunctionType):
            waiting += [each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__]
    return None


def _library(value: Any) -> str | None:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(name, str):
        return None
    return next((each for each in _IN_C if name == each or name.startswith(f"{each}.")), None)


def _names(code: CodeType) -> set[str]:
    """The global names that code uses, including those in nested functions."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names(each)
    return found


def outsides_of(bolt: Any) -> list[Outside]:
    """The ``Outside`` objects of a bolt: among its attributes, and among the names of the modules
    of its classes."""
    own = [value for value in vars(bolt).values() if isinstance(value, Outside)]
    modules = [sys.modules.get(each.__module__) for each in type(bolt).__mro__]
    return own + [
        value
        for module in modules
        if module is not None
        for value in vars(module).values()
        if isinstance(value, Outside)
    ]
