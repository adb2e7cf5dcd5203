"""The hosts by whose names a server of ours may be asked."""

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
    """Tells whether a Host header names this server. A browser that another site's DNS led here
    sends the name of that site.

    >>> hosts = AllowedHosts(["localhost", "ratchet.example"])
    >>> hosts.allow("Ratchet.example:9108", "127.0.0.1"), hosts.allow("evil.example", "127.0.0.1")
    (True, False)
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = {each.lower() for each in names}

    def allow(self, header: str, address: str | None) -> bool:
        """``address``: where the server was reached. It is no name that DNS could lead here; None
        stands for any address."""
        name = host_of(header)
        if name in self._names:
            return True
        try:
            found = ipaddress.ip_address(name)
            return address is None or found == ipaddress.ip_address(address)
        except ValueError:
            return False
