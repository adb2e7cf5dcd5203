"""Every kind of sink, written by Spark tasks: in local workers,
and in executors of their own processes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from integration import PostgresServer, RedisServer
from sinks import (
    AppendCommitter,
    ApproxDistinct,
    Count,
    DeltaLakeTable,
    Mean,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    RedisBackend,
    Reduce,
    StateCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.spark]
FIELDS = Fields(word=str, n=int)
DATA = {part: [[f"w{each % 13}", each % 50] for each in range(400)] for part in range(3)}
ALL = [(word, n) for rows in DATA.values() for word, n in rows]


@pytest.mark.slow
@pytest.mark.behaviour("3.2", "3.5")
@pytest.mark.parametrize("where", ["spark", pytest.param("cluster", marks=pytest.mark.slow)])
def test_every_kind_of_sink_is_exact_when_spark_tasks_write_it(
    request: pytest.FixtureRequest,
    where: str,
    postgres: PostgresServer,
    redis_server: RedisServer,
    tmp_path: Path,
    name: str,
) -> None:
    request.getfixturevalue(where)
    table = name.replace("-", "_")
    builder = TransactionalTopologyBuilder(name, "spout", OpaqueMemoryTransactionalSpout(DATA, FIELDS, 70), 2)
    backends: dict[str, Any] = {
        "postgres": PostgresBackend(postgres.dsn, table),
        "redis": RedisBackend(redis_server.url, name),
    }
    for each, backend in backends.items():
        words = StateCommitter(
            OpaqueMapState(backend),
            ["word"],
            {
                "count": Count(),
                "mean": Mean("n"),
                "users": ApproxDistinct("n"),
                "bits": Reduce("n", lambda one, other: one | other),
            },
        )
        builder.set_bolt(each, words, 2).fields_grouping("spout", Fields("word"))
    builder.set_bolt("parquet", AppendCommitter(ParquetTable(tmp_path / "parquet")), 2).shuffle_grouping("spout")
    builder.set_bolt("delta", AppendCommitter(DeltaLakeTable(tmp_path / "delta")), 2).shuffle_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with submit(topology, {"topology.collapse.records.max": 0}, store=store) as run:
        run.wait_until_caught_up(PATIENCE_S)
    for backend in backends.values():
        found = {key[0]: row.value for key, row in backend.scan()}
        for word, count in Counter(word for word, _ in ALL).items():
            numbers = [n for each, n in ALL if each == word]
            fields = dict(zip(backend.fields[1], found[word], strict=True))
            assert fields["count"] == count
            assert fields["mean"] == pytest.approx(sum(numbers) / len(numbers))
            assert fields["users"] == len(set(numbers))  # with so few it is exact
            bits = 0
            for each in numbers:
                bits |= each
            assert fields["bits"] == bits
    for files in (ParquetTable(tmp_path / "parquet"), DeltaLakeTable(tmp_path / "delta")):
        rows = files.to_table()
        assert Counter(zip(rows["word"].to_pylist(), rows["n"].to_pylist(), strict=True)) == Counter(ALL)
    assert verify(topology, store).right


def test_a_folder_that_is_not_shared_is_refused_on_a_cluster(tmp_path: Path) -> None:
    def build(shared: bool) -> Any:
        builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout(DATA, FIELDS, 70), 2)
        table = ParquetTable(tmp_path / "parquet", shared=shared)
        builder.set_bolt("files", AppendCommitter(table)).shuffle_grouping("spout")
        return builder.build()

    with pytest.raises(ConfigError, match="can be written from one host only"):
        submit(build(False), {"spark.master": "spark://nowhere:7077"}, store=MemoryStore())
    assert build(True).states[0].reach.value == "network"
