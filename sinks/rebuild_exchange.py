"""Backends whose rows ``rebuild`` can exchange."""

from __future__ import annotations

from abc import abstractmethod

from framework.errors import ConfigError
from framework.topology import Header
from sinks.backend import MapBackend


class ExchangeBackend(MapBackend):
    """A backend that can store other rows of the same columns next to its own. Optional."""

    @abstractmethod
    def beside(self, place: str) -> ExchangeBackend:
        """A backend of the same columns in the same store, at ``place`` next to this one. Raises
        ``ConfigError`` if rows cannot be exchanged."""

    @abstractmethod
    def check_exchange(self, topology_id: str) -> None:
        """As ``RebuildableState.check_exchange``."""

    @abstractmethod
    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        """As ``RebuildableState.exchange``. Objects that others have attached to the rows, such as
        permissions and indexes, are kept, or ``ConfigError`` names the obstacle."""

    @abstractmethod
    def remove(self, topology_id: str) -> bool:
        """As ``RebuildableState.remove``."""


def exchangeable(backend: MapBackend) -> ExchangeBackend:
    """The backend, for ``rebuild``. Raises ``ConfigError``."""
    if isinstance(backend, ExchangeBackend):
        return backend
    raise ConfigError(
        f"{backend.location} cannot be rebuilt: a {type(backend).__name__} cannot exchange its rows for others"
    )
