"""A Redis server, from the system's package or in a container."""

from __future__ import annotations

from integration.server import Server, exchange


class RedisServer(Server):
    """A server on the loopback interface. Every write is on disk before it is acknowledged."""

    name = "redis"
    kind = "redis"

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
        # Every user can read a command line, and a setting may be a password.
        config = self.write(
            "redis.conf", "".join(f"{key} {_quoted(value)}\n" for key, value in settings.items()), secret=True
        )
        return [self.host.program("redis-server"), str(config)]

    def is_ready(self) -> bool:
        return exchange(self.port, b"PING\r\n").startswith((b"+PONG", b"-NOAUTH"))


def _quoted(value: str) -> str:
    """A value as Redis reads it from a file."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
