"""A pipeline into a real MariaDB."""

from __future__ import annotations

import uuid

import pytest

from framework import submit
from framework.transactions import MemoryStore
from integration import MariaDbServer
from ratchet import Pipeline, mysql, sum_
from tests.kit.mysql import client
from tests.kit.waiting import PATIENCE_S


@pytest.mark.integration
def test_mariadb_takes_aggregates_newest_rows_and_every_row(mariadb: MariaDbServer) -> None:
    database = f"s_{uuid.uuid4().hex[:12]}"
    dsn = f"{mariadb.dsn.rpartition('/')[0]}/{database}"
    rows = [{"k": f"k{number % 3}", "n": number} for number in range(30)]
    pipeline = Pipeline("shop")
    stream = pipeline.read(rows, k=str, n=int)
    stream.group_by("k").agg(total=sum_("n")).upsert_into(mysql(dsn, "totals"))
    stream.latest_by("k", sequence_by="n").upsert_into(mysql(dsn, "newest"))
    stream.append_into(mysql(dsn, "raw"))
    assert str(mysql(dsn, "raw")) == "mysql(..., 'raw')"
    with client(mariadb.dsn) as admin:
        admin.execute(f"CREATE DATABASE {database}")
        with submit(pipeline.build(), store=MemoryStore(), executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        totals = dict(admin.execute(f"SELECT k, total FROM {database}.totals_live"))
        newest = dict(admin.execute(f"SELECT k, n FROM {database}.newest"))
        raw = admin.execute(f"SELECT k, n FROM {database}.raw ORDER BY n")
    assert totals == {key: sum(row["n"] for row in rows if row["k"] == key) for key in ("k0", "k1", "k2")}
    assert newest == {"k0": 27, "k1": 28, "k2": 29}
    assert raw == [(row["k"], row["n"]) for row in rows]
