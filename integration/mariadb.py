"""A MariaDB server, from the system's package. It runs as a child process only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from integration.server import Server, exchange
from integration.server_launcher import EMBEDDED

#: If this process is root, this user runs the server.
USER = "daemon"
#: Creates the system tables, as ``mariadb-install-db`` does, which needs more packages. The slow
#: part, a schema of views, and the users ``root``, who have no password, are left out.
_BOOTSTRAP = """
cd /usr/share/mysql
{ printf 'CREATE DATABASE mysql;\\nUSE mysql;\\n'
  cat mysql_system_tables.sql mysql_performance_tables.sql mysql_system_tables_data.sql
  printf "DELETE FROM global_priv WHERE User <> 'mariadb.sys';\\n"
} | "$@"
"""
_SETUP = """CREATE DATABASE IF NOT EXISTS ratchet CHARACTER SET utf8mb4;
SET sql_log_bin = 0;
CREATE USER IF NOT EXISTS ratchet@'%' IDENTIFIED BY '{password}';
GRANT ALL ON *.* TO ratchet@'%' WITH GRANT OPTION;
"""


class MariaDbServer(Server):
    """A server on the loopback interface with the database ``ratchet``, and with an administrator
    ``ratchet`` who has a random password. Every commit is on disk before it is acknowledged, and in
    the binary log.

    ``settings``: options of ``mariadbd``. As root, give a ``folder`` that every user can reach,
    because the server runs as the user ``daemon``.
    """

    name = "mariadb"
    kind = "mariadb"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, settings=settings, where=EMBEDDED)

    @property
    def password(self) -> str:
        """The password of the user ``ratchet``."""
        return self.kept_secret("password")

    @property
    def dsn(self) -> str:
        return f"mysql://ratchet:{self.password}@127.0.0.1:{self.port}/ratchet"

    def prepare(self) -> list[str]:
        data = self.folder / "data"
        if not (data / "mysql").exists():
            self.initialise(data, self._fill)
        self.make_folder(self._temporary, USER, "MariaDB")
        setup = self.write_for(USER, "setup.sql", _SETUP.format(password=self.password))
        settings = {
            "datadir": str(data),
            "tmpdir": str(self._temporary),
            "bind-address": "127.0.0.1",
            "port": str(self.port),
            "socket": str(data / "mariadb.sock"),
            "pid-file": str(data / "mariadb.pid"),
            "init-file": str(setup),
            "skip-name-resolve": "1",
            "server-id": "1",
            "log-bin": str(data / "binlog"),
            "binlog-format": "ROW",
            "sync-binlog": "1",
            "max-connections": "200",
            "innodb-buffer-pool-size": "64M",
            **self._settings,
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        return [*self.host.as_user(USER), self.host.program("mariadbd"), "--no-defaults", *options]

    @property
    def _temporary(self) -> Path:
        """The folder for temporary tables. A server that starts removes all temporary tables in
        this folder, also those of other servers, which then fail or crash. So each server has its
        own."""
        return self.folder / "tmp"

    def _fill(self, data: Path) -> None:
        for each in (data, self._temporary):
            self.make_folder(each, USER, "MariaDB")
        options = [f"--datadir={data}", f"--tmpdir={self._temporary}", "--innodb-flush-log-at-trx-commit=0"]
        command = [*self.host.as_user(USER), self.host.program("mariadbd"), "--no-defaults", "--bootstrap", *options]
        self._run(["sh", "-c", _BOOTSTRAP, "sh", *command])

    def _run(self, command: Sequence[str]) -> None:
        self.run_tool(command, f"MariaDB's data folder {self.folder / 'data'} cannot be made")

    def is_ready(self) -> bool:
        """A running server sends a packet of its protocol, whose number is 0 and whose first byte
        is 10."""
        greeting = exchange(self.port, b"", 5)
        return len(greeting) == 5 and greeting[3:] == b"\0\x0a"
