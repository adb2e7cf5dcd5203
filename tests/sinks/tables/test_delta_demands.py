"""What other programs demand of a Delta table's writers binds Ratchet: it goes on where it meets
that, and otherwise refuses the table by name, before a row breaks it.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake.schema import PrimitiveType

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, CorruptStateError, RetryableError, StaleWriterError
from framework.topology import Header
from framework.transactions import MemoryStore
from sinks import AppendCommitter, DeltaLakeTable
from spouts import MemoryTransactionalSpout
from tests.kit.file_tables import append, granted, opened

pytestmark = pytest.mark.behaviour("3.5")
FIELDS = Fields(k=str, cents=int)
BATCH = pa.record_batch({"k": ["a", "b"], "cents": [5, 7]})


@pytest.fixture
def table(tmp_path: Path) -> DeltaLakeTable:
    made = DeltaLakeTable(tmp_path / "table")
    made.bind(FIELDS)
    made.prepare("topology")
    append(made, 1, BATCH)
    return made


def log(table: DeltaLakeTable, version: int) -> Path:
    return table.path / "_delta_log" / f"{version:020d}.json"


def commit(table: DeltaLakeTable, action: dict[str, Any]) -> None:
    """What another program commits."""
    log(table, deltalake.DeltaTable(str(table.path)).version() + 1).write_text(json.dumps(action) + "\n")


def protocol(*features: str, readers: bool = False) -> dict[str, Any]:
    read = {"minReaderVersion": 3, "readerFeatures": list(features)} if readers else {"minReaderVersion": 1}
    return {"protocol": {**read, "minWriterVersion": 7, "writerFeatures": list(features)}}


def versions(reader: int, writer: int) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": reader, "minWriterVersion": writer}}


def metadata(table: DeltaLakeTable) -> dict[str, Any]:
    for line in log(table, 0).read_text().splitlines():
        if "metaData" in (found := json.loads(line)):
            return dict(found)
    raise AssertionError("no metadata")


def with_columns(table: DeltaLakeTable, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Commit a schema that ``change`` has made of the columns of the table."""
    action = metadata(table)
    schema = json.loads(action["metaData"]["schemaString"])
    change(schema["fields"])
    action["metaData"]["schemaString"] = json.dumps(schema)
    commit(table, action)


def demanding(key: str) -> Callable[[DeltaLakeTable], None]:
    return lambda table: with_columns(table, lambda columns: columns[1]["metadata"].update({key: "x"}))


def configured(table: DeltaLakeTable, **settings: str) -> None:
    action = metadata(table)
    action["metaData"]["configuration"] = settings
    commit(table, action)


def constrained(table: DeltaLakeTable) -> None:
    deltalake.DeltaTable(str(table.path)).alter.add_constraint({"positive": "cents > 0"})


def added(table: DeltaLakeTable, name: str, *, nullable: bool) -> None:
    column = deltalake.Field(name, PrimitiveType("string"), nullable=nullable)
    deltalake.DeltaTable(str(table.path)).alter.add_columns([column])


REFUSED: dict[str, tuple[Callable[[DeltaLakeTable], None], str]] = {
    "constraint": (constrained, "has the constraint 'positive', cents > 0"),
    "generated": (demanding("delta.generationExpression"), r"generation expression .* in column 'cents'"),
    "invariant": (demanding("delta.invariants"), r"an invariant \(delta.invariants\) in column 'cents'"),
    "identity": (demanding("delta.identity.start"), r"an identity .* in column 'cents'"),
    "default": (demanding("CURRENT_DEFAULT"), r"a default .* in column 'cents'"),
    "length": (demanding("__CHAR_VARCHAR_TYPE_STRING"), r"a length .* in column 'cents'"),
    "not null": (
        lambda table: with_columns(table, lambda c: c[1].update(nullable=False)),
        "changed the column 'cents'",
    ),
    "wider": (lambda table: with_columns(table, lambda c: c[1].update(type="double")), "changed the column 'cents'"),
    "lost": (lambda table: with_columns(table, lambda c: c.pop()), "lost the column 'cents'"),
    "new and not null": (
        lambda table: added(table, "need", nullable=False),
        "the column 'need', which must not be null",
    ),
    "renamed": (lambda table: configured(table, **{"delta.columnMapping.mode": "name"}), "columnMapping.* 'name'"),
    "unknown": (lambda table: commit(table, protocol("unheardOf")), "unheardOf"),
    "unknown to readers": (lambda table: commit(table, protocol("unheardOf", readers=True)), "unheardOf"),
    **{
        feature: (lambda table, feature=feature: commit(table, protocol(feature)), f"the feature {feature}")  # type: ignore[misc]
        for feature in ("rowTracking", "inCommitTimestamp", "identityColumns", "icebergCompatV2", "clustering")
    },
    "identity columns by version": (lambda table: commit(table, versions(1, 6)), "wants writers of version 6"),
    "a later version": (lambda table: commit(table, versions(1, 9)), "wants writers of version 9"),
    "a later version of readers": (lambda table: commit(table, versions(9, 9)), "minimum reader version 9"),
    "deletionVectors": (
        lambda table: commit(table, protocol("deletionVectors", readers=True)),
        "the feature deletionVectors",
    ),
}


@pytest.mark.parametrize("demand", REFUSED)
def test_a_demand_that_is_not_met_is_refused_by_name_at_the_start_and_in_a_run(
    table: DeltaLakeTable, demand: str
) -> None:
    make, message = REFUSED[demand]
    header = opened(table, 2, 1)
    table.write(granted(header), [BATCH])
    make(table)
    version = len(list((table.path / "_delta_log").glob("*.json")))
    for refused in (
        lambda: table.publish(header),
        lambda: table.check("topology"),
        lambda: table.prepare("topology"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            refused()
        assert "\n" not in str(error.value)
    assert len(list((table.path / "_delta_log").glob("*.json"))) == version


@pytest.mark.parametrize(
    "make",
    [
        lambda table: added(table, "note", nullable=True),
        lambda table: commit(table, protocol("appendOnly", "invariants", "checkConstraints", "generatedColumns")),
        lambda table: configured(table, **{"delta.appendOnly": "true", "delta.enableChangeDataFeed": "true"}),
        lambda table: with_columns(table, lambda columns: columns[0]["metadata"].update(comment="the key")),
    ],
    ids=["a nullable column", "features that nothing uses", "properties", "a comment"],
)
def test_a_topology_goes_on_where_it_meets_what_is_demanded(
    table: DeltaLakeTable, make: Callable[[DeltaLakeTable], None]
) -> None:
    make(table)
    table.check("topology")
    table.prepare("topology")
    append(table, 2, BATCH)
    found = deltalake.DeltaTable(str(table.path)).to_pyarrow_table()
    assert sorted(found.column("cents").to_pylist()) == [5, 5, 7, 7]
    assert table.to_table().num_rows == 4


@pytest.mark.parametrize("feature", ["deletionVectors", "unheardOf", "rowTracking"])
def test_a_table_with_a_feature_that_is_not_known_is_not_compacted_and_loses_no_file(
    table: DeltaLakeTable, feature: str
) -> None:
    append(table, 2, BATCH)
    vector = table.path / "deletion_vector_61d16c75.bin"
    vector.write_bytes(b"another program's")
    commit(table, protocol(feature, readers=feature == "deletionVectors"))
    for refused in (table.compact, lambda: table.vacuum(older_than_s=0)):
        with pytest.raises(ConfigError, match=f"the feature {feature}"):
            refused()
    assert vector.exists()


def test_a_constraint_that_is_added_during_a_commit_is_not_broken(table: DeltaLakeTable) -> None:
    """Between the look at the table and the commit."""

    class Slow(DeltaLakeTable):
        def read_header(self) -> Header:
            found = super().read_header()
            looks.append(found)
            if len(looks) == 2:
                constrained(table)
            return found

    looks: list[Header] = []
    header = opened(table, 2, 1)
    table.write(granted(header), [pa.record_batch({"k": ["c"], "cents": [-1]})])
    slow = Slow(table.path)
    slow.bind(FIELDS)
    with pytest.raises(StaleWriterError):
        slow.publish(header)
    assert len(looks) == 2
    with pytest.raises(ConfigError, match="the constraint 'positive'"):
        slow.publish(header)
    assert sorted(deltalake.DeltaTable(str(table.path)).to_pyarrow_table().column("cents").to_pylist()) == [5, 7]


def topology(table: DeltaLakeTable, rows: list[list[Any]]) -> Any:
    builder = TransactionalTopologyBuilder("files", "spout", MemoryTransactionalSpout({0: rows}, FIELDS, 2))
    builder.set_bolt("append", AppendCommitter(table)).global_grouping("spout")
    return builder.build()


def test_a_topology_stops_and_does_not_try_for_ever(tmp_path: Path) -> None:
    table, store = DeltaLakeTable(tmp_path / "table"), MemoryStore()
    with submit(topology(table, [["a", 1]]), store=store, executor="local") as run:
        run.wait_until_caught_up(60)
    commit(table, protocol("unheardOf", readers=True))
    again = submit(topology(DeltaLakeTable(tmp_path / "table"), [["a", 1], ["b", 2]]), store=store, executor="local")
    with pytest.raises(ConfigError, match="unheardOf"):
        again.wait_until_caught_up(60)
    again.stop()


def test_a_damaged_or_missing_log_is_permanent(table: DeltaLakeTable) -> None:
    log(table, 2).write_text("{garbage")
    with pytest.raises(ConfigError, match="does not pass by itself") as refused:
        table.files()
    assert "\n" not in str(refused.value)
    shutil.rmtree(table.path / "_delta_log")
    with pytest.raises(CorruptStateError, match="_delta_log is gone"):
        table.files()


@pytest.mark.parametrize(
    ("kind", "number"), [(RetryableError, errno.ENOSPC), (RetryableError, errno.EIO), (ConfigError, errno.EROFS)]
)
def test_errors_of_deltas_client_pass_where_those_of_the_file_system_do(
    table: DeltaLakeTable, kind: type[Exception], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Generic LocalFileSystem error: Unable to copy: something (os error {number})"
    header = opened(table, 2, 1)
    table.write(granted(header), [BATCH])
    for error in (deltalake.exceptions.DeltaError(text), OSError(text), OSError(number, text)):

        def failing(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", failing)
        with pytest.raises(kind) as named:
            table.publish(header)
        assert type(named.value) is kind


def test_a_protocol_that_deltas_client_cannot_write_is_no_other_commit(
    table: DeltaLakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the attempt was repeated for ever."""
    header = opened(table, 2, 1)
    table.write(granted(header), [BATCH])
    for text, kind in {
        "Unsupported table features required: [IdentityColumns]": ConfigError,
        "Table features must be specified, please specify: AppendOnly": ConfigError,
        "Metadata changed since last commit.": StaleWriterError,
    }.items():

        def failing(*_: object, text: str = text, **__: object) -> None:
            raise deltalake.exceptions.CommitFailedError(text)

        monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", failing)
        with pytest.raises(kind, match=text.partition(":")[0]):
            table.publish(header)


def test_columns_that_differ_only_by_case_are_refused(tmp_path: Path) -> None:
    struct = pa.struct([("ID", pa.int64()), ("Id", pa.int64())])
    for fields, names in (
        (Fields(Word=str, word=str), "'Word' and 'word'"),
        (Fields(k=str, v=struct), "'ID' and 'Id'"),
        (Fields(k=str, v=pa.list_(struct)), "'ID' and 'Id'"),
    ):
        with pytest.raises(ConfigError, match=f"{names} differ only by case"):
            DeltaLakeTable(tmp_path / "table").bind(fields)
    DeltaLakeTable(tmp_path / "table").bind(Fields(k=str, v=pa.struct([("k", pa.int64())])))
