"""How errors of tasks are classified and shown, and which line of a user's code they blame."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    CoreTopologyFailed,
    Fields,
    TopologyBuilder,
    TopologyFailed,
    TransactionalTopologyBuilder,
    Tuple,
    submit,
)
from framework.core.round_protocol import ComponentError, ErrorKind
from framework.errors import BadRecordError, ConfigError, CorruptStateError, DataLossError, TopologyError
from framework.execution.failures import FailureKind, TaskFailure, is_users_file, kind_of
from framework.execution.spark.code_archive import make_archive
from framework.transactions import MemoryStore
from spouts import MemoryTransactionalSpout
from spouts.codecs.registry_client import RefusedSchemaError
from tests.kit.core_parts import ListSpout
from tests.kit.processes import ROOT

USERS = """
from framework import Fields


def execute():
    Fields("word", "word")  # refused, inside the framework
"""
WORKER = """
import mine
from framework.execution.failures import users_line
try:
    mine.execute()
except Exception as error:
    print(users_line(error))
"""


def test_in_an_archive_of_code_the_users_file_is_named_and_not_ours(tmp_path: Path) -> None:
    """An executor of a cluster imports everything from one archive, ours and the user's."""
    archive = make_archive(tmp_path)
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("mine.py", USERS)
    environment = {**os.environ, "PYTHONPATH": f"./{archive.name}"}
    answer = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout == 'mine.py:6: Fields("word", "word")  # refused, inside the framework\n'


def test_files_beside_our_packages_are_the_users() -> None:
    assert is_users_file(str(ROOT / "examples" / "flights.py"))
    assert not is_users_file(str(ROOT / "framework" / "run.py"))
    assert not is_users_file(os.__file__)


class ByName(BaseBasicBolt):
    def __init__(self, tmp_path: Path) -> None:
        self.calls = tmp_path / "calls"

    def execute(self, tup: Tuple, collector: Any) -> None:
        with self.calls.open("a") as file:
            file.write("x")
        collector.emit([tup["wrod"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class ByPosition(ByName):
    def execute(self, tup: Tuple, collector: Any) -> None:
        super().execute(tup, collector) if tup[7] else None


class ByColumn(ArrowBolt):
    def __init__(self, ask: Callable[[pa.RecordBatch], object]) -> None:
        self.ask = ask

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self.ask(batch)
        yield batch

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ByName, "no field 'wrod' in .* of 'spout'; perhaps 'word' is meant"),
        (ByPosition, "no field at position 7 in .* of 'spout'; positions end at 1"),
        (lambda _: ByColumn(lambda batch: batch.column("wrod")), 'Field "wrod" does not exist in schema'),
        (lambda _: ByColumn(lambda batch: batch.select(["wrod"])), 'Field "wrod" does not exist in schema'),
        (lambda _: ByColumn(lambda batch: batch.schema.field("wrod")), "Column wrod does not exist in schema"),
    ],
)
def test_a_field_that_no_tuple_has_ends_a_topology_at_the_first_attempt(
    make: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1))
    builder.set_bolt("asks", make(tmp_path)).shuffle_grouping("spout")
    run = submit(builder.build(), {}, MemoryStore(), "local")
    with pytest.raises(TopologyFailed, match=message) as error:
        run.wait_until_caught_up(60)
    assert run.status().attempts_failed == 1
    assert error.value.failure.kind is FailureKind.FATAL
    assert "test_failures.py" in error.value.failure.where


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), ConfigError),
        (RefusedSchemaError("x"), ConfigError),
        (DataLossError("x"), DataLossError),
        (BadRecordError("x"), BadRecordError),
        (CorruptStateError("x"), None),
        (TopologyError("x"), None),
    ],
)
def test_the_error_of_a_run_has_the_class_by_which_to_recover(error: Exception, kind: type[Exception] | None) -> None:
    of_core = ComponentError.of(error, ErrorKind.FATAL, "bolt", 0)
    for raised in (TopologyFailed.of(TaskFailure.of(error, "bolt", 0)), CoreTopologyFailed.of(of_core)):
        assert [each for each in (ConfigError, DataLossError, BadRecordError) if isinstance(raised, each)] == (
            [kind] if kind is not None else []
        )


def test_a_field_that_no_tuple_has_ends_a_core_topology_at_the_first_tuple(tmp_path: Path) -> None:
    builder = TopologyBuilder("t")
    builder.set_spout("spout", ListSpout("certain", [1]))
    builder.set_bolt("asks", ByName(tmp_path)).shuffle_grouping("spout")
    run = submit(builder.build(), {}, MemoryStore(), "local")
    with pytest.raises(CoreTopologyFailed, match="no field 'wrod' in .* of 'spout'"):
        run.wait_until_idle(60)
    assert (tmp_path / "calls").read_text() == "x"


def test_what_a_user_looks_up_elsewhere_is_tried_again() -> None:
    assert kind_of(KeyError("wrod")) is FailureKind.ERROR
    assert kind_of(IndexError("list index out of range")) is FailureKind.ERROR


def test_only_who_knows_that_it_helps_advises_what_to_do() -> None:
    undecodable = BadRecordError("offset 3: not a JSON object", "value b'x'", "give the spout on_bad_record='skip'")
    for error in (undecodable, pickle.loads(pickle.dumps(undecodable))):
        assert TaskFailure.of(error, "spout", 0).lines() == [
            "component 'spout', task 0: offset 3: not a JSON object",
            "  with value b'x'",
            "  next: give the spout on_bad_record='skip'",
        ]
    for other in (BadRecordError("a null key cannot be stored"), BadRecordError("3 of the last 9 records")):
        assert len(TaskFailure.of(other, "sum", 0).lines()) == 1
