"""``ratchet ingest``: a topic in a table without code."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from framework.errors import ConfigError
from ratchet.ingest_command import PASSWORD, Codec, Job, Mode, app, check, program
from tests.kit.topics import Topics

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])


def job(**options: Any) -> Job:
    known = {"topic": "orders", "into": "sqlite:shop.db", "table": "orders", "mode": Mode.APPEND, "codec": Codec.JSON}
    return Job(**{**known, "columns": COLUMNS, "name": "ingest-orders", "subject": "orders-value", **options})


def built(text: str) -> Any:
    found: dict[str, Any] = {}
    exec(compile(text, "ejected.py", "exec"), found)
    return found["pipeline"].build()


def test_the_program_is_what_a_person_would_write() -> None:
    text = program(job(mode=Mode.UPSERT, key=["id"], sequence_by="at"))
    assert text == (
        "from datetime import datetime\n\nfrom ratchet import Json, Pipeline, sqlite\n\n"
        "pipeline = Pipeline('ingest-orders')\n"
        "rows = pipeline.read_kafka('orders', value=Json(id=int, name=str, at=datetime))\n"
        "rows.latest_by('id', sequence_by='at').upsert_into(sqlite('shop.db', 'orders'), name=\"rows\")\n"
    )
    assert [each.id for each in built(text).components] == ["kafka", "rows"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": Codec.TEXT},
        {"columns": pa.schema([("a b", pa.list_(pa.struct([("n", pa.float64())]))), ("t", pa.timestamp("us", "UTC"))])},
        {"mode": Mode.MIRROR, "codec": Codec.DEBEZIUM, "topic": r"shop\..*"},
        {"mode": Mode.UPSERT, "key": ["k"], "key_field": "k", "start": "latest", "on_bad_record": "skip"},
        {"into": "parquet:folder"},
        {"start": "latest", "end": "2026-01-01T00:00:00Z", "start_group": "billing"},
    ],
)
def test_every_program_builds(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = job(**options)
    check(asked)
    assert built(program(asked)).components


@pytest.mark.parametrize("name", ["class", "ﬁ", "None"])
def test_columns_that_are_no_arguments_of_python_keep_their_names(name: str) -> None:
    topology = built(program(job(columns=pa.schema([(name, pa.int64())]))))
    assert list(topology.spout.streams["default"].names) == [name]


def test_the_password_of_a_registry_does_not_get_into_the_program() -> None:
    text = program(job(codec=Codec.AVRO, registry="http://ann:s3cret@host:8081", subject="orders-value"))
    assert "s3cret" not in text and "http://ann:${RATCHET_REGISTRY_PASSWORD}@host:8081" in text


def test_a_password_does_not_get_into_the_program() -> None:
    text = program(job(into="postgresql://ann:s3cret@host/shop"))
    assert "s3cret" not in text and f"ann:${{{PASSWORD}}}@host" in text
    with pytest.raises(ConfigError) as raised:
        check(job(into="oracle://ann:s3cret@host/shop"))
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": "ftp://host"}, "--into ftp://host: write one of postgresql://"),
        ({"into": "delta:x", "mode": Mode.UPSERT, "key": ["id"]}, "delta takes new ones only"),
        ({"mode": Mode.UPSERT}, "--mode upsert needs --key"),
        ({"key": ["id"]}, "--key is for --mode upsert"),
        (
            {"mode": Mode.UPSERT, "key": ["id"], "key_field": "id", "sequence_by": "n"},
            "--sequence-by n with --key-from-record: a tombstone deletes the row of its key, and has no 'n' to compare",
        ),
        ({"mode": Mode.MIRROR}, "go together"),
        ({"topic": "a*"}, "only --mode mirror takes a pattern"),
        ({"codec": Codec.AVRO}, "needs --registry"),
        ({"on_bad_record": "ignore"}, "give fail or skip"),
    ],
)
def test_options_that_do_not_fit_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check(job(**options))


@pytest.mark.integration
def test_a_topic_is_in_a_table_without_code(topics: Topics, name: str, tmp_path: Path) -> None:
    topics.create(name, 2)
    records = [{"id": 1, "word": "a"}, {"id": 2, "word": "b", "n": 1.5}, {"id": 1, "word": "c"}]
    topics.send(name, [json.dumps(each).encode() for each in records], partition=0)
    file, words = tmp_path / "shop.db", [name, "--into", f"sqlite:{tmp_path}/shop.db", "--mode", "upsert"]
    settings = {"kafka.bootstrap.servers": topics.bootstrap_servers}
    words += [part for each in settings.items() for part in ("--set", "=".join(each))]
    runner = CliRunner()
    shown = runner.invoke(app, [*words, "--key", "id"], catch_exceptions=False)
    assert shown.exit_code == 0 and "value=Json(id=int, word=str, n=float)" in shown.output and not file.exists()
    wrong = runner.invoke(app, [*words, "--key", "ident"])
    assert wrong.exit_code == 2 and "--key ident: the records have no such field; they have id, word, n" in wrong.output
    written = runner.invoke(app, [*words, "--key", "id", "--eject", f"{tmp_path}/job.py"], catch_exceptions=False)
    assert written.exit_code == 0 and (tmp_path / "job.py").read_text() == shown.stdout
    run = [*words, "--key", "id", "--table", "newest", "--yes", "--until-caught-up", "--executor", "local"]
    done = runner.invoke(app, run, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT id, word, n FROM newest ORDER BY id").fetchall() == [
            (1, "c", None),
            (2, "b", 1.5),
        ]
