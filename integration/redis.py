"""One Redis server as a child process, from the system's package."""

from __future__ import annotations

import socket

from integration.packages import find_program
from integration.process import ServerProcess


class RedisServer(ServerProcess):
    """A server on the loopback interface; every write is on disk before it is acknowledged."""

    name = "redis"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(data),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
            **self._settings,
        }
        options = [part for key, value in settings.items() for part in (f"--{key}", value)]
        return [find_program("redis-server", "redis-server"), *options]

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
