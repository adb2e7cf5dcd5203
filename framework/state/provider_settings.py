"""``topology.state.provider.config``: the settings of a provider, all checked before anything
starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from framework.errors import ConfigError
from framework.state.checkpointed_key_value_state import LayeredState
from framework.state.expiry import ExpiringState
from framework.state.serialization import MsgpackSerializer, Serializer, named, serializer_of
from framework.topology.context import TopologyContext
from framework.topology.stateful import KeyValueState, State, StateProvider

PROVIDER = "topology.state.provider"
PROVIDER_CONFIG = "topology.state.provider.config"

S = TypeVar("S", bound="SerializerSettings")


class SerializerSettings(BaseModel):
    """The serializers of keys and values, for every provider of this package. Write classes as
    ``module.Class``, or ``str``, ``int`` and the like. Objects of a dataclass or a ``NamedTuple``
    are stored by their fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keyClass: str | None = None
    valueClass: str | None = None
    keySerializerClass: str | None = None
    valueSerializerClass: str | None = None

    def keys(self) -> Serializer:
        return serializer_of(self.keySerializerClass, self.keyClass, f"{PROVIDER_CONFIG}.keyClass")

    def values(self) -> Serializer:
        return serializer_of(self.valueSerializerClass, self.valueClass, f"{PROVIDER_CONFIG}.valueClass")


class RedisPool(BaseModel):
    """The connection settings. ``timeout``: in milliseconds, for connecting and for an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = "localhost"
    port: Annotated[int, Field(ge=1, le=65_535)] = 6379
    timeout: Annotated[int, Field(ge=1, le=600_000)] = 2000
    database: Annotated[int, Field(ge=0)] = 0
    username: str | None = None
    password: SecretStr | None = None
    ssl: bool = False


class RedisSettings(SerializerSettings):
    jedisPoolConfig: RedisPool = RedisPool()


class LmdbSettings(SerializerSettings):
    """The settings of the LMDB provider.

    * ``path``: a folder on a local disk that all executors can reach.
    * ``sync``: whether a commit waits for the disk. Without it, a crash of the machine (not of a
      process) may lose the last commits, and the topology then refuses to continue."""

    path: Annotated[str, Field(min_length=1)]
    sync: bool = True


def settings_of(conf: Mapping[str, Any], kind: type[S]) -> S:
    """The provider's section of a configuration: a table, or JSON text as in Storm. Raises
    ``ConfigError``."""
    given = conf.get(PROVIDER_CONFIG) or {}
    try:
        if isinstance(given, str):
            given = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{PROVIDER_CONFIG} is not JSON: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        each = error.errors(include_url=False, include_input=False)[0]
        where = ".".join([PROVIDER_CONFIG, *(str(part) for part in each["loc"])])
        known = f"; it knows {', '.join(kind.model_fields)}" if each["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{where}: {each['msg']}{known}") from None


def state_of(
    provider: StateProvider,
    namespace: str,
    ttl_s: float | None,
    conf: Mapping[str, Any],
    context: TopologyContext | None,
    *,
    expires: Callable[[Any], bool] = lambda key: True,
) -> State:
    """The state of a namespace, as a bolt sees it. ``ttl_s``: how long its values live, in seconds;
    None or 0 for ever. ``expires``: which keys expire. Raises ``ConfigError``."""
    state = kept_state_of(provider, namespace, bool(ttl_s), conf, context)
    if not ttl_s:
        return state
    if not isinstance(state, KeyValueState):
        raise ConfigError(f"state_ttl_s is for a KeyValueState, and {type(state).__name__} is none")
    return ExpiringState(state, ttl_s, expires=expires)


def kept_state_of(
    provider: StateProvider, namespace: str, timed: bool, conf: Mapping[str, Any], context: TopologyContext | None
) -> State:
    """As ``state_of``, with values in stored form. ``timed``: each with the time when it was put
    (``expiry.kept``). ``context``: of the only task that writes to the state; None for any other
    reader."""
    state = provider.new_state(namespace, conf, context)
    if isinstance(state, LayeredState):
        if timed:
            state.keep_times()
        if context is None:
            state.keep_nothing()
    return state


def serializers_of(provider: StateProvider, conf: Mapping[str, Any]) -> tuple[Serializer, Serializer]:
    """The serializers of keys and of values, for use outside of states, as in snapshots."""
    return provider.serializers(conf) or (MsgpackSerializer(), MsgpackSerializer())


def provider_of(conf: Mapping[str, Any]) -> StateProvider:
    """The provider that a configuration names. Raises ``ConfigError``."""
    name = conf.get(PROVIDER) or "framework.state.InMemoryKeyValueStateProvider"
    kind = named(name, PROVIDER)
    if not (isinstance(kind, type) and issubclass(kind, StateProvider)):
        raise ConfigError(f"{PROVIDER}: {name} is no StateProvider")
    return kind()
