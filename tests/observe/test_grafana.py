"""What a Grafana is started with. None can be had here, so a program that reads the same files
stands in for it: these tests show that the files are well formed and that it is started and
stopped, not that Grafana draws the board."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest

from integration import ServerError, grafana
from integration.grafana import BOARD, GrafanaServer, grafana_program
from tests.kit.waiting import PATIENCE_S

STAND_IN = """#!{python}
import configparser, http.server, json, pathlib, sys
assert sys.argv[1] == "server" and sys.argv[2::2] == ["--homepath", "--config"], sys.argv
assert (pathlib.Path(sys.argv[3]) / "conf" / "defaults.ini").is_file()
config = configparser.ConfigParser()
config.read(sys.argv[5])
provisioning = pathlib.Path(config["paths"]["provisioning"])
sources = json.loads((provisioning / "datasources" / "ratchet.yaml").read_text())
(boards,) = json.loads((provisioning / "dashboards" / "ratchet.yaml").read_text())["providers"]
(board,) = pathlib.Path(boards["options"]["path"]).glob("*.json")
settings = [("security", "disable_initial_admin_creation"), ("auth", "disable_login_form"), ("auth.basic", "enabled")]
closed = [config[section][key] for section, key in settings]
said = dict(sources=sources, board=json.loads(board.read_text())["title"], home=config["dashboards"]["default_home_dashboard_path"])
said["closed"] = closed

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

http.server.HTTPServer((config["server"]["http_addr"], int(config["server"]["http_port"])), Handler).serve_forever()
"""


def test_it_is_started_with_the_board_and_the_prometheus_as_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "defaults.ini").touch()
    program = programs / "grafana"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(grafana, "HOMES", (home,))
    assert grafana_program() == (str(program), home)
    with GrafanaServer(tmp_path / "grafana", "http://127.0.0.1:9090") as server:
        with urllib.request.urlopen(f"{server.url}/said", timeout=PATIENCE_S) as answer:
            said = json.load(answer)
        (source,) = said["sources"]["datasources"]
        assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
        assert said["board"] == json.loads(BOARD.read_text())["title"]
        assert Path(said["home"]).is_file()
        # Another user of the host knows the password that Grafana gives to its administrator.
        assert said["closed"] == ["true", "true", "false"]


def test_where_it_is_not_installed_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grafana, "HOMES", (tmp_path,))
    assert grafana_program() is None
    with pytest.raises(ServerError, match="Grafana is not installed"):
        GrafanaServer(tmp_path / "grafana", "http://127.0.0.1:9090").start()
