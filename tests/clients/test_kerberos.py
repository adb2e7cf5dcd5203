"""Kerberos: a client that was built without it says so; one that has it signs in with a keytab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from framework import Config, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from integration import KafkaBroker
from spouts.kafka.cluster_metadata import check_settings
from tests.kit.kerberos import BROKER, CLIENT, KerberosListener, KeyCentre, has_kerberos, why_not_kerberos
from tests.kit.readers import READERS
from tests.kit.secured_copy import SecuredCopy, topology
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.behaviour("2.11")
needs_kerberos = pytest.mark.skipif(why_not_kerberos() is not None, reason=f"no Kerberos: {why_not_kerberos()}")


@pytest.fixture
def centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyCentre]:
    with KeyCentre(tmp_path / "kdc") as running:
        monkeypatch.setenv("KRB5_CONFIG", str(running.config))
        monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path / 'tickets'}")
        yield running


@pytest.mark.skipif(has_kerberos(), reason="this confluent-kafka was built with Kerberos")
@pytest.mark.parametrize("named", [{"kafka.sasl.mechanism": "GSSAPI"}, {}])
def test_a_client_without_kerberos_says_what_to_do(named: dict[str, str]) -> None:
    """GSSAPI is librdkafka's default: a file that names no mechanism asks for it, too."""
    conf = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.security.protocol": "SASL_SSL", **named}
    with pytest.raises(ConfigError) as refused:
        check_settings(KafkaSettings(None, None).with_conf(conf))
    assert str(refused.value) == (
        "Kafka settings: this confluent-kafka has no Kerberos (GSSAPI, also the default of 'sasl.mechanism'): name another "
        "mechanism, or build confluent-kafka with Kerberos on the driver and the executors, as "
        "docs/operating/kafka-security.md shows"
    )


@needs_kerberos
@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_topology_signs_in_with_a_keytab(reader: str, centre: KeyCentre, name: str, tmp_path: Path) -> None:
    secure = KerberosListener(centre.keytab(BROKER), centre.config)
    keytab = centre.keytab(CLIENT)
    with KafkaBroker(tmp_path / "kafka", secure=secure) as broker:
        copy = SecuredCopy(broker, name, security(keytab))
        copy.send(100)
        config = Config.load(copy.file(tmp_path, reader=reader))
        with submit(topology(config.for_components()), config, MemoryStore(), "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        assert copy.copied() == copy.sent()
        config = Config.load(copy.file(tmp_path, **{"sasl.kerberos.service.name": "wrong"}))
        with pytest.raises(ConfigError, match=r"wrong/127.0.0.1@RATCHET.TEST not found in Kerberos database"):
            submit(topology(config.for_components()), config, MemoryStore(), "local").wait_until_caught_up(PATIENCE_S)


def test_a_keytab_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    settings = KafkaSettings("127.0.0.1:1", security(tmp_path / "nothing.keytab"))
    with pytest.raises(ConfigError) as refused:
        check_settings(settings)
    assert str(refused.value) == (
        f"Kafka setting 'sasl.kerberos.keytab': {tmp_path}/nothing.keytab: No such file or directory; it must be readable "
        "on the driver and the executors"
    )


def security(keytab: Path) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.kerberos.principal": CLIENT,
        "sasl.kerberos.keytab": str(keytab),
    }
