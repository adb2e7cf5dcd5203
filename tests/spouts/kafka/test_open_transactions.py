"""Records behind an open kafka_txn are reported: in the lag, in the status, and in the log when
they stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from spouts.kafka.planning import open_transactions
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("opaque", [True, False])
def test_hidden_records_count_as_lag(
    topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opaque: bool
) -> None:
    monkeypatch.setattr(open_transactions, "LONG_OPEN_S", 0.0)
    topics.create(name)
    topics.send(name, [b"seen"] * 10)
    hanging = topics.send_in_kafka_txn(name, [b"hanging"], end=None)
    topics.send(name, [b"hidden"] * 100)
    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    with capture_logs() as logs, runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: run.status().lag == 101)
        assert run.status().partitions[f"{name}/0"].open_records == 101
        wait_for(lambda: any(each["event"] == "source.open_transaction" for each in logs))
        hanging.commit_transaction(60)
        run.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: run.status().lag == 0)
    (warning,) = [each for each in logs if each["event"] == "source.open_transaction"]
    assert (warning["partition"], warning["stable_offset"], warning["records"]) == (f"{name}/0", 10, 101)
    assert runs.counts() == {"seen": 10, "hanging": 1, "hidden": 100}
