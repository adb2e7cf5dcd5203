"""The choice of the host on which a server runs."""

from __future__ import annotations

from integration.errors import NotOursError
from integration.processes import ProcessHost
from integration.server_launcher import CONTAINERS, EXTERNAL, VARIABLE, Host, chosen


def find_host(kind: str, where: str | None = None) -> Host:
    """The host for a kind of server, as ``where`` says, or else as ``RATCHET_SERVERS`` says.

    Raises ``NotOursError`` if servers are external: Ratchet can neither start nor stop them.
    """
    where = where or chosen()
    if where == EXTERNAL:
        raise NotOursError(f"{VARIABLE} is {EXTERNAL}, and this wants a {kind} server of its own to start and stop")
    if where == CONTAINERS:
        # imported here because only this choice needs its packages
        from integration.containers import ContainerHost

        return ContainerHost(kind)
    return ProcessHost(kind)
