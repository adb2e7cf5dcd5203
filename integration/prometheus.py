"""A Prometheus server, from the system's package, with Ratchet's alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from integration.errors import ServerError
from integration.server import Server, exchange
from integration.server_launcher import EMBEDDED

#: The alert rules in Ratchet's repository; an installed package does not have them.
RULES = Path(__file__).parent.parent / "deploy" / "prometheus" / "ratchet-alerts.yml"
#: The address of a driver's metrics in the examples of the documentation.
TARGET = "127.0.0.1:9464"

_CONFIG = """global:
  scrape_interval: 5s
  evaluation_interval: 5s
rule_files: {rules}
scrape_configs:
  - job_name: ratchet
    file_sd_configs:
      - files: [targets.json]
"""


class PrometheusServer(Server):
    """A server on the loopback interface. Always a process of this machine: it scrapes drivers
    there, whose metrics are served on the loopback interface too.

    * ``targets``: HOST:PORT of the drivers. They are in the file ``targets.json`` in its folder,
      which is read again when it changes.
    * ``rules``: files with alert rules; missing files are ignored.

    Raises ``ServerError`` for an invalid target.
    """

    name = "prometheus"
    kind = "prometheus"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        targets: Sequence[str] = (TARGET,),
        rules: Sequence[Path] = (RULES,),
        guarded: bool = True,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, where=EMBEDDED)
        wrong = next((each for each in targets if not re.fullmatch(r"[^\s/]+:\d{1,5}", each)), None)
        if wrong is not None:
            raise ServerError(f"{wrong!r} cannot be scraped: write HOST:PORT, the metrics.prometheus.port of a driver")
        self._targets = list(targets)
        self._rules = [str(each) for each in rules if each.is_file()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> list[str]:
        self.write("targets.json", json.dumps([{"targets": self._targets}]))
        config = self.write("prometheus.yml", _CONFIG.format(rules=json.dumps(self._rules)))
        return [
            self.host.program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.address}",
            "--log.level=warn",
        ]

    def is_ready(self) -> bool:
        return exchange(self.port, b"GET /-/ready HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
