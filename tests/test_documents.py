"""The documents: their code builds, and their links point to something that exists."""

import re
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseRichSpout,
    Config,
    Fields,
    OutputFieldsDeclarer,
    Topology,
    TopologyBuilder,
    TransactionalTopologyBuilder,
    TransactionAttempt,
)
from framework.clients.kafka_settings import KafkaSettings
from framework.config import flatten
from framework.state.provider_settings import RedisSettings, settings_of
from framework.testing import simulate
from framework.topology import CoreTopology
from sinks import OpaqueMapState, SqliteBackend
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit import pages

ORDERS = Fields(customer=str, cents=int)
ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str, document: str = "README.md") -> list[str]:
    return pages.blocks(language, ROOT / document)


def test_readme_topology_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, code = blocks("python")
    namespace: dict[str, object] = {}
    exec(code, namespace)
    built = namespace["topology"]({"app.kafka": "127.0.0.1:1"})  # type: ignore[operator]
    assert isinstance(built, Topology)


def test_readme_pipeline_gives_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = blocks("python")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    orders = [{"shop": "x", "cents": cents} for cents in (5, -1, 7)]
    assert list(namespace["shop"].test({"orders": orders})["per-shop"]) == [{"shop": "x", "orders": 2, "cents": 12}]


def test_readme_configuration_is_valid() -> None:
    (toml,) = blocks("toml")
    config = Config.of(flatten(tomllib.loads(toml)))
    assert config.zookeeper_hosts() == "zk1:2181,zk2:2181,zk3:2181"
    assert config.app["app.kafka"] == "broker1:9092,broker2:9092"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/start/index.md", "docs/deployment.md"])
def test_a_page_names_the_first_and_the_last_python_that_the_package_takes(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    first, last = int(named[0]), int(named[-1])
    assert list(map(int, named)) == list(range(first, last + 1))
    assert project["requires-python"] == f">=3.{first},<3.{last + 1}"
    assert {f"3.{first}", f"3.{last}"} <= set(re.findall(r"3\.\d+", (ROOT / page).read_text()))


def test_the_code_of_the_page_on_reading_kafka_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python", "docs/kafka.md"):
        exec(code, {})
    (toml,) = blocks("toml", "docs/kafka.md")
    (tmp_path / "kafka.toml").write_text(toml)
    monkeypatch.setenv("ORDERS_PASSWORD", "secret")
    conf = Config.load(tmp_path / "kafka.toml").for_components()
    KafkaSettings(None, None).with_conf(conf)
    assert conf["kafka.sasl.password"].get_secret_value() == "secret"


def test_the_code_of_the_page_on_core_topologies_builds() -> None:
    namespace: dict[str, object] = {}
    for code in blocks("python", "docs/core.md"):
        exec(code, namespace)
    built = namespace["topology"]({"app.kafka": "127.0.0.1:1"})  # type: ignore[operator]
    assert isinstance(built, CoreTopology)
    assert built.parallelisms() == {"sentences": 2, "split": 2, "count": 3}


def test_the_code_of_the_page_on_state_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    namespace: dict[str, object] = {}
    for code in blocks("python", "docs/state.md"):
        exec(code, namespace)
    built = namespace["topology"]({"app.kafka": "127.0.0.1:1"})  # type: ignore[operator]
    assert isinstance(built, CoreTopology)
    builder = TopologyBuilder("totals")
    builder.set_spout("spout", MemoryUsers())
    builder.set_bolt("totals", namespace["Totals"]()).fields_grouping("spout", Fields("user"))  # type: ignore[operator]
    assert set(builder.build().components[-1].streams) == {"default", "late"}
    (toml,) = blocks("toml", "docs/state.md")
    path = Path("counts.toml")
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: toml)
    settings = settings_of(Config.load(path).for_components(), RedisSettings)
    assert settings.jedisPoolConfig.password is not None
    assert settings.jedisPoolConfig.password.get_secret_value() == "secret"


class MemoryUsers(BaseRichSpout):
    def next_tuple(self) -> None: ...

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(user=str, at=float, amount=int))


def test_the_code_of_the_page_on_sinks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python", "docs/sinks.md"):
        exec(code, {"__name__": "shown"})
    (sql,) = blocks("sql", "docs/sinks.md")
    backend = SqliteBackend("shop.db", "totals", Fields(customer=str), Fields(orders=int))
    state = OpaqueMapState(backend)
    for txid, orders in ((1, {"ann": 1, "bob": 2}), (2, {"ann": 5, "eve": 3})):
        state.begin_commit(TransactionAttempt(txid, 1))
        state.multi_put(list(orders), list(orders.values()))
        state.commit(TransactionAttempt(txid, 1))
    with sqlite3.connect("shop.db") as connection:
        assert dict(connection.execute(sql, {"t": 1})) == {"ann": 1, "bob": 2}
        assert dict(connection.execute(sql, {"t": 2})) == {"ann": 5, "bob": 2, "eve": 3}


@pytest.fixture(scope="module")
def testing_page() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "shown"}
    for code in blocks("python", "docs/testing.md"):
        exec(code, namespace)
    return namespace


def test_the_code_of_the_page_on_testing_runs(testing_page: dict[str, Any]) -> None:
    tests = [name for name in testing_page if name.startswith("test_")]
    assert len(tests) == 5
    for name in tests:
        testing_page[name]()
    builder = TransactionalTopologyBuilder("invoices", "spout", OpaqueMemoryTransactionalSpout({0: []}, ORDERS, 1))
    builder.set_bolt("invoices", testing_page["committer"]).global_grouping("spout")
    assert simulate(builder.build(), [("ann", 250), ("bob", 100)], schedules=30).left_out == {}


def test_the_suite_on_the_page_on_testing_passes(testing_page: dict[str, Any]) -> None:
    suite = testing_page["TestOrders"]()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    assert len(tests) > 5
    for name in tests:
        getattr(suite, name)()


@pytest.mark.integration
def test_the_test_on_real_servers_on_the_page_on_testing_passes(
    testing_page: dict[str, Any], ratchet_topic: Any, ratchet_servers: Any, tmp_path: Path
) -> None:
    assert testing_page["pytest_plugins"] == ["framework.testing.plugin", "integration.plugin"]
    testing_page["check_orders_in_kafka"](ratchet_topic, ratchet_servers, tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"`((?:framework|spouts|sinks|integration|docs|examples)/[\w/.\-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/internals/attacks.md"])
def test_each_row_of_the_threat_model_names_tests_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.M)
    rows = [line for table in tables for line in table.splitlines()]
    assert rows
    for row in rows:
        last = row.rstrip("|").rpartition("|")[2]
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", last)
        assert named or "not by a test" in last, row
        for path, name in named:
            assert (ROOT / path).is_file(), f"{path}: {row}"
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}: {row}"
