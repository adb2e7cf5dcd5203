"""Secrets are planted everywhere, and searched for wherever they could come out."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from kazoo.client import KazooClient

from integration import KafkaBroker, PostgresServer, SecureListener, SecurePort, ZooKeeperServer
from integration.server import free_port
from integration.spark_cluster import descendants
from tests.kit.certificates import Certificates, make_certificates
from tests.kit.processes import RunProcess, commands_below
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.kills]

KAFKA, ZOOKEEPER, POSTGRES, VIEWER, STORE = CANARIES = tuple(
    f"canary-{each}-5eed" for each in ("kafka", "zookeeper", "postgres", "viewer", "store")
)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest.fixture
def broker(certificates: Certificates, tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path / "kafka", secure=SecureListener(certificates.broker, {"alice": KAFKA})) as server:
        yield server


@pytest.fixture
def zookeeper(certificates: Certificates, tmp_path: Path) -> Iterator[ZooKeeperServer]:
    secure = SecurePort(certificate=certificates.broker, authority=certificates.authority, users={"alice": ZOOKEEPER})
    with ZooKeeperServer(tmp_path / "zookeeper", secure=secure) as server:
        yield server


@pytest.mark.parametrize("executor", ["local", pytest.param("spark", marks=pytest.mark.slow)])
def test_no_secret_comes_out_anywhere(
    certificates: Certificates,
    broker: KafkaBroker,
    zookeeper: ZooKeeperServer,
    postgres: PostgresServer,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
) -> None:
    """Not in logs (also of a failure), ps, Spark's environment page, the page, metrics, znodes or
    tables.
    """
    topics = Topics(broker.address)
    topics.send(topics.create(name), [f"w{number % 5}".encode() for number in range(50)])
    table = name.replace("-", "_")
    with psycopg.connect(postgres.dsn) as database:
        database.execute(f"CREATE ROLE canary LOGIN SUPERUSER PASSWORD '{POSTGRES}'".encode())
    page, metrics, own = free_port(), free_port(), free_port()
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        [kafka]
        bootstrap.servers = "{broker.secure_address}"
        security.protocol = "SASL_SSL"
        sasl.mechanism = "SCRAM-SHA-256"
        sasl.username = "alice"
        ssl.ca.location = "{certificates.authority}"
        [transactional.zookeeper]
        servers = "{zookeeper.secure_address}"
        root = "/{name}"
        tls.enabled = true
        tls.ca = "{certificates.authority}"
        tls.certificate = "{certificates.broker}"
        tls.key = "{certificates.broker}"
        sasl.username = "alice"
        sasl.password = "${{MY_ZOOKEEPER}}"
        [metrics.prometheus]
        port = {metrics}
        [ui]
        port = {own}
        token = "${{MY_VIEWER}}"
        [spark]
        master = "local[2]"
        ui.enabled = "true"
        ui.port = "{page}"
        eventLog.enabled = "true"
        eventLog.compress = "false"
        eventLog.dir = "{(tmp_path / "events").as_uri()}"
        hadoop.fs.s3a.secret.key = "${{MY_STORE}}"
        hadoop.fs.azure.account.key.shop = "${{MY_STORE}}"
        shop.address = "postgresql://ann:${{MY_STORE}}@host/shop"
        [app]
        topic = "{name}"
        table = "{table}"
        database = "{postgres.dsn.replace(f"ratchet:{postgres.password}@", "canary:${MY_POSTGRES}@")}"
        """
    )
    monkeypatch.setenv("RATCHET_KAFKA_SASL_PASSWORD", KAFKA)
    monkeypatch.setenv("MY_ZOOKEEPER", ZOOKEEPER)
    monkeypatch.setenv("MY_POSTGRES", POSTGRES)
    monkeypatch.setenv("MY_VIEWER", VIEWER)
    monkeypatch.setenv("MY_STORE", STORE)
    (tmp_path / "events").mkdir()
    overrides = [part for key in ("app.note", "kafka.sasl.password") for part in ("--set", f"{key}={KAFKA}")]
    run = RunProcess(tmp_path / "run.log", "tests.kit.guarded:topology", {}, executor=executor)
    shown: dict[str, str] = {}
    try:
        run.start("--config", str(config), "--verbose", *overrides)

        def counted() -> int:
            with psycopg.connect(postgres.dsn) as database:
                if database.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
                    return 0
                row = database.execute(f"SELECT sum(n) FROM {table}").fetchone()
            return int(row[0] or 0) if row is not None else 0

        assert run.wait_for(lambda: counted() == 50), run.tail()
        assert run.process is not None
        processes = [run.process.pid, *descendants(run.process.pid)]
        assert executor == "local" or len(processes) >= 3  # the driver, its JVM, Python workers
        # The driver's own command line is what the user has typed.
        shown["ps"] = "\n".join(commands_below(psutil.Process(run.process.pid)))
        served = {"metrics": f"{metrics}/metrics"} | (
            {"environment page": f"{page}/environment/"} if executor == "spark" else {}
        )
        for what, address in served.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{address}", timeout=PATIENCE_S) as answer:
                shown[what] = answer.read().decode()
        for path in ("topologies", f"topology?id={name}", f"topology/transaction?id={name}&txid=1"):
            asked = urllib.request.Request(
                f"http://127.0.0.1:{own}/api/{path}", headers={"Authorization": f"Bearer {VIEWER}"}
            )
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                shown[f"page {path}"] = answer.read().decode()
        # A record that no bolt can count: the topology fails with a long message.
        topics.send(name, [b"poison"])
        assert run.finish() != 0
        shown["log"] = run.log.read_text()
    finally:
        run.end()
    shown["znodes"] = "\n".join(documents(zookeeper, certificates, f"/{name}"))
    with psycopg.connect(postgres.dsn) as database:
        shown["table"] = repr(database.execute(f"SELECT * FROM {table}").fetchall())
        shown["headers"] = repr(database.execute("SELECT * FROM _ratchet_headers").fetchall())
        database.execute("REASSIGN OWNED BY canary TO ratchet")
        database.execute("DROP ROLE canary")
    if executor == "spark":
        shown["events"] = contents(tmp_path / "events")
        assert "spark.master" in shown["environment page"] and "spark.master" in shown["events"]
    assert "next: ratchet find-poison tests.kit.guarded:topology" in shown["log"] and "app.note=..." in shown["log"]
    assert "kafka.sasl.password" in shown[f"page topology?id={name}"]
    assert "poison" in shown["log"] and "Traceback" in shown["log"]
    assert "currtx" in shown["znodes"]
    for what, text in shown.items():
        for canary in CANARIES:
            assert canary not in text, f"{canary} is in {what}: {re.findall(f'.*{canary}.*', text)[0][:300]}"
    assert all(os.environ.get(variable) for variable in ("MY_ZOOKEEPER", "MY_POSTGRES"))
    assert run.process.poll() is not None


def contents(folder: Path) -> str:
    """All files below a folder, byte by byte as characters."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    assert found, folder
    return "".join(each.decode("latin-1") for each in found)


def documents(zookeeper: ZooKeeperServer, certificates: Certificates, root: str) -> list[str]:
    client = KazooClient(
        zookeeper.secure_address,
        use_ssl=True,
        ca=str(certificates.authority),
        certfile=str(certificates.broker),
        keyfile=str(certificates.broker),
        sasl_options={"mechanism": "DIGEST-MD5", "username": "alice", "password": ZOOKEEPER},
    )
    client.start(PATIENCE_S)
    found: list[str] = []

    def walk(path: str) -> None:
        found.append(f"{path} {client.get(path)[0]!r}")
        for child in client.get_children(path):
            walk(f"{path}/{child}")

    walk(root)
    client.stop()
    client.close()
    return found
