"""Redis servers: classification of their errors, and information about them."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from framework.errors import ConfigError

try:
    import redis
except ImportError as error:  # redis is an optional extra
    raise ConfigError(
        "states and sinks in Redis need the package redis: pip install 'ratchet-pipelines[redis]'"
    ) from error

#: Transient errors, including lack of space: as classes of the client, and as words in the errors
#: of scripts and of other servers.
_PASSING = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ReadOnlyError,
)
_PASSING_WORDS = re.compile(r"\b(BUSY|LOADING|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|MISCONF|OOM|READONLY)\b")


#: A longer value is neither written nor decoded.
VALUE_BYTES_MAX = 64 * 2**20


def passes(error: redis.exceptions.RedisError) -> bool:
    """Whether a server's error is transient, such as a failover."""
    return isinstance(error, _PASSING) or bool(_PASSING_WORDS.search(str(error)))


def redirects(error: redis.exceptions.RedisError) -> str:
    """Advice for an error by which a node of a Redis Cluster says that another node has the key;
    empty for other errors."""
    if not isinstance(error, (redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError)):
        return ""
    return (
        f"the server is a node of a Redis Cluster, and another node has the key ({error}); Ratchet does not follow it: give "
        "the address of a server without cluster mode"
    )


def leave_replica(client: Any, error: redis.exceptions.RedisError) -> None:
    """Close the idle connections if their server has become a replica, because the address may lead
    to another server now."""
    if isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in str(error):
        with suppress(redis.exceptions.RedisError):
            client.connection_pool.disconnect(inuse_connections=False)


def server_information(client: Any) -> dict[str, Any] | None:
    """The server's information about its role, memory and persistence. None if the user may not
    read it, as in some managed services."""
    try:
        found: dict[str, Any] = client.info("everything")
    except redis.exceptions.ResponseError as error:
        if passes(error):
            raise
        return None
    return found


def evicts(information: dict[str, Any]) -> str:
    """Describes how the server may evict keys that never expire, such as Ratchet's, with the
    remedy; empty if it does not."""
    policy, most = information.get("maxmemory_policy", "noeviction"), information.get("maxmemory", 0)
    if not most or policy == "noeviction" or policy.startswith("volatile-"):
        return ""
    return f"the server evicts keys ({policy}) beyond {most} bytes; set maxmemory-policy to noeviction"
