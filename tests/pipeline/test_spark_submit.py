"""``spark-submit`` on a standalone cluster, in both deploy modes: what it was given holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from integration import EmbeddedServers, PostgresServer, SparkCluster
from integration.jars import spark_jars
from tests.kit.topics import Topics
from tests.pipeline.test_cluster import users_folder

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]

#: What a user submits; ``docs/deployment.md`` shows it.
PROGRAM = "import ratchet\n\nratchet.main()\n"
#: What Spark itself opens of Java's own modules, except for a driver that a worker starts.
OPENED = ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent")
OPENS = " ".join(f"--add-opens=java.base/java.{each}=ALL-UNNAMED" for each in OPENED)


@pytest.fixture
def folder(servers: EmbeddedServers, postgres: PostgresServer, topics: Topics, name: str, tmp_path: Path) -> Path:
    """A user's folder: its modules, its configuration, and the program that is submitted."""
    topics.create(name, 2)
    for partition in (0, 1):
        topics.send(name, [f"w{number % 10}".encode() for number in range(100)], partition)
    found = users_folder(tmp_path / "user")
    (found / "main.py").write_text(PROGRAM)
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.collapse.records.max": 0,
        "app.kafka": servers.bootstrap_servers,
        "app.database": postgres.dsn,
        "app.topic": name,
        "app.table": name.replace("-", "_"),
    }
    (found / "ratchet.toml").write_text(
        "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in settings.items())
    )
    return found


def submitted(cluster: SparkCluster, folder: Path, *options: str, program: Sequence[str]) -> tuple[int, str]:
    """Run ``spark-submit``; no part of the configuration names the master."""
    home = spark_jars().parent
    properties = folder / "spark.conf"
    properties.write_text(f"spark.authenticate true\nspark.authenticate.secret {cluster.master.secret}\n")
    command = [str(home / "bin" / "spark-submit"), "--master", cluster.address, "--properties-file", str(properties)]
    command += ["--conf", "spark.executor.memory=512m", "--driver-memory", "512m", *options, *program]
    command += ["run", "pipeline:topology", "--config", str(folder / "ratchet.toml"), "--until-caught-up"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False, timeout=400
    )
    return done.returncode, done.stdout


def counted(postgres: PostgresServer, name: str) -> dict[str, int]:
    with psycopg.connect(postgres.dsn) as connection:
        return dict(connection.execute(f"SELECT value, n FROM {name.replace('-', '_')}").fetchall())


def applications(cluster: SparkCluster) -> list[str]:
    page = cluster.master.page() or {}
    return [each["state"] for each in (*page.get("activeapps", ()), *page.get("completedapps", ()))]


WANTED = {f"W{digit}!": 20 for digit in range(10)}


def test_in_client_mode_the_program_runs_here_and_its_tasks_on_the_cluster(
    folder: Path, postgres: PostgresServer, name: str, tmp_path: Path
) -> None:
    with SparkCluster(tmp_path / "spark", 1) as cluster:
        status, said = submitted(cluster, folder, program=["main.py"])
        assert status == 0, said[-4000:]
        assert applications(cluster) == ["FINISHED"]  # with the defaults of Ratchet it would have run in local[*]
    assert counted(postgres, name) == WANTED


def test_in_cluster_mode_a_worker_runs_the_program(
    folder: Path, postgres: PostgresServer, name: str, tmp_path: Path
) -> None:
    """A standalone cluster takes no Python file in this mode. It takes Spark's own class that runs
    one."""
    with SparkCluster(tmp_path / "spark", 2) as cluster:
        mode = ("--deploy-mode", "cluster")
        status, said = submitted(cluster, folder, *mode, program=["main.py"])
        assert status != 0 and "not supported for python applications on standalone clusters" in said
        (jar,) = spark_jars().glob("spark-core_*.jar")
        mode = (*mode, "--conf", "spark.standalone.submit.waitAppCompletion=true")
        mode = (*mode, "--conf", f"spark.pyspark.python={sys.executable}")
        mode = (*mode, "--driver-java-options", f"{OPENS} --add-opens=java.base/sun.nio.ch=ALL-UNNAMED")
        mode = (*mode, "--class", "org.apache.spark.deploy.PythonRunner")
        status, said = submitted(cluster, folder, *mode, program=[f"file:{jar}", str(folder / "main.py"), ""])
        page = cluster.master.page() or {}
        drivers = [each["state"] for each in (*page.get("activedrivers", ()), *page.get("completeddrivers", ()))]
        logs = [file.read_text()[-4000:] for file in tmp_path.glob("spark/*/work/driver-*/std*")]
        assert status == 0, said[-2000:] + "\n".join(logs)
        assert (drivers, applications(cluster)) == (["FINISHED"], ["FINISHED"]), logs
    assert counted(postgres, name) == WANTED
