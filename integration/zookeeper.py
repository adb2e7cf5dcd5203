"""One ZooKeeper server as a child process, from the jars inside PySpark."""

from __future__ import annotations

import socket

from integration.errors import ServerError
from integration.jars import spark_jars
from integration.java import find_java
from integration.process import ServerProcess

#: Sessions of 1 to 60 s: short ones let a test, or a restarted driver, go on quickly.
TICK_MS = 500
_JARS = (
    "zookeeper-*",
    "netty-*",
    "slf4j-api-*",
    "log4j-*",
    "metrics-core-*",
    "snappy-java-*",
    "commons-*",
    "jackson-*",
)


class ZooKeeperServer(ServerProcess):
    """A standalone server on the loopback interface; every write is on disk before it is acknowledged."""

    name = "zookeeper"

    def prepare(self) -> list[str]:
        config = self.folder / "zoo.cfg"
        properties = {
            "tickTime": str(TICK_MS),
            "minSessionTimeout": "1000",
            "maxSessionTimeout": "60000",
            "dataDir": str(self.folder / "data"),
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "maxClientCnxns": "0",
            "4lw.commands.whitelist": "ruok,srvr",
            "autopurge.snapRetainCount": "3",
            "autopurge.purgeInterval": "1",
        }
        try:
            (self.folder / "data").mkdir(exist_ok=True)
            config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()), encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; make room or give another folder") from error
        jars = [str(jar) for pattern in _JARS for jar in sorted(spark_jars().glob(f"{pattern}.jar"))]
        logging = self.java_logging()
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return [find_java(), "-Xmx256m", "-XX:+UseSerialGC", logging, "-cp", ":".join(jars), main, str(config)]

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"ruok")
                return connection.recv(16) == b"imok"
        except OSError:
            return False
