"""The configured addresses of servers, such as ``postgres.url``, for code that does not name
them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from pydantic import Field, SecretStr

from framework.config.section import Section

_MORE = "Give a password as ${NAME} from the environment."


class AddressConfig(Section):
    """The addresses of servers. They may contain passwords."""

    postgres_url: SecretStr | None = Field(
        None,
        alias="postgres.url",
        description=f"The database of postgres('table') in a pipeline: postgresql://USER@HOST/DATABASE. {_MORE}",
    )
    mysql_url: SecretStr | None = Field(
        None,
        alias="mysql.url",
        description=f"The database of mysql('table') in a pipeline: mysql://USER@HOST:3306/DATABASE. {_MORE}",
    )
    redis_url: SecretStr | None = Field(
        None, alias="redis.url", description=f"The server of redis('name') in a pipeline: redis://HOST:6379/0. {_MORE}"
    )
    registry_url: SecretStr | None = Field(
        None,
        alias="registry.url",
        description=f"The Schema Registry of RegistryAvro('subject') and its like: http://HOST:8081. {_MORE}",
    )

    def addresses(self) -> dict[str, str]:
        """The addresses that are set: key -> address."""
        found = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {key: each.get_secret_value() for key, each in found.items() if each is not None}


#: Field -> key.
_KEYS: Mapping[str, str] = {name: str(each.alias) for name, each in AddressConfig.model_fields.items()}
_loading: ContextVar[Mapping[str, str] | None] = ContextVar("addresses", default=None)


def variable_of(key: str) -> str:
    """The environment variable that sets an address.

    >>> variable_of("postgres.url")
    'RATCHET_POSTGRES_URL'
    """
    return f"RATCHET_{key.upper().replace('.', '_')}"


def address_environment() -> dict[str, str]:
    """The addresses in environment variables: key -> address."""
    found = {key: os.environ.get(variable_of(key)) for key in _KEYS.values()}
    return {key: each for key, each in found.items() if each}


def default_address(key: str) -> str | None:
    """The address for code that names none: of the configuration with which its module is loaded,
    or of the environment."""
    return {**address_environment(), **(_loading.get() or {})}.get(key)


@contextmanager
def loading_with(config: AddressConfig) -> Iterator[None]:
    """Code that is loaded in this block gets the addresses of ``config``."""
    token = _loading.set(config.addresses())
    try:
        yield
    finally:
        _loading.reset(token)
