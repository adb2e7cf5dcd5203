"""Windows of a real topic are in a topic, a table and files once, though drivers die."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from framework import Config
from framework.coordination import store_of
from framework.transactions import committed_txid
from integration import EmbeddedServers
from tests.kit.closed_windows import Minutes, clicks, closed, seconds
from tests.kit.oracle import read_topics
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.rule("C44")]


@pytest.mark.slow
@pytest.mark.kills
def test_each_window_of_a_backlog_is_sent_once_to_three_stores_though_drivers_die(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    topics.create(name, 4)
    topics.create(f"{name}-closed", 2)
    sent = [clicks(partition, 900) for partition in range(4)]
    for partition, values in enumerate(sent):
        topics.send(name, values, partition=partition)
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "app.kafka": topics.bootstrap_servers,
        "app.name": name,
        "app.folder": str(tmp_path),
        "app.records": "60",
    }
    driver = RunProcess(tmp_path / "run.log", "tests.kit.closed_windows:topology", settings, executor="local")
    store = store_of(Config.of({"transactional.zookeeper.servers": servers.zookeeper}))
    last = 60
    deaths = 25
    try:
        for death in range(1, deaths + 1):
            driver.start()
            least = death * (last - 10) // deaths
            assert driver.wait_for(lambda txid=least: committed_txid(store, name) >= txid), driver.tail()
            driver.kill()
            driver.end()
        driver.start("--until-caught-up")
        assert driver.finish() == 0, driver.tail()
    finally:
        driver.end()
        store.close()
    expected = closed(sent)
    in_topic: list[Any] = []
    read_topics(
        topics.bootstrap_servers, [f"{name}-closed"], lambda message: in_topic.append(json.loads(message.value()))
    )
    found: Minutes = Counter()
    for row in in_topic:
        found[row["page"], seconds(row["window_end"])] += row["clicks"]
    assert len(in_topic) == len(expected) and found == expected
    with sqlite3.connect(tmp_path / "windows.db") as connection:
        rows = connection.execute("SELECT page, window_end, times, clicks FROM sent_live").fetchall()
    assert {times for _, _, times, _ in rows} == {1}
    assert {(page, seconds(end + "+00:00")): clicks for page, end, _, clicks in rows} == expected
    files = pq.read_table(tmp_path / "files").to_pylist()
    assert len(files) == len(expected)
    assert {(row["page"], int(row["window_end"].timestamp())): row["clicks"] for row in files} == expected
