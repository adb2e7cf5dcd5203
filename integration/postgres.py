"""A PostgreSQL server, from the system's package or in a container."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from integration.server import Server, exchange

#: PostgreSQL refuses to run as root. If this process is root, this user of the package runs it.
USER = "postgres"
#: The users that may connect. With the options for ``initdb``, nobody else may.
_ACCESS = """host all all 127.0.0.1/32 scram-sha-256
host replication all 127.0.0.1/32 scram-sha-256
"""
_SETUP = """ALTER ROLE ratchet PASSWORD '{password}';
CREATE DATABASE ratchet;
"""
#: The first message of a client: it asks whether TLS is on. A running server answers with one byte.
SSL_REQUEST = bytes.fromhex("0000000804d2162f")


class PostgresEndpoint(Server):
    """A server, or something in front of one, to which clients of PostgreSQL connect."""

    stop_signal = "INT"  # do not wait until clients disconnect

    @property
    @abstractmethod
    def password(self) -> str:
        """The password of the user ``ratchet``."""

    @property
    def dsn(self) -> str:
        return f"postgresql://ratchet:{self.password}@127.0.0.1:{self.port}/ratchet"

    def is_ready(self) -> bool:
        return exchange(self.port, SSL_REQUEST, 1) in (b"S", b"N")


class PostgresServer(PostgresEndpoint):
    """A server on the loopback interface with the database ``ratchet``. Its owner is the
    administrator ``ratchet``, who has a random password. Every commit is on disk before it is
    acknowledged.

    As root, give a ``folder`` that every user can reach, because the server runs as the user
    ``postgres``.
    """

    name = "postgres"
    kind = "postgres"

    @property
    def password(self) -> str:
        return self.kept_secret("password")

    def prepare(self) -> list[str]:
        data = self.folder / "data"
        if not (data / "PG_VERSION").exists():
            self.initialise(data, self._fill)
        access = self.write("pg_hba.conf", _ACCESS)
        access.chmod(0o644)
        settings = {
            "hba_file": str(access),
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            **self._settings,
        }
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [*self.host.as_user(USER), self.host.program("postgres"), "-D", str(data), *options]

    def _fill(self, data: Path) -> None:
        initdb, postgres = self.host.program("initdb"), self.host.program("postgres")
        as_user = self.host.as_user(USER)
        self.make_folder(data, USER, "PostgreSQL")
        command = [*as_user, initdb, "-D", str(data), "-U", "ratchet", "-A", "reject"]
        self._run([*command, "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"])
        setup = self.write("setup.sql", _SETUP.format(password=self.password), secret=True)
        alone = [*as_user, postgres, "--single", "-D", str(data), "postgres"]
        self._run(["sh", "-c", 'cat "$0" | "$@"', str(setup), *alone])
        setup.unlink()

    def _run(self, command: Sequence[str]) -> None:
        self.run_tool(command, f"PostgreSQL's data folder {self.folder / 'data'} cannot be made")

    def is_ready(self) -> bool:
        """Asks for a session too, because the server answers before it accepts sessions."""
        if not super().is_ready():
            return False
        words = b"user\0ratchet\0database\0ratchet\0\0"
        startup = (8 + len(words)).to_bytes(4, "big") + (196608).to_bytes(4, "big") + words
        return exchange(self.port, startup, 1) == b"R"


class PostgresStandby(PostgresServer):
    """A hot standby. ``primary``: the address (``host:port``) of the primary, or of a proxy in
    front of it. It replicates until ``promote``. ``password``: of the primary, and of the
    standby."""

    name = "standby"

    def __init__(self, folder: Path, primary: str, password: str) -> None:
        super().__init__(folder)
        self._primary, self._password = primary, password

    @property
    def password(self) -> str:
        return self._password

    def promote(self) -> None:
        """Make it a primary, and return when it accepts writes."""
        pg_ctl = self.host.program("pg_ctl")
        self._run([*self.host.as_user(USER), pg_ctl, "promote", "-w", "-D", str(self.folder / "data")])

    def _fill(self, data: Path) -> None:
        host, _, port = self._primary.rpartition(":")
        as_user = self.host.as_user(USER)
        self.make_folder(data, USER, "PostgreSQL")
        copy = [self.host.program("pg_basebackup"), "-D", str(data), "-R", "-c", "fast", "-X", "stream"]
        secret = self.write("password", self._password, secret=True)
        script = 'PGPASSWORD="$(cat "$0")" exec "$@"'
        self._run(["sh", "-c", script, str(secret), *as_user, *copy, "-h", host, "-p", port, "-U", "ratchet"])
