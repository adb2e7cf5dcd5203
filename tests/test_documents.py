"""The documents: their code builds, their links lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from framework import Config, Topology
from framework.config import flatten
from framework.kafka_clients import KafkaSettings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str, document: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_topology_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    namespace: dict[str, object] = {}
    exec(code, namespace)
    built = namespace["topology"]({"app.kafka": "127.0.0.1:1"})  # type: ignore[operator]
    assert isinstance(built, Topology)


def test_readme_configuration_is_valid() -> None:
    (toml,) = blocks("toml")
    config = Config.of(flatten(tomllib.loads(toml)))
    assert config.zookeeper_hosts() == "zk1:2181,zk2:2181,zk3:2181"
    assert config.app["app.kafka"] == "broker1:9092,broker2:9092"


def test_what_is_shown_of_reading_kafka_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python", "docs/kafka.md"):
        exec(code, {})
    (toml,) = blocks("toml", "docs/kafka.md")
    (tmp_path / "kafka.toml").write_text(toml)
    monkeypatch.setenv("ORDERS_PASSWORD", "secret")
    conf = Config.load(tmp_path / "kafka.toml").for_components()
    KafkaSettings(None, None).with_conf(conf)
    assert conf["kafka.sasl.password"].get_secret_value() == "secret"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"`((?:framework|spouts|sinks|integration|docs|examples)/[\w/.\-]+)`", text):
        assert (ROOT / path).exists(), path
