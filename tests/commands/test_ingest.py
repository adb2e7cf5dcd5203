"""``ratchet ingest``: a topic in a table without code."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import stat
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from framework.errors import ConfigError
from ratchet import ingest_command
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
        ({"into": "postgresql://db/x?user=u&password=hunter2"}, "--into: write the value of 'password' as ${NAME}"),
        ({"into": "mysql://u@db/x?PASSWORD=hunter2"}, "--into: write the value of 'PASSWORD' as ${NAME}"),
        ({"into": "postgresql://u:hun/ter2@db/x"}, "--into does not parse"),
        ({"into": "postgresql://u@hunter2:x@db/x"}, "--into does not parse"),
        ({"into": "mysql://u:12?hunter2@db/x"}, "--into does not parse"),
        ({"into": "delta:s3://K:hunter2@b/x"}, "--into: a folder takes no password"),
        ({"into": "parquet:s3://K:hun/ter2@b/x"}, "--into: a folder takes no password"),
        ({"into": "delta:s3://b/x?secret_key=hunter2"}, "--into: write the value of 'secret_key' as ${NAME}"),
        ({"into": "oracle:u/hunter2@db"}, "--into oracle:... is unknown"),
        ({"into": "u:hunter2@db"}, "--into u:... is unknown"),
        ({"registry": "http://u:hun/ter2@one"}, "--registry does not parse"),
        ({"registry": "http://one,http://u:hun/ter2@two"}, "--registry does not parse"),
        ({"registry": "http://a:1@one,http://b:hunter2@two"}, "--registry: the addresses have several passwords"),
        ({"registry": "http://one?apikey=hunter2"}, "--registry does not parse"),
        ({"registry": "http://u:12,hunter2@one"}, "--registry does not parse"),
    ],
)
def test_a_password_in_an_unexpected_place_is_refused_and_not_shown(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(job(codec=Codec.AVRO, **{"registry": "http://host", **options}))
    assert message in str(refused.value) and "ter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("into", "shown"),
    [
        ("postgresql://u:12?hunter2@db/x", f"postgresql://u:${{{PASSWORD}}}@db/x"),
        ("postgresql://u:${A}hunter2@db/x", f"postgresql://u:${{{PASSWORD}}}@db/x"),
        ("postgresql://u:${A}@db/x?sslpassword=${B}", "postgresql://u:${A}@db/x?sslpassword=${B}"),
        ("mariadb://u:hunter2@db/x", f"mysql://u:${{{PASSWORD}}}@db/x"),
        ("delta:abfss://container@account.example/x", "abfss://container@account.example/x"),
    ],
)
def test_an_address_is_written_without_its_password(into: str, shown: str) -> None:
    check(job(into=into))
    assert f"({shown!r}, " in program(job(into=into)) or f"({shown!r})" in program(job(into=into))


@pytest.mark.parametrize("before", [False, True])
def test_a_file_with_the_name_of_a_user_is_for_this_user_alone(tmp_path: Path, before: bool) -> None:
    file = tmp_path / "job.py"
    if before:
        file.touch(0o644)
    command = ["orders", str(file), "--into", "postgresql://ann:s3cret@host/shop", "--codec", "text", "--eject"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert "s3cret" not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_is_written_neither_where_a_link_leads_nor_into_one_that_others_have_open(tmp_path: Path) -> None:
    (own := tmp_path / "own").write_text("mine")
    (tmp_path / "linked.py").symlink_to(own)
    (tmp_path / "open.py").touch(0o644)
    with open(tmp_path / "open.py", encoding="utf-8") as opened:
        for file in ("linked.py", "open.py"):
            command = [
                "orders",
                str(tmp_path / file),
                "--into",
                "postgresql://ann@host/shop",
                "--codec",
                "text",
                "--eject",
            ]
            assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
            assert "ann" in (tmp_path / file).read_text() and not (tmp_path / file).is_symlink()
        assert own.read_text() == "mine" and not opened.read()
    assert {each.name for each in tmp_path.iterdir()} == {"own", "linked.py", "open.py"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": "ftp://host"}, "--into ftp:... is unknown: write one of postgresql://"),
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


@pytest.mark.slow
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


def test_programs_that_remove_old_files_leave_the_folder_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver imports from it as long as it runs, so another user must not make it again. Such
    programs leave a locked folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    locked: list[bool] = []

    def run(name: str, **_: object) -> None:
        held = os.open(sys.path[0], os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked.append(True)
        finally:
            os.close(held)

    monkeypatch.setattr(ingest_command, "run", run)
    ingest_command._run(job(), "", None, None)
    assert locked == [True]
