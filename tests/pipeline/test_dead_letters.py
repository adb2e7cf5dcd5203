"""``ratchet dead-letters``: what was taken out is listed, shown, replayed and dropped, exactly once
(C20, C48)."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from integration import EmbeddedServers
from tests.kit.mended import Commands, settings_of
from tests.kit.oracle import read_topics
from tests.kit.processes import ROOT, RunProcess
from tests.kit.topics import Topics

pytestmark = pytest.mark.integration

AT_MS = 1_700_000_000_000


@pytest.fixture
def store(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of a store and its address, by the parameter: "sqlite", "postgres", "mysql" or
    "redis"."""
    kind = getattr(request, "param", "sqlite")
    if kind == "sqlite":
        return kind, str(request.getfixturevalue("tmp_path") / "x.db")
    if kind == "redis":
        return kind, request.getfixturevalue("redis_server").url
    return kind, request.getfixturevalue({"postgres": "postgres", "mysql": "mariadb"}[kind]).dsn


#: Where letters can be, and the tables of the topology.
KEEPERS = [
    ("table", "sqlite"),
    ("topic", "sqlite"),
    ("table", "postgres"),
    pytest.param("table", "mysql", marks=pytest.mark.slow),
    ("table", "redis"),
]


@pytest.mark.quick_for("table-sqlite")
@pytest.mark.parametrize(("keeper", "store"), KEEPERS, indirect=["store"])
def test_dead_letters_are_counted_and_shown(
    servers: EmbeddedServers, topics: Topics, name: str, keeper: str, store: tuple[str, str]
) -> None:
    topics.create(name)
    producer = topics.producer()
    for number, value in enumerate([b"a", b"bad\x1b[2J", b"\xff\xfe", b"bad\x1b[2J", b"a", b"\xff"]):
        headers = [("trace", b"t\x07"), ("none", None), ("error", b"mine")]
        producer.produce(name, value, key=b"k", headers=headers, timestamp=AT_MS + number * 1_000)
    producer.arrived()
    letters = keeper if keeper == "table" else topics.create(f"{name}-dead", 2)
    commands = Commands(settings_of(servers, name, "opaque", letters, store))
    commands.run()

    *groups, total = commands.documents("list")
    assert total == {"type": "dead_letters", "letters": 4}
    shown = {(each["component"], each["reason"]): each for each in groups}
    refused, undecoded = shown["picky", "'bad\\x1b[2J' is refused"], shown["spout", "invalid UTF-8 at byte 0"]
    assert (refused["letters"], refused["topic"], refused["partition"], refused["attempts"]) == (2, name, 0, 0)
    assert (undecoded["oldest_ms"], undecoded["newest_ms"]) == (AT_MS + 2_000, AT_MS + 5_000)
    assert (undecoded["first_offset"], undecoded["last_offset"]) == (2, 5)

    def count(*options: str) -> Any:
        return commands.documents("list", *options)[-1]["letters"]

    assert count("--component", "picky") == count("--reason", "IS REFUSED") == 2
    assert count("--topic", "another") == count("--since", "1h") == 0
    assert count("--since", "2023-11-14T22:13:24", "--component", "spout") == 1

    (found,) = commands.documents("show", f"{name}/0/2")
    assert (found["topic"], found["partition"], found["offset"]) == (name, 0, 2)
    assert (found["timestamp_ms"], found["component"], found["attempts"]) == (AT_MS + 2_000, "spout", 0)
    assert (found["key"], found["value"]) == ("k", None)
    assert base64.b64decode(found["value_base64"]) == b"\xff\xfe"
    assert [(each["name"], each["value"]) for each in found["headers"]] == [
        ("trace", "t\x07"),
        ("none", None),
        ("error", "mine"),
    ]
    people = commands.ask("show", f"{name}/0/1")
    assert people.returncode == 0 and not {"\x1b", "\x07"} & {*people.stdout}
    assert "value: b'bad\\x1b[2J'" in people.stdout and "header error: b'mine'" in people.stdout
    listed = commands.ask("list").stdout
    assert "4 dead letters" in listed and "is refused, offset 1 to 3" in listed
    missing = commands.ask("show", f"{name}/0/0")
    assert missing.returncode == 2 and "is no dead letter" in missing.stderr
    assert commands.ask("show", "orders").returncode == 2
    assert commands.ask("list", "--since", "soon").returncode == 2


def places(commands: Commands) -> dict[int, int]:
    """Offset -> attempts, of the letters of the first 8 records."""
    answer = commands.ask("show", *(f"{commands.settings['app.topic']}/0/{n}" for n in range(8)), "--json")
    letters = [document for line in answer.stdout.splitlines() if (document := json.loads(line))["type"] != "error"]
    return {each["offset"]: each["attempts"] for each in letters}


def check_verified(commands: Commands) -> None:
    verified = commands.ask(what="verify")
    if commands.settings["app.letters"] == "table":
        assert verified.returncode == 0, verified.stdout + verified.stderr
    else:  # a topic is not recomputed, so nobody knows which letters there were
        assert verified.returncode == 1 and "has replayed or dropped dead letters" in verified.stderr


def check_kept_together(topics: Topics, letters: str) -> None:
    """All records of a letter are in one partition: retention then removes its end last."""
    records: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def note(message: Any) -> None:
        headers = dict(message.headers())
        records.setdefault(headers["ratchet.offset"], []).append((message.partition(), headers.get("ratchet.settled")))

    read_topics(topics.bootstrap_servers, [letters], note)
    assert all(len({partition for partition, _ in its}) == 1 for its in records.values())
    assert {offset: its[-1][1] for offset, its in records.items()} == {
        b"1": b"replayed", b"2": b"replayed", b"3": b"dropped", b"4": b"replayed",
    }  # fmt: skip
    assert len(records[b"3"]) == 5


@pytest.mark.slow
@pytest.mark.rule("C48")
@pytest.mark.parametrize(
    ("keeper", "kind", "store"),
    [
        ("table", "opaque", "sqlite"),
        pytest.param("table", "transactional", "sqlite", marks=pytest.mark.slow),
        ("topic", "transactional", "sqlite"),
        pytest.param("topic", "opaque", "sqlite", marks=pytest.mark.slow),
        *(
            pytest.param(
                "table", kind, store, marks=() if (store, kind) == ("postgres", "opaque") else pytest.mark.slow
            )
            for store in ("postgres", "mysql", "redis")
            for kind in ("opaque", "transactional")
        ),
    ],
    indirect=["store"],
)
def test_letters_are_replayed_once_and_those_that_come_back_keep_their_coordinates(
    servers: EmbeddedServers, topics: Topics, name: str, keeper: str, kind: str, store: tuple[str, str]
) -> None:
    topics.create(name)
    topics.send(name, [b"a", b"bad-1", b"\xff", b"never", b"bad-1", b"a"])
    letters = keeper if keeper == "table" else topics.create(f"{name}-dead", 2)
    commands = Commands(settings_of(servers, name, kind, letters, store))
    commands.run()
    local = ("--executor", "local")
    before = commands.documents("show", f"{name}/0/3")[0]
    unmended = commands.ask("replay", f"{name}/0/3", "--json", *local)
    assert unmended.returncode == 3, unmended.stderr
    assert json.loads(unmended.stdout.splitlines()[-1]) == {
        "type": "letters_replayed", "replayed": 0, "came_back": 1, "came_back_often": 0, "cut": 0,
    }  # fmt: skip
    assert places(commands) == {1: 0, 2: 0, 3: 1, 4: 0} and commands.counted() == {"a": 2}
    listed = commands.ask("list").stdout
    assert "offset 3, " in listed and listed.count("came back") == 1 and "00:00, came back once\n" in listed

    commands.mend()
    topics.send(name, [b"new"])
    answer = commands.ask("replay", *local)
    assert answer.returncode == 3, answer.stderr
    assert "3 replayed, 1 came back" in answer.stdout and f"{name}/0/3 came back 2 times: picky:" in answer.stdout
    assert places(commands) == {3: 2}
    commands.run()
    assert commands.counted() == {"a": 2, "bad-1": 2, "\xff": 1, "new": 1}
    after = commands.documents("show", f"{name}/0/3")[0]
    assert after == {**before, "attempts": 2, "reason": after["reason"]}

    assert commands.ask("replay", *local).returncode == 3
    often = commands.ask("replay", *local)
    assert often.returncode == 3 and "1 left, which came back 3 times or more" in often.stdout
    assert places(commands) == {3: 3} and commands.counted() == {"a": 2, "bad-1": 2, "\xff": 1, "new": 1}
    check_verified(commands)

    dropped = commands.ask("drop", "--reason", "never", "--yes", *local)
    assert dropped.returncode == 0 and "1 dead letter dropped" in dropped.stdout
    for what in (("drop", "--yes"), ("replay",)):
        again = commands.ask(*what, f"{name}/0/3", *local)
        assert again.returncode == 0 and f"{name}/0/3 is no dead letter that is left" in again.stderr
    assert commands.documents("list") == [{"type": "dead_letters", "letters": 0}]
    commands.run()
    assert commands.counted() == {"a": 2, "bad-1": 2, "\xff": 1, "new": 1}
    check_verified(commands)
    if keeper == "topic":
        check_kept_together(topics, letters)


@pytest.mark.rule("C48")
@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opaque", "transactional"])
@pytest.mark.parametrize("keeper", ["table", "topic"])
def test_letters_are_replayed_once_though_drivers_and_commands_die(
    servers: EmbeddedServers,
    topics: Topics,
    name: str,
    tmp_path: Path,
    keeper: str,
    kind: str,
    seed: int,
    store: tuple[str, str],
) -> None:
    """A driver reads new records meanwhile; the command goes on without it."""
    chance = random.Random(seed)
    values = [f"\xff{number % 7}" if number % 2 else f"w{number % 5}" for number in range(3_000)]
    values[100:100], values[2_000:2_000] = ["never-1"], ["never-2"]
    topics.send(topics.create(name), [each.encode("latin-1") for each in values])
    letters = keeper if keeper == "table" else topics.create(f"{name}-dead", 2)
    commands = Commands(settings_of(servers, name, kind, letters, store))
    commands.run()
    commands.mend()
    settings = {**commands.settings, "app.mended": "true", "transactional.zookeeper.session.timeout.secs": 2}
    more = [f"w{number % 5}" for number in range(500)]
    topics.send(name, [each.encode() for each in more])
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    replay = [
        sys.executable,
        "-m",
        "ratchet",
        "dead-letters",
        "replay",
        "tests.kit.mended:topology",
        "--executor",
        "local",
    ]
    run = RunProcess(tmp_path / "run.log", "tests.kit.mended:topology", settings, executor="local")
    try:
        for _ in range(3):
            run.start()
            with open(tmp_path / "replay.log", "ab") as log:
                command = subprocess.Popen([*replay, *words], cwd=ROOT, stdout=log, stderr=log)
            run.wait_for(lambda: run.said("leads"), pause_s=chance.uniform(0.0, 2.0))
            run.kill()
            time.sleep(chance.uniform(0.0, 3.0))
            command.kill()
            command.wait()
    finally:
        run.end()
    answer = commands.ask("replay", "--executor", "local")
    assert answer.returncode in (0, 3), answer.stderr  # 0: those that come back have come back already
    commands.run()
    assert commands.counted() == Counter(each for each in [*values, *more] if not each.startswith("never"))
    *_, total = commands.documents("list")
    assert total["letters"] == 2
    shown = commands.documents("show", f"{name}/0/100", f"{name}/0/2000")
    assert [each["value"] for each in shown] == ["never-1", "never-2"] and all(each["attempts"] for each in shown)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.rule("C48")
@pytest.mark.parametrize("collapse_max", [20_000, 0])
def test_letters_are_replayed_on_spark(
    servers: EmbeddedServers, topics: Topics, name: str, spark: str, collapse_max: int, store: tuple[str, str]
) -> None:
    topics.send(topics.create(name), [b"a", b"\xff", b"never", b"bad", b"a"])
    commands = Commands(settings_of(servers, name, "opaque", "table", store))
    commands.run()
    commands.settings |= {"spark.master": spark, "topology.collapse.records.max": collapse_max}
    commands.mend()
    answer = commands.ask("replay")
    assert answer.returncode == 3 and "2 replayed, 1 came back" in answer.stdout, answer.stderr
    assert places(commands) == {2: 1} and commands.counted() == {"a": 2, "\xff": 1, "bad": 1}
