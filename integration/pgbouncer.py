"""A PgBouncer pooler before a PostgreSQL server, from the system's package or in a container."""

from __future__ import annotations

from pathlib import Path

from integration.postgres import USER, PostgresEndpoint


class PgBouncerServer(PostgresEndpoint):
    """A pooler on the loopback interface for the database ``ratchet`` of the server at ``target``
    (``host:port``). ``password``: of the user ``ratchet``, of the server and of the pooler. In its
    mode ``transaction``, each transaction may run in a different session of the server.

    As root, give a ``folder`` that every user can reach, because the pooler runs as the user
    ``postgres``.
    """

    name = "pgbouncer"
    kind = "pgbouncer"

    def __init__(self, folder: Path, target: str, password: str, *, settings: dict[str, str] | None = None) -> None:
        super().__init__(folder, settings=settings)
        self._target, self._password = target, password

    @property
    def password(self) -> str:
        return self._password

    def prepare(self) -> list[str]:
        host, _, port = self._target.rpartition(":")
        users = self.write_for(USER, "users.txt", f'"ratchet" "{self._password}"\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(users),
            "pool_mode": "transaction",
            "max_client_conn": "200",
            **self._settings,
        }
        lines = ["[databases]", f"ratchet = host={host} port={port} dbname=ratchet", "[pgbouncer]"]
        lines += [f"{key} = {value}" for key, value in settings.items()]
        file = self.write("pgbouncer.ini", "\n".join(lines) + "\n")
        file.chmod(0o644)
        return [*self.host.as_user(USER), self.host.program("pgbouncer"), str(file)]
