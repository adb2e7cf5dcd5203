"""``transactional.zookeeper.*``: where the state of transactions is kept, and who may access it."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import Field, SecretStr, field_validator

from framework.config.section import Section, listed

#: A ZooKeeper server: a name or an address, with IPv6 in brackets, optionally with a port.
_ZOOKEEPER_SERVER = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]+))?")


class ZooKeeperConfig(Section):
    """Keys of ``transactional.zookeeper.*``."""

    zookeeper_servers: tuple[str, ...] = Field(
        (),
        alias="transactional.zookeeper.servers",
        description="ZooKeeper servers, a list of host or host:port, the last one perhaps with a chroot, as in zk3:2181/team. "
        "Not set: the state ends with the process.",
    )
    zookeeper_port: Annotated[int, Field(ge=1, le=65_535)] = Field(
        2181, alias="transactional.zookeeper.port", description="The port of servers that are given without one."
    )
    zookeeper_root: str = Field(
        "/ratchet", alias="transactional.zookeeper.root", description="The znode that contains all topologies."
    )
    zookeeper_session_timeout_secs: Annotated[float, Field(ge=1, le=600, strict=False)] = Field(
        10.0,
        alias="transactional.zookeeper.session.timeout.secs",
        description="Seconds without contact after which a leader loses the lead.",
    )
    zookeeper_connection_timeout_secs: Annotated[float, Field(gt=0, le=600, strict=False)] = Field(
        15.0,
        alias="transactional.zookeeper.connection.timeout.secs",
        description="Seconds in which a server must answer at the start.",
    )
    zookeeper_election_timeout_secs: Annotated[float, Field(gt=0, le=600, strict=False)] = Field(
        15.0,
        alias="transactional.zookeeper.election.timeout.secs",
        description="Seconds that a command such as reset waits for the lead.",
    )
    zookeeper_auth: SecretStr | None = Field(
        None,
        alias="transactional.zookeeper.auth",
        description="digest:user:password for ACLs. Secret: give it as ${NAME} from the environment.",
    )
    zookeeper_tls_enabled: bool = Field(
        False,
        alias="transactional.zookeeper.tls.enabled",
        description="Whether connections to ZooKeeper are encrypted.",
    )
    zookeeper_tls_ca: str | None = Field(
        None,
        alias="transactional.zookeeper.tls.ca",
        description="A PEM file with the authorities that sign the servers' certificates.",
    )
    zookeeper_tls_certificate: str | None = Field(
        None, alias="transactional.zookeeper.tls.certificate", description="A PEM file with this client's certificate."
    )
    zookeeper_tls_key: str | None = Field(
        None, alias="transactional.zookeeper.tls.key", description="A PEM file with the key of that certificate."
    )
    zookeeper_tls_password: SecretStr | None = Field(
        None, alias="transactional.zookeeper.tls.password", description="The password of that key. Secret."
    )
    zookeeper_sasl_username: str | None = Field(
        None, alias="transactional.zookeeper.sasl.username", description="The user of SASL with DIGEST-MD5."
    )
    zookeeper_sasl_password: SecretStr | None = Field(
        None, alias="transactional.zookeeper.sasl.password", description="The password of that user. Secret."
    )

    @field_validator("zookeeper_servers", mode="before")
    @classmethod
    def _listed_servers(cls, value: object) -> object:
        return listed(value)

    @field_validator("zookeeper_servers")
    @classmethod
    def _zookeeper_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            zookeeper_address(",".join(value))
        return value

    @field_validator("zookeeper_root")
    @classmethod
    def _root(cls, value: str) -> str:
        return checked_zookeeper_root(value)

    @field_validator("zookeeper_auth")
    @classmethod
    def _auth(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value is not None else "digest::"
        if text.count(":") < 2 or not text.startswith("digest:"):
            raise ValueError("must be digest:user:password; SASL has transactional.zookeeper.sasl.* and TLS .tls.*")
        return value

    def zookeeper_hosts(self) -> str | None:
        """``host:port,...`` with the chroot at the end, or None when no servers are configured. A
        server may carry a port of its own."""
        if not self.zookeeper_servers:
            return None
        return str(zookeeper_address(",".join(self.zookeeper_servers), self.zookeeper_port))


def checked_zookeeper_root(value: str) -> str:
    """Return the path without empty components. Raises ``ValueError`` for a path that is empty, not
    absolute, or has a component that could leave the root.

    >>> checked_zookeeper_root("/a//b/")
    '/a/b'
    """
    parts = [part for part in value.split("/") if part]
    if not value.startswith("/") or not parts or not all(map(_is_node_name, parts)):
        raise ValueError("must be an absolute path such as /ratchet")
    return "/" + "/".join(parts)


class ZooKeeperAddress(NamedTuple):
    """A parsed address. ``servers``: each ``host:port``. ``chroot``: the path below which all nodes
    are kept; empty if there is none."""

    servers: tuple[str, ...]
    chroot: str

    def __str__(self) -> str:
        return ",".join(self.servers) + self.chroot


def zookeeper_address(text: str, port: int = 2_181) -> ZooKeeperAddress:
    """Parse ``host:port,host:port/chroot``. Servers without a port get ``port``. Raises
    ``ValueError`` with the problem for any other text, which ZooKeeper's own clients would misread:
    for instance, they read the scheme of a URL as a host.

    >>> str(zookeeper_address("zk1, zk2:2182/team"))
    'zk1:2181,zk2:2182/team'
    """
    *servers, last = (each.strip() for each in text.split(","))
    last, slash, chroot = last.partition("/")
    if "://" in text:
        raise _no_address("a URL is not the address of a ZooKeeper server")
    found = []
    for each in (*servers, last):
        if not each:
            raise _no_address("a server is missing")
        if "/" in each:
            raise _no_address(f"{each!r} has a chroot of its own, and one chroot holds for all servers")
        if "@" in each:
            raise _no_address("a user does not belong in an address: set transactional.zookeeper.auth")
        server = _ZOOKEEPER_SERVER.fullmatch(each)
        if server is None:
            raise _no_address(f"{each!r} is not a host with or without a port")
        number = int(server["port"] or port)
        if not 1 <= number <= 65_535:
            raise _no_address(f"{each!r} has no port from 1 to 65535")
        found.append(f"{server['host']}:{number}")
    if slash and (" " in chroot or not all(map(_is_node_name, chroot.split("/")))):
        raise _no_address(f"the chroot {slash + chroot!r} is not a path such as /team")
    return ZooKeeperAddress(tuple(found), slash + chroot)


def _no_address(reason: str) -> ValueError:
    return ValueError(f"{reason}: write host:port,host:port, and after the last one a chroot such as /team, if any")


def _is_node_name(text: str) -> bool:
    """Whether ZooKeeper accepts a text as the name of a node, and all its characters are
    visible."""
    return text not in ("", ".", "..") and text.isprintable()
