"""``ratchet ingest TOPIC --into URL``: brings a topic into a table, without code.

It generates a pipeline, shows it, and runs it. ``--eject`` writes the pipeline to a file, as a
starting point.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl

import pyarrow as pa
import typer

from framework.commands.exit_status import exit_codes
from framework.commands.options import AsJson, ConfigFile, Overrides
from framework.commands.run import main as run
from framework.config import Config, check_address, is_reference, is_secret, passwords_in, with_password_variable
from framework.errors import ConfigError, TopologyError, escaped
from framework.execution.executor_name import SPARK
from framework.local_paths import held_temporary_folder, new_file
from framework.topology import ReadCounts, TransactionalTopologyBuilder
from framework.transactions.source_preview import first_rows
from ratchet.kafka_connect_translation import PASSWORD, REGISTRY_PASSWORD, Connector, read_connector
from spouts import BytesCodec, OpaqueKafkaTransactionalSpout
from spouts.codecs.json_arrow_schema import schema_of_sample
from spouts.codecs.registry_client import check_urls

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: The number of a topic's first records from which its columns are inferred.
SAMPLE = 1_000
#: Characters that no topic name contains: a name with one is a pattern.
_PATTERN = re.compile(r"[^a-zA-Z0-9._-]")
_FILES = ("parquet", "delta")
_PLACES = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
    "parquet": "parquet",
    "delta": "delta",
}
_TYPES: Mapping[str, pa.DataType] = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "datetime": pa.timestamp("us", "UTC"),
}
#: The keyword that declares a column's type.
_KEYWORDS = {kind: name for name, kind in _TYPES.items()}


class Mode(StrEnum):
    """The mode: how records become rows."""

    APPEND = "append"
    UPSERT = "upsert"
    MIRROR = "mirror"


class Codec(StrEnum):
    """The format of a value's bytes."""

    JSON = "json"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    JSON_SCHEMA = "json-schema"
    TEXT = "text"
    BYTES = "bytes"
    DEBEZIUM = "debezium"


class Job(NamedTuple):
    """The user's options. ``columns``: of JSON values."""

    topic: str
    into: str
    table: str
    mode: Mode
    codec: Codec
    key: Sequence[str] = ()
    key_field: str | None = None
    registry: str | None = None
    subject: str | None = None
    columns: pa.Schema | None = None
    sequence_by: str | None = None
    delete_when: str | None = None
    on_bad_record: str = "fail"
    start: str | None = None
    end: str | None = None
    start_group: str | None = None
    name: str = ""


@app.command()
def main(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="The topic; with --mode mirror, also a pattern.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The file to which --eject writes the pipeline.")
    ] = None,
    *,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="URL",
            help="postgresql://USER@HOST/DB, mysql://USER@HOST/DB, sqlite:PATH, parquet:FOLDER or delta:FOLDER. Give a "
            "password as ${NAME} from the environment.",
        ),
    ] = None,
    from_connector: Annotated[
        Path | None,
        typer.Option(
            "--from-connector",
            metavar="FILE",
            help="Take the options from the configuration of a JDBC, S3 or Iceberg sink of Kafka Connect, and say what differs.",
        ),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            "--mode", help="A row per record (the default); the newest row of each key; or a copy of a database."
        ),
    ] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="A field of the key, or several with commas.")] = None,
    key_field: Annotated[
        str | None,
        typer.Option(
            "--key-from-record",
            metavar="NAME",
            help="The record's key is text: store it in this field, which becomes the table's key.",
        ),
    ] = None,
    table: Annotated[str | None, typer.Option("--table", help="The table; by default named as the topic.")] = None,
    codec: Annotated[Codec | None, typer.Option("--codec", help="The format of values; by default JSON.")] = None,
    registry: Annotated[
        str | None, typer.Option("--registry", metavar="URL", help="The URL of the Schema Registry.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="The schema's subject; by default TOPIC-value.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=TYPE",
            help=f"A field of JSON, instead of the type found in a sample: {', '.join(_TYPES)}. May be repeated.",
        ),
    ] = None,
    sequence_by: Annotated[
        str | None, typer.Option("--sequence-by", help="With upsert: a field that rises with each change of a key.")
    ] = None,
    delete_when: Annotated[
        str | None, typer.Option("--delete-when", help="With upsert: delete the row if this expression is true.")
    ] = None,
    on_bad_record: Annotated[str | None, typer.Option("--on-bad-record", help="fail (the default), or skip.")] = None,
    start: Annotated[
        str | None, typer.Option("--start", help="The start position: earliest, latest or a time.")
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--end", help="The end position: latest, as of the first start; or a time in the past."),
    ] = None,
    start_group: Annotated[
        str | None,
        typer.Option(
            "--start-group", metavar="GROUP", help="Begin at the offsets that this consumer group has committed."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The pipeline's name; by default made from the topic.")
    ] = None,
    eject: Annotated[
        bool, typer.Option("--eject", help="Write the pipeline to FILE, or print it. Do nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run it; without this option, only show it.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up", help="Stop when all records that were in the topic at the start are committed."
        ),
    ] = False,
    executor: Annotated[str, typer.Option("--executor", help="spark, or local, in this process.")] = SPARK,
    as_json: AsJson = False,
) -> None:
    """Bring a topic into a table, exactly once, without code. Shows the pipeline that does it;
    --yes runs it. The columns are those of the registry, or of the first records of the topic."""
    with exit_codes(as_json=as_json):
        connector = None
        if from_connector is not None:
            if eject and file is None and topic is not None and topic.endswith(".py"):
                file, topic = Path(topic), None  # the topic is in the configuration
            connector = read_connector(from_connector, topic)
        if file is not None and not eject:
            raise ConfigError(f"{file}: a file is for --eject")
        settings = Config.load(config, overrides or ())
        job = _job(
            connector,
            topic=topic,
            into=into,
            table=table,
            mode=mode,
            codec=codec,
            key=[each for part in key or ([key_field] if key_field else []) for each in part.split(",") if each]
            or None,
            key_field=key_field,
            registry=registry,
            subject=subject,
            sequence_by=sequence_by,
            delete_when=delete_when,
            on_bad_record=on_bad_record,
            start=start,
            end=end,
            start_group=start_group,
            name=name,
        )
        check(job)
        if connector is not None and yes:
            _check_rows_are_the_same(connector)
        if job.codec is Codec.JSON:
            job = job._replace(columns=_columns(job, field or [], settings))
        elif field:
            raise ConfigError(f"--field is for --codec json: {job.codec.value} says itself which fields there are")
        text = _notes(connector, job) + program(job)
        if eject and file is not None:
            _write(file, text, private="@" in f"{job.into}{job.registry}")
            typer.echo(f"{file} is written: ratchet run {file.stem}:pipeline", err=True)
            return
        typer.echo(text, err=as_json, nl=False)
        if eject:
            return
        if not yes:
            typer.echo("\n--yes runs this pipeline; --eject FILE writes it", err=True)
            return
    _run(job, text, config, overrides, until_caught_up=until_caught_up, executor=executor, as_json=as_json)


def _write(file: Path, text: str, *, private: bool) -> None:
    """``private``: only this user can read the file. Raises ``ConfigError``."""
    try:
        with new_file(file, 0o600 if private else 0o666) as made:
            made.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; give another file") from error


def _job(connector: Connector | None, **given: Any) -> Job:
    """The job that the options describe, and the configuration of a connector where they do not
    say. Raises ``ConfigError``."""
    chosen: dict[str, Any] = {}
    if connector is not None:
        known = connector._asdict()
        chosen = {name: value for name, value in known.items() if name in Job._fields and value not in (None, ())}
        chosen |= {"mode": Mode(connector.mode), "codec": Codec(connector.codec)}
    chosen |= {name: value for name, value in given.items() if value is not None}
    for name, option in (("topic", "TOPIC"), ("into", "--into URL")):
        if name not in chosen:
            raise ConfigError(f"give {option}" + (f", which {name} is not said in the file" if connector else ""))
    topic, mode = chosen["topic"], chosen.setdefault("mode", Mode.APPEND)
    chosen.setdefault("codec", Codec.DEBEZIUM if mode is Mode.MIRROR else Codec.JSON)
    chosen.setdefault("table", re.sub(r"\W+", "_", topic).strip("_"))
    chosen.setdefault("subject", f"{topic}-value")
    chosen.setdefault("name", f"ingest-{re.sub(r'[^A-Za-z0-9_-]+', '-', topic).strip('-')}")
    return Job(**chosen)


def _check_rows_are_the_same(connector: Connector) -> None:
    """Raise ``ConfigError`` where the pipeline would write other rows than the connector."""
    others = [each for each in connector.differences if each.changes_rows]
    if others:
        raise ConfigError(
            f"the rows would differ from those of the connector: {others[0]}"
            + (f", and {len(others) - 1} more" if len(others) > 1 else "")
            + "; write the pipeline with --eject FILE, change it where needed, and run it with ratchet run"
        )


def _notes(connector: Connector | None, job: Job) -> str:
    """What differs from a connector, as comments above the pipeline."""
    if connector is None:
        return ""
    lines = [f"# Differs from the connector: {each}" for each in connector.differences]
    if job.start_group is None:
        lines.append(f"# To go on where the connector has stopped: start_group={connector.group!r}")
    return "".join(f"{escaped(each)}\n" for each in lines)


def check(job: Job) -> None:
    """Raise ``ConfigError`` for options that contradict each other."""
    scheme = job.into.partition(":")[0]
    place = _PLACES.get(scheme)
    if place is None:
        known = "postgresql://..., mysql://..., sqlite:PATH, parquet:FOLDER, delta:FOLDER"
        raise ConfigError(f"--into {scheme + ':... ' if scheme.isalnum() else ''}is unknown: write one of {known}")
    if place in _FILES:
        _check_folder(job.into)
    elif place != "sqlite":
        check_address("--into", job.into, "/" if place == "postgres" else "/?#")
        _check_query(job.into)
    if job.registry is not None:
        check_urls("--registry", job.registry)
    if len(set(passwords_in(job.registry or ""))) > 1:
        raise ConfigError(
            "--registry: the addresses have several passwords: write each as ${NAME} from the environment"
        )
    if place in _FILES and job.mode is not Mode.APPEND:
        raise ConfigError(f"--mode {job.mode.value} changes rows, and {place} takes new ones only: use a database")
    if (job.codec is Codec.DEBEZIUM) != (job.mode is Mode.MIRROR):
        raise ConfigError("--codec debezium and --mode mirror go together: use both or neither")
    if job.mode is Mode.UPSERT and not job.key:
        raise ConfigError("--mode upsert needs --key, the field of which each value has one row")
    if job.mode is Mode.UPSERT and job.key_field is not None and job.sequence_by is not None:
        raise ConfigError(
            f"--sequence-by {job.sequence_by} with --key-from-record: a tombstone deletes the row of its key, and has no "
            f"{job.sequence_by!r} to compare: leave --sequence-by out, and the record that comes later is newer; or leave "
            "--key-from-record out"
        )
    if job.mode is not Mode.UPSERT:
        for option, given in (
            ("--key", job.key),
            ("--sequence-by", job.sequence_by),
            ("--delete-when", job.delete_when),
        ):
            if given and not (option == "--key" and job.key_field):
                raise ConfigError(f"{option} is for --mode upsert")
    if _PATTERN.search(job.topic) and job.mode is not Mode.MIRROR:
        raise ConfigError(f"{job.topic!r} is no name of a topic; only --mode mirror takes a pattern")
    if job.codec in (Codec.AVRO, Codec.PROTOBUF, Codec.JSON_SCHEMA) and job.registry is None:
        raise ConfigError(f"--codec {job.codec.value} needs --registry, the address of the Schema Registry")
    if job.on_bad_record not in ("fail", "skip"):
        raise ConfigError(
            f"--on-bad-record {job.on_bad_record}: give fail or skip; --eject shows where dead letters are named"
        )


def _check_folder(address: str) -> None:
    """Raise ``ConfigError`` for a password in the address of a folder, because the clients of
    object stores take their keys from elsewhere."""
    if re.search(r"://[^/@]*:.*@", address):
        raise ConfigError("--into: a folder takes no password: give it to the object store's client in the environment")
    _check_query(address)


def _check_query(address: str) -> None:
    """Raise ``ConfigError`` for a password among the options of an address."""
    for name, value in parse_qsl(address.partition("?")[2], keep_blank_values=True):
        if is_secret(name) and not is_reference(value):
            raise ConfigError(f"--into: write the value of {name!r} as ${{NAME}} from the environment")


def program(job: Job) -> str:
    """The pipeline as Python."""
    imports = {"Pipeline", _PLACES[job.into.partition(":")[0]]}
    others: list[str] = []
    place = _place(job, imports)
    lines = [f"pipeline = Pipeline({job.name!r})"]
    if job.mode is Mode.MIRROR:
        topics = f"pattern={job.topic!r}" if _PATTERN.search(job.topic) else repr(job.topic)
        options = [topics, f"into={place}", *_options(job)]
        lines.append(_call("pipeline.mirror", options))
    else:
        value = _value(job, imports, others)
        options = [repr(job.topic), f"value={value}"]
        if job.key_field is not None:
            imports.add("Text")
            options.append(f"key=Text({job.key_field!r})")
            if job.mode is Mode.UPSERT:
                options.append('metadata=["tombstone"]')
        lines.append(_call("rows = pipeline.read_kafka", [*options, *_options(job)]))
        if job.mode is Mode.APPEND:
            lines.append(f'rows.append_into({place}, name="rows")')
        else:
            latest = [*map(repr, job.key)]
            latest += [f"sequence_by={job.sequence_by!r}"] if job.sequence_by is not None else []
            latest += [f"delete_when={job.delete_when!r}"] if job.delete_when is not None else []
            lines.append(f'rows.latest_by({", ".join(latest)}).upsert_into({place}, name="rows")')
    head = [*others, *([""] if others else []), f"from ratchet import {', '.join(sorted(imports, key=str.casefold))}"]
    return "\n".join([*head, "", *lines, ""])


def _options(job: Job) -> list[str]:
    bounds = {"start": job.start, "end": job.end, "start_group": job.start_group}
    found = [f"{name}={value!r}" for name, value in bounds.items() if value is not None]
    return [*found, *([f"on_bad_record={job.on_bad_record!r}"] if job.on_bad_record != "fail" else [])]


def _call(function: str, arguments: Sequence[str]) -> str:
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= 100:
        return line
    return "\n".join([f"{function}(", *(f"    {each}," for each in arguments), ")"])


def _place(job: Job, imports: set[str]) -> str:
    scheme, _, rest = job.into.partition(":")
    place = _PLACES[scheme]
    if place in _FILES:
        return f"{place}({rest!r})"
    address = re.sub(r"^//(?=/)", "", rest) if place == "sqlite" else with_password_variable(job.into, PASSWORD)
    if place == "mysql":
        address = re.sub(r"^mariadb:", "mysql:", address)
    return f"{place}({address!r})" if job.mode is Mode.MIRROR else f"{place}({address!r}, {job.table!r})"


def _value(job: Job, imports: set[str], others: list[str]) -> str:
    if job.codec in (Codec.TEXT, Codec.BYTES):
        kind = "Text" if job.codec is Codec.TEXT else "Bytes"
        imports.add(kind)
        return f'{kind}("value")'
    if job.codec is not Codec.JSON or job.columns is None:
        kind = {Codec.AVRO: "RegistryAvro", Codec.PROTOBUF: "RegistryProtobuf"}.get(job.codec, "RegistryJson")
        imports.add(kind)
        return f"{kind}({job.subject!r}, {with_password_variable(job.registry or '', REGISTRY_PASSWORD)!r})"
    imports.add("Json")
    if all(_is_argument(each.name) and each.type in _KEYWORDS for each in job.columns):
        names = {each.name: _KEYWORDS[each.type] for each in job.columns}
        times = sorted({"date", "datetime"}.intersection(names.values()))
        others += [f"from datetime import {', '.join(times)}"] if times else []
        return f"Json({', '.join(f'{name}={kind}' for name, kind in names.items())})"
    others.append("import pyarrow as pa")
    columns = "".join(f"\n            ({each.name!r}, {_code(each.type)})," for each in job.columns)
    return f"Json(\n        pa.schema([{columns}\n        ])\n    )"


def _is_argument(name: str) -> bool:
    """Whether Python passes a keyword argument of this name on unchanged: it refuses keywords of
    the language, and normalizes letters that are not ASCII."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _code(kind: pa.DataType) -> str:
    """A type as Python."""
    types = pa.types
    if types.is_list(kind):
        return f"pa.list_({_code(kind.value_type)})"
    if types.is_struct(kind):
        parts = ", ".join(f"({each.name!r}, {_code(each.type)})" for each in kind)
        return f"pa.struct([{parts}])"
    if types.is_timestamp(kind):
        return f"pa.timestamp({kind.unit!r}{f', {kind.tz!r}' if kind.tz is not None else ''})"
    plain = {"double": "float64", "bool": "bool_", "date32[day]": "date32"}
    return f"pa.{plain.get(str(kind), str(kind))}()"


def _columns(job: Job, given: Sequence[str], settings: Config) -> pa.Schema:
    """The fields of a JSON topic: those of its first records, and the given ones."""
    declared: dict[str, pa.DataType] = {}
    for each in given:
        name, _, kind = each.partition("=")
        if kind not in _TYPES:
            raise ConfigError(f"--field {each}: write NAME=TYPE, with one of {', '.join(_TYPES)}")
        declared[name] = _TYPES[kind]
    values = _sampled(job, settings)
    if not values and not declared:
        raise ConfigError(
            f"topic {job.topic!r} has no record that would tell its columns: give --field NAME=TYPE for each of them"
        )
    columns = {**_inferred(job.topic, values, declared), **declared}
    if job.key_field is not None:
        columns.pop(job.key_field, None)  # it comes from the record's key
    missing = [name for name in job.key if name not in columns and name != job.key_field]
    if missing:
        raise ConfigError(f"--key {missing[0]}: the records have no such field; they have {', '.join(columns)}")
    return pa.schema(list(columns.items()))


def _inferred(topic: str, values: Sequence[bytes], declared: Collection[str]) -> dict[str, pa.DataType]:
    """The fields of the values that are not declared."""
    others = []
    for each in values:
        try:
            read = json.loads(each)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise ConfigError(f"topic {topic!r} has a value that is no JSON object: give another --codec")
        if rest := {name: value for name, value in read.items() if name not in declared}:
            others.append(json.dumps(rest).encode())
    try:
        return {each.name: each.type for each in schema_of_sample(others)} if others else {}
    except TopologyError as error:
        raise ConfigError(f"topic {topic!r}: {error}; give --field NAME=TYPE for it") from None


def _sampled(job: Job, settings: Config) -> list[bytes]:
    spout = OpaqueKafkaTransactionalSpout([job.topic], codec=BytesCodec("value"), start="earliest")
    builder = TransactionalTopologyBuilder(job.name, "kafka", spout)
    counts = ReadCounts()
    values: list[bytes] = []
    for _, _, rows in first_rows(builder.build(), settings.for_components(), SAMPLE, counts):
        values += [each for each in rows.column("value").to_pylist() if each is not None]
    return values[:SAMPLE]


def _run(job: Job, text: str, config: Path | None, overrides: list[str] | None, **options: Any) -> None:
    """Run the pipeline as ``ratchet run`` runs a user's module."""
    for variable, address in ((PASSWORD, job.into), (REGISTRY_PASSWORD, job.registry)):
        for password in passwords_in(address or ""):
            os.environ[variable] = password
    with held_temporary_folder("ratchet-ingest-") as folder:
        module = "ratchet_" + re.sub(r"\W+", "_", job.name)
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, str(folder))
        run(f"{module}:pipeline", config=config, overrides=overrides, **options)
