"""The allowed host names of our HTTP servers."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection


def host_of(text: str) -> str:
    """The name in a Host header.

    >>> host_of("[::1]:80"), host_of("Localhost:8470")
    ('::1', 'localhost')
    """
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return text.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """Decides whether a Host header names this server. If another site's DNS name points to this
    server, a browser sends that name.

    >>> hosts = AllowedHosts(["localhost", "ratchet.example"])
    >>> hosts.allow("Ratchet.example:9108", "127.0.0.1"), hosts.allow("evil.example", "127.0.0.1")
    (True, False)
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = {each.lower() for each in names}

    def allow(self, header: str, address: str | None) -> bool:
        """Whether to answer a request. ``address``: the server's address to which the client
        connected, which is always allowed; None: any IP address is allowed."""
        name = host_of(header)
        if name in self._names:
            return True
        try:
            found = ipaddress.ip_address(name)
            return address is None or found == ipaddress.ip_address(address)
        except ValueError:
            return False
