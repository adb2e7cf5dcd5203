"""A worker of Kafka Connect with Debezium's connectors for PostgreSQL and MariaDB."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.errors import ServerError
from integration.jars import Progress
from integration.server import Server, wait_until
from integration.server_launcher import EMBEDDED

_HEAP = "-Xmx512m"
_ANSWER_TIMEOUT_S = 90.0
_RUN_TIMEOUT_S = 240.0
_TOPICS = {"config.storage.topic": "configs", "offset.storage.topic": "offsets", "status.storage.topic": "status"}
_JSON = "org.apache.kafka.connect.json.JsonConverter"


class ConnectWorker(Server):
    """A distributed worker, the only one of its group, on the loopback interface. Always a process
    of this machine. Its connectors and their offsets are in topics of ``bootstrap_servers``, whose
    names begin with ``group``. So a killed worker continues where it stopped, and a second worker
    of the same group finds the same connectors.

    Records are JSON without schemas, unless ``settings`` or a connector say otherwise.
    """

    name = "connect"
    kind = "connect"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        bootstrap_servers: str,
        group: str = "connect",
        guarded: bool = True,
        progress: Progress | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, settings=settings, where=EMBEDDED)
        self._bootstrap_servers = bootstrap_servers
        self._group = group
        self._progress = progress

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def prepare(self) -> list[str]:
        properties = {
            "bootstrap.servers": self._bootstrap_servers,
            "group.id": self._group,
            "listeners": self.url,
            "plugin.discovery": "service_load",
            "key.converter": _JSON,
            "key.converter.schemas.enable": "false",
            "value.converter": _JSON,
            "value.converter.schemas.enable": "false",
            "connector.client.config.override.policy": "All",
            "offset.flush.interval.ms": "1000",
            # the broker's minimum: the time until a killed worker is noticed
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "1000",
            "scheduled.rebalance.max.delay.ms": "0",
            **{key: f"{self._group}-{name}" for key, name in _TOPICS.items()},
            **{key.replace(".topic", ".replication.factor"): "1" for key in _TOPICS},
            "offset.storage.partitions": "1",
            "status.storage.partitions": "1",
            **self._settings,
        }
        text = "".join(f"{key}={value}\n" for key, value in properties.items())
        config = self.write("worker.properties", text, secret=True)
        classpath = self.host.classpath(self._progress)
        java = [self.host.java(), _HEAP, *self.java_options, *self.java_files(), "-cp", classpath]
        return [*java, "org.apache.kafka.connect.cli.ConnectDistributed", str(config)]

    def is_ready(self) -> bool:
        try:
            return isinstance(self._ask("GET", "/connectors"), list)
        except ServerError:
            return False

    def put(self, connector: str, config: Mapping[str, str]) -> None:
        """Create or change a connector, and wait until it and its task run. Raises
        ``ServerError``, with the reason that the connector gives."""
        self._ask("PUT", f"/connectors/{connector}/config", dict(config))
        wait_until(lambda: self.runs(connector), _RUN_TIMEOUT_S, f"{connector}: a running task")

    def runs(self, connector: str) -> bool:
        """Whether the connector and its task run. Raises ``ServerError`` if one of them has
        failed."""
        try:
            status = self._ask("GET", f"/connectors/{connector}/status")
        except ServerError:
            return False  # the worker has not read it yet
        parts = [status["connector"], *status["tasks"]]
        failed = next((each for each in parts if each["state"] == "FAILED"), None)
        if failed is not None:
            raise ServerError(f"connector {connector} failed: {_cause(failed.get('trace', ''))}")
        return len(parts) > 1 and all(each["state"] == "RUNNING" for each in parts)

    def offsets(self, connector: str) -> list[dict[str, Any]]:
        """The offsets that a source connector has stored: where it continues after a crash. Without
        any, Debezium begins with a new snapshot, which does not contain earlier deletions."""
        found = self._ask("GET", f"/connectors/{connector}/offsets")["offsets"]
        return [each["offset"] for each in found]

    def restart(self, connector: str) -> None:
        """Start a connector and its task again, as after a failure."""
        self._ask("POST", f"/connectors/{connector}/restart?includeTasks=true")

    def delete(self, connector: str) -> None:
        """Remove a connector. Its offsets stay."""
        self._ask("DELETE", f"/connectors/{connector}")

    def _ask(self, method: str, path: str, document: Any = None) -> Any:
        body = json.dumps(document).encode() if document is not None else None
        request = urllib.request.Request(
            self.url + path, body, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{path}: {error.read().decode(errors='replace')[:500]}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"{self.url}: {error}") from error
        return json.loads(text) if text else None


def _cause(trace: str) -> str:
    """The last cause in a Java stack trace."""
    lines = [line.strip() for line in trace.splitlines() if line and not line.startswith("\t")]
    return (lines[-1] if lines else "it said nothing")[:300]
