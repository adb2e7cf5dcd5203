"""The image of ``deploy/image`` runs a topology as nobody, with a root that it cannot write to, and
the demo of ``deploy/compose`` runs on it. Its size and its times are printed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework import Config
from framework.coordination import store_of
from framework.coordination.presence import read_drivers
from integration import EmbeddedServers, PostgresServer
from integration.docker_engine import OWNER_LABEL, engine
from integration.server import free_port
from integration.server_programs import find_program
from tests.kit import shipped
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]

COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
WAIT_S = 300.0
#: As the manifest for Kubernetes runs it.
HARDENED: dict[str, Any] = {
    "read_only": True,
    "tmpfs": {"/tmp": "exec"},
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "network_mode": "host",
}
PIPELINE = """
from framework import Fields, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout


def topology(app):
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder(app["app.name"], "spout", spout)
    state = OpaqueMapState(PostgresBackend(app["app.database"], app["app.table"]))
    builder.set_bolt("counts", StateCommitter(state, ["word"], {"n": Count()})).fields_grouping("spout", Fields("word"))
    return builder.build()
"""


@contextmanager
def container(command: list[str], **more: Any) -> Iterator[Any]:
    client: Any = engine()
    made = client.containers.run(
        shipped.driver_image(), command, detach=True, labels={OWNER_LABEL: "test"}, **HARDENED, **more
    )
    try:
        yield made
    finally:
        made.remove(force=True)


def test_a_topology_runs_as_nobody_on_a_root_that_cannot_be_written_to(
    servers: EmbeddedServers, postgres: PostgresServer, name: str, tmp_path: Path
) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    tmp_path.chmod(0o755)
    port = free_port()
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "spark.master": "local[1]",
        "metrics.prometheus.port": port,
        "app.database": postgres.dsn,
        "app.name": name,
        "app.table": name.replace("-", "_"),
    }
    command = ["ratchet", "run", "pipeline:topology"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    mounted = {str(tmp_path / "pipeline.py"): {"bind": "/srv/ratchet/pipeline.py", "mode": "ro"}}
    image = engine().images.get(shipped.driver_image())
    began = time.monotonic()
    with container(command, volumes=mounted, environment={"METRICS_PORT": str(port)}) as running:

        def health() -> str:
            running.reload()
            assert running.status == "running", running.logs().decode()[-4_000:]
            return str(running.attrs["State"]["Health"]["Status"])

        def said() -> str:
            return str(running.exec_run(["ratchet", "status", name, "--set", zookeeper])[1].decode())

        zookeeper = f"transactional.zookeeper.servers={servers.zookeeper}"
        store = store_of(Config.of({"transactional.zookeeper.servers": [servers.zookeeper]}))
        wait_for(lambda: any(each.status.get("committed_txid") for each in read_drivers(store, name)), WAIT_S)
        ready_s = time.monotonic() - began
        store.close()
        wait_for(lambda: health() == "healthy", WAIT_S)
        assert running.exec_run(["sh", "-c", "id -u; id -g"])[1] == b"10001\n10001\n"
        assert running.exec_run(["find", "/usr", "/opt", "-type", "f", "-perm", "/6000"])[1] == b""
        assert b"Read-only file system" in running.exec_run(["touch", "/srv/ratchet/x"])[1]
        assert running.exec_run(["cat", "/proc/1/comm"])[1] == b"tini\n"
        running.kill(signal="SIGTERM")  # as every orchestrator ends it
        assert running.wait(timeout=WAIT_S)["StatusCode"] in (0, 130), running.logs().decode()[-4_000:]
    print(
        json.dumps(
            {
                "size_mb": round(image.attrs["Size"] / 1e6),
                "layers_mb": [round(each["Size"] / 1e6, 1) for each in image.history() if each["Size"] > 1e5],
                "first_commit_s": round(ready_s, 1),
            }
        )
    )


def test_a_change_of_ratchet_alone_changes_small_layers_only() -> None:
    """What is below them is the same in the next image, and need not travel again."""
    layers = engine().images.get(shipped.driver_image()).history()
    own = next(number for number, each in enumerate(layers) if "/opt/wheels" in each["CreatedBy"])
    above = [each["Size"] for each in layers[: own + 1]]
    assert sum(above) < 30e6 < sum(each["Size"] for each in layers) / 10


# --- the demo of deploy/compose -------------------------------------------------------------------


def compose(*arguments: str, folder: Path, **variables: str) -> str:
    program = find_program("docker-compose", "docker-compose")
    files = ["--file", str(COMPOSE), "--file", str(folder / "here.yaml")]
    return shipped.run([program, "--project-name", "ratchet-demo-test", *files, *arguments], ROOT, **variables)


def test_the_compose_file_is_one_and_its_drivers_are_hardened(tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text("services: {driver: {image: mine}}\n")  # as a user overrides something
    found = yaml.safe_load(compose("config", folder=tmp_path))["services"]
    assert set(found) >= {"zookeeper", "kafka", "postgres", "load", "driver", "standby"}
    for each in ("load", "driver", "standby"):
        assert (found[each]["read_only"], found[each]["cap_drop"], found[each]["tmpfs"]) == (
            True,
            ["ALL"],
            ["/tmp:exec"],
        )


def test_the_demo_in_containers_goes_on_when_its_driver_is_killed(postgres: PostgresServer, tmp_path: Path) -> None:
    """Its own services are from the compose file. The servers are those of this test: the usual
    images cannot be had everywhere, and a container here has no network of its own."""
    with EmbeddedServers(tmp_path / "servers") as servers:
        addresses = {"KAFKA": servers.bootstrap_servers, "ZOOKEEPER": servers.zookeeper, "DATABASE": postgres.dsn}
        ours = ("load", "driver", "standby", "compare")
        here: dict[str, Any] = {each: {"image": shipped.driver_image(), "network_mode": "host"} for each in ours}
        for each in ours:
            port = str(free_port())
            here[each]["environment"] = {**addresses, "METRICS_PORT": port}
            here[each]["labels"] = {OWNER_LABEL: "test"}
            config = tmp_path / f"{each}.toml"
            config.write_text((COMPOSE.parent / "ratchet.toml").read_text().replace("9108", port))
            config.chmod(0o644)
            here[each]["volumes"] = [f"{config}:/etc/ratchet/ratchet.toml:ro"]
        (tmp_path / "here.yaml").write_text(yaml.safe_dump({"services": here}))
        store = store_of(Config.of({"transactional.zookeeper.servers": [servers.zookeeper]}))
        try:
            compose("run", "--rm", "--no-deps", "load", folder=tmp_path)
            compose("up", "--detach", "--no-build", "--no-deps", "driver", folder=tmp_path)
            topology = "flights-opaque"
            wait_for(lambda: any(each.phase == "running" for each in read_drivers(store, topology)), WAIT_S)
            compose("up", "--detach", "--no-build", "--no-deps", "standby", folder=tmp_path)
            wait_for(lambda: any(each.phase == "standby" for each in read_drivers(store, topology)), WAIT_S)
            compose("kill", "driver", folder=tmp_path)

            def caught_up() -> bool:
                drivers = read_drivers(store, topology)
                return len(drivers) == 1 and drivers[0].phase == "running" and drivers[0].status.get("lag") == 0

            wait_for(caught_up, WAIT_S)
            said = compose("run", "--rm", "--no-deps", "compare", folder=tmp_path)
            assert "exactly the figures of the CSV file" in said, said
        finally:
            store.close()
            compose("down", "--timeout", "1", folder=tmp_path)
