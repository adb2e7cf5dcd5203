"""HAProxy before a primary PostgreSQL server and its standby, from the system's package. It runs as
a child process only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from integration.postgres import PostgresEndpoint
from integration.server_launcher import EMBEDDED

_CONFIGURATION = """defaults
  mode tcp
  timeout connect 5s
  timeout client 1h
  timeout server 1h
listen postgres
  bind 127.0.0.1:{port}
  default-server check inter 200ms fall 2 rise 1 on-marked-down shutdown-sessions
"""


class HaproxyServer(PostgresEndpoint):
    """A proxy on the loopback interface. It sends connections to the first of ``targets``
    (``host:port``) that accepts them, and closes the connections to a target that fails.
    ``password``: of the user ``ratchet`` of all targets."""

    name = "haproxy"
    kind = "haproxy"

    def __init__(self, folder: Path, targets: Sequence[str], password: str) -> None:
        super().__init__(folder, where=EMBEDDED)
        self._targets, self._password = targets, password

    @property
    def password(self) -> str:
        return self._password

    def prepare(self) -> list[str]:
        lines = [
            f"  server server{number} {target}{' backup' if number else ''}\n"
            for number, target in enumerate(self._targets)
        ]
        file = self.write("haproxy.cfg", _CONFIGURATION.format(port=self.port) + "".join(lines))
        return [self.host.program("haproxy"), "-db", "-f", str(file)]
