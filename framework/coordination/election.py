"""Who may act for a topology: a command that needs it stopped."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from framework.coordination.store import CoordinationStore, Leadership
from framework.errors import ConfigError

#: How long a command waits for the leadership: longer than the session of a leader that has just died lasts.
#: ``transactional.zookeeper.election.timeout.secs`` sets it.
ELECTION_TIMEOUT_S = 15.0


def identity_of_process() -> str:
    """How a candidate is called, for whoever looks at an election."""
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def leadership_of(
    topology_id: str, store: CoordinationStore, timeout_s: float = ELECTION_TIMEOUT_S
) -> Iterator[Leadership]:
    """The topology's leadership, for as long as it takes. Raises ``ConfigError`` when a driver still leads after
    ``timeout_s``."""
    identity = f"reset on {identity_of_process()}"
    leadership = store.lead(topology_id, identity, timeout_s=timeout_s)
    if leadership is None:
        raise ConfigError(f"a driver runs topology {topology_id!r}: stop it first, and its standby drivers too")
    try:
        yield leadership
    finally:
        leadership.resign()
