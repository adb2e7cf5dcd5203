"""From MODULE:TOPOLOGY to a topology."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework.config import Config
from framework.coordination import CoordinationStore, store_of
from framework.errors import ConfigError
from framework.topology import CoreTopology, Topology


def load_transactional(name: str, config: Config) -> Topology:
    """As ``load_topology``. Raises ``ConfigError`` for a core topology, which has no transactional state."""
    found = load_topology(name, config)
    if isinstance(found, CoreTopology):
        raise ConfigError(
            f"{name} is a core topology, which keeps no transactional state: there is nothing to do here; the state of stateful "
            "bolts is for python -m framework.state"
        )
    return found


@contextmanager
def opened_transactional(
    name: str, config: Path | None, overrides: Sequence[str] | None
) -> Iterator[tuple[Topology, CoordinationStore, Config]]:
    """A transactional topology, the store of its state, and the configuration that names both; store and states are closed in
    the end. Raises ``ConfigError`` as ``load_transactional``, and where no store outlives a process."""
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


def load_topology(name: str, config: Config) -> Topology | CoreTopology:
    """The topology at ``MODULE:TOPOLOGY``. Raises ``ConfigError`` saying what is not there."""
    found = resolve(name)
    if not isinstance(found, (Topology, CoreTopology)) and callable(found):
        found = found(config.app) if inspect.signature(found).parameters else found()
    if not isinstance(found, (Topology, CoreTopology)):
        raise ConfigError(f"{name} is a {type(found).__name__}: name a Topology (what build() returns) or a function")
    return found


def resolve(name: str) -> Callable[..., Any]:
    """What stands at ``MODULE:NAME``; the current folder comes first. Raises ``ConfigError`` saying what is not there."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{name!r}: write MODULE:TOPOLOGY, such as myproject.pipeline:topology")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's modules lie where the command is called
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(
                f"{name}: there is no module {error.name!r} here or among the installed packages"
            ) from None
        raise
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{name}: module {module_name!r} has no {attribute!r}")
    return found  # type: ignore[no-any-return]
