"""Records of a real Debezium for a table with every type that it documents for PostgreSQL.

``python -m tests.kit.debezium_types`` makes the files in ``tests/spouts/codecs/data`` again: for
each setting of a connector the records of one table, and what the database says about its rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psycopg

from integration import ConnectWorker, KafkaBroker, PostgresServer
from integration.folder_permissions import open_folder
from tests.kit.debezium import change_source, read_records
from tests.kit.waiting import PATIENCE_S

FOLDER = Path(__file__).parent.parent / "spouts" / "codecs" / "data"

EXTENSIONS = ("hstore", "ltree", "citext")
TYPES = (
    "create type mood as enum ('sad', 'it''s ok', 'happy, really')",
    "create domain pieces as int check (value >= 0)",
)
#: Column -> its type, and its value in the rows of the snapshot: usual, least, most. A fourth row
#: is all nulls.
COLUMNS: dict[str, tuple[str, str, str, str]] = {
    "a_bool": ("boolean", "true", "false", "true"),
    "a_bit": ("bit(1)", "B'1'", "B'0'", "B'1'"),
    "bits": ("bit(13)", "B'1011001110001'", "B'0000000000000'", "B'1111111111111'"),
    "bits_varying": ("bit varying(9)", "B'101'", "B''", "B'111111111'"),
    "small": ("smallint", "7", "-32768", "32767"),
    "whole": ("integer", "-5", "-2147483648", "2147483647"),
    "big": ("bigint", "1234567890123", "-9223372036854775808", "9223372036854775807"),
    "an_oid": ("oid", "24", "0", "4294967295"),
    "single": ("real", "1.5", "-3.4e38", "1.1e-38"),
    "double": ("double precision", "0.1", "-1.7976931348623157e308", "5e-324"),
    "letters": ("char(4)", "'ab'", "''", "'äöü€'"),
    "words": ("varchar(40)", "'grüße 😀'", "''", "E'a\"b\\\\c\\nd\\te'"),
    "prose": ("text", "'text'", "''", "repeat('long ', 50)"),
    "any_case": ("citext", "'Ann'", "''", "'ANN'"),
    "moment_zoned": (
        "timestamptz",
        "'2024-02-29 12:34:56.123456+02'",
        "'1970-01-01 00:00:00Z'",
        "'9999-12-31 23:59:59.999999Z'",
    ),
    "moment": ("timestamp", "'2024-02-29 12:34:56.123456'", "'1583-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'"),
    "moment_0": ("timestamp(0)", "'2024-02-29 12:34:56'", "'1969-12-31 23:59:59'", "'9999-12-31 23:59:59'"),
    "moment_3": ("timestamp(3)", "'2024-02-29 12:34:56.789'", "'1969-12-31 23:59:59.999'", "'2261-01-01 00:00:00.001'"),
    "day": ("date", "'2024-02-29'", "'0001-01-01'", "'9999-12-31'"),
    "clock": ("time", "'12:34:56.123456'", "'00:00:00'", "'23:59:59.999999'"),
    "clock_3": ("time(3)", "'12:34:56.789'", "'00:00:00.001'", "'23:59:59.999'"),
    "clock_zoned": ("timetz", "'12:34:56.123456+02'", "'00:00:00Z'", "'23:59:59.999999Z'"),
    "span": ("interval", "'1 day 02:03:04.5'", "'-3 hours'", "'1 year 2 mons 3 days 04:05:06.789'"),
    "raw": ("bytea", r"'\x00ff10'", r"'\x'", "decode(repeat('a5', 100), 'hex')"),
    "a_json": ("json", """'{"a": [1, 2.50, null]}'""", "'null'", """'"text"'"""),
    "a_jsonb": ("jsonb", """'{"b": {"c": "é"}}'""", "'[]'", "'1e400'"),
    "a_xml": ("xml", "'<a b=\"c\">d</a>'", "'<a/>'", "'<ü/>'"),
    "an_uuid": (
        "uuid",
        "'11111111-2222-3333-4444-555555555555'",
        "'00000000-0000-0000-0000-000000000000'",
        "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
    ),
    "place": ("point", "'(1.5,-2.25)'", "'(0,0)'", "'(1e300,-1e300)'"),
    "path": ("ltree", "'top.science'", "''", "'a.b.c.d'"),
    "address": ("inet", "'192.168.1.7/24'", "'::1'", "'10.0.0.1'"),
    "network": ("cidr", "'192.168.0.0/16'", "'::/0'", "'10.1.0.0/16'"),
    "card": ("macaddr", "'08:00:2b:01:02:03'", "'00:00:00:00:00:00'", "'ff:ff:ff:ff:ff:ff'"),
    "card_8": ("macaddr8", "'08:00:2b:01:02:03:04:05'", "'00:00:00:00:00:00:00:00'", "'ff:ff:ff:ff:ff:ff:ff:ff'"),
    "ints_range": ("int4range", "'[1,5)'", "'empty'", "'(,)'"),
    "bigs_range": ("int8range", "'[1,5)'", "'empty'", "'(,)'"),
    "numbers_range": ("numrange", "'[1.5,2.5]'", "'empty'", "'(,)'"),
    "moments_range": ("tsrange", "'[2024-01-01 00:00,2024-01-02 00:00)'", "'empty'", "'(,)'"),
    "zoned_range": ("tstzrange", "'[2024-01-01 00:00Z,2024-01-02 00:00Z)'", "'empty'", "'(,)'"),
    "days_range": ("daterange", "'[2024-01-01,2024-01-02)'", "'empty'", "'(,)'"),
    "feeling": ("mood", "'sad'", "'it''s ok'", "'happy, really'"),
    "some": ("pieces", "3", "0", "2147483647"),
    "price": ("numeric(12,2)", "12.50", "-9999999999.99", "9999999999.99"),
    "count": ("numeric(30)", "7", "-999999999999999999999999999999", "999999999999999999999999999999"),
    "free": ("numeric", "12.500", "-0.00000000001", "123456789012345678901234.5"),
    "cash": ("money", "12.34", "-9999999999999.99", "9999999999999.99"),  # Debezium reads it as a double
    "pairs": ("hstore", """'a=>1, "b c"=>"d\\"e"'""", "''", "'n=>NULL'"),
    "lexemes": ("tsvector", "'a fat cat'::tsvector", "''", "'x:1A y:2'::tsvector"),
    "ints": ("int[]", "'{1,2,NULL}'", "'{}'", "'{2147483647}'"),
    "texts": ("text[]", """'{a,"b,c",NULL}'""", "'{}'", "'{\"\"}'"),
    "numbers": ("numeric(10,2)[]", "'{1.50,-2.25}'", "'{}'", "'{NULL}'"),
    "moments": ("timestamptz[]", "'{2024-02-29 12:00Z}'", "'{}'", "'{1969-12-31 23:59:59.5Z}'"),
    "days": ("date[]", "'{2024-02-29,1970-01-01}'", "'{}'", "'{NULL}'"),
    "truths": ("boolean[]", "'{t,f}'", "'{}'", "'{NULL}'"),
}
ROWS = 4

#: The settings of connectors, by name. Each is used with and without schemas in the records.
SETTINGS: dict[str, dict[str, str]] = {
    "usual": {},
    "text": {
        "decimal_handling_mode": "string",
        "time_precision_mode": "isostring",
        "binary_handling_mode": "base64",
        "interval_handling_mode": "string",
    },
    "numbers": {
        "decimal_handling_mode": "double",
        "time_precision_mode": "connect",
        "binary_handling_mode": "hex",
        "hstore_handling_mode": "map",
    },
    "finer": {
        "time_precision_mode": "adaptive_time_microseconds",
        "binary_handling_mode": "base64-url-safe",
    },
}


def create(connection: psycopg.Connection[Any], table: str) -> None:
    """Create the table and its rows."""
    for name in EXTENSIONS:
        connection.execute(f"create extension if not exists {name}".encode())
    if not connection.execute("select 1 from pg_type where typname = 'mood'").fetchone():
        for statement in TYPES:
            connection.execute(statement.encode())
    columns = ", ".join(f'"{name}" {declared}' for name, (declared, *_) in COLUMNS.items())
    connection.execute(f"create table {table} (id int primary key, {columns})".encode())
    for row in range(ROWS):
        values = [each[1 + row] if row < ROWS - 1 else "null" for each in COLUMNS.values()]
        connection.execute(f"insert into {table} values ({row + 1}, {', '.join(values)})".encode())


def texts(connection: psycopg.Connection[Any], table: str) -> list[dict[str, str | None]]:
    """The rows, each value as the database writes it."""
    columns = ", ".join(f'"{name}"::text' for name in ("id", *COLUMNS))
    connection.execute("set timezone to 'UTC'")
    found = connection.execute(f"select {columns} from {table} order by id".encode()).fetchall()
    return [dict(zip(("id", *COLUMNS), row, strict=True)) for row in found]


def changes(connection: psycopg.Connection[Any], table: str) -> int:
    """Change rows in every way. Returns how many records that makes."""
    connection.execute(f"update {table} set whole = 6 where id = 1".encode())
    connection.execute(f"update {table} set id = 9 where id = 2".encode())  # delete, tombstone, create
    connection.execute(f"delete from {table} where id = 3".encode())  # delete, tombstone
    connection.execute(f"truncate {table}".encode())
    return 1 + 3 + 2 + 1


def record(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(exist_ok=True)
    with (
        open_folder() as where,
        KafkaBroker(where / "kafka") as broker,
        PostgresServer(
            where / "postgres", settings={"wal_level": "logical", "max_replication_slots": "20"}
        ) as database,
        ConnectWorker(where / "connect", bootstrap_servers=broker.address) as worker,
        psycopg.connect(database.dsn, autocommit=True) as connection,
    ):
        create(connection, "every")
        said = texts(connection, "every")
        (folder / "postgres-rows.json").write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
        connection.execute("create table long (id int primary key, words text, raw bytea, ints int[], other int)")
        connection.execute("alter table long alter words set storage external, alter raw set storage external")
        connection.execute("alter table long alter ints set storage external")
        connection.execute(
            "insert into long select 1, repeat('w', 3000), decode(repeat('aa', 3000), 'hex'),"
            " array(select generate_series(1, 1000)), 1"
        )
        names = []
        for name, settings in SETTINGS.items():
            for schemas in ("plain", "schemas"):
                prefix = f"{name}-{schemas}"
                names.append(prefix)
                config = change_source(
                    database,
                    prefix,
                    schema_include_list="public",
                    provide_transaction_metadata="true",
                    skipped_operations="none",
                    value_converter="org.apache.kafka.connect.json.JsonConverter",
                    value_converter_schemas_enable=str(schemas == "schemas").lower(),
                    **settings,
                )
                worker.put(prefix, config)
        for prefix in names:  # every connector has its snapshot before the first change
            read_records(broker.address, f"{prefix}.public.every", ROWS, PATIENCE_S)
            read_records(broker.address, f"{prefix}.public.long", 1, PATIENCE_S)
        count = ROWS + changes(connection, "every")
        connection.execute("update long set other = 2")
        for prefix in names:
            found = read_records(broker.address, f"{prefix}.public.every", count, PATIENCE_S)
            write(folder / f"postgres-{prefix}-every.jsonl", found)
        for prefix in names[:2]:
            found = read_records(broker.address, f"{prefix}.public.long", 2, PATIENCE_S)
            write(folder / f"postgres-{prefix}-long.jsonl", found)
        found = read_records(broker.address, f"{names[0]}.transaction", 2, PATIENCE_S)
        write(folder / "postgres-transactions.jsonl", found)


def write(file: Path, records: list[tuple[bytes | None, bytes | None]]) -> None:
    lines = [
        json.dumps([None if part is None else part.decode() for part in each], ensure_ascii=False) for each in records
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(name: str) -> list[tuple[bytes | None, bytes | None]]:
    """The recorded keys and values of a file."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [tuple(None if part is None else part.encode() for part in json.loads(line)) for line in lines]  # type: ignore[misc]


if __name__ == "__main__":
    record(FOLDER)
    print(f"{sum(each.stat().st_size for each in FOLDER.iterdir()):,} bytes in {FOLDER}", file=sys.stderr)
