"""``ratchet ingest --from-connector``: what the configuration of a Kafka Connect sink becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from framework.errors import ConfigError
from ratchet.ingest_command import app
from ratchet.kafka_connect_translation import read_connector
from tests.commands.test_ingest import built

CONFLUENT: dict[str, Any] = {
    "connector.class": "io.confluent.connect.jdbc.JdbcSinkConnector",
    "topics": "orders",
    "connection.url": "jdbc:postgresql://db:5433/shop?user=ann",
    "connection.password": "s3c/ret",
    "value.converter": "io.confluent.connect.avro.AvroConverter",
    "value.converter.schema.registry.url": "http://registry:8081",
    "tasks.max": 4,
    "auto.create": True,
}
DEBEZIUM: dict[str, Any] = {
    "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
    "topics.regex": r"shop\..*",
    "connection.url": "jdbc:mariadb://db/copy",
    "connection.username": "ann",
    "connection.password": "${file:/etc/secret:password}",
    "insert.mode": "upsert",
    "primary.key.mode": "record_key",
    "delete.enabled": "true",
    "schema.evolution": "basic",
}


def written(folder: Path, config: dict[str, Any], name: str = "to-shop") -> Path:
    path = folder / "sink.json"
    path.write_text(json.dumps({"name": name, "config": config}))
    return path


def ingest(*words: str) -> Any:
    return CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"mode": "append", "codec": "avro", "registry": "http://registry:8081", "table": "orders", "key": ()}),
        (
            {"insert.mode": "upsert", "pk.mode": "record_value", "pk.fields": "id, region"},
            {"mode": "upsert", "key": ("id", "region"), "key_field": None},
        ),
        (
            {
                "insert.mode": "upsert",
                "pk.mode": "record_key",
                "pk.fields": "id",
                "delete.enabled": "true",
                "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            },
            {"mode": "upsert", "key": ("id",), "key_field": "id", "differences": ()},
        ),
        ({"table.name.format": "kafka_${topic}"}, {"table": "kafka_orders"}),
        ({"errors.tolerance": "all"}, {"on_bad_record": "skip"}),
        ({"consumer.override.auto.offset.reset": "latest"}, {"start": "latest"}),
        ({"connection.url": "jdbc:sqlite:/data/shop.db"}, {"into": "sqlite:/data/shop.db"}),
        ({"connection.url": "jdbc:mysql://db/shop"}, {"into": "mysql://db/shop"}),
    ],
)
def test_settings_are_taken_over(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = read_connector(written(tmp_path, CONFLUENT | changes), None)._asdict()
    assert {name: found[name] for name in expected} == expected
    assert found["topic"] == "orders" and found["group"] == "connect-to-shop"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"transforms": "route"}, "transforms=route"),
        ({"fields.whitelist": "a,b"}, "fields.whitelist=a,b"),
        ({"table.name.format": "public.${topic}"}, "table public.orders"),
        ({"pk.mode": "kafka"}, "pk.mode=kafka"),
        ({"insert.mode": "upsert", "pk.mode": "record_key", "pk.fields": "id"}, "pk.mode=record_key, pk.fields=id"),
        ({"a.setting.of.tomorrow": "1"}, "a.setting.of.tomorrow=1"),
    ],
)
def test_a_pipeline_whose_rows_would_differ_is_not_run(changes: dict[str, Any], setting: str, tmp_path: Path) -> None:
    path = written(tmp_path, CONFLUENT | changes)
    assert [each.setting for each in read_connector(path, None).differences if each.changes_rows] == [setting]
    shown = ingest("--from-connector", str(path))
    assert shown.exit_code == 0 and f"# Differs from the connector: {setting}: " in shown.stdout
    refused = ingest("--from-connector", str(path), "--yes")
    assert refused.exit_code == 2 and f"would differ from those of the connector: {setting}: " in refused.stderr


def test_a_pipeline_is_ejected_without_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = ingest("--from-connector", str(written(tmp_path, CONFLUENT)), "--eject", "pipe.py")
    assert done.exit_code == 0
    text = (tmp_path / "pipe.py").read_text()
    assert "s3c" not in text and "postgresql://ann:${RATCHET_INTO_PASSWORD}@db:5433/shop" in text
    assert text.startswith("# To go on where the connector has stopped: start_group='connect-to-shop'\n")


@pytest.mark.parametrize("name", ["errors.deadletterqueue.topic.name", "a.setting.of.tomorrow"])
def test_no_value_of_a_connector_becomes_code(name: str, tmp_path: Path) -> None:
    more = {"errors.tolerance": "all", name: "dlq\nprint('ran')\r\x0cprint('ran')\n# "}
    shown = ingest("--from-connector", str(written(tmp_path, CONFLUENT | more)), "--eject")
    assert shown.exit_code == 0 and "print('ran')" in shown.stdout
    assert all(line.startswith("# ") for line in shown.stdout.splitlines() if "print" in line)


@pytest.mark.parametrize(
    "name", ["value.converter.basic.auth.user.info", "connection.ssl.keyPassword", "aws.access.key"]
)
def test_secrets_of_a_connector_are_not_shown(name: str, tmp_path: Path) -> None:
    registry = {"value.converter.schema.registry.url": "http://ann:hunter2@registry:8081"}
    shown = ingest(
        "--from-connector", str(written(tmp_path, {**CONFLUENT, **registry, name: "ann:hunter2"})), "--eject"
    )
    assert shown.exit_code == 0 and f"{name}=(hidden)" in shown.stdout and "hunter2" not in shown.stdout
    other = {"connection.url": "jdbc:sqlserver://db;user=sa;password=hunter2"}
    refused = ingest("--from-connector", str(written(tmp_path, CONFLUENT | other)))
    assert refused.exit_code == 2 and "jdbc:sqlserver:" in refused.stderr and "hunter2" not in refused.stderr


def test_debeziums_sink_becomes_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_connector(written(tmp_path, DEBEZIUM), None)
    assert (found.mode, found.codec, found.topic) == ("mirror", "debezium", r"shop\..*")
    assert [each.setting for each in found.differences] == ["connection.password"]
    shown = ingest("--from-connector", str(tmp_path / "sink.json"), "--into", "sqlite:copy.db")
    assert shown.exit_code == 0
    assert [each.id for each in built(shown.stdout).components]


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, CONFLUENT | {"topics": "orders,refunds", "insert.mode": "insert"})
    words = ("refunds", "--from-connector", str(path), "--table", "r", "--into", "sqlite:x.db", "--codec", "text")
    shown = ingest(*words)
    assert "read_kafka('refunds'" in shown.stdout and "sqlite('x.db', 'r')" in shown.stdout
    assert "Text(" in shown.stdout


def test_properties_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "sink.properties"
    path.write_text("# ours\nname = to-shop\n" + "".join(f"{name}={value}\n" for name, value in CONFLUENT.items()))
    assert read_connector(path, None) == read_connector(written(tmp_path, CONFLUENT), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"connector.class": "org.example.Sink"}, "connector.class=org.example.Sink is not known"),
        ({"topics": "a,b"}, "reads the topics a, b: name one topic"),
        ({"topics": "", "topics.regex": "a.*"}, "reads the pattern 'a.*': name one topic"),
        ({"connection.url": "jdbc:oracle:thin:@db"}, "ingest writes PostgreSQL, MariaDB, MySQL and SQLite"),
        ({"insert.mode": "update"}, "insert.mode=update changes only rows that exist"),
        ({"insert.mode": "upsert"}, "there is no key to find rows by"),
        ({"value.converter": "org.apache.kafka.connect.json.JsonConverter"}, "schemas.enable is true"),
        ({"value.converter": "com.example.Mine"}, "is not known: give --codec"),
    ],
)
def test_a_file_that_means_nothing_here_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_connector(written(tmp_path, CONFLUENT | changes), None)
    assert message in str(refused.value) and "s3c" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", '{"config": 3}', "", "name=x"])
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sink.json"
    path.write_text(text)
    done = ingest("--from-connector", str(path))
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert ingest("--from-connector", str(tmp_path / "none.json")).exit_code == 2
    assert ingest().exit_code == 2


def test_a_sink_of_an_object_store_needs_another_place(tmp_path: Path) -> None:
    config = {"connector.class": "io.confluent.connect.s3.S3SinkConnector", "topics": "orders", "s3.bucket.name": "b"}
    path = written(tmp_path, config | {"value.converter": "org.apache.kafka.connect.storage.StringConverter"})
    assert "give --into URL" in ingest("--from-connector", str(path)).stderr
    shown = ingest("--from-connector", str(path), "--into", f"parquet:{tmp_path / 'rows'}")
    assert shown.exit_code == 0 and "writes to S3" in shown.stdout
