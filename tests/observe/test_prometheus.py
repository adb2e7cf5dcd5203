"""A real Prometheus watches a real topology whose sink is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from framework import Fields, TopologyBuilder, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from integration import RedisServer, ServerError
from integration.kafka_and_zookeeper import is_ours
from integration.prometheus import PrometheusServer
from integration.server import free_port
from integration.servers_command import app
from sinks import Count, OpaqueMapState, RedisBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.core_parts import ListSpout
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.observe.test_alerts import BOARD
from tests.ui.worlds import Prints, Rests

#: The panels of what the topologies here do not have: lookups, and errors of their own code.
UNUSED = {"Errors in user code", "Lookups: keys per second, and failures", "Lookups: waiting for the function"}


def ask(server: PrometheusServer, path: str, **query: str) -> Any:
    with urllib.request.urlopen(
        f"{server.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE_S
    ) as answer:
        return json.load(answer)["data"]


def firing(server: PrometheusServer) -> set[str]:
    return {each["labels"]["alertname"] for each in ask(server, "alerts")["alerts"] if each["state"] == "firing"}


def without_figures(server: PrometheusServer) -> set[str]:
    """The panels of the board that would be empty now. Raises for a query with a mistake."""
    empty = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        asked = [
            each["expr"].replace("$topology", ".*").replace("$__rate_interval", "1m")
            for each in panel.get("targets", ())
        ]
        found = [ask(server, "query", query=each)["result"] for each in asked]
        if asked and not any(found):
            empty.add(panel["title"])
    return empty


def wait_long(condition: Callable[[], Any], what: str) -> None:
    wait_for(condition, 300, what=what)


@pytest.mark.slow  # Debian's package of Prometheus is installed for it
@pytest.mark.integration
def test_alerts_fire_when_the_sink_is_killed_and_end_when_it_is_back(topics: Topics, tmp_path: Path) -> None:
    name = topics.create(f"watched-{tmp_path.name[-12:]}")
    port, core_port = free_port(), free_port()
    done = threading.Event()
    numbers = TopologyBuilder("numbers")
    numbers.set_spout("numbers", ListSpout(name, list(range(200_000))))
    numbers.set_bolt("prints", Prints()).shuffle_grouping("numbers")
    numbers.set_bolt("rests", Rests()).fields_grouping("prints", Fields("rest"))

    def feed() -> None:
        while not done.wait(0.2):
            topics.send(name, [b"x"] * 10)

    with (
        RedisServer(tmp_path / "redis") as redis,
        PrometheusServer(
            tmp_path / "prometheus", targets=[f"127.0.0.1:{each}" for each in (port, core_port)]
        ) as prometheus,
        submit(numbers.build(), {"metrics.prometheus.port": core_port}, MemoryStore(), "local"),
    ):
        spout = OpaqueKafkaTransactionalSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec())
        state = OpaqueMapState(RedisBackend(redis.url, "counts"))
        builder = TransactionalTopologyBuilder("watched", "spout", spout)
        builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            with submit(builder.build(), {"metrics.prometheus.port": port}, MemoryStore(), "local") as run:
                run.wait_for_commit(3, PATIENCE_S)
                wait_long(
                    lambda: ask(prometheus, "query", query="ratchet_committed_txid > 2")["result"], "the first scrape"
                )
                assert firing(prometheus) == set()
                trouble = {"Failures by kind", "Retries since"}  # there is none yet
                wait_long(lambda: without_figures(prometheus) == trouble | UNUSED, "a full board")
                redis.kill()
                killed_s = time.monotonic()
                wait_long(lambda: "RatchetSinkWaits" in firing(prometheus), "the alert")
                print(f"RatchetSinkWaits fired {time.monotonic() - killed_s:.0f} s after the kill")
                wait_long(lambda: without_figures(prometheus) == UNUSED, "the failures on the board")
                waits = ask(prometheus, "query", query="ratchet_retrying_since_timestamp_seconds")["result"]
                assert waits[0]["metric"]["kind"] == "retryable"
                wait_long(lambda: "RatchetNoCommit" in firing(prometheus), "the alert")
                print(f"RatchetNoCommit fired {time.monotonic() - killed_s:.0f} s after the kill")
                redis.start()
                wait_long(lambda: firing(prometheus) <= {"RatchetFailuresRepeat"}, "the end of the alerts")
        finally:
            done.set()
            feeder.join()


def test_what_cannot_be_scraped_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="'http://driver' cannot be scraped: write HOST:PORT"):
        PrometheusServer(tmp_path, targets=["http://driver"])
    answer = CliRunner().invoke(app, ["up", "--dir", str(tmp_path), "--observe", "--scrape", "driver"])
    assert answer.exit_code == 2
    assert "error: 'driver' cannot be scraped" in answer.output


@pytest.mark.slow  # Debian's package of Prometheus is installed for it
@pytest.mark.integration
def test_servers_come_up_with_prometheus_and_go_down_with_it(tmp_path: Path) -> None:
    def ratchet(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", "servers", *arguments, "--dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    up = ratchet("up", "--observe", "--scrape", "127.0.0.1:9", "--json")
    try:
        assert up.returncode == 0, up.stderr
        state = json.loads(up.stdout)
        rules = json.loads(urllib.request.urlopen(f"{state['prometheus']}/api/v1/rules", timeout=PATIENCE_S).read())
        assert [each["name"] for each in rules["data"]["groups"]] == ["ratchet"]
        assert f"prometheus {state['prometheus']}" in ratchet("status").stdout
    finally:
        down = ratchet("down")
    assert down.returncode == 0
    assert not is_ours(state["pids"]["prometheus"], tmp_path)
