"""Values that name environment variables, and addresses with passwords."""

from __future__ import annotations

import os
import re
from typing import Any

from framework.config.secret_redaction import HIDDEN
from framework.errors import ConfigError

#: A part of an address: a host, optionally with a port.
_HOST = re.compile(r"(\[[^\]]*\]|[^:@\[\]]*)(:\d*)?")
#: A name, an IPv6 address, the folder of a socket.
_PLAIN_HOST = re.compile(r"[\w.-]*|\[?[0-9A-Fa-f:.]+(%\w+)?\]?|/[\w./-]*")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_REFERENCES = re.compile(rf"({_REFERENCE.pattern})*")
#: The user and the password in an address.
_PASSWORD = re.compile(r"(://[^:@/]*:)([^@/]*)@")


def resolved(key: str, value: Any) -> Any:
    """Replace each ``${NAME}`` in a value by that environment variable. ``key`` names the value in
    messages. Raises ``ConfigError`` for a variable that is not set."""

    def look_up(match: re.Match[str]) -> str:
        found = os.environ.get(match.group(1))
        if found is None:
            raise ConfigError(
                f"{key} refers to ${{{match.group(1)}}}, and there is no such environment variable: set it"
            )
        return found

    if isinstance(value, str):
        return _REFERENCE.sub(look_up, value)
    return [resolved(key, each) for each in value] if isinstance(value, list) else value


def resolved_address(what: str, value: str, ends: str) -> str:
    """``resolved``, for an address. Raises ``ConfigError`` if a character in its password ends the
    password too early, because a part of the password would be read as a host, a port or a path,
    and shown. User and password must not contain @, because libpq ends them at the first @, and
    other libraries at the last. ``what`` names the address in messages; ``ends``: the characters
    that end a password.

    >>> resolved_address("the address", "redis://:a%2Fb@host:6379/0", "/?#")
    'redis://:a%2Fb@host:6379/0'
    >>> resolved_address("the address", "redis://:a/b@host:6379/0", "/?#")
    Traceback (most recent call last):
    ...
    framework.errors.ConfigError: the address does not parse: is there a sign in its user or password that must be written in \
another way? Write %2F for /, %3F for ?, %23 for #, %40 for @, %3A for :
    """  # noqa: W505 - doctest lines are not wrapped
    address: str = resolved(what, value)
    check_address(what, address, ends)
    return address


def check_address(what: str, address: str, ends: str) -> None:
    """Raise ``ConfigError`` for an address that ``resolved_address`` refuses. It may still contain
    ``${NAME}``."""
    scheme, found, rest = address.partition("://")
    authority = re.split(f"[{re.escape(ends)}]", rest, maxsplit=1)[0]
    path = rest[len(authority) :].partition("?")[0]
    behind = rest.partition("@")[2] if "@" in authority else rest
    hosts = re.split(r"[/?#]", behind, maxsplit=1)[0].split(",")
    odd_query = any("@" in each.partition("=")[0] for each in behind.partition("?")[2].split("&"))
    if found and (("@" in path and scheme != "unix") or odd_query or not all(map(_HOST.fullmatch, hosts))):
        raise ConfigError(
            f"{what} does not parse: is there a sign in its user or password that must be written in another way? Write %2F for "
            "/, %3F for ?, %23 for #, %40 for @, %3A for :"
        )


def is_reference(value: str) -> bool:
    """Whether a value is only ``${NAME}``, and so contains no secret.

    >>> is_reference("${NAME}"), is_reference("${NAME}a")
    (True, False)
    """
    return _REFERENCES.fullmatch(value) is not None


def passwords_in(address: str) -> list[str]:
    """The passwords in one or several addresses, except references.

    >>> passwords_in("http://me:secret@one:8081,http://you:${NAME}@two:8081")
    ['secret']
    """
    return [found[2] for found in _PASSWORD.finditer(address) if not is_reference(found[2])]


def with_password_variable(address: str, variable: str) -> str:
    """An address, or several, with a reference to a variable in place of each password.

    >>> with_password_variable("http://me:secret@one:8081", "NAME")
    'http://me:${NAME}@one:8081'
    """
    return _PASSWORD.sub(lambda found: found[0] if is_reference(found[2]) else f"{found[1]}${{{variable}}}@", address)


def shown_host(host: str) -> str:
    """The host of an address, or several hosts separated by commas, for messages. Text that does
    not look like a host is hidden.

    >>> shown_host("a.example,::1"), shown_host("a.example:secret@b.example")
    ('a.example,::1', '(hidden)')
    """
    return host if all(map(_PLAIN_HOST.fullmatch, host.split(","))) else HIDDEN
