"""Fixtures of the spouts' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer.consumer_pool import sessions
from tests.kit.readers import READERS


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each of the two readers of Kafka, for what both must do alike.

    The native one is skipped only where the compiled part was not built, which is optional.
    """
    sessions.close()
    monkeypatch.setattr(KafkaSettings, "reader", request.param)
    yield request.param
    sessions.close()
