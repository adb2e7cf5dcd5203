"""What becomes of the errors of Redis servers, and what these tell of themselves."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from framework.errors import ConfigError

try:
    import redis
except ImportError as error:  # an extra
    raise ConfigError(
        "states and sinks in Redis need the package redis: pip install 'ratchet-pipelines[redis]'"
    ) from error

#: Errors that pass by themselves, or when there is room again: as classes of the client, and as
#: words in the errors of scripts and of other servers.
_PASSING = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ReadOnlyError,
)
_PASSING_WORDS = re.compile(r"\b(BUSY|LOADING|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|MISCONF|OOM|READONLY)\b")


def passes(error: redis.exceptions.RedisError) -> bool:
    """Whether an error that a server has answered passes by itself, as a failover does."""
    return isinstance(error, _PASSING) or bool(_PASSING_WORDS.search(str(error)))


def leave_replica(client: Any, error: redis.exceptions.RedisError) -> None:
    """Close the idle connections if the server that they lead to has become a replica: the address
    may lead to another server by now."""
    if isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in str(error):
        with suppress(redis.exceptions.RedisError):
            client.connection_pool.disconnect(inuse_connections=False)


def server_information(client: Any) -> dict[str, Any] | None:
    """What the server tells of its role, memory and persistence. None if the user may not ask, as
    in some managed services."""
    try:
        found: dict[str, Any] = client.info("everything")
    except redis.exceptions.ResponseError as error:
        if passes(error):
            raise
        return None
    return found


def evicts(information: dict[str, Any]) -> str:
    """How the server may evict keys that never expire, as ours, with what to do; empty if it does
    not."""
    policy, most = information.get("maxmemory_policy", "noeviction"), information.get("maxmemory", 0)
    if not most or policy == "noeviction" or policy.startswith("volatile-"):
        return ""
    return f"the server evicts keys ({policy}) beyond {most} bytes; set maxmemory-policy to noeviction"
