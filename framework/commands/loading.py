"""Loads the topology at MODULE:TOPOLOGY."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework.config import Config, loading_with
from framework.coordination import CoordinationStore, store_of
from framework.errors import ConfigError, RatchetError
from framework.execution.failures import in_users_words, users_errors, users_line
from framework.topology import CoreTopology, Topology
from framework.topology.builder import TopologyMaker
from framework.transactions.history_archive import HistoryTarget, history_target

#: The folder of Ratchet's packages.
_OURS = Path(__file__).resolve().parents[2]
_PACKAGES = ("framework", "spouts", "sinks", "integration", "ratchet")
_EXAMPLE = "myproject.pipeline:topology"


def load_transactional(name: str, config: Config) -> Topology:
    """As ``load_topology``. Raises ``ConfigError`` for a core topology, which has no transactional
    state."""
    found = load_topology(name, config)
    if isinstance(found, CoreTopology):
        raise ConfigError(
            f"{name} is a core topology, which keeps no transactional state: there is nothing to do here; the state of stateful "
            "bolts is for ratchet state"
        )
    return found


@contextmanager
def opened_transactional(
    name: str, config: Path | None, overrides: Sequence[str] | None
) -> Iterator[tuple[Topology, CoordinationStore, Config]]:
    """A transactional topology, the store of its state, and the configuration that names both; the
    block's end closes store and states. Raises ``ConfigError`` as ``load_transactional``, and when
    no store outlives a process."""
    settings = Config.load(config, overrides or ())
    topology = load_transactional(name, settings)
    if settings.zookeeper_hosts() is None:
        raise ConfigError("transactional.zookeeper.servers is not set: there is no state that outlives a process")
    store = store_of(settings)
    try:
        yield topology, store, settings
    finally:
        store.close()
        for state in topology.states:
            state.close()


@contextmanager
def opened_archive(settings: Config, topology_id: str) -> Iterator[HistoryTarget | None]:
    """The table of records that the configuration names; None if it names none. The block's end
    closes it."""
    target = history_target(settings, topology_id)
    try:
        yield target
    finally:
        if target is not None:
            target.close()


def load_topology(name: str, config: Config) -> Topology | CoreTopology:
    """The topology at ``MODULE:TOPOLOGY``. Raises ``ConfigError`` naming the missing part."""
    with loading_with(config):
        return _loaded(name, config)


def _loaded(name: str, config: Config) -> Topology | CoreTopology:
    found: Any = resolve(name)
    called = not isinstance(found, (Topology, CoreTopology, TopologyMaker)) and callable(found)
    if called:
        with _users_errors(name):
            found = found(_AppSettings(config.app)) if inspect.signature(found).parameters else found()
    if found is None and called:
        raise ConfigError(f'{name} returned None: is "return builder.build()" missing?')
    if isinstance(found, TopologyMaker):
        with _users_errors(name):
            found = found.build()
    if hasattr(found, "build"):
        raise ConfigError(f"{name} {'returned' if called else 'is'} a builder: call its build()")
    if not isinstance(found, (Topology, CoreTopology)):
        raise ConfigError(
            f"{name} is a {type(found).__name__}: name a Pipeline, a Topology, or a function that makes one"
        )
    return found


class _SettingMissing(ConfigError):
    """The configuration, and no line of code, has a mistake."""


class _AppSettings(dict[str, Any]):
    """The ``app.*`` keys, as a topology function gets them. A missing key is reported as a mistake
    in the configuration."""

    def __missing__(self, key: str) -> Any:
        near = difflib.get_close_matches(key, list(self), n=1)
        raise _SettingMissing(
            f"{key} is not set"
            + (f"; there is {near[0]}: is one of the two misspelt?" if near else ": give it in [app]")
        )


@contextmanager
def _users_errors(name: str) -> Iterator[None]:
    """Converts errors in the user's own file to a ``ConfigError`` that names file and line."""
    try:
        yield
    except (_SettingMissing, KeyboardInterrupt):
        raise
    except ConfigError as error:
        line = users_line(error)
        place = line.partition(": ")[0].rpartition(os.sep)[2]
        if not line or f"{place}: " in str(error):
            raise
        raise ConfigError(f"{line}: {error}") from error
    except RatchetError:
        raise  # it names a component, or the line
    except SyntaxError as error:
        raise ConfigError(
            f"{name}: {error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    except users_errors() as error:
        raise ConfigError(f"{name}: {in_users_words(error)}") from error


def resolve(name: str, *, installed: bool = False) -> Callable[..., Any]:
    """The object at ``MODULE:NAME``; the current folder is searched first, unless the module is
    known to be ``installed``: another user may own that folder. Raises ``ConfigError`` naming the
    missing part."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        near = f"{_module_of(name)}:NAME, with what the file calls it" if name.endswith(".py") else _EXAMPLE
        raise ConfigError(f"{name!r}: write MODULE:TOPOLOGY, such as {near}")
    if "/" in module_name or module_name.endswith(".py"):
        raise ConfigError(f"{name!r}: write {_module_of(module_name)}:{attribute}")
    if not installed and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's modules are in the current folder
    _check_hidden(Path.cwd())
    with _users_errors(name):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{name}: there is no module {error.name!r} here or among the installed packages"
                ) from None
            raise
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{name}: module {module_name!r} has no {attribute!r}")
    return found  # type: ignore[no-any-return]


def _module_of(file: str) -> str:
    """The name by which Python imports a file.

    >>> _module_of("./jobs/shop.py")
    'jobs.shop'
    """
    return file.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")


def _check_hidden(folder: Path) -> None:
    """Refuse a folder or module of the user's with the name of one of our packages, because it
    would be imported instead."""
    if folder.resolve() == _OURS:
        return
    for name in _PACKAGES:
        for found in (folder / name, folder / f"{name}.py"):
            if found.exists():
                raise ConfigError(f"{found} hides Ratchet's package {name!r}: rename it")
