"""TLS, SASL and ACLs against real ZooKeeper servers.

Right settings work, wrong ones are named, and no znode is open to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient, KazooState

from framework import Config
from framework.coordination import store_of
from framework.coordination.security import ZooKeeperSecurity
from framework.errors import ConfigError, RetryableError
from framework.transactions import CoordinationStore, MemoryStore, Put, ZooKeeperStore
from integration import SecurePort, ZooKeeperServer
from tests.kit.certificates import Certificates, make_certificates
from tests.kit.own_logs import own_logs
from tests.kit.waiting import PATIENCE_S, WATCH_S, wait_for

USER, PASSWORD = "ratchet", "canary-2bad1dea"

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("1.13")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    secure = SecurePort(certificate=certificates.broker, authority=certificates.authority, users={USER: PASSWORD})
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"), secure=secure) as running:
        yield running


def settings(address: str, certificates: Certificates, **changes: object) -> dict[str, object]:
    values = {
        "servers": address,
        "tls.enabled": True,
        "tls.ca": str(certificates.authority),
        "tls.certificate": str(certificates.broker),
        "tls.key": str(certificates.broker),
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "connection.timeout.secs": PATIENCE_S,
        **{key.replace("_", "."): value for key, value in changes.items()},
    }
    return {f"transactional.zookeeper.{key}": value for key, value in values.items() if value is not None}


def opened(values: dict[str, object]) -> CoordinationStore:
    return store_of(Config.of(values))


@pytest.mark.slow
def test_tls_with_sasl_connects_and_leaves_no_znode_open_to_others(
    server: ZooKeeperServer, certificates: Certificates, name: str
) -> None:
    values = settings(server.secure_address, certificates, root=f"/{name}")
    store = opened(values)
    leadership = store.lead("topology", "test", timeout_s=PATIENCE_S)
    assert leadership is not None
    leadership.apply([Put("topology/coordinator/currtx", b"1")])
    assert isinstance(store, ZooKeeperStore)
    for path in ("", "/topology", "/topology/epoch", "/topology/leader", "/topology/coordinator/currtx"):
        acls, _ = store._client.get_acls(f"/{name}{path}")
        assert ("sasl", USER) in [(acl.id.scheme, acl.id.id) for acl in acls], path
        assert {acl.id.scheme for acl in acls} <= {"sasl", "x509"}, path  # x509: clients with this certificate
    with pytest.raises(ConfigError, match=f"ZooKeeper denies access to /{name}: check the ACLs there"):
        ZooKeeperStore(server.address, f"/{name}")
    store.close()


def test_a_certificate_alone_leaves_no_znode_open_to_others(
    server: ZooKeeperServer, certificates: Certificates, name: str
) -> None:
    alone = {"sasl_username": None, "sasl_password": None}
    store = opened(settings(server.secure_address, certificates, root=f"/{name}", **alone))
    store.apply([Put("topology/x", b"1")])
    assert isinstance(store, ZooKeeperStore)
    for path in ("", "/topology", "/topology/x"):
        acls, _ = store._client.get_acls(f"/{name}{path}")
        assert {acl.id.scheme for acl in acls} == {"x509"}, path
    with pytest.raises(ConfigError, match=f"ZooKeeper denies access to /{name}: check the ACLs there"):
        ZooKeeperStore(server.address, f"/{name}")
    store.close()


@pytest.mark.slow
def test_a_certificate_that_the_server_ignores_is_named(certificates: Certificates, tmp_path: Path) -> None:
    secure = SecurePort(certificate=certificates.broker, authority=certificates.authority, clients=False)
    alone = {"sasl_username": None, "sasl_password": None}
    with (
        ZooKeeperServer(tmp_path, secure=secure) as server,
        pytest.raises(ConfigError, match="takes the credentials given for nobody's"),
    ):
        opened(settings(server.secure_address, certificates, **alone))


def test_sasl_connects_without_tls(server: ZooKeeperServer, certificates: Certificates, name: str) -> None:
    plain = {f"tls_{key}": None for key in ("enabled", "ca", "certificate", "key")}
    store = opened(settings(server.address, certificates, root=f"/{name}", **plain))
    store.apply([Put("x", b"1")])
    assert store.get("x") == b"1"
    store.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sasl_password": "wrong-canary"}, "refused the credentials: check transactional.zookeeper.sasl.username"),
        ({"sasl_username": "mallory"}, "refused the credentials"),
        ({"tls_ca": "other"}, "its certificate is not accepted: .*; check transactional.zookeeper.tls.ca"),
        ({"tls_certificate": None, "tls_key": None}, "TLS fails: .*check transactional.zookeeper.tls.certificate"),
    ],
)
def test_a_wrong_security_setting_is_named_without_showing_secrets(
    server: ZooKeeperServer,
    certificates: Certificates,
    name: str,
    change: dict[str, object],
    message: str,
) -> None:
    if change.get("tls_ca") == "other":
        change = {"tls_ca": str(certificates.other_authority)}
    with pytest.raises(ConfigError, match=message) as refused:
        opened(settings(server.secure_address, certificates, root=f"/{name}", **change))
    assert "canary" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "message"),
    [("expired", "its certificate is not accepted: certificate has expired"), ("other_host", "IP address mismatch")],
)
def test_a_server_with_an_untrusted_certificate_is_refused(
    certificates: Certificates, tmp_path: Path, which: str, message: str
) -> None:
    secure = SecurePort(certificate=getattr(certificates, which), authority=certificates.authority)
    with ZooKeeperServer(tmp_path, secure=secure) as server:
        security = ZooKeeperSecurity(
            tls=True, ca=str(certificates.authority), certificate=str(certificates.broker), key=str(certificates.broker)
        )
        with pytest.raises(ConfigError, match=message):
            ZooKeeperStore(server.secure_address, "/x", security=security, connect_timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_tls_to_a_plain_port_and_plain_text_to_a_tls_port_are_refused(
    server: ZooKeeperServer, certificates: Certificates
) -> None:
    security = ZooKeeperSecurity(
        tls=True, ca=str(certificates.authority), certificate=str(certificates.broker), key=str(certificates.broker)
    )
    with pytest.raises(ConfigError, match="TLS fails: .*this port is the one for TLS"):
        ZooKeeperStore(server.address, "/x", security=security, connect_timeout_s=PATIENCE_S)
    with pytest.raises(RetryableError, match=r"whether it wants TLS \(transactional.zookeeper.tls"):
        ZooKeeperStore(server.secure_address, "/x", connect_timeout_s=WATCH_S)


@pytest.mark.slow
def test_a_server_that_demands_sasl_says_so(tmp_path: Path) -> None:
    secure = SecurePort(users={USER: PASSWORD}, required=True)
    with ZooKeeperServer(tmp_path, secure=secure) as server:
        with pytest.raises(ConfigError, match="refused the credentials: check transactional.zookeeper.sasl.username"):
            ZooKeeperStore(server.address, "/x", connect_timeout_s=PATIENCE_S)
        store = ZooKeeperStore(server.address, "/x", security=ZooKeeperSecurity(username=USER, password=PASSWORD))
        store.apply([Put("a", b"1")])
        store.close()


def test_credentials_that_are_refused_before_the_start_looks_are_not_called_a_timeout(
    server: ZooKeeperServer, certificates: Certificates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server checks credentials after it has accepted the connection: a start that is slow sees
    only that the connection is gone."""
    begin = KazooClient.start_async

    def slow(client: KazooClient) -> Any:
        states: list[str] = []
        client.add_listener(states.append)
        live = begin(client)
        wait_for(lambda: KazooState.LOST in states)
        return live

    monkeypatch.setattr(KazooClient, "start_async", slow)
    with pytest.raises(ConfigError, match="refused the credentials"):
        opened(settings(server.secure_address, certificates, root=f"/{name}", sasl_password="wrong-canary"))


@pytest.mark.parametrize(
    ("servers", "credentials", "warned"),
    [
        ("zookeeper:2181", {}, True),
        ("127.0.0.1:2181,10.0.0.7:2181/chroot", {}, True),
        ("127.0.0.1:2181,[::1]:2182", {}, False),
        ("zookeeper:2181", {"sasl.username": "a", "sasl.password": "b"}, False),
        ("zookeeper:2181", {"auth": "digest:a:b"}, False),
    ],
)
def test_a_start_without_credentials_says_that_znodes_are_open_to_all(
    monkeypatch: pytest.MonkeyPatch, servers: str, credentials: dict[str, str], warned: bool
) -> None:
    monkeypatch.setattr("framework.coordination.configured.ZooKeeperStore", lambda *_, **__: MemoryStore())
    values = {f"transactional.zookeeper.{key}": value for key, value in {"servers": servers, **credentials}.items()}
    with own_logs() as logs:
        store_of(Config.of(values))
        store_of(Config.of(values), observes=True)
    assert [each["event"] for each in logs] == ["zookeeper.open_to_all"] * warned


def test_a_session_timeout_beyond_the_servers_limits_is_logged(
    server: ZooKeeperServer,
) -> None:
    with own_logs() as logs:
        ZooKeeperStore(server.address, "/limits", session_timeout_s=600).close()
    said = [(log["wanted_s"], log["granted_s"]) for log in logs if log["event"] == "zookeeper.session_timeout"]
    assert said == [(600, 60.0)]
    with own_logs() as logs:
        ZooKeeperStore(server.address, "/limits", session_timeout_s=5).close()
    assert not logs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tls.ca": "/nowhere/ca.pem"}, r"tls\.ca is given, and .*tls\.enabled is not true"),
        ({"tls.enabled": True, "tls.ca": "/nowhere/ca.pem"}, r"tls\.ca: there is no file /nowhere/ca\.pem"),
        ({"tls.enabled": True, "tls.key": __file__}, r"tls\.certificate and .*tls\.key go together"),
        ({"sasl.username": "a"}, r"sasl\.username and .*sasl\.password go together"),
        ({"auth": "sasl:a:b"}, r"must be digest:user:password"),
    ],
)
def test_incomplete_security_settings_and_missing_files_are_refused_before_connecting(
    values: dict[str, object], message: str
) -> None:
    prefixed = {f"transactional.zookeeper.{key}": value for key, value in values.items()}
    with pytest.raises(ConfigError, match=message):
        ZooKeeperSecurity.of(Config.of(prefixed))


def test_secrets_do_not_appear_when_settings_are_printed(certificates: Certificates) -> None:
    config = Config.of(settings("127.0.0.1:1", certificates, tls_password=PASSWORD, auth=f"digest:a:{PASSWORD}"))
    assert PASSWORD not in f"{config!r} {config} {config.for_components()} {ZooKeeperSecurity.of(config)!r}"


def test_a_plain_kazoo_client_connects_with_the_same_certificates_and_not_without(
    server: ZooKeeperServer, certificates: Certificates
) -> None:
    """A check of the server itself, without any code of Ratchet."""
    client = KazooClient(
        server.secure_address,
        use_ssl=True,
        ca=str(certificates.authority),
        certfile=str(certificates.broker),
        keyfile=str(certificates.broker),
    )
    client.start(PATIENCE_S)
    assert "zookeeper" in client.get_children("/")
    client.stop()
    client.close()
