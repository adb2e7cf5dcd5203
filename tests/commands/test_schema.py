"""``ratchet schema``."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from framework.commands.schema import app

TABLES = "tests.kit.shop_tables:tables"


def ratchet_schema(folder: Path, *words: str, topology: str = TABLES) -> Any:
    command, *others = words
    return CliRunner().invoke(
        app, [command, topology, *others, "--set", f"app.db={folder / 'shop.db'}"], catch_exceptions=False
    )


def test_tables_are_compared_and_made_to_fit_only_when_asked(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("CREATE TABLE customers (id integer PRIMARY KEY, name text, note text)")
    shown = ratchet_schema(tmp_path, "show", "customers")
    assert shown.exit_code == 0
    assert [line.split() for line in shown.stdout.splitlines()[1:]] == [
        ["column", "declared", "in", "the", "table"],
        ["id", "INTEGER", "INTEGER"],
        ["name", "TEXT", "TEXT"],
        ["note", "-", "TEXT"],
        ["phone", "TEXT", "-"],
        ["_txid", "INTEGER", "-"],
    ]
    for words in (("diff",), ("apply",)):
        found = ratchet_schema(tmp_path, *words)
        assert found.exit_code == (3 if words == ("diff",) else 0)
        assert 'ALTER TABLE "customers" ADD COLUMN "phone" TEXT;\n' in found.stdout
        assert 'CREATE TABLE "log" ("id" INTEGER, "name" TEXT, "phone" TEXT) STRICT;\n' in found.stdout
    assert "nothing was changed; add --yes" in found.stderr
    assert ratchet_schema(tmp_path, "apply", "--yes").exit_code == 0
    after = ratchet_schema(tmp_path, "diff", "--json")
    assert after.exit_code == 0
    assert [json.loads(line)["statements"] for line in after.stdout.splitlines()] == [[], []]
    names = [each["name"] for each in json.loads(ratchet_schema(tmp_path, "show", "log", "--json").stdout)["columns"]]
    assert names == ["id", "name", "phone"]


def test_a_topology_without_tables_of_rows_is_told(tmp_path: Path) -> None:
    for words in (("show",), ("diff", "counts")):
        told = ratchet_schema(tmp_path, *words, topology="tests.kit.shop_tables:counts")
        assert told.exit_code == 2 and told.stdout == ""
    assert "has no columns of yours" in told.stderr
