"""Translates the configuration of a Kafka Connect sink, for ``ratchet ingest --from-connector``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from framework.config import shown_value
from framework.errors import ConfigError

_JDBC = {
    "io.confluent.connect.jdbc.JdbcSinkConnector",
    "io.aiven.connect.jdbc.JdbcSinkConnector",
}
_DEBEZIUM = "io.debezium.connector.jdbc.JdbcSinkConnector"
#: Sinks that write files or tables of an object store.
_STORES = {
    "io.confluent.connect.s3.S3SinkConnector": "S3",
    "io.aiven.kafka.connect.s3.AivenKafkaConnectS3SinkConnector": "S3",
    "org.apache.iceberg.connect.IcebergSinkConnector": "Iceberg",
    "io.tabular.iceberg.connect.IcebergSinkConnector": "Iceberg",
}
#: Converter -> the name of a codec of ``ratchet ingest``.
_CODECS = {
    "org.apache.kafka.connect.json.JsonConverter": "json",
    "io.confluent.connect.avro.AvroConverter": "avro",
    "io.confluent.connect.protobuf.ProtobufConverter": "protobuf",
    "io.confluent.connect.json.JsonSchemaConverter": "json-schema",
    "org.apache.kafka.connect.storage.StringConverter": "text",
    "org.apache.kafka.connect.converters.ByteArrayConverter": "bytes",
}
#: The environment variables of the passwords in the addresses of the database and of the registry.
PASSWORD, REGISTRY_PASSWORD = "RATCHET_INTO_PASSWORD", "RATCHET_REGISTRY_PASSWORD"
_SCHEMES = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
#: Settings without an equivalent that change no row.
_OF_CONNECT = re.compile(
    r"name|connector\.class|tasks\.max|batch\.size|max\.retries|retry\.backoff\.ms|auto\.create|dialect\.name|errors\.log\..*|"
    r"errors\.retry\..*|connection\.(attempts|backoff\.ms|pool\..*)|key\.converter.*|header\.converter.*|"
    r"errors\.deadletterqueue\.(topic\.replication\.factor|context\.headers\.enable)|trim\.sensitive\.log|use\.reduction\.buffer"
)
#: Settings that ``read_connector`` takes over.
_TAKEN = re.compile(
    r"topics|topics\.regex|connection\.(url|user|username|password)|insert\.mode|(pk|primary\.key)\.(mode|fields)|"
    r"delete\.enabled|(table|collection)\.name\.format|value\.converter|value\.converter\.schemas\.enable|"
    r"value\.converter\.schema\.registry\.url|errors\.tolerance|errors\.deadletterqueue\.topic\.name|"
    r"consumer\.override\.auto\.offset\.reset|auto\.evolve|schema\.evolution"
)


class Difference(NamedTuple):
    """A difference between Ratchet and the connector. ``changes_rows``: rows would differ."""

    setting: str
    text: str
    changes_rows: bool = False

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}"


class Connector(NamedTuple):
    """A connector's configuration as options of ``ratchet ingest``. ``into``: the address of the
    database with its password; None: the connector writes no database. ``group``: the consumer
    group whose offsets say how far the connector has read."""

    topic: str
    into: str | None
    table: str
    mode: str
    codec: str
    key: tuple[str, ...]
    key_field: str | None
    registry: str | None
    on_bad_record: str
    start: str | None
    group: str
    differences: tuple[Difference, ...]


def read_connector(path: Path, topic: str | None) -> Connector:
    """Read the configuration file of a connector, JSON as its REST interface takes it, or
    properties. ``topic``: which one, where the connector reads several. Raises ``ConfigError``."""
    settings = _settings(path)
    kind = settings.get("connector.class", "")
    differences = [
        Difference(f"{name}={shown_value(name, value)}", "has no equivalent here", True)
        for name, value in settings.items()
        if not _OF_CONNECT.fullmatch(name) and not _TAKEN.fullmatch(name) and _differs(name, value)
    ]
    if kind not in _JDBC and kind != _DEBEZIUM and kind not in _STORES:
        known = ", ".join(each.rpartition(".")[2] for each in (*sorted(_JDBC), _DEBEZIUM, *_STORES))
        raise ConfigError(
            f"{path}: connector.class={kind or '(missing)'} is not known: give the file of one of {known}"
        )
    debezium = kind == _DEBEZIUM
    chosen = _topic(path, settings, topic, is_pattern=debezium)
    codec, registry = _codec(path, settings, differences, debezium=debezium)
    mode, key, key_field = _mode(path, settings, differences, debezium=debezium)
    into = None
    if kind in _STORES:
        differences.append(
            Difference(kind.rpartition(".")[2], f"writes to {_STORES[kind]}: give --into, a folder or a database", True)
        )
    else:
        into = _database(path, settings, differences)
    table = settings.get("table.name.format", settings.get("collection.name.format", "${topic}"))
    table = table.replace("${topic}", chosen)
    if "." in table and not debezium:
        differences.append(Difference(f"table {table}", "only what follows the last point is the table's name", True))
    tolerant = settings.get("errors.tolerance", "none") == "all"
    if tolerant and (letters := settings.get("errors.deadletterqueue.topic.name")):
        differences.append(
            Difference(
                f"errors.deadletterqueue.topic.name={letters}",
                "refused records are skipped and counted; in the ejected pipeline, name dead letters to keep them",
            )
        )
    start = settings.get("consumer.override.auto.offset.reset")
    return Connector(
        topic=chosen,
        into=into,
        table=re.sub(r"\W+", "_", table.rpartition(".")[2]).strip("_"),
        mode=mode,
        codec=codec,
        key=key,
        key_field=key_field,
        registry=registry,
        on_bad_record="skip" if tolerant else "fail",
        start=None if start == "earliest" else start,
        group=f"connect-{settings.get('name', '')}",
        differences=tuple(differences),
    )


def _settings(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-connector {path}: {getattr(error, 'strerror', None) or error}") from None
    if not text.lstrip().startswith("{"):
        lines = [line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] not in "#!"]
        return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--from-connector {path}: is no JSON: {error}") from None
    inner = found.get("config", found)
    if not isinstance(inner, dict):
        raise ConfigError(f'--from-connector {path}: "config" is no object')
    named = {"name": found["name"]} if "name" in found else {}
    return {
        str(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {**named, **inner}.items()
        if value is not None
    }


def _differs(name: str, value: str) -> bool:
    """Whether a setting that is not known can change what is written."""
    defaults = {"quote.sql.identifiers": "always", "db.timezone": "UTC", "database.time_zone": "UTC"}
    return value != defaults.get(name) and not name.startswith("consumer.override.")


def _topic(path: Path, settings: Mapping[str, str], topic: str | None, *, is_pattern: bool) -> str:
    names = [each.strip() for each in settings.get("topics", "").split(",") if each.strip()]
    pattern = settings.get("topics.regex")
    if topic is not None:
        if names and topic not in names:
            raise ConfigError(f"{path}: the connector does not read {topic!r}; it reads {', '.join(names)}")
        return topic
    if pattern is not None and is_pattern:
        return pattern
    if len(names) > 1 and is_pattern:
        return "|".join(map(re.escape, names))
    if len(names) != 1:
        reads = f"the topics {', '.join(names)}" if names else f"the pattern {pattern!r}" if pattern else "no topic"
        raise ConfigError(f"{path}: the connector reads {reads}: name one topic, in a command for each of them")
    return names[0]


def _codec(
    path: Path, settings: Mapping[str, str], differences: list[Difference], *, debezium: bool
) -> tuple[str, str | None]:
    converter = settings.get("value.converter")
    registry = settings.get("value.converter.schema.registry.url", "").split(",")[0].strip() or None
    if debezium:
        if converter not in (None, "org.apache.kafka.connect.json.JsonConverter"):
            raise ConfigError(f"{path}: value.converter={converter}: a mirror reads Debezium's JSON with its schema")
        return "debezium", None
    if converter is None:
        differences.append(
            Difference("value.converter", "is that of the worker, and is taken for JSON here: give --codec")
        )
        return "json", None
    if converter not in _CODECS:
        raise ConfigError(f"{path}: value.converter={converter} is not known: give --codec, and remove the setting")
    codec = _CODECS[converter]
    if codec == "json" and settings.get("value.converter.schemas.enable", "true") != "false":
        raise ConfigError(
            f"{path}: value.converter.schemas.enable is true: each value is an object with its schema in it; --codec json reads "
            "plain objects, --mode mirror the changes of Debezium"
        )
    return codec, registry


def _mode(
    path: Path, settings: Mapping[str, str], differences: list[Difference], *, debezium: bool
) -> tuple[str, tuple[str, ...], str | None]:
    """The mode, the fields of the key, and the field that the record's key is read into."""
    inserts = settings.get("insert.mode", "insert")
    prefix = "primary.key" if debezium else "pk"
    place = settings.get(f"{prefix}.mode", "none").lower()
    fields = tuple(each.strip() for each in settings.get(f"{prefix}.fields", "").split(",") if each.strip())
    deletes = settings.get("delete.enabled", "false").lower() == "true"
    if debezium:
        if inserts != "upsert" or place != "record_key":
            raise ConfigError(
                f"{path}: insert.mode={inserts} and primary.key.mode={place}: a mirror upserts by the record's key; use "
                "--mode append with another codec"
            )
        if not deletes:
            differences.append(Difference("delete.enabled=false", "a mirror deletes rows, too", True))
        return "mirror", (), None
    if inserts == "update":
        raise ConfigError(
            f"{path}: insert.mode=update changes only rows that exist: use upsert, or a committer of your own"
        )
    if inserts == "insert":
        if place not in ("none", "kafka"):
            differences.append(Difference(f"pk.mode={place}", "rows are appended; the table keeps its own key", True))
        elif place == "kafka":
            differences.append(
                Difference("pk.mode=kafka", "no columns for topic, partition and offset are written", True)
            )
        return "append", (), None
    if place == "record_value":
        return "upsert", fields, None
    if place != "record_key":
        raise ConfigError(f"{path}: insert.mode=upsert with pk.mode={place}: there is no key to find rows by")
    if settings.get("key.converter", "").endswith("StringConverter") and len(fields) == 1:
        if not deletes:
            differences.append(Difference("delete.enabled=false", "a tombstone deletes its row here", True))
        return "upsert", fields, fields[0]
    differences.append(
        Difference(
            f"pk.mode=record_key, pk.fields={','.join(fields)}", "the key is taken from the value's fields", True
        )
    )
    if deletes:
        differences.append(Difference("delete.enabled=true", "tombstones delete nothing: their key is no text", True))
    return "upsert", fields, None


def _database(path: Path, settings: Mapping[str, str], differences: list[Difference]) -> str:
    """The address of the database."""
    url = settings.get("connection.url", "")
    kind, _, rest = url.removeprefix("jdbc:").partition(":")
    if not url.startswith("jdbc:") or (kind != "sqlite" and kind not in _SCHEMES):
        raise ConfigError(
            f"{path}: connection.url={url[: -len(rest)] if rest else kind}...: ingest writes PostgreSQL, MariaDB, MySQL and SQLite"
        )
    if kind == "sqlite":
        return f"sqlite:{rest}"
    parts = urlsplit(f"{_SCHEMES[kind]}:{rest}")
    given = dict(parse_qsl(parts.query))
    user = settings.get("connection.user") or settings.get("connection.username") or given.get("user")
    password = settings.get("connection.password") or given.get("password")
    if password is not None and password.startswith("${"):
        differences.append(
            Difference("connection.password", f"is looked up by Connect: set {PASSWORD} in the environment")
        )
        password = f"${{{PASSWORD}}}"
    elif password is not None:
        password = quote(password, safe="")
    host = parts.netloc.rpartition("@")[2] or "localhost"
    login = f"{quote(user, safe='')}{f':{password}' if password is not None else ''}@" if user else ""
    return f"{parts.scheme}://{login}{host}{parts.path}"
