"""Servers that keep running after the command that started them: ``ratchet servers up``, and
``down``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.local_paths import local_path
from integration.errors import ServerError
from integration.grafana import GrafanaServer, grafana_program
from integration.jars import Progress
from integration.kafka_and_zookeeper import STATE_FILE, EmbeddedServers, Shape, is_ours, read_state
from integration.prometheus import PrometheusServer
from integration.server import START_TIMEOUT_S, Server, wait_until
from integration.server_launcher import STOP_TIMEOUT_S
from integration.spark_cluster import SparkCluster

DEFAULT_FOLDER = Path(".ratchet/servers")


def up(
    folder: Path,
    *,
    kafka_port: int | None = None,
    zookeeper_port: int | None = None,
    shape: Shape | None = None,
    spark_workers: int = 0,
    scraped: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Start servers that run until ``down``. If servers already run in this folder, only report
    them. ``scraped``: HOST:PORT of drivers; if there are any, a Prometheus scrapes them, and a
    Grafana, if installed, shows them.

    Returns: ``kafka``, ``zookeeper`` (``host:port,...``), ``spark`` (``spark://host:port``, or
    null), ``spark_secret`` (the file with the cluster's ``spark.authenticate.secret``, or null),
    ``prometheus`` and ``grafana`` (``http://host:port``, or null), ``pids`` (name -> pid),
    ``logs``. If it raises ``ServerError``, no server is left running.
    """
    folder = local_path(folder, "folder of servers").absolute()
    running = read_state(folder)
    if running is not None:
        return running
    servers = EmbeddedServers(
        folder, kafka_port=kafka_port, zookeeper_port=zookeeper_port, guarded=False, progress=progress, shape=shape
    )
    spark = SparkCluster(folder, spark_workers, guarded=False) if spark_workers else None
    watching: list[PrometheusServer | GrafanaServer] = []
    if scraped:
        watching = [PrometheusServer(folder / "prometheus", targets=scraped, guarded=False)]
        if grafana_program() is not None:
            watching.append(GrafanaServer(folder / "grafana", watching[0].url, guarded=False))
    servers.start()
    try:
        for each in watching:
            each.start()
        if spark is not None:
            spark.start()
        every: list[Server] = [*servers.all, *(spark.all if spark is not None else ()), *watching]
        urls = {each.kind: each.url for each in watching}
        state = {
            "kafka": servers.bootstrap_servers,
            "zookeeper": servers.zookeeper,
            "spark": spark.address if spark is not None else None,
            "spark_secret": str(_kept_secret(folder, spark)) if spark is not None else None,
            "prometheus": urls.get("prometheus"),
            "grafana": urls.get("grafana"),
            "logs": [str(server.log_file) for server in every],
            "pids": {server.folder.name: server.pid for server in every},
        }
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    except BaseException:
        for each in reversed(watching):
            each.stop()
        if spark is not None:
            spark.stop()
        servers.stop()
        raise
    return state


def _kept_secret(folder: Path, spark: SparkCluster) -> Path:
    """Write the cluster's secret into a file for this user alone; return its path."""
    file = folder / "spark.secret"
    file.touch(mode=0o600)
    file.write_text(spark.master.secret or "", encoding="ascii")
    return file


def down(folder: Path, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Stop the servers that ``up`` started. Returns False if none ran. Stops Grafana, Prometheus
    and Spark first, then the brokers, then ZooKeeper."""
    folder = folder.absolute()
    state = read_state(folder)
    if state is None:
        return False
    pids: dict[str, int] = state["pids"]
    for kind in ("grafana", "prometheus", "spark", "kafka", "zookeeper"):
        _end([pid for name, pid in pids.items() if name.startswith(kind)], folder, timeout_s)
    (folder / STATE_FILE).unlink(missing_ok=True)
    return True


def _end(pids: list[int], folder: Path, timeout_s: float) -> None:
    """Ask all processes to end, wait for them, and then kill the rest."""

    def left() -> list[int]:
        return [pid for pid in pids if is_ours(pid, folder)]

    for which in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(pid, which)
        killed = which is signal.SIGKILL
        try:
            wait_until(lambda: not left(), START_TIMEOUT_S if killed else timeout_s, "the end of the servers")
            return
        except ServerError:
            if killed:
                raise
