"""``ratchet state`` shows, saves and restores state; with real ZooKeeper and Redis."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from framework import Config, CoreTopology, Fields, TopologyBuilder, Tuple, submit
from framework.commands.state import SNAPSHOT_FORMAT
from framework.coordination import store_of
from framework.core.committed_state_reader import TopologyState
from framework.state import MsgpackSerializer
from integration import EmbeddedServers, RedisServer
from tests.kit.command import call
from tests.kit.processes import ROOT
from tests.kit.state_parts import Count, Log, counting, journal, lmdb, redis_pool
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

WORDS = ["the", "cow", "jumped", "over", "the", "moon"]


def topology(app: Mapping[str, Any]) -> CoreTopology:
    """The topology, for the command line."""
    return counting(app["app.id"], Log(app["app.id"], [WORDS]), counters=int(app.get("app.counters", 2)))


@pytest.fixture(params=["redis", "lmdb"])
def settings(
    request: pytest.FixtureRequest, servers: EmbeddedServers, redis_server: RedisServer, tmp_path: Path
) -> dict[str, Any]:
    common = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "transactional.zookeeper.election.timeout.secs": PATIENCE_S,
        "topology.state.checkpoint.interval.ms": 50,
    }
    if request.param == "lmdb":
        return {
            **common,
            "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
            "topology.state.provider.config.path": str(tmp_path / "state"),
        }
    pool = {
        f"topology.state.provider.config.jedisPoolConfig.{key}": value
        for key, value in redis_pool(redis_server).items()
    }
    return {**common, **pool, "topology.state.provider": "framework.state.RedisKeyValueStateProvider"}


def command(*arguments: str, settings: Mapping[str, Any], key: str, status: int = 0) -> tuple[str, str]:
    overrides = []
    for each, value in settings.items():
        overrides += ["--set", f"{each}={str(value).lower() if isinstance(value, bool) else value}"]
    name, *rest = arguments
    done = call("ratchet", "state", f"{__name__}:topology", name, *rest, *overrides, "--set", f"app.id={key}")
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def run(key: str, words: list[list[str]], settings: Mapping[str, Any], *, counters: int = 2) -> None:
    with submit(counting(key, Log(key, words), counters=counters), settings, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)


def held(key: str, settings: Mapping[str, Any]) -> Counter[str]:
    config = Config.of(settings)
    store = store_of(config)
    try:
        with TopologyState(counting(key, Log(key, [])), config, store) as state:
            return Counter(dict(state.items("count")))
    finally:
        store.close()


@pytest.mark.quick_for("redis")
@pytest.mark.behaviour("5.2")
def test_state_is_shown_saved_compared_and_restored(settings: dict[str, Any], tmp_path: Path) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    _, said = command("scan", settings=settings, key=key, status=2)
    assert said == f"error: topology '{key}' has not committed a checkpoint yet\n"
    run(key, [WORDS], settings)
    assert command("get", "the", settings=settings, key=key)[0] == "2\n"
    swapped = [sys.executable, "-m", "ratchet", "state", "get", f"{__name__}:topology", "the"]
    overrides = [part for each, value in {**settings, "app.id": key}.items() for part in ("--set", f"{each}={value}")]
    assert subprocess.run([*swapped, *overrides], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "2\n"
    assert "there is no key sun" in command("get", "sun", settings=settings, key=key, status=1)[1]
    shown, said = command("scan", settings=settings, key=key)
    assert Counter({word: count for _, word, count in map(json.loads, shown.splitlines())}) == Counter(WORDS)
    assert said.startswith("checkpoint ")
    assert len(command("scan", "--limit", "2", settings=settings, key=key)[0].splitlines()) == 2
    exported = tmp_path / "state.jsonl"
    command("export", str(exported), settings=settings, key=key)
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert {"component": "count", "key": "cow", "value": 1} in lines
    saved = tmp_path / "state.snapshot.gz"
    assert "5 keys" in command("snapshot", str(saved), settings=settings, key=key)[0]
    assert command("diff", str(saved), settings=settings, key=key)[0] == ""
    more = [[*WORDS, "the", "sun"]]
    run(key, more, settings)
    changed = command("diff", str(saved), settings=settings, key=key, status=1)[0].splitlines()
    assert sorted(map(json.loads, changed), key=str) == [["count", "sun", None, 1], ["count", "the", 2, 3]]
    # Restore the snapshot, with another number of tasks; the log is read again from its positions.
    command("restore", str(saved), "--set", "app.counters=3", settings=settings, key=key)
    assert held(key, settings) == Counter(WORDS)
    journal(key).emitted.clear()
    run(key, [[*more[0], "again"]], settings, counters=3)
    assert len(journal(key).emitted) == 3
    assert held(key, settings) == Counter([*more[0], "again"])


@dataclass(frozen=True)
class Tally:
    """A value of a custom class."""

    count: int


class Tallies(Count):
    """Keeps counts as numbers or as ``Tally`` objects."""

    kind: Any = int

    def execute(self, tup: Tuple) -> None:
        kept = self.counts.get(tup["word"])
        count = 1 + (kept.count if isinstance(kept, Tally) else kept or 0)
        self.counts.put(tup["word"], self.kind(count))
        self.collector.ack(tup)


def tallying(app: Mapping[str, Any]) -> CoreTopology:
    """For the command line: bolts whose values expire, are of a class, or both."""
    made = Tallies(app["app.id"])
    made.kind = Tally if app["app.class"] else int
    made.state_ttl_s = 3600.0 if app["app.ttl"] else None
    builder = TopologyBuilder(app["app.id"])
    builder.set_spout("words", Log(app["app.id"], [WORDS]))
    builder.set_bolt("count", made, int(app.get("app.counters", 2))).fields_grouping("words", Fields("word"))
    return builder.build()


@pytest.mark.parametrize(("class_", "ttl"), [(False, True), (True, False), (True, True)])
def test_values_that_expire_and_values_of_a_class_are_saved_and_restored(
    servers: EmbeddedServers, tmp_path: Path, class_: bool, ttl: bool
) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    app = {"app.id": key, "app.class": class_, "app.ttl": ttl}
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.state.checkpoint.interval.ms": 50,
        "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
        "topology.state.provider.config.path": str(tmp_path / "state"),
        **({"topology.state.provider.config.valueClass": f"{__name__}.Tally"} if class_ else {}),
        **app,
    }

    def command(*words: str, status: int = 0) -> str:
        overrides = [part for each, value in settings.items() for part in ("--set", f"{each}={json.dumps(value)}")]
        done = call("ratchet", "state", f"{__name__}:tallying", *words, *overrides)
        assert done.returncode == status, done.stderr
        return done.stdout

    saved, again = tmp_path / "saved", tmp_path / "again"
    with submit(tallying(app), settings, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)
    command("snapshot", str(saved))
    before = command("scan")
    command("forget")
    command("restore", str(saved), "--set", "app.counters=3")
    assert sorted(command("scan").splitlines()) == sorted(before.splitlines())
    command("snapshot", str(again))
    lines = [sorted(json.loads(line)[:4] for line in file.read_text().splitlines()[1:-1]) for file in (saved, again)]
    assert {each[3] is not None for each in lines[0]} == {ttl}
    assert lines[0] == lines[1]  # the times at which values were put are restored; the tasks differ
    assert command("diff", str(saved), str(again)) == ""
    with submit(tallying({**app, "app.counters": 3}), settings, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)  # it goes on
    assert sorted(command("scan").splitlines()) == sorted(before.splitlines())


def saved_by_hand(file: Path, entries: list[tuple[Any, Any]]) -> Path:
    """Write a snapshot of one bolt's state."""
    dumps = MsgpackSerializer().dumps
    lines = [["count", *(base64.b64encode(dumps(part)).decode() for part in entry), None, 0] for entry in entries]
    header: list[Any] = [{"format": SNAPSHOT_FORMAT, "topology": "any", "record": {}}]
    file.write_text("\n".join(json.dumps(line) for line in [*header, *lines, {"keys": len(lines)}]) + "\n")
    return file


def test_diff_compares_stored_values_and_not_python_equality(tmp_path: Path) -> None:
    nan = float("nan")
    before = saved_by_hand(
        tmp_path / "a", [(1, "one"), (True, "true"), ([1, 2], "list"), ("nan", nan), ("map", {1: 2, 3: 4})]
    )
    after = saved_by_hand(
        tmp_path / "b",
        [(1, "one"), (True, "false"), ([1, 2], "list"), ("nan", nan), ("map", {3: 4, 1: 2}), ("new", None)],
    )
    done = call("ratchet", "state", f"{__name__}:topology", "diff", str(before), str(after))
    assert done.returncode == 1, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["count", True, "true", "false"],
        ["count", "new", None, None],
    ]


def of_a_bolt(app: Mapping[str, Any]) -> CoreTopology:
    """For the command line: a topology whose bolt is named by ``app.bolt``."""
    builder = TopologyBuilder(app["app.id"])
    builder.set_spout("words", Log(app["app.id"], [WORDS]))
    builder.set_bolt(app["app.bolt"], Count(app["app.id"])).fields_grouping("words", Fields("word"))
    return builder.build()


def test_a_snapshot_that_would_lack_the_state_of_a_bolt_is_refused(servers: EmbeddedServers, tmp_path: Path) -> None:
    """The topology on the command line no longer has that bolt, or has it under another name."""
    settings = {
        "transactional.zookeeper.servers": servers.zookeeper,
        **lmdb(tmp_path / "state"),
        "app.id": f"t{uuid.uuid4().hex[:8]}",
        "app.bolt": "count",
    }
    with submit(of_a_bolt(settings), settings, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)
    settings["app.bolt"] = "tally"
    overrides = [part for each, value in settings.items() for part in ("--set", f"{each}={value}")]
    saved = tmp_path / "saved"
    done = call("ratchet", "state", f"{__name__}:of_a_bolt", "snapshot", str(saved), *overrides)
    assert done.returncode == 2 and "has state of count" in done.stderr, done
    assert not saved.exists()


def test_a_topology_whose_state_is_forgotten_begins_anew(settings: dict[str, Any]) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    assert "no checkpoint to forget" in command("forget", settings=settings, key=key)[0]
    run(key, [WORDS], settings)
    assert "is forgotten" in command("forget", settings=settings, key=key)[0]
    assert "has not committed" in command("scan", settings=settings, key=key, status=2)[1]
    journal(key).emitted.clear()
    run(key, [WORDS], settings)
    assert len(journal(key).emitted) == len(WORDS)
    assert held(key, settings) == Counter(WORDS)


def test_a_file_that_is_no_snapshot_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    run(key, [WORDS], settings)
    saved = tmp_path / "state.snapshot"
    command("snapshot", str(saved), settings=settings, key=key)
    whole = saved.read_text().splitlines()
    assert (
        f"{tmp_path}/nothing: no such snapshot"
        in command("restore", f"{tmp_path}/nothing", settings=settings, key=key, status=2)[1]
    )
    saved.write_text("\n".join(whole[:-2]))
    assert "breaks off after 4 keys" in command("restore", str(saved), settings=settings, key=key, status=1)[1]
    saved.write_text("{}\n")
    assert "is not a snapshot" in command("restore", str(saved), settings=settings, key=key, status=2)[1]
    saved.write_text(whole[0].replace(key, "other", 1) + "\n")
    assert "is of topology 'other'" in command("restore", str(saved), settings=settings, key=key, status=2)[1]
    assert held(key, settings) == Counter(WORDS)  # no refused restore has changed anything


@pytest.mark.parametrize("exact", [True, False])
def test_a_restore_says_when_the_snapshot_has_no_positions(
    settings: dict[str, Any], tmp_path: Path, exact: bool
) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    settings["topology.state.exactly.once"] = exact
    run(key, [WORDS], settings)
    saved = tmp_path / "state.snapshot"
    command("snapshot", str(saved), settings=settings, key=key)
    said = command("restore", str(saved), settings=settings, key=key)[1]
    assert ("has no positions" in said) != exact


def test_a_topology_that_runs_is_not_restored(settings: dict[str, Any], tmp_path: Path) -> None:
    key = f"t{uuid.uuid4().hex[:8]}"
    run(key, [WORDS], settings)
    saved = tmp_path / "state.snapshot"
    command("snapshot", str(saved), settings=settings, key=key)
    with submit(counting(key, Log(key, [WORDS])), settings, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)
        settings["transactional.zookeeper.election.timeout.secs"] = 0.5
        assert "a driver runs topology" in command("restore", str(saved), settings=settings, key=key, status=2)[1]
        if "Redis" in settings["topology.state.provider"]:
            assert command("get", "cow", settings=settings, key=key)[0] == "1\n"  # but its state can be read
