"""ZooKeeper servers, from the jars inside PySpark: one server or an ensemble, plain or also with
TLS and SASL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration.server import Server, exchange, free_port, port_taken, start_together, stop_all

#: Allows sessions of 1 to 60 s. With short sessions, tests and restarted drivers continue quickly.
TICK_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurePort:
    """A second client port, for TLS; and the users who may log in by SASL (DIGEST-MD5) on either
    port.

    ``certificate``: a PEM file with the server's private key and chain; None: no TLS.
    ``authority``: a PEM file with the authority that signs client certificates. ``users``: name ->
    password. ``required``: refuse sessions without SASL. ``clients``: clients must show a
    certificate.
    """

    certificate: Path | None = None
    authority: Path | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    required: bool = False
    clients: bool = True
    port: int = field(default_factory=free_port)

    def properties(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.certificate is not None:
            found |= {
                "secureClientPort": str(self.port),
                "secureClientPortAddress": "127.0.0.1",
                "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
                "ssl.keyStore.location": str(self.certificate),
                "ssl.keyStore.type": "PEM",
                "ssl.trustStore.location": str(self.authority),
                "ssl.trustStore.type": "PEM",
                "ssl.clientAuth": "need" if self.clients else "none",
            }
        if self.users:
            found["authProvider.sasl"] = "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
            if self.required:
                found["enforce.auth.enabled"] = "true"
                found["enforce.auth.schemes"] = "sasl"
        return found

    def login_configuration(self) -> str:
        """The JAAS file of the server."""
        lines = "\n".join(f'  user_{name}="{password}"' for name, password in self.users.items())
        return f"Server {{\n  org.apache.zookeeper.server.auth.DigestLoginModule required\n{lines};\n}};\n"

    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.certificate, self.authority) if file is not None)


@dataclass(frozen=True, slots=True)
class EnsembleMember:
    """A server's place in an ensemble: its number, and the two ports of each member (for data, and
    for elections)."""

    number: int
    members: dict[int, tuple[int, int]]

    def properties(self) -> dict[str, str]:
        return {
            "initLimit": "20",
            "syncLimit": "10",
            "quorumListenOnAllIPs": "false",
            **{f"server.{each}": f"127.0.0.1:{data}:{vote}" for each, (data, vote) in self.members.items()},
        }


class ZooKeeperServer(Server):
    """A server on the loopback interface, alone or with a ``place`` in an ensemble. Every write is
    on disk before it is acknowledged."""

    name = "zookeeper"
    kind = "zookeeper"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        settings: dict[str, str] | None = None,
        secure: SecurePort | None = None,
        place: EnsembleMember | None = None,
        where: str | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, settings=settings, where=where)
        self._secure = secure
        self._place = place

    @property
    def secure_address(self) -> str:
        """The address of the TLS port."""
        return f"127.0.0.1:{self._secure.port if self._secure is not None else 0}"

    def prepare(self) -> list[str]:
        data = self.folder / "data"
        properties = {
            "tickTime": str(TICK_MS),
            "minSessionTimeout": "1000",
            "maxSessionTimeout": "60000",
            "dataDir": str(data),
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "maxClientCnxns": "0",
            "4lw.commands.whitelist": "ruok,srvr",
            "autopurge.snapRetainCount": "3",
            "autopurge.purgeInterval": "1",
            **(self._place.properties() if self._place is not None else {}),
            **(self._secure.properties() if self._secure is not None else {}),
            **self._settings,
        }
        config = self.write("zoo.cfg", "".join(f"{key}={value}\n" for key, value in properties.items()), secret=True)
        data.mkdir(exist_ok=True)
        options = ["-Xmx256m", *self.java_options, *self.java_files()]
        if self._place is not None:
            (data / "myid").write_text(str(self._place.number), encoding="ascii")
        if self._secure is not None and self._secure.users:
            login = self.write("jaas.conf", self._secure.login_configuration(), secret=True)
            options.append(f"-Djava.security.auth.login.config={login}")
        alone = "org.apache.zookeeper.server.ZooKeeperServerMain"
        member = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        main = alone if self._place is None else member
        return [self.host.java(), *options, "-cp", self.host.classpath(), main, str(config)]

    def reads(self) -> tuple[Path, ...]:
        return self._secure.files() if self._secure is not None else ()

    def is_ready(self) -> bool:
        """Whether it serves. A member of an ensemble serves when it leads or follows."""
        return b"Mode: " in exchange(self.port, b"srvr", 4096)


class ZooKeeperEnsemble:
    """Several servers that vote. A majority must be alive."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        *,
        ports: Sequence[int] = (),
        guarded: bool = True,
        where: str | None = None,
    ) -> None:
        members = self._members = {number: (free_port(), free_port()) for number in range(1, servers + 1)}
        self.servers: Sequence[ZooKeeperServer] = [
            ZooKeeperServer(
                folder / f"zookeeper-{number}",
                ports[number - 1] if ports else None,
                guarded=guarded,
                place=EnsembleMember(number, members) if servers > 1 else None,
                where=where,
            )
            for number in members
        ]

    @property
    def address(self) -> str:
        return ",".join(server.address for server in self.servers)

    def start(self) -> None:
        """Start all and wait until each serves."""
        start_together(self.servers, self.renew_ports)

    def renew_ports(self) -> None:
        """Replace the ports between the members that another program took before they started."""
        for number, ports in self._members.items():
            if any(map(port_taken, ports)):
                self._members[number] = (free_port(), free_port())

    def stop(self) -> None:
        stop_all(self.servers)

    def __enter__(self) -> ZooKeeperEnsemble:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
