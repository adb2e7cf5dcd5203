"""OAUTHBEARER by OpenID Connect, against a real broker that checks every token: a topology signs in
with settings of a file alone, renews its tokens, and tells why it has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from framework import Config, Run, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_token_errors import token_failure
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from integration import KafkaBroker
from tests.kit.certificates import Certificates, make_certificates
from tests.kit.identity import CLIENT, SECRET, IdentityProvider, TokenListener, identity_provider
from tests.kit.processes import RunProcess
from tests.kit.readers import READERS
from tests.kit.secured_copy import SecuredCopy, topology
from tests.kit.waiting import PATIENCE_S, wait_for

#: librdkafka renews a token when a fifth of its life is left, and looks once a second.
SHORT_S = 10
pytestmark = [pytest.mark.behaviour("2.11")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def running(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KafkaBroker, IdentityProvider]]:
    with identity_provider() as provider:
        secure = TokenListener(certificates.broker, provider.keys_url)
        with KafkaBroker(tmp_path_factory.mktemp("tokens"), secure=secure) as broker:
            yield broker, provider


@pytest.fixture
def provider(running: tuple[KafkaBroker, IdentityProvider]) -> Iterator[IdentityProvider]:
    found = running[1]
    yield found
    found.reset()


@pytest.fixture
def copy(running: tuple[KafkaBroker, IdentityProvider], certificates: Certificates, name: str) -> SecuredCopy:
    security = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(certificates.authority),
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": CLIENT,
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": running[1].token_url,
        "sasl.oauthbearer.scope": "kafka",
    }
    return SecuredCopy(running[0], name, security)


def started(file: Path, store: MemoryStore | None = None) -> Run:
    config = Config.load(file)
    return submit(topology(config.for_components()), config, store or MemoryStore(), "local")


def tells(run: Run, words: str) -> bool:
    status = run.status()
    assert status.phase != "failed", status.last_error
    return words in (status.waiting_for or "")


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", [READERS[0], pytest.param("python", marks=pytest.mark.slow)])
def test_every_client_signs_in_and_renews_its_token(
    reader: str, copy: SecuredCopy, provider: IdentityProvider, tmp_path: Path
) -> None:
    """The broker ends a connection with its token."""
    provider.lifetime_s = SHORT_S
    copy.send(100)
    with structlog.testing.capture_logs() as logs, started(copy.file(tmp_path, reader=reader)) as run:
        run.wait_until_caught_up(PATIENCE_S)
        first, until_s = len(provider.tokens), time.time() + 1.5 * SHORT_S
        wait_for(lambda: time.time() > until_s and len(provider.tokens) > first, what="the end of the first tokens")
        copy.send(100)
        run.wait_until_caught_up(PATIENCE_S)
        shown = f"{run.status()} {run.transactions()} {logs}"
    assert copy.copied() == copy.sent()
    assert [each for each in (SECRET, *provider.tokens) if each in shown] == []


@pytest.mark.slow
@pytest.mark.integration
def test_an_outage_of_the_identity_provider_is_waited_for_and_told(
    copy: SecuredCopy, provider: IdentityProvider, tmp_path: Path
) -> None:
    provider.lifetime_s = SHORT_S
    copy.send(100)
    provider.link.cut()
    with started(copy.file(tmp_path)) as run:
        wait_for(lambda: tells(run, "no token for OAUTHBEARER"), what="the reason of the wait")
        assert tells(run, "check 'sasl.oauthbearer.token.endpoint.url', and that the identity provider answers")
        provider.link.heal()
        run.wait_until_caught_up(PATIENCE_S)
        # After the first working connection a refusal is an outage, too.
        provider.refusal = 401, b'{"error": "invalid_client"}'
        wait_for(lambda: provider.answers[401] > 0, what="a refusal")
        copy.send(100)
        wait_for(lambda: tells(run, 'no token for OAUTHBEARER: {"error": "invalid_client"}'), what="its reason")
        provider.refusal = None
        run.wait_until_caught_up(PATIENCE_S)
        status = run.status()
    assert copy.copied() == copy.sent()
    assert SECRET not in str(status)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "refusal", "message"),
    [
        (
            {"sasl.oauthbearer.client.secret": "wrong-canary"},
            None,
            'no token for OAUTHBEARER: {"error": "invalid_client", "error_description": "no such client"}; '
            "check 'sasl.oauthbearer.client.id' and 'sasl.oauthbearer.client.secret'",
        ),
        (
            {},
            (401, b"<html>\n<h1>401 Authorization Required</h1>\n</html>"),
            "no token for OAUTHBEARER: <html> <h1>401 Authorization Required</h1> </html>; "
            "check 'sasl.oauthbearer.client.id' and 'sasl.oauthbearer.client.secret'",
        ),
    ],
)
def test_a_refusal_stops_the_start_and_names_the_setting(
    copy: SecuredCopy,
    provider: IdentityProvider,
    tmp_path: Path,
    changes: dict[str, str],
    refusal: tuple[int, bytes] | None,
    message: str,
) -> None:
    provider.refusal = refusal
    with pytest.raises(ConfigError) as refused, started(copy.file(tmp_path, **changes)) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert str(refused.value) == f"Kafka at {copy.address}: {message}"


@pytest.mark.slow
@pytest.mark.integration
def test_a_token_for_somebody_else_stops_the_start(
    copy: SecuredCopy, provider: IdentityProvider, tmp_path: Path
) -> None:
    provider.audience = "another"
    with pytest.raises(ConfigError) as refused, started(copy.file(tmp_path)) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert str(refused.value).startswith(f"Kafka at {copy.address}: ") and "invalid_token" in str(refused.value)
    assert [each for each in (SECRET, *provider.tokens) if each in str(refused.value)] == []


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_prints_neither_its_secret_nor_a_token(
    copy: SecuredCopy, provider: IdentityProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Spark, in all its words, also of a failure. The secret comes from the environment."""
    monkeypatch.setenv("MY_SECRET", SECRET)
    copy.send(100)
    changes = {"sasl.oauthbearer.client.secret": "${MY_SECRET}"}
    file = copy.file(tmp_path, '[spark]\nmaster = "local[2]"', **changes)
    run = RunProcess(tmp_path / "run.log", "tests.kit.secured_copy:topology", {})
    try:
        run.start("--config", str(file), "--verbose")
        run.wait_for(lambda: copy.copied() == copy.sent(), pause_s=0.5)
        copy.send_poison()
        assert run.finish() != 0
        printed = run.log.read_text()
    finally:
        run.end()
    assert "poison" in printed and "Traceback" in printed
    assert [each for each in (SECRET, *provider.tokens) if each in printed] == []


@pytest.mark.parametrize(
    ("answer", "settings", "refused"),
    [
        ("oauth_cb raised RuntimeError: boto3 finds no AWS credentials, access denied", "", False),
        ("Could not resolve host: login.example.com", "token.endpoint.url", False),
        ("Failed to connect to 127.0.0.1 port 1 after 0 ms: Could not connect to server", "token.endpoint.url", False),
        ("Operation timed out after 20000 milliseconds with 0 bytes received", "token.endpoint.url", False),
        ("Server did not provide an error string", "token.endpoint.url", False),  # of any status
        ("<html><title>503 Service Temporarily Unavailable</title></html>", "token.endpoint.url", False),
        ('{"error": "temporarily_unavailable"}', "token.endpoint.url", False),
        ('{"message": "Forbidden"}', "client.id client.secret", True),
        ('{"error": "access_denied", "error_description": "Unauthorized"}', "client.id client.secret", True),
        ('{"error": "unsupported_grant_type"}', "grant.type", True),
        (
            "SSL certificate problem: unable to get local issuer certificate",
            "https.ca.location token.endpoint.url",
            True,
        ),
        ('{"error": "invalid_scope"}', "scope", True),
        ("404 page not found", "token.endpoint.url", True),
        ("Response is not JSON encoded: text/html", "token.endpoint.url", True),
        ('Expected JSON JWT response with "access_token" field', "token.endpoint.url", True),
    ],
)
def test_an_answer_is_a_refusal_or_an_outage(answer: str, settings: str, refused: bool) -> None:
    found = token_failure(f"Failed to acquire SASL OAUTHBEARER token: {answer}")
    assert found is not None
    assert [each.removeprefix("sasl.oauthbearer.") for each in found.settings] == settings.split()
    assert found.refused == refused


def test_a_long_answer_is_cut_to_a_line() -> None:
    assert token_failure("Receive failed: Disconnected") is None
    found = token_failure("Failed to acquire SASL OAUTHBEARER token: <html>\n" + "<p>x</p>\n" * 1_000)
    assert found is not None and len(str(found)) < 400 and "\n" not in str(found)


@pytest.mark.parametrize("more", [{}, {"sasl.oauthbearer.method": "default"}, {"oauth_cb": None}])
def test_settings_without_a_source_of_tokens_are_refused(more: dict[str, Any]) -> None:
    settings = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", **more}
    with pytest.raises(ConfigError, match="OAUTHBEARER needs tokens: set 'sasl.oauthbearer.method' to 'oidc'"):
        KafkaSettings("here:9092", settings).with_conf({})
    for source in ({"sasl.oauthbearer.method": "oidc"}, {"oauth_cb": print}):
        KafkaSettings("here:9092", {**settings, **source}).with_conf({})
