"""A Grafana server with Ratchet's board, where Grafana is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from integration.errors import ServerError
from integration.server import Server, exchange
from integration.server_launcher import EMBEDDED

#: The board in Ratchet's repository; an installed package does not have it.
BOARD = Path(__file__).parent.parent / "deploy" / "grafana" / "ratchet.json"
#: The folders of Grafana's own packages for its files other than the program.
HOMES = (Path("/usr/share/grafana"), Path("/usr/local/share/grafana"))

_CONFIG = """[server]
http_addr = 127.0.0.1
http_port = {port}
[paths]
data = {folder}/data
logs = {folder}/logs
plugins = {folder}/plugins
provisioning = {folder}/provisioning
[auth.anonymous]
enabled = true
org_role = Viewer
[auth]
disable_login_form = true
[auth.basic]
enabled = false
[security]
disable_initial_admin_creation = true
[analytics]
reporting_enabled = false
check_for_updates = false
check_for_plugin_updates = false
[dashboards]
default_home_dashboard_path = {folder}/boards/ratchet.json
[log]
mode = console
level = warn
"""


def grafana_program() -> tuple[str, Path] | None:
    """Grafana's program and its home folder; None if it is not installed. Debian has no package of
    it, so Ratchet does not install it."""
    program = shutil.which("grafana") or shutil.which("grafana-server")
    home = next((each for each in HOMES if (each / "conf" / "defaults.ini").is_file()), None)
    return None if program is None or home is None else (program, home)


class GrafanaServer(Server):
    """A server on the loopback interface that shows the board without a login, and has no
    administrator: Grafana's own password for one is known. ``prometheus``: the URL of the data."""

    name = "grafana"
    kind = "grafana"

    def __init__(self, folder: Path, prometheus: str, port: int | None = None, *, guarded: bool = True) -> None:
        super().__init__(folder, port, guarded=guarded, where=EMBEDDED)
        self._prometheus = prometheus

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> list[str]:
        found = grafana_program()
        if found is None:
            raise ServerError("Grafana is not installed: Debian has no package of it")
        program, home = found
        for each in ("boards", "provisioning/datasources", "provisioning/dashboards"):
            (self.folder / each).mkdir(parents=True, exist_ok=True)
        if BOARD.is_file():
            shutil.copy(BOARD, self.folder / "boards" / BOARD.name)
        source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "isDefault": True}
        sources = {"apiVersion": 1, "datasources": [{**source, "url": self._prometheus}]}
        boards = {"name": "ratchet", "type": "file", "options": {"path": str(self.folder / "boards")}}
        self.write("provisioning/datasources/ratchet.yaml", json.dumps(sources))  # JSON is YAML
        self.write("provisioning/dashboards/ratchet.yaml", json.dumps({"apiVersion": 1, "providers": [boards]}))
        config = self.write("grafana.ini", _CONFIG.format(port=self.port, folder=self.folder))
        server = [program, "server"] if Path(program).name == "grafana" else [program]
        return [*server, "--homepath", str(home), "--config", str(config)]

    def is_ready(self) -> bool:
        return exchange(self.port, b"GET /api/health HTTP/1.0\r\n\r\n").split(b" ", 2)[1:2] == [b"200"]
