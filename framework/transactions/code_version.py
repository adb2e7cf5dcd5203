"""Identifies the code that made a transaction: versions, and hashes of the topology's shape and of
its code.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from framework.topology import Topology
from framework.topology.extra_partition_spout_wrapper import unwrapped

#: The distribution that Ratchet is installed as.
_PACKAGE = "ratchet-pipelines"
#: Ratchet's own packages, whose code is identified by the version.
_OURS = ("framework", "sinks", "spouts", "integration")
#: The most items of a list, tuple or mapping in a component that are examined: longer ones are
#: data.
ITEMS_MAX = 100


def lineage_of(topology: Topology) -> dict[str, str]:
    """The lineage of a topology. Kept small, because each record of a transaction contains it.

    * ``ratchet``, ``python``: versions.
    * ``shape``: the digest of the topology's outline.
    * ``code``: a hash of the files that define the classes of its components and of their
      attributes; empty if there are none, as in a notebook."""
    return {
        "ratchet": _version(),
        "python": platform.python_version(),
        "shape": topology.digest(),
        "code": code_digest(unwrapped(each.instance) for each in topology.components),
    }


def code_digest(instances: Iterable[Any]) -> str:
    """A hash of the source files of these objects' classes and functions, and of those of their
    attributes, without files of Ratchet's own. The hash covers the name of a module, not its path.
    """
    names = {name for each in instances for held in (each, *_attributes(each)) for name in _modules(held)}
    files = {name: file for name in names if (file := _file_of(name)) is not None}
    if not files:
        return ""
    found = hashlib.sha256()
    for name, file in sorted(files.items()):
        found.update(f"{name}\0{_digest(file, _modified_ns(file))}\0".encode())
    return found.hexdigest()[:16]


@lru_cache(maxsize=1_000)
def _digest(file: Path, modified_ns: int) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:  # the file may have been removed, or be unreadable
        return ""


def _modified_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _attributes(instance: Any) -> Iterable[Any]:
    for each in getattr(instance, "__dict__", {}).values():
        items = each.values() if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else [each]
        yield from islice(items, ITEMS_MAX)


def _modules(held: Any) -> Iterable[str]:
    if isinstance(held, type):
        classes = held.__mro__
    elif isinstance(held, (FunctionType, MethodType)):
        return [held.__module__]
    else:
        classes = type(held).__mro__
    return [each.__module__ for each in classes]


def _file_of(name: str | None) -> Path | None:
    """The source file of a user's module. None for modules of Ratchet, of Python, and without a
    file."""
    if not name or name.partition(".")[0] in {*_OURS, *sys.stdlib_module_names}:
        return None
    path = getattr(sys.modules.get(name), "__file__", None)
    file = Path(path) if path is not None else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


@cache
def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return ""
