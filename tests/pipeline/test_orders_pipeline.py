"""A ``Pipeline`` over a real topic, in a process of its own."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from integration import EmbeddedServers
from tests.kit.oracle import read_topics
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics

pytestmark = pytest.mark.integration

ORDERS = [("a", "x", 2, 0), ("a", "x", 1, 1), ("b", "x", 9, 2), ("c", "y", 0, 3), ("c", "y", 4, 4), ("d", "y", 5, 7)]


def test_a_pipeline_lands_upserts_drops_repeats_and_sends_what_closed(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    topics.create(name, 1)
    topics.create(f"{name}-closed", 1)
    keys = ("order", "shop", "cents", "at")
    values = [
        json.dumps(dict(zip(keys, (order, shop, cents, f"2026-01-01T10:{minute:02}:00Z"), strict=True))).encode()
        for order, shop, cents, minute in ORDERS
    ]
    topics.send(name, values, partition=0)
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "app.kafka": topics.bootstrap_servers,
        "app.topic": name,
        "app.folder": str(tmp_path),
    }
    run = RunProcess(tmp_path / "run.log", "tests.kit.orders_pipeline:pipeline", settings, executor="local")
    try:
        run.start("--until-caught-up")
        assert run.finish() == 0, run.tail()
    finally:
        run.end()
    sent: list[Any] = []
    read_topics(topics.bootstrap_servers, [f"{name}-closed"], lambda message: sent.append(json.loads(message.value())))
    assert sorted((row["shop"], row["n"], row["cents"]) for row in sent) == [("x", 3, 12), ("y", 1, 4)]
    with closing(sqlite3.connect(tmp_path / "orders.db")) as connection:
        newest = connection.execute('SELECT "order", cents FROM newest ORDER BY 1').fetchall()
        raw = connection.execute("SELECT count(*), sum(cents) FROM raw").fetchone()
        first = connection.execute('SELECT "order" FROM first ORDER BY 1').fetchall()
    assert newest == [("a", 2), ("c", 4), ("d", 5)]
    assert raw == (5, 21)
    assert first == [("a",), ("b",), ("c",), ("d",)]
