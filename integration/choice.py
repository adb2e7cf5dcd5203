"""Which host a server runs on."""

from __future__ import annotations

from integration.errors import NotOursError
from integration.hosts import CONTAINERS, EXTERNAL, VARIABLE, Host, chosen
from integration.processes import ProcessHost


def find_host(kind: str, where: str | None = None) -> Host:
    """The host of a kind of server: ``where`` it says, else where ``RATCHET_SERVERS`` says.

    Raises ``NotOursError`` where servers are external: they cannot be started, let alone killed.
    """
    where = where or chosen()
    if where == EXTERNAL:
        raise NotOursError(f"{VARIABLE} is {EXTERNAL}, and this wants a {kind} server of its own to start and stop")
    if where == CONTAINERS:
        from integration.containers import ContainerHost  # needs packages that only this choice needs

        return ContainerHost(kind)
    return ProcessHost(kind)
