"""Errors of Redis servers by what becomes of them, for states and sinks."""

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
