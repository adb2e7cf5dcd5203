"""A URL is not a path: it is refused wherever a path is taken, and no folder is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from framework import Config, Fields
from framework.errors import ConfigError, RatchetError
from framework.execution.spark import spark_context
from framework.local_paths import local_path, replaceable_by_others
from framework.observe.history_plot import picture
from framework.state import lmdb as lmdb_state
from framework.state.lmdb import LmdbKeyValueStateProvider
from framework.testing.simulation.sample_records import read_sample
from integration import EmbeddedServers
from integration.detached_servers import up
from sinks import DeltaLakeTable, ParquetTable, SqliteBackend
from sinks.compact import app as compact
from sinks.transaction_history_table import history_table
from spouts import AvroCodec
from spouts.codecs.avro_schema import loaded
from spouts.codecs.json_arrow_schema import schema_of_json_schema
from tests.kit.other_users import made_by


def lmdb(path: str) -> None:
    conf = {
        "topology.state.provider": "framework.state.lmdb:LmdbKeyValueStateProvider",
        "topology.state.provider.config": {"path": path},
    }
    LmdbKeyValueStateProvider().check_before_start(Config.of(conf).for_components())


def drawn(path: str) -> None:
    with picture(Path(path), "title"):
        pass


TAKERS: dict[str, Callable[[str], object]] = {
    "parquet": ParquetTable,
    "parquet by a path": lambda path: ParquetTable(Path(path)),
    "delta": DeltaLakeTable,
    "sqlite": lambda path: SqliteBackend(path, "words"),
    "lmdb": lmdb,
    "history": lambda path: history_table(f"sqlite:{path}", "topology"),
    "configuration": Config.load,
    "avro schema": lambda path: loaded(Path(path)),
    "avro schema by its ending": lambda path: AvroCodec(schema=f"{path}.avsc"),
    "json schema": schema_of_json_schema,
    "compaction": lambda path: compact([path], standalone_mode=False),
    "sample": lambda path: read_sample(None, Path(path)),  # type: ignore[arg-type]
    "plot": drawn,
    "servers": lambda path: EmbeddedServers(Path(path)),
    "servers in the background": lambda path: up(Path(path)),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://bucket/x", "hdfs://name:8020/x", "abfss://a@b.net/x", "file:///x"]
)
def test_a_url_is_refused_where_a_path_is_taken(
    taker: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scheme = url.split(":")[0]
    wanted = f"{scheme}:// is not a local path"
    try:
        TAKERS[taker](url)
    except SystemExit:
        assert wanted in capsys.readouterr().err
    except RatchetError as refused:
        assert isinstance(refused, ConfigError)
        assert wanted in str(refused)
    else:
        pytest.fail("it was taken")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("path", ["~/x", "~"])
def test_the_home_folder_of_a_shell_is_refused_where_a_path_is_taken(
    taker: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if taker in ("history", "avro schema by its ending"):
        path = "~/x"  # what stands around the path is a part of it
    monkeypatch.chdir(tmp_path)
    try:
        TAKERS[taker](path)
    except SystemExit:
        assert "give the whole path" in capsys.readouterr().err
    except ConfigError as refused:
        assert "give the whole path" in str(refused)
    else:
        pytest.fail("it was taken")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["a%20b", "[a]", "a|b", "a^b", "a\\b"])
def test_a_path_that_delta_lake_would_take_for_another_is_refused(tmp_path: Path, part: str) -> None:
    table = DeltaLakeTable(tmp_path / part / "x")
    table.bind(Fields(n=int))
    for refused in (table.check, table.prepare):
        with pytest.raises(ConfigError, match="Delta's client takes it for another path"):
            refused("topology")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/data/a:b/c", "a:b", "./s3:/x", "/s3:/x", "C", "10:/x", "data//x"])
def test_a_path_with_a_colon_is_a_path(path: str) -> None:
    assert local_path(path, "table") == Path(path)


def test_a_table_in_a_folder_with_a_colon_is_made(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "s3:" / "x")
    table.bind(Fields(n=int))
    table.prepare("topology")
    assert table.to_table().num_rows == 0


def test_a_folder_of_another_user_is_found_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by(12_345, tmp_path / "theirs", monkeypatch)
    found = replaceable_by_others(tmp_path / "theirs" / "a" / "b")
    assert found is not None and found in (tmp_path / "theirs", *tmp_path.parents, tmp_path)


def test_a_folder_that_everybody_may_write_is_found_unless_it_is_sticky(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "own").mkdir(parents=True)
    for mode, expected in ((0o777, open_to_all), (0o1777, None), (0o775, None), (0o700, None)):
        open_to_all.chmod(mode)
        assert replaceable_by_others(open_to_all / "own") == expected


def test_the_way_behind_a_link_counts_too(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "own").mkdir(parents=True)
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(open_to_all / "own")
    assert replaceable_by_others(tmp_path / "link") == open_to_all


def test_temporary_files_and_states_where_others_may_replace_them_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for log in (spark_context._log, lmdb_state._log):
        monkeypatch.setattr(log, "warning", lambda event, **fields: said.append(f"{event} {fields['advice']}"))
    for mode, warned in ((0o1777, 0), (0o777, 1)):
        folder = tmp_path / f"mode-{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        spark_context._private_folder(str(folder))
        LmdbKeyValueStateProvider().check_before_start(
            {"topology.state.provider.config": {"path": str(folder / "state")}}
        )
        assert [each.split()[0] for each in said] == ["spark.folder_of_others", "state.folder_of_others"] * warned
        assert all(f"another user may replace what is in {folder}" in each for each in said)
