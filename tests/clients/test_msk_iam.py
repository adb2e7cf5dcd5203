"""Amazon MSK with IAM by settings alone: each process signs tokens with its own credentials."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import cloudpickle
import pytest
from confluent_kafka import Consumer, Producer

from framework.clients import msk_iam
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.config import Config
from framework.errors import ConfigError, RetryableError
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for

BROKERS = (
    "b-1.orders.a1b2c3.c2.kafka.eu-west-1.amazonaws.com:9098,b-2.orders.a1b2c3.c2.kafka.eu-west-1.amazonaws.com:9098"
)
KEYS = {"AWS_ACCESS_KEY_ID": "AKIACANARY", "AWS_SECRET_ACCESS_KEY": "canary-5ec3e7"}
#: A task runs this with settings that the driver has sent.
TASK = """
import sys, cloudpickle
given = cloudpickle.loads(sys.stdin.buffer.read()).producer()
print(given["oauth_cb"](given["sasl.oauthbearer.config"])[0])
"""


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def settings_of(brokers: str = BROKERS, **more: str) -> KafkaSettings:
    conf = {"kafka.bootstrap.servers": brokers, "kafka.sasl.mechanism": "AWS_MSK_IAM"}
    return KafkaSettings(None, None).with_conf({**conf, **{f"kafka.{key}": value for key, value in more.items()}})


def check_token(token: str) -> None:
    """A token is the signed address of a request to connect."""
    address = urlparse(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
    query = parse_qs(address.query)
    assert address.netloc == "kafka.eu-west-1.amazonaws.com" and query["Action"] == ["kafka-cluster:Connect"]
    assert query["X-Amz-Credential"][0].startswith("AKIACANARY/") and query["X-Amz-Signature"]


@pytest.mark.usefixtures("credentials")
def test_two_lines_of_a_file_are_enough(tmp_path: Path) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text(f'[kafka]\nbootstrap.servers = "{BROKERS}"\nsasl.mechanism = "AWS_MSK_IAM"\n')
    settings = KafkaSettings(None, None).with_conf(Config.load(file).for_components())
    for given in (settings.consumer("g"), settings.producer(), settings.admin()):
        assert (given["security.protocol"], given["sasl.mechanism"]) == ("SASL_SSL", "OAUTHBEARER")
        token, expires_s = given["oauth_cb"](given["sasl.oauthbearer.config"])
        check_token(token)
        assert expires_s > time.time()


@pytest.mark.usefixtures("credentials")
def test_librdkafka_takes_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def token(region: str) -> tuple[str, float]:
        asked.append(region)
        return real(region)

    real = msk_iam.token
    monkeypatch.setattr(msk_iam, "token", token)
    errors: list[Any] = []
    given = settings_of("127.0.0.1:1", **{"aws.region": "eu-west-1"}).producer()
    producer = Producer({**given, "error_cb": errors.append})
    wait_for(lambda: producer.poll(0.1) is not None and bool(asked), what="a call for a token")
    assert asked[0] == "eu-west-1"
    assert [each for each in errors if "token" in each.str().lower()] == []


def test_a_worker_signs_with_its_own_credentials_and_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of()
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    sent = cloudpickle.dumps(settings)
    assert not any(value.encode() in sent for value in KEYS.values())
    assert cloudpickle.loads(sent).fingerprint() == settings.fingerprint()
    worker = subprocess.run(
        [sys.executable, "-c", TASK], input=sent, capture_output=True, cwd=ROOT, env=dict(os.environ), check=False
    )
    assert worker.returncode == 0, worker.stderr
    check_token(worker.stdout.decode().strip())


@pytest.mark.slow
@pytest.mark.usefixtures("no_credentials")
def test_missing_credentials_are_named() -> None:
    for make in (lambda: Producer(settings_of().producer()), lambda: Consumer(settings_of().consumer("g"))):
        with pytest.raises(RetryableError) as failed:
            ConnectionErrors("here:9098").made(make)
        assert str(failed.value) == (
            "Kafka at here:9098: no token for OAUTHBEARER (RuntimeError: boto3 finds no AWS credentials in this process)"
        )


@pytest.mark.parametrize(
    ("brokers", "region"),
    [
        (BROKERS, "eu-west-1"),
        ("boot-x1.c3.kafka-serverless.us-gov-west-1.amazonaws.com:9098", "us-gov-west-1"),
        ("b-1.o.a1.c2.kafka.cn-north-1.amazonaws.com.cn:9098", "cn-north-1"),
    ],
)
def test_the_region_is_in_the_addresses(brokers: str, region: str) -> None:
    assert settings_of(brokers).producer()["sasl.oauthbearer.config"] == region
    assert settings_of(brokers, **{"aws.region": "eu-north-1"}).producer()["sasl.oauthbearer.config"] == "eu-north-1"


@pytest.mark.parametrize(
    ("brokers", "more", "message"),
    [
        (
            "kafka.internal:9098",
            {},
            "the region is not in the addresses kafka.internal:9098: give it as kafka.aws.region",
        ),
        (BROKERS, {"oauth_cb": "m:f"}, "'oauth_cb' contradicts AWS_MSK_IAM, which signs tokens itself: remove one"),
        (BROKERS, {"sasl.oauthbearer.method": "oidc"}, "'sasl.oauthbearer.method' contradicts AWS_MSK_IAM"),
    ],
)
def test_settings_that_contradict_are_refused(brokers: str, more: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(brokers, **more).producer()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ratchet-pipelines\[msk\]', on the driver and the executors$"):
        settings_of().producer()
