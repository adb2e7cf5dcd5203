"""Fixtures of the spouts' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka import cluster_metadata
from spouts.kafka.consumer.consumer_pool import sessions
from tests.kit.readers import READERS
from tests.kit.waiting import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def patient_questions() -> Iterator[None]:
    """Let questions to a broker outlast one that stands still. A driver asks again; a test that
    plans without a driver cannot."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cluster_metadata, "REQUEST_TIMEOUT_S", PATIENCE_S)
        yield


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each of the two readers of Kafka, for what both must do alike.

    The native one is skipped only where the compiled part was not built, which is optional.
    """
    sessions.close()
    monkeypatch.setattr(KafkaSettings, "reader", request.param)
    yield request.param
    sessions.close()
