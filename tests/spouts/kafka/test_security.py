"""SASL/SCRAM and TLS against real brokers: right settings work, wrong ones are named,
no secret is shown.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from confluent_kafka import Producer

from framework import Config, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError, RetryableError
from framework.topology import TopologyContext
from framework.transactions import MemoryStore
from integration import KafkaBroker, SecureListener
from integration.processes import ProcessHost
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.certificates import Certificates, make_certificates
from tests.kit.registry_answers import answering, send
from tests.kit.secrets_on_disk import exposed
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("2.11")]

USER, PASSWORD = "alice", "canary-5c0ffee"
TOPIC = "secured"
CONTEXT = TopologyContext("secured", "spout", 0, 1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    secure = SecureListener(certificates.broker, {USER: PASSWORD})
    server = KafkaBroker(tmp_path_factory.mktemp("secured"), secure=secure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessHost, "run", _noting(ProcessHost.run))
        server.start()
    topics = Topics(server.address)
    topics.send(topics.create(TOPIC), [str(number % 10).encode() for number in range(100)])
    yield server
    server.stop()


#: What was started to format the data of the broker.
@pytest.fixture(scope="module", autouse=True)
def patient_questions() -> None:
    """Questions end in the usual time here: most of them have no answer."""


FORMATTED: list[str] = []


def _noting(run: Callable[..., Any]) -> Callable[..., Any]:
    def noted(host: ProcessHost, command: Sequence[str], folder: Path, *more: Any) -> Any:
        FORMATTED.append(" ".join(command))
        return run(host, command, folder, *more)

    return noted


def test_the_passwords_of_a_broker_are_on_no_command_line(broker: KafkaBroker) -> None:
    if not isinstance(broker.host, ProcessHost):
        pytest.skip("the files of a server in a container are closed by their folder alone")
    assert any("StorageTool" in each for each in FORMATTED)
    assert not [each for each in FORMATTED if PASSWORD in each]
    assert not exposed(broker.folder, PASSWORD)


def settings(certificates: Certificates, **changes: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "ssl.ca.location": str(certificates.authority),
        **{key.replace("_", "."): value for key, value in changes.items()},
    }


def topology(spout: Any, backend: MemoryBackend) -> Any:
    builder = TransactionalTopologyBuilder("secured", "spout", spout)
    count = StateCommitter(OpaqueMapState(backend), ["value"], {"n": Count()})
    builder.set_bolt("count", count).global_grouping("spout")
    return builder.build()


def run(address: str, config: dict[str, Any], backend: MemoryBackend) -> Any:
    """Run a topology whose security comes from the configuration alone, as an operator sets it."""
    spout = OpaqueKafkaTransactionalSpout([TOPIC], codec=TextCodec())
    conf = {f"kafka.{key}": value for key, value in config.items()}
    whole = {"kafka.bootstrap.servers": address, **conf}
    return submit(topology(spout, backend), whole, MemoryStore(), "local")


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_scram_over_tls_reads_everything_and_shows_no_secret(
    broker: KafkaBroker, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MemoryBackend()
    file = tmp_path / "kafka.toml"
    file.write_text(
        f'[kafka]\nbootstrap.servers = "{broker.secure_address}"\nsecurity.protocol = "SASL_SSL"\n'
        f'sasl.mechanism = "SCRAM-SHA-256"\nsasl.username = "${{KAFKA_USER}}"\n'
        f'ssl.ca.location = "{certificates.authority}"\n'
    )
    monkeypatch.setenv("KAFKA_USER", USER)
    monkeypatch.setenv("RATCHET_KAFKA_SASL_PASSWORD", PASSWORD)
    config = Config.load(file)
    spout = OpaqueKafkaTransactionalSpout([TOPIC], codec=TextCodec())
    store = MemoryStore()
    with structlog.testing.capture_logs() as logs, submit(topology(spout, backend), config, store, "local") as running:
        running.wait_until_caught_up(PATIENCE_S)
        status, records = running.status(), running.transactions()
    state = OpaqueMapState(backend)
    assert [state.get(str(digit)) for digit in range(10)] == [10] * 10
    shown = f"{config!r} {config} {spout!r} {vars(spout)} {logs} {status} {records} {config.for_components()}"
    documents = [store.get(path) for path in _paths(store, "")]
    assert len(documents) > 3
    assert PASSWORD not in shown
    assert PASSWORD not in repr(documents)


def _paths(store: MemoryStore, root: str) -> list[str]:
    found = []
    for name in store.children(root):
        path = f"{root}/{name}".lstrip("/")
        found += [path, *_paths(store, path)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sasl_password": "wrong"}, "[Aa]uthentication failed"),
        ({"sasl_username": "mallory"}, "[Aa]uthentication failed"),
        ({"ssl_ca_location": "other"}, "certificate verify failed|SSL handshake failed"),
        ({"sasl_mechanism": "PLAIN"}, "mechanism"),
    ],
)
def test_a_wrong_security_setting_stops_the_topology_and_is_named(
    broker: KafkaBroker, certificates: Certificates, change: dict[str, str], message: str
) -> None:
    if change.get("ssl_ca_location") == "other":
        change = {"ssl_ca_location": str(certificates.other_authority)}
    running = run(broker.secure_address, settings(certificates, **change), MemoryBackend())
    with pytest.raises(ConfigError, match=message) as failed:
        running.wait_until_caught_up(PATIENCE_S)
    assert broker.secure_address in str(failed.value)
    assert "check the security settings" in str(failed.value)
    assert PASSWORD not in str(failed.value)
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize("which", [pytest.param("expired", marks=pytest.mark.slow), "other_host"])
def test_a_broker_that_cannot_be_trusted_is_not_read(certificates: Certificates, which: str, tmp_path: Path) -> None:
    server = KafkaBroker(tmp_path / which, secure=SecureListener(getattr(certificates, which), {USER: PASSWORD}))
    server.start()
    try:
        running = run(server.secure_address, settings(certificates), MemoryBackend())
        with pytest.raises(ConfigError, match="certificate verify failed|SSL handshake failed"):
            running.wait_until_caught_up(PATIENCE_S)
        running.stop()
    finally:
        server.stop()


@pytest.mark.slow
def test_plain_text_to_a_tls_listener_is_waited_for_with_its_reason(
    broker: KafkaBroker, certificates: Certificates
) -> None:
    """The broker closes such a connection without a word, like a broker that is starting."""
    spout = OpaqueKafkaTransactionalSpout([TOPIC], bootstrap_servers=broker.secure_address)
    planner = spout.planner({}, CONTEXT)
    with pytest.raises((ConfigError, RetryableError), match=f"Kafka at {broker.secure_address}"):
        planner.plan({})
    planner.close()


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("sasl.mechansim", "did you mean 'sasl.mechanism'?"),
        ("sasl.oauthbearer.token.endpoint", "did you mean 'sasl.oauthbearer.token.endpoint.url'?"),
        ("nothing.like.it", "see librdkafka's list of settings, which are not those of Java"),
    ],
)
def test_an_unknown_setting_is_refused_before_anything_starts(setting: str, advice: str) -> None:
    spout = OpaqueKafkaTransactionalSpout([TOPIC], bootstrap_servers="127.0.0.1:1")
    with pytest.raises(ConfigError) as error:
        submit(topology(spout, MemoryBackend()), {f"kafka.{setting}": "x"}, MemoryStore(), "local")
    assert str(error.value) == f"unknown Kafka setting '{setting}': {advice}"


def test_settings_of_which_no_client_can_be_made_are_refused_before_anything_starts() -> None:
    spout = OpaqueKafkaTransactionalSpout([TOPIC], bootstrap_servers="127.0.0.1:1")
    conf = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "NTLM"}
    with pytest.raises(ConfigError, match="Unsupported SASL mechanism: NTLM"):
        submit(topology(spout, MemoryBackend()), conf, MemoryStore(), "local")


def test_a_token_is_fetched_with_settings_of_a_file_alone(tmp_path: Path) -> None:
    """OAUTHBEARER by OpenID Connect: librdkafka asks the token endpoint."""
    bodies: list[bytes] = []

    def answer(request: Any, _: int) -> None:
        bodies.append(request.headers["Authorization"].encode() + b" " + request.body)
        send(request, 401, b"{}")

    with answering(answer) as (url, asked):
        file = tmp_path / "kafka.toml"
        file.write_text(f"""
            [kafka]
            bootstrap.servers = "127.0.0.1:1"
            security.protocol = "SASL_SSL"
            sasl.mechanism = "OAUTHBEARER"
            sasl.oauthbearer.method = "oidc"
            sasl.oauthbearer.client.id = "orders"
            sasl.oauthbearer.client.secret = "canary"
            sasl.oauthbearer.token.endpoint.url = "{url}/token"
            sasl.oauthbearer.scope = "kafka"
        """)
        config = Config.load(file)
        assert "canary" not in str(config)
        producer = Producer(KafkaSettings(None, None).with_conf(config.for_components()).producer())
        wait_for(lambda: producer.poll(0.1) is not None and bool(bodies), what="a request for a token")
        assert asked[0] == "/token"
    assert bodies[0] == b"Basic " + base64.b64encode(b"orders:canary") + b" grant_type=client_credentials&scope=kafka"


_asked: list[str] = []


def token(config: str) -> tuple[str, float]:
    _asked.append(config)
    return "a-token", time.time() + 3_600


def test_a_function_of_tokens_is_named_in_a_file() -> None:
    conf = {
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.oauthbearer.config": "eu-west-1",
        "kafka.oauth_cb": f"{__name__}:token",
    }
    settings_ = KafkaSettings(None, None).with_conf(conf)
    copy = pickle.loads(pickle.dumps(settings_))
    assert copy.fingerprint() == settings_.fingerprint()
    producer = Producer(copy.producer())
    wait_for(lambda: producer.poll(0.1) is not None and bool(_asked), what="a call for a token")
    assert _asked[0] == "eu-west-1"
    for wrong in ("nowhere:token", f"{__name__}:nothing", "token", f"{__name__}:TOPIC"):
        spout = OpaqueKafkaTransactionalSpout([TOPIC])
        with pytest.raises(ConfigError, match="Kafka setting 'oauth_cb'"):
            submit(topology(spout, MemoryBackend()), {**conf, "kafka.oauth_cb": wrong}, MemoryStore(), "local")


def test_an_unknown_setting_is_named() -> None:
    spout = OpaqueKafkaTransactionalSpout([TOPIC], bootstrap_servers="127.0.0.1:1", settings={"sasl.pasword": "x"})
    with pytest.raises(ConfigError, match="unknown Kafka setting 'sasl.pasword': did you mean 'sasl.password'\\?"):
        spout.planner({}, CONTEXT).partitions()


@pytest.mark.slow
def test_a_setting_that_breaks_a_guarantee_is_refused_before_anything_starts() -> None:
    spout = OpaqueKafkaTransactionalSpout([TOPIC], bootstrap_servers="127.0.0.1:1")
    built = topology(spout, MemoryBackend())
    for key, value in (("isolation.level", "read_uncommitted"), ("acks", "1"), ("enable.idempotence", False)):
        with pytest.raises(ConfigError, match=f"Kafka setting '{key}' cannot be"):
            submit(built, {f"kafka.{key}": value}, MemoryStore(), "local")
    submit(built, {"kafka.isolation.level": "READ_COMMITTED"}, MemoryStore(), "local").stop()


def test_a_missing_variable_and_missing_brokers_are_named(tmp_path: Path) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text('kafka.sasl.password = "${NOT_SET_ANYWHERE}"')
    with pytest.raises(ConfigError, match=r"kafka.sasl.password refers to \$\{NOT_SET_ANYWHERE\}.*set it"):
        Config.load(file)
    spout = OpaqueKafkaTransactionalSpout([TOPIC])
    with pytest.raises(ConfigError, match="no Kafka brokers are named"):
        submit(topology(spout, MemoryBackend()), {}, MemoryStore(), "local")


def test_settings_never_show_secrets() -> None:
    shown = repr(KafkaSettings("h:1", {"sasl.password": "canary", "ssl.key.password": "canary", "client.id": "me"}))
    assert "canary" not in shown
    assert "me" in shown
    listed = Config.of({"kafka.bootstrap.servers": ["a:1", "b:2"]}).for_components()
    assert KafkaSettings(None, None).with_conf(listed).bootstrap_servers == "a:1,b:2"
    config = Config.of({"kafka.sasl.password": "canary", "kafka.client.id": "me"})
    assert "canary" not in json.dumps({key: str(value) for key, value in config.for_components().items()})
    assert config.for_components()["kafka.client.id"] == "me"
