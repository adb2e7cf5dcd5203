"""The servers of places and formats, by an address in the code or in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from framework.call_site import Call
from framework.config import default_address, variable_of
from framework.errors import ConfigError, TopologyError

T = TypeVar("T")
#: Places -> an address of their form. No server answers at a name in ``.invalid`` (RFC 2606).
_NOWHERE = {
    "postgres": "postgresql://address-not-set.invalid/none",
    "mysql": "mysql://address-not-set.invalid/none",
    "redis": "redis://address-not-set.invalid",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A server. ``key``: the key of the configuration for an address that the code does not name.
    ``lacks``: the mistake if the key is not set, either."""

    address: str
    key: str | None = None
    lacks: TopologyError | None = None

    def reached(self, make: Callable[[str], T]) -> T:
        """Call ``make`` with the address. Raises ``ConfigError`` that names the setting."""
        try:
            return make(self.address)
        except ConfigError as error:
            if self.key is None:
                raise
            raise ConfigError(f"{self.key}, or {variable_of(self.key)}: {error}") from None


def server_of(call: Call, kind: str, address: str | None, example: str) -> Server:
    """The server at an address, or at the address of the configuration. A pipeline with a place
    without an address can be tested, but not built. ``example``: the call with an address."""
    if address is not None:
        return Server(address)
    key = f"{kind}.url"
    found = default_address(key)
    if found is not None:
        return Server(found, key)
    return Server(_NOWHERE[kind], key, not_set(call, key, example))


def not_set(call: Call, key: str, example: str) -> TopologyError:
    """The mistake of a call without an address."""
    return call.mistake(
        f"there is no address: set {key} in the configuration, or {variable_of(key)} in the environment, or write {example}"
    )


def is_address(text: str) -> bool:
    """Whether a text is the address of a server, and not a name.

    >>> is_address("postgresql://db/shop"), is_address("host=db"), is_address("${SHOP}"), is_address("orders")
    (True, True, True, False)
    """  # noqa: W505 - doctest lines are not wrapped
    return any(sign in text for sign in ("://", "=", "${"))
