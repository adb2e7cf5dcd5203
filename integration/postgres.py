"""One PostgreSQL server as a child process, from the system's package."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

from integration.errors import ServerError
from integration.packages import find_program
from integration.process import ServerProcess

#: PostgreSQL refuses to run as root: there its package's own user runs it.
_USER = "postgres"
_PACKAGE = "postgresql"
_BINARIES = ("usr/lib/postgresql/*/bin",)
#: What a client asks first: whether TLS is on. A server that is up answers with one byte.
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


class PostgresServer(ServerProcess):
    """A server on the loopback interface with one database, ``ratchet``, and one user, ``ratchet``, who owns it and needs
    no password. Every commit is on disk before it is acknowledged.

    For root, ``folder`` must be one that every user can reach: the server runs as the user ``postgres``.
    """

    name = "postgres"
    stop_signal = "INT"  # do not wait for clients to leave

    @property
    def dsn(self) -> str:
        return f"postgresql://ratchet@127.0.0.1:{self.port}/ratchet"

    def prepare(self) -> list[str]:
        data = self.folder / "data"
        if not (data / "PG_VERSION").exists():
            self._initialise(data)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            **self._settings,
        }
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [*self._as_user(), _binary("postgres"), "-D", str(data), *options]

    def _initialise(self, data: Path) -> None:
        if os.geteuid() == 0:
            binary = _binary("initdb")  # installs the package, and with it the user
            try:
                owner = pwd.getpwnam(_USER)
            except KeyError:
                raise ServerError(f"{binary} is there, and no user {_USER!r} to run it: install {_PACKAGE}") from None
            self._check_reachable()
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir(mode=0o700)
            os.chown(data, owner.pw_uid, owner.pw_gid)
        command = [*self._as_user(), _binary("initdb"), "-D", str(data), "-U", "ratchet", "-A", "trust"]
        command += ["-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        _run(command)
        _run(
            [*self._as_user(), _binary("postgres"), "--single", "-D", str(data), "postgres"],
            "CREATE DATABASE ratchet;\n",
        )

    def _check_reachable(self) -> None:
        for folder in (self.folder, *self.folder.parents):
            if not folder.stat().st_mode & 0o001:
                raise ServerError(
                    f"{folder}: the user {_USER!r}, as whom PostgreSQL runs, cannot reach it; give another folder"
                )

    def _as_user(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(_SSL_REQUEST)
                if connection.recv(1) not in (b"S", b"N"):
                    return False
        except OSError:
            return False
        command = [_binary("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False, timeout=10).returncode == 0


def _binary(name: str) -> str:
    return find_program(name, _PACKAGE, _BINARIES)


def _run(command: list[str], text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd="/", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ServerError(f"{Path(command[-3]).name}: {lines[-1] if lines else 'it said nothing'}")
